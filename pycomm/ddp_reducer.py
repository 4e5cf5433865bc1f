"""The gradients' way through one backward: hooks, buckets in order, one status at the end.

A parameter's hook runs when its gradient has been accumulated. The hook that completes a bucket launches it,
after all buckets before it: so every rank launches the same buckets in the same order, whatever order its own
gradients came in. When backward ends, autograd calls ``_finish``: it launches what is left, waits, and agrees
with the other ranks on a 4-byte status, the number of *problems* (gradients that a rank could not
contribute).

A gradient that did not come, or cannot be reduced, does not stop the sequence: a *stand-in* (what the
parameter's gradient already holds, else zeros) takes its place, so that every rank makes the same calls in
every backward. Where the status is not zero, and only there, ranks gather who had which problem, and then all
raise the same error, or with ``find_unused`` all keep or drop the same stand-ins. A backward that ended in an
exception is closed in the same way by the next forward.

After the first backward without problems the buckets are built again, once, in the order in which rank 0's
gradients came. Everything here runs on the thread that calls backward.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from pycomm import _C
from pycomm.communicator import Communicator
from pycomm.ddp_agree import in_memory_order, memory_order
from pycomm.ddp_wire import Compression, HalfWire, PlainWire, Wire

__all__ = ["Overlap", "Reducer"]

Overlap = Literal["async", "inline", "end"]


class Problem(IntEnum):
    """Why a rank has no gradient to contribute for a parameter; NONE when it has one."""

    NONE = 0
    UNUSED = 1
    GONE = 2
    NOT_DENSE = 3
    OTHER_TYPE = 4
    HAS_GRAPH = 5
    TWICE = 6
    BROKEN = 7  # of the whole backward, not of a parameter


_SAYING = {
    Problem.UNUSED: "got no gradient in this backward",
    Problem.GONE: "lost its gradient to a hook before it was reduced (an optimizer that steps in backward?)",
    Problem.NOT_DENSE: "has a gradient that is not a strided tensor (an Embedding with sparse=True?)",
    Problem.OTHER_TYPE: "has a gradient whose class, shape, dtype or device is not the parameter's",
    Problem.HAS_GRAPH: "has a gradient that is part of a graph (create_graph=True), which would be lost",
    Problem.TWICE: "got its gradient twice in one backward (checkpointing with use_reentrant=True?)",
}


@dataclass
class _Bucket:
    indices: list[int]
    wire: Wire
    n_awaited: int = field(default=0)


class Reducer:
    """Averages the gradients of ``parameters`` over the ranks of ``comm`` in every backward while ``armed``.

    Args:
        comm: a communicator of at least two ranks.
        names: the parameters' names, for errors.
        parameters: those that require a gradient, in the same order on all ranks, distinct.
        first_cap, cap: bytes of gradients of the first and of the other buckets.
        find_unused: parameters without a gradient are no error; see ``DistributedDataParallel``.
        compression: None, "fp16" or "bf16", for float32 gradients.
        overlap: where buckets are reduced: "async" on the progress thread while backward goes on, "inline"
            in the hook that completes them, "end" when backward is over.
    """

    def __init__(
        self,
        comm: Communicator,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        *,
        first_cap: int,
        cap: int,
        find_unused: bool,
        compression: Compression | None,
        overlap: Overlap,
    ) -> None:
        self.armed = True
        self.exposed_s = 0.0
        """Seconds that the thread of backward has spent here: launching, reducing, waiting."""
        self._comm = comm
        self._names = list(names)
        self._parameters = list(parameters)
        self._orders = [memory_order(parameter) for parameter in parameters]
        self._caps = (first_cap, cap)
        self._find_unused = find_unused
        self._compression = compression
        self.overlap: Overlap = overlap
        self._order = list(reversed(range(len(parameters))))
        self._is_order_agreed = False
        self._build_buckets()
        self._status = torch.zeros(1, dtype=torch.int32)
        self._reset()
        for index, parameter in enumerate(parameters):
            register = cast(Any, parameter).register_post_accumulate_grad_hook  # untyped in torch
            register(_hook(weakref.ref(self), index))

    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters in each bucket, in the order in which buckets are launched."""
        return [[self._names[i] for i in bucket.indices] for bucket in self._buckets]

    def _build_buckets(self) -> None:
        in_order = [self._parameters[i] for i in self._order]
        kinds = {dtype: kind for kind, dtype in enumerate(dict.fromkeys(p.dtype for p in self._parameters))}
        assigned = _C.bucket.assign(
            [p.numel() * p.element_size() for p in in_order], [kinds[p.dtype] for p in in_order], *self._caps
        )
        self._buckets: list[_Bucket] = []
        self._bucket_of: list[int] = [0] * len(in_order)
        for at, places in enumerate(assigned):
            indices = [self._order[place] for place in places]
            for index in indices:
                self._bucket_of[index] = at
            self._buckets.append(_Bucket(indices, self._wire_for([self._parameters[i] for i in indices])))

    def _wire_for(self, parameters: list[nn.Parameter]) -> Wire:
        if self._compression is not None and parameters[0].dtype == torch.float32:
            return HalfWire(self._comm, self._compression, sum(p.numel() for p in parameters))
        return PlainWire(self._comm)

    def _reset(self) -> None:
        """After a reduction: nothing has come."""
        n = len(self._parameters)
        self._is_open = False
        self._came = [False] * n  # whose hook ran in this backward
        self._has_new = [False] * n  # whose hook ran in any backward since the last reduction (no_sync)
        self._problems = [Problem.NONE] * n
        self._stand_ins: dict[int, Tensor] = {}
        self._arrivals: list[int] = []
        self._n_launched = 0
        for bucket in self._buckets:
            bucket.n_awaited = len(bucket.indices)

    def gradient_came(self, index: int) -> None:
        """The hook of parameter ``index``."""
        self._has_new[index] = True
        if not self.armed:
            return
        if not self._is_open:
            self._is_open = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if self._came[index]:
            self._problems[index] = Problem.TWICE
            return
        self._came[index] = True
        self._arrivals.append(index)
        bucket = self._buckets[self._bucket_of[index]]
        bucket.n_awaited -= 1
        if bucket.n_awaited == 0 and self.overlap != "end":
            started = time.perf_counter()
            while self._n_launched < len(self._buckets) and self._buckets[self._n_launched].n_awaited == 0:
                self._launch_next()
            self.exposed_s += time.perf_counter() - started

    def close_broken_backward(self) -> None:
        """Tells the other ranks of a backward that an exception ended here, if there was one. Raises then.

        Raises:
            RuntimeError: on every rank: here from forward, on the others from the backward that waits.
        """
        if self._is_open and torch._C._current_graph_task_id() == -1:
            self._finish(is_broken=True)

    def _launch_next(self) -> None:
        bucket = self._buckets[self._n_launched]
        self._n_launched += 1
        with torch.no_grad():  # create_graph=True records in hooks
            bucket.wire.start([self._contribution(i) for i in bucket.indices], self.overlap == "async")

    def _contribution(self, index: int) -> Tensor:
        """What this rank gives for a parameter, in memory order: its gradient, or a stand-in."""
        parameter, gradient = self._parameters[index], self._parameters[index].grad
        problem = self._problem_of(index, gradient)
        if problem is Problem.NONE:
            assert gradient is not None
        else:
            self._problems[index] = max(problem, self._problems[index])
            keeps = problem is Problem.UNUSED and gradient is not None
            gradient = gradient.clone() if keeps and gradient is not None else torch.zeros_like(parameter)
            self._stand_ins[index] = gradient
        return in_memory_order(gradient, self._orders[index])

    def _problem_of(self, index: int, gradient: Tensor | None) -> Problem:
        if gradient is None:
            return Problem.GONE if self._came[index] else Problem.UNUSED
        fault = self._fault_of(index, gradient)
        return Problem.UNUSED if fault is Problem.NONE and not self._has_new[index] else fault

    def _fault_of(self, index: int, gradient: Tensor) -> Problem:
        parameter = self._parameters[index]
        if gradient.layout is not torch.strided:
            return Problem.NOT_DENSE
        is_alike = gradient.dtype is parameter.dtype and gradient.shape == parameter.shape and gradient.is_cpu
        if not is_alike or type(gradient) is not torch.Tensor:
            return Problem.OTHER_TYPE
        return Problem.HAS_GRAPH if gradient.requires_grad else Problem.NONE

    @torch.no_grad()
    def _finish(self, is_broken: bool = False) -> None:
        """At the end of backward: everything is launched, waited for and agreed upon."""
        started = time.perf_counter()
        try:
            while self._n_launched < len(self._buckets):
                self._launch_next()
            for bucket in self._buckets:
                bucket.wire.finish()
            n_problems = sum(problem is not Problem.NONE for problem in self._problems) + is_broken
            self._status.fill_(n_problems)
            self._comm.all_reduce(self._status)
            if int(self._status) > 0:
                self._resolve(is_broken)
            elif not self._is_order_agreed:
                self._agree_on_order()
        finally:
            self._reset()
            self.exposed_s += time.perf_counter() - started

    def _resolve(self, is_broken: bool) -> None:
        """Some rank had a problem: all learn of all, then all raise, or all settle the stand-ins."""
        mine = torch.tensor(
            [*self._problems, Problem.BROKEN if is_broken else Problem.NONE], dtype=torch.uint8
        )
        table = torch.empty(self._comm.size, mine.numel(), dtype=torch.uint8)
        self._comm.all_gather(table, mine)
        if int(table.max()) > (Problem.UNUSED if self._find_unused else Problem.NONE):
            raise RuntimeError(self._report(table))
        is_used_by_none = (table[:, :-1] == Problem.UNUSED).all(dim=0).tolist()
        for index, stand_in in self._stand_ins.items():
            if not is_used_by_none[index]:
                gradient = self._parameters[index].grad
                if gradient is None:
                    self._parameters[index].grad = stand_in
                else:
                    gradient.copy_(stand_in)

    def _report(self, table: Tensor) -> str:
        """The same words on every rank."""
        findings = []
        for rank, row in enumerate(table.tolist()):
            if row[-1]:
                findings.append(f"rank {rank}: backward ended in an exception")
                continue  # what did not come, did not come for that reason
            for problem, saying in _SAYING.items():
                if problem is Problem.UNUSED and self._find_unused:
                    continue
                names = [self._names[i] for i, found in enumerate(row[:-1]) if found == problem]
                if names:
                    shown = ", ".join(names[:20]) + (
                        f" and {len(names) - 20} more" if len(names) > 20 else ""
                    )
                    findings.append(f"rank {rank}: {saying}: {shown} ({len(names)} of {len(self._names)})")
        advice = (
            " Let every parameter take part in the loss, freeze it (requires_grad_(False)) before wrapping, "
            "or wrap with find_unused_parameters=True (activation checkpointing: give use_reentrant=False)."
            if any(_SAYING[Problem.UNUSED] in finding for finding in findings)
            else ""
        )
        return (
            f"DistributedDataParallel: gradients could not be averaged. {'; '.join(findings)}.{advice} The "
            "gradients of this backward are undefined on every rank; the communicator stays usable"
        )

    def _agree_on_order(self) -> None:
        """Builds the buckets again in the order in which rank 0's gradients came. Collective."""
        came = [*self._arrivals, *(i for i in self._order if not self._came[i])]
        order = torch.tensor(came, dtype=torch.int64)
        self._comm.broadcast(order, src=0)
        self._is_order_agreed = True
        if order.tolist() != self._order:
            self._order = order.tolist()
            self._build_buckets()


def _hook(owner: weakref.ref[Reducer], index: int) -> Callable[[Tensor], None]:
    """A hook that does not keep the reducer alive: the garbage collector cannot see through hooks."""

    def gradient_came(_: Tensor) -> None:
        reducer = owner()
        if reducer is not None:
            reducer.gradient_came(index)

    return gradient_came
