"""Activations computed again in the backward instead of kept.

A *frame* is one call whose saved tensors are not kept. Its forward builds autograd's graph as ever, so what
requires a gradient is known and a backward in halves finds its nodes; but every tensor that a node would
save is replaced by an empty *holder*. The first holder that a backward opens, or the stage while it waits
for a gradient, runs the call again and fills all holders, once, whatever the number of backwards that
follow (input gradients, then weights'). Each value goes when autograd lets go of its holder.

The second run finds what the first found: the arguments, torch's random numbers, autocast, the values that
were popped, and the buffers as they were; what it stashes and what it does to buffers is thrown away, so
running statistics are updated once. It ends with the last tensor that is needed.

Cost: one more forward. Not restored: Python's and numpy's random numbers. Hooks on modules and ``loss_fn``
run again, with :func:`is_recomputing` true.

Source: Chen et al. (2016); torchgpipe's names; the holders are torch.utils.checkpoint's idea, which computes
again for each backward.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from pycomm.pipeline.skips import Skips, current, serving

__all__ = ["Checkpointing", "Frame", "is_recomputing"]

_recomputing: contextvars.ContextVar[bool] = contextvars.ContextVar("pycomm.pipeline.again", default=False)


def is_recomputing() -> bool:
    """Whether a forward runs for the second time, for its backward.

    Example:
        >>> is_recomputing()
        False
    """
    return _recomputing.get()


class _Enough(Exception):
    """All holders are filled."""


class _Holder:
    """In place of a saved tensor."""

    def __init__(self, frame: Frame, like: Tensor) -> None:
        self.frame = frame
        self.kind = tuple(like.shape), like.dtype
        self.value: Tensor | None = None


class Frame:
    """One call to be computed again.

    Args:
        call: what is called.
        args, kwargs: of it.
        module: whose buffers it may change.
        where: for errors.
        policy: of torch's selective checkpointing: which operations' results are kept; None: none.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: nn.Module,
        where: str,
        policy: Any = None,
    ) -> None:
        self._call, self._where = call, where
        self._holders: list[weakref.ref[_Holder]] = []
        self._n_filled = 0
        self._is_open = True  # may be computed again
        self._given: Any = tree_map_only(Tensor, _Kept, (args, kwargs))
        self._buffers = _Buffers(module)
        self._random = torch.get_rng_state()
        self._autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        self._contexts = None if policy is None else _contexts(policy)
        self._popped: dict[str, Any] = {}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first run."""
        held = current()
        before = dict(held.incoming) if held is not None else {}
        caching = contextlib.nullcontext() if self._contexts is None else self._contexts[0]
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack), caching:
            output = self._call(*args, **kwargs)
        left = held.incoming if held is not None else {}
        self._popped = {
            name: tree_map_only(Tensor, _Kept, value) for name, value in before.items() if name not in left
        }
        self._buffers.after(self._where)
        return output

    def _pack(self, tensor: Tensor) -> _Holder:
        holder = _Holder(self, tensor)
        self._holders.append(weakref.ref(holder))
        return holder

    def recompute(self) -> None:
        """The second run; nothing when there was one.

        Raises:
            RuntimeError: an argument has been changed in place since, or the call did something else.
        """
        if not self._is_open or all(holder() is None for holder in self._holders):
            return
        self._is_open = False
        args, kwargs = tree_map_only(_Kept, self._fresh, self._given)
        popped = tree_map_only(_Kept, self._fresh, self._popped)
        cached = contextlib.nullcontext() if self._contexts is None else self._contexts[1]
        enabled, dtype = self._autocast
        now = torch.get_rng_state()
        token = _recomputing.set(True)
        try:
            torch.set_rng_state(self._random)
            with (
                self._buffers.again(),
                serving(Skips(self._where, popped)),
                torch.enable_grad(),
                torch.autocast("cpu", enabled=enabled, dtype=dtype),
                torch.autograd.graph.saved_tensors_hooks(self._fill, _unpack),
                cached,
                contextlib.suppress(_Enough),
            ):
                self._call(*args, **kwargs)
        finally:
            _recomputing.reset(token)
            torch.set_rng_state(now)
            self._given, self._popped, self._contexts = None, {}, None
        n = len(self._holders)
        if self._n_filled < n:
            raise self._differs(f"it saved {n} tensors for the backward, then {self._n_filled}")

    def _fill(self, tensor: Tensor) -> None:
        """Notes one saved tensor; the second run's own graph keeps nothing."""
        holder = self._holders[self._n_filled]() if self._n_filled < len(self._holders) else None
        self._n_filled += 1
        if holder is not None:
            kind = tuple(tensor.shape), tensor.dtype
            if kind != holder.kind:
                raise self._differs(
                    f"tensor {self._n_filled - 1} that it saved was {holder.kind}, then {kind}"
                )
            holder.value = tensor.detach()
        if self._n_filled >= len(self._holders):
            raise _Enough

    def _differs(self, how: str) -> RuntimeError:
        return RuntimeError(
            f"{self._where}: computed again for the backward, it did something else: {how}. A checkpointed "
            "module must do the same twice; use checkpoint='never' for it, or checkpoint_modules for others"
        )

    def _fresh(self, kept: _Kept) -> Tensor:
        if kept.tensor._version != kept.version:
            raise RuntimeError(
                f"{self._where}: an argument of shape {tuple(kept.tensor.shape)} was changed in place after "
                "the call began, so it cannot be computed again; use an operation that is not in place"
            )
        return kept.tensor.detach().requires_grad_(kept.requires_grad)


