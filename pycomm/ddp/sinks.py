"""Hooks on the outputs of a forward: they tell the reducer that a backward has begun, and through which one.

A *sink* is such a hook. It runs before any parameter's gradient is there, on the thread of backward, within
the outermost backward that passes through the wrapper. What it finds:

* gradients will be accumulated into parameters (``backward()``): the reducer begins, as the forward was told;
* gradients of parameters are asked for (``torch.autograd.grad``): they are averaged too, in ``_Capture``, for
  what replicas would compute from local gradients would differ;
* only other gradients are asked for (a penalty on the gradient of an input): nothing is to be averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from pycomm.ddp.averaging import average
from pycomm.ddp.resolve import agree_on_structure
from pycomm.ddp.tally import REDUCING

if TYPE_CHECKING:
    from pycomm.ddp.reducer import Reducer

__all__ = ["Forward", "Sinks", "tensors_in"]


@dataclass(frozen=True)
class Forward:
    """What a forward was told, for the backward through it."""

    is_synced: bool = True
    weight: float | None = None
    """This rank's share of the average; None: 1/size."""


def tensors_in(thing: Any) -> Iterator[Tensor]:
    """The tensors of a tensor, list, tuple, dict or dataclass, at any depth.

    Example:
        >>> import torch
        >>> len(list(tensors_in({"a": [torch.ones(1), 2], "b": torch.ones(2)})))
        2
    """
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, (list, tuple, set)):
        for part in thing:
            yield from tensors_in(part)
    elif isinstance(thing, dict):
        for part in thing.values():
            yield from tensors_in(part)
    elif is_dataclass(thing) and not isinstance(thing, type):
        for field in fields(thing):
            yield from tensors_in(getattr(thing, field.name, None))


class Sinks:
    """Puts sinks on outputs, for one reducer."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._first = 0  # the parameter that is asked about first: one that was reached the last time
        self._capture: _Capture | None = None

    def attach(self, output: Any, forward: Forward) -> None:
        """Puts a sink on every tensor of ``output`` that has a graph; where none has, the reducer is told."""
        sink = partial(self._sink, forward)
        self._reducer.pending = forward
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                cast(Any, tensor).register_hook(sink)
                self._reducer.pending = None

    def _sink(self, forward: Forward, _: Tensor) -> None:
        if self._reducer.tally.mode == REDUCING:  # under way already; it looks at the weights
            self._reducer.begin(forward)
            return
        if self._capture is not None:
            if self._capture.is_of_this_backward():
                return
            self._capture.remove()  # its backward ended in an exception
            self._capture = None
        reached = self._what_is_reached()
        if reached is True:
            self._reducer.begin(forward)
        elif reached is None and (forward.is_synced or self._reducer.forced):
            self._reducer.close_broken_backward()
            self._capture = _Capture(self._reducer, forward.weight)

    def _what_is_reached(self) -> bool | None:
        """True: gradients of parameters are accumulated; None: they are asked for; False: neither."""
        known = self._reducer.parameters
        reached = self._reached_of(known)
        if reached is False and not self._reducer.structure.is_current():
            # Frozen all, and others put in their place: the known ones say nothing.
            reached = self._reached_of(self._reducer.look().parameters)
            self._first = 0
        return reached

    def _reached_of(self, parameters: Sequence[nn.Parameter]) -> bool | None:
        n = len(parameters)
        for step in range(n):
            at = (self._first + step) % n
            if not parameters[at].requires_grad:  # frozen since the last backward
                continue
            try:
                if torch._C._will_engine_execute_node(get_gradient_edge(parameters[at]).node):
                    self._first = at
                    return True
            except RuntimeError as error:
                if "autograd.grad()" not in str(error):
                    raise
                self._first = at
                return None
        return False


class _Capture:
    """Averages the gradients of parameters that one ``torch.autograd.grad`` returns."""

    def __init__(self, reducer: Reducer, weight: float | None) -> None:
        self._reducer = reducer
        self._weight = weight
        self._task = torch._C._current_graph_task_id()
        shapes = [p.shape for p in reducer.parameters]
        self._has_changed = not reducer.structure.is_current() or shapes != reducer.plan.shapes
        self._structure = reducer.look() if self._has_changed else reducer.structure
        self._captured: dict[int, Tensor] = {}
        self._handles = [
            cast(Any, parameter).register_hook(partial(self._take, index))
            for index, parameter in enumerate(self._structure.parameters)
        ]
        torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def is_of_this_backward(self) -> bool:
        """Whether the backward under way is the one that this belongs to."""
        return bool(torch._C._current_graph_task_id() == self._task)

    def remove(self) -> None:
        """Takes the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _take(self, index: int, gradient: Tensor) -> Tensor:
        # A copy of our own, which is changed when all are there; its graph (create_graph) is the gradient's.
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"DistributedDataParallel: the gradient of '{self._structure.names[index]}' that "
                "autograd.grad asks for is sparse and cannot be averaged; use backward(), or no_sync() for "
                "the local one"
            )
        self._captured[index] = gradient.clone()
        return self._captured[index]

    @torch.no_grad()
    def _average(self) -> None:
        self.remove()
        if not self._captured:
            return
        comm, parameters = self._reducer.comm, self._structure.parameters
        # Parameters that came, went or were cast since the last backward: alike on all ranks, or an error.
        has_changed = torch.tensor([self._has_changed], dtype=torch.uint8)
        comm.all_reduce(has_changed, op="max")
        if has_changed.item():
            agree_on_structure(self._reducer)
        is_asked = torch.zeros(len(parameters), dtype=torch.uint8)
        is_asked[list(self._captured)] = 1
        comm.all_reduce(is_asked, op="max")
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for index in is_asked.nonzero().flatten().tolist():
            gradient = self._captured.get(index)
            mine = torch.zeros_like(parameters[index]) if gradient is None else gradient.detach()
            by_dtype.setdefault(mine.dtype, []).append(mine)
        for gradients in by_dtype.values():
            average(comm, gradients, self._weight)
        self._captured = {}
