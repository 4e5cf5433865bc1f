"""Communication hooks: ``hook(state, bucket)`` takes a bucket of gradients, returns a Future of the result.

A hook sees one flat buffer for each bucket, packed with this rank's gradients as they are, not divided by the
number of ranks; what its Future holds becomes the gradients. torch's own hooks (allreduce, fp16 and bf16
compression and their wrappers, PowerSGD, post-local SGD) run unchanged: they call torch.distributed, with the
group that their state names.

A parameter whose gradient is sparse is a bucket of its own, as in torch: its buffer is the sparse gradient,
coalesced. It comes after the others. Which these are is known from ``Embedding`` and ``EmbeddingBag`` layers
with ``sparse=True``; a gradient that turns out sparse elsewhere is given to the hook when it does. torch's
allreduce hook takes such a buffer, over gloo; hooks that flatten or narrow it (fp16, PowerSGD) raise, as they
do under torch's wrapper.

**One hook at a time.** The hook of a bucket is called when the Future of the bucket before is done. Some
hooks (PowerSGD) launch collectives from callbacks and block in them; with several buckets under way these
would take all threads of gloo and wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["GradBucket", "Hook", "HookWire", "LooseHook", "UsersHook"]

Hook = Callable[[Any, Any], "torch.futures.Future[Any]"]


class GradBucket:
    """One bucket, as a hook sees it; the methods are those of ``torch.distributed.GradBucket``.

    Example:
        >>> import torch
        >>> flat = torch.arange(3.0)
        >>> bucket = GradBucket(0, True, flat, [flat[:1], flat[1:]], [])
        >>> [g.tolist() for g in bucket.gradients()]
        [[0.0], [1.0, 2.0]]
    """

    def __init__(
        self,
        index: int,
        is_last: bool,
        buffer: Tensor,
        gradients: Sequence[Tensor],
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self._index = index
        self._is_last = is_last
        self._buffer = buffer
        self._gradients = list(gradients)
        self._parameters = list(parameters)

    def index(self) -> int:
        """The bucket's number, from 0, in the order of reduction; it changes when buckets are rebuilt."""
        return self._index

    def is_last(self) -> bool:
        """True for the bucket that is reduced last in a backward."""
        return self._is_last

    def buffer(self) -> Tensor:
        """The gradients as one flat tensor, undivided; or the sparse gradient."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Puts ``buffer``, of the same number of elements, in the place of the flat tensor.

        Raises:
            ValueError: the number of elements differs.
        """
        if buffer.numel() != self._buffer.numel():
            raise ValueError(
                f"GradBucket.set_buffer: the bucket has {self._buffer.numel()} elements, got {buffer.numel()}"
            )
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """The gradients one by one, views of the flat tensor, in the parameters' shapes."""
        return self._gradients

    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the order of :meth:`gradients`."""
        return self._parameters


class UsersHook:
    """What the user registered. What it raises on this rank is kept until all ranks know.

    An exception that left backward at once would leave the other ranks waiting for the end of it; and this
    rank's next backward would answer them.

    Args:
        hook, state: what the user registered.
    """

    def __init__(self, hook: Hook, state: Any) -> None:
        self._hook = hook
        self._state = state
        self.failure: Exception | None = None
        """The first exception in this backward."""

    def start(self, bucket: GradBucket) -> torch.futures.Future[Any] | None:
        """Calls it; None when it raises."""
        try:
            future = self._hook(self._state, bucket)
            if not hasattr(future, "wait"):
                raise TypeError(
                    f"DistributedDataParallel: the communication hook {self._name()} must return a "
                    f"torch.futures.Future, got {type(future).__name__}"
                )
        except Exception as error:
            self.failure = self.failure or error
            return None
        return future

    def result(self, future: torch.futures.Future[Any] | None, n_elems: int) -> Tensor | None:
        """Waits for what ``start`` gave; None when there is no such tensor."""
        if future is None:
            return None
        try:
            result = future.wait()
            if isinstance(result, (list, tuple)) and len(result) == 1:
                result = result[0]
            if not isinstance(result, Tensor) or result.numel() != n_elems:
                got = f"{result.numel()} elements" if isinstance(result, Tensor) else type(result).__name__
                raise TypeError(
                    f"DistributedDataParallel: the Future of the communication hook {self._name()} must "
                    f"hold one tensor of the bucket's {n_elems} elements, got {got}"
                )
        except Exception as error:
            self.failure = self.failure or error
            return None
        return result.detach()

    def _name(self) -> str:
        return getattr(self._hook, "__name__", None) or repr(self._hook)


class HookWire:
    """Gives a bucket to a hook, and its result to the gradients.

    Args:
        bucket: its buffer and views are this wire's own memory.
        hook: what is called.
        size: the number of ranks, by which a share of a weighted average is multiplied.
        before: the wire of the bucket before, whose Future is awaited first.
    """

    algorithm: str | None = "hook"

    def __init__(self, bucket: GradBucket, hook: UsersHook, size: int, before: HookWire | None) -> None:
        self._bucket = bucket
        self._memory = bucket.buffer()
        self._views = bucket.gradients()
        self._hook = hook
        self._size = size
        self._before = before
        self._future: torch.futures.Future[Any] | None = None
        self._gradients: list[Tensor] = []

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What the hook is given; what it sends is its own business."""
        return dtype

    def start(self, gradients: list[Tensor], weight: float | None, async_op: bool) -> None:
        """Packs, waits for the hook of the bucket before, and calls the hook."""
        self._gradients = gradients
        apart = [i for i, (g, view) in enumerate(zip(gradients, self._views, strict=True)) if g is not view]
        if apart:
            torch._foreach_copy_([self._views[i] for i in apart], [gradients[i] for i in apart])
        if weight is not None:
            self._memory.mul_(weight * self._size)
        self._bucket.set_buffer(self._memory)
        if self._before is not None:
            self._before.settle()
        self._future = self._hook.start(self._bucket)
        if not async_op:
            self.settle()

    def settle(self) -> None:
        """Waits for the Future; its result is then in this wire's memory."""
        future, self._future = self._future, None
        result = self._hook.result(future, self._memory.numel())
        if result is not None and (
            result.data_ptr() != self._memory.data_ptr() or result.dtype is not self._memory.dtype
        ):
            self._memory.copy_(result.view(-1))

    def finish(self) -> None:
        """Waits, and gives the result to the gradients given to ``start``."""
        self.settle()
        if not all(map(is_, self._gradients, self._views)):
            torch._foreach_copy_(self._gradients, self._views)
        self._gradients = []