def _contexts(policy: Any) -> Any:
    make: Any = create_selective_checkpoint_contexts  # has no types
    return make(policy)


def _unpack(holder: Any) -> Tensor:
    if holder.value is None:
        holder.frame.recompute()
    if holder.value is None:
        raise RuntimeError("a checkpointed module's backward runs although computing it again has failed")
    found: Tensor = holder.value
    return found


class _Kept:
    """An argument, without autograd's graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.requires_grad = tensor.detach(), tensor.requires_grad
        self.version = tensor._version


_Place = tuple[nn.Module, str]
#: by module and mode: the buffers that its forward changes, found in its first one
_changing: weakref.WeakKeyDictionary[nn.Module, dict[bool, set[_Place]]] = weakref.WeakKeyDictionary()


class _Buffers:
    """What a forward changes in a module beside its output."""

    def __init__(self, module: nn.Module) -> None:
        known = _changing.setdefault(module, {})
        self._is_first = module.training not in known
        self._known = known.setdefault(module.training, set())
        self._all = [
            ((inner, name), buffer, buffer._version)
            for inner in module.modules()
            for name, buffer in inner._buffers.items()
            if buffer is not None
        ]
        self._before = {
            place: buffer.detach().clone()
            for place, buffer, _ in self._all
            if self._is_first or place in self._known
        }

    def after(self, where: str) -> None:
        """Keeps what was before of the buffers that the forward has changed."""
        for (module, name), buffer, version in self._all:
            now = module._buffers.get(name)
            if now is buffer and buffer._version == version and (module, name) not in self._before:
                continue
            if now is buffer and buffer._version == version and self._is_first:
                is_norm = isinstance(module, nn.modules.batchnorm._NormBase)  # changes it unseen
                if not is_norm and torch.equal(buffer, self._before[module, name]):
                    del self._before[module, name]
                    continue
            if (module, name) not in self._before:
                warnings.warn(
                    f"{where}: buffer {name!r} of a {type(module).__name__} changed, which it did not in the "
                    "first forward; this once it is computed again from the new value",
                    stacklevel=2,
                )
            self._known.add((module, name))
        self._all = []

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the module has copies of the buffers as they were."""
        now = {(module, name): module._buffers[name] for module, name in self._before}
        try:
            for (module, name), before in self._before.items():
                module._buffers[name] = before
            yield
        finally:
            for (module, name), buffer in now.items():
                module._buffers[name] = buffer


class Checkpointing:
    """What of a stage is computed again, and for which microbatches.

    Args:
        module: of the stage.
        which: "always", "except_last" (microbatch), "never"; None: "always" where one of the others is given.
        modules: of the stage, by a regular expression found in their names or a predicate of name and
            module; the outermost that match. None: the stage as a whole.
        policy: of torch.utils.checkpoint's selective checkpointing: a function or a list of operations.
        where: the stage, for errors.

    Raises:
        ValueError: another ``which``, or an expression that no name matches.
    """

    def __init__(
        self,
        module: nn.Module,
        which: str | None,
        modules: str | Callable[[str, nn.Module], bool] | None,
        policy: Any,
        where: str,
    ) -> None:
        if which is None:
            which = "never" if modules is None and policy is None else "always"
        if which not in ("always", "except_last", "never"):
            raise ValueError(f"{where}: checkpoint must be always, except_last or never, got {which!r}")
        self._module, self._which, self._policy, self._where = module, which, policy, where
        self._inner: list[tuple[str, nn.Module]] = []
        self._is_whole = modules is None
        if modules is None:
            return
        expression = modules
        matches: Callable[[str, nn.Module], bool] = (
            (lambda name, _: re.search(expression, name) is not None)
            if isinstance(expression, str)
            else expression
        )
        self._find(module, "", matches)
        if isinstance(modules, str) and not self._inner:
            names = [name for name, _ in module.named_modules() if name]
            raise ValueError(
                f"{where}: no module's name matches checkpoint_modules={modules!r}: {names[:20]}"
            )

    def _find(self, module: nn.Module, name: str, matches: Callable[[str, nn.Module], bool]) -> None:
        if matches(name, module):
            self._inner.append((name, module))
            return
        for inner, child in module.named_children():
            self._find(child, f"{name}.{inner}" if name else inner, matches)

    def forward(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], k: int, is_last: bool
    ) -> tuple[Any, Frame | None]:
        """Runs a stage's forward.

        Args:
            call: the forward, loss included.
            args, kwargs: of it.
            k: the microbatch, for errors.
            is_last: of the batch's microbatches.

        Returns:
            Its output, and the frame of the whole stage if it is one.
        """
        if self._which == "never" or (self._which == "except_last" and is_last):
            return call(*args, **kwargs), None
        where = f"{self._where}, microbatch {k}"
        if self._is_whole:
            frame = Frame(call, args, kwargs, self._module, where, self._policy)
            return frame.run(args, kwargs), frame
        with contextlib.ExitStack() as stack:
            for name, module in self._inner:
                stack.enter_context(self._framed(module, f"{where}, module {name!r}"))
            return call(*args, **kwargs), None

    @contextlib.contextmanager
    def _framed(self, module: nn.Module, where: str) -> Iterator[None]:
        """Inside, the module's forward makes a frame."""
        own, own_forward = module.__dict__.get("forward"), module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return Frame(own_forward, args, kwargs, module, where, self._policy).run(args, kwargs)

        module.__dict__["forward"] = forward
        try:
            yield
        finally:
            del module.__dict__["forward"]
            if own is not None:
                module.__dict__["forward"] = own