class LooseHook:
    """Gives gradients that are in no bucket to a hook, one by one, each as a bucket of its own.

    Args:
        hook: what is called.
        size: the number of ranks, by which a share of a weighted average is multiplied.
        first: the number of the first of these buckets.
        n: how many there are; the last one is the last of the backward.
    """

    def __init__(self, hook: UsersHook, size: int, first: int, n: int) -> None:
        self._hook = hook
        self._size = size
        self._first = first
        self._n = n

    def reduce(self, at: int, parameter: nn.Parameter, gradient: Tensor, weight: float | None) -> Tensor:
        """What the hook makes of a gradient, which it may overwrite; sparse or dense as the hook gives it."""
        if weight is not None:
            gradient = gradient * (weight * self._size)
        is_sparse = gradient.layout is not torch.strided
        buffer = gradient if is_sparse else gradient.contiguous().view(-1)
        bucket = GradBucket(
            self._first + at,
            at == self._n - 1,
            buffer,
            [gradient if is_sparse else buffer.view(parameter.shape)],
            [parameter],
        )
        result = self._hook.result(self._hook.start(bucket), parameter.numel())
        if result is None:
            return gradient
        if result.layout is not torch.strided:
            return result.to(parameter.dtype).coalesce()
        return result.to(parameter.dtype).view(parameter.shape)
