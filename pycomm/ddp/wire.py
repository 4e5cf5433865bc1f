"""How the gradients of one bucket travel: as they lie, or as 16-bit numbers.

A wire has two steps. ``start`` launches the reduction of a list of gradients (and may return before it is
done); ``finish`` returns when every gradient holds the average over the ranks. All ranks start and finish
their wires in the same order, and all start before any finish, so collectives inside ``finish`` pair up.

**As they lie**: one coalesced all_reduce on the list, no packing (docs/architecture.md says why).

**16 bits** (float32 gradients only): packed with cast and scale in one pass into a buffer in the shared
arena, averaged there (accumulated in float32, divided, rounded once), unpacked with cast and scale. With m
the mean over the ranks of an element's magnitudes and u = 2^-11 (float16) or 2^-8 (bfloat16), the result is
within

    2.01 u m + f    of the exact average,

for the roundings of the sources and of the result. f is bfloat16's own underflow, 2^-133, and for float16
2^-33 M: a power of two s scales the bucket such that M s is in [2^9, 2^10), where M is the largest magnitude
in the bucket's average of the step before. This needs no communication, since the average has the same bits
on all ranks. Where values have grown 64-fold since, the result is not finite, on all ranks alike: then (and
in the first step) ranks agree by one all_reduce on the largest finite magnitude in any rank's gradients,
which is M for this step and the next, and the bucket is packed and reduced again. So float16 overflows
nowhere for finite gradients, and a true infinity or NaN arrives as one, on all ranks, without harm to its
neighbours. bfloat16 has float32's range: only magnitudes above its largest, 3.39e38, become infinite.
"""

from __future__ import annotations

import math
from operator import is_
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from pycomm import _C
from pycomm.communicator import Communicator
from pycomm.work import Work

__all__ = ["Compression", "HalfWire", "PlainWire", "Wire"]

Compression = Literal["fp16", "bf16"]

WIRE_DTYPES: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
TARGET_EXPONENT = 10
"""M s is below 2^10 and at least half of it: 64-fold room below float16's 65504, 2^33 above its 2^-24."""
MAX_EXPONENT = 120
"""s and 1/s stay normal float32 numbers, whatever M is."""


class Wire(Protocol):
    """What a bucket needs to know of its wire."""

    #: The algorithm that it always uses; None: the communicator chooses.
    algorithm: str | None

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What elements of ``dtype`` travel as."""

    def start(self, gradients: list[Tensor], weight: float | None, async_op: bool) -> None:
        """Launches the reduction; with ``async_op`` on the communicator's progress thread.

        Args:
            gradients: one for each parameter of the bucket.
            weight: this rank's share of the average, the same kind on all ranks; None: 1/size each.
            async_op: may return before the reduction is done.
        """

    def finish(self) -> None:
        """Returns when the gradients given to ``start`` hold the average."""


class PlainWire:
    """Gradients are averaged where they lie.

    Args:
        comm: whose ranks average.
        buffer, views: where gradients live when they are views of memory in the arena: then the buffer is
            reduced as one tensor, which copies nothing. Both None otherwise.
    """

    algorithm: str | None = None

    def __init__(
        self, comm: Communicator, buffer: Tensor | None = None, views: list[Tensor] | None = None
    ) -> None:
        self._comm = comm
        self._buffer = buffer
        self._views = views
        self._work: Work | None = None

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Their own."""
        return dtype

    def start(self, gradients: list[Tensor], weight: float | None, async_op: bool) -> None:
        """One coalesced call; gradients have one dtype and any layout."""
        op: Any = "avg" if weight is None else ("premul_sum", weight)
        whole = self._views is not None and all(map(is_, gradients, self._views))
        # A list counts as the concatenation of its tensors, so ranks may differ in which they give.
        tensors = self._buffer if whole else gradients
        work = self._comm.all_reduce(tensors, op=op, async_op=async_op)
        self._work = work if async_op else None

    def finish(self) -> None:
        """Waits where ``start`` did not."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()


class HalfWire:
    """float32 gradients are averaged as float16 or bfloat16; the header has the error bound."""

    algorithm: str | None = "direct"

    def __init__(self, comm: Communicator, compression: Compression, n_elems: int) -> None:
        self._comm = comm
        self._dtype = WIRE_DTYPES[compression]
        self._name = str(self._dtype).removeprefix("torch.")
        self._buffer = comm.empty((n_elems,), dtype=self._dtype)
        self._gradients: list[Tensor] = []
        self._factor = 1.0
        self._work: Work | None = None
        self._is_started = False
        self._can_overflow = compression == "fp16" and n_elems > 0
        # None: not known yet. Equal on all ranks at all times.
        self._scale: float | None = None if self._can_overflow else 1.0

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """float16 or bfloat16."""
        return self._dtype

    def start(self, gradients: list[Tensor], weight: float | None, async_op: bool) -> None:
        """Packs and launches, unless the scale must be agreed first: that is left to ``finish``."""
        self._gradients = gradients
        self._factor = 1.0 if weight is None else weight * self._comm.size
        self._is_started = self._scale is not None
        if self._scale is not None:
            self._pack_and_reduce(self._scale, async_op)

    def finish(self) -> None:
        """Waits, reduces once more where the scale did not fit, and unpacks."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        scale, largest = self._scale, 0.0
        if self._can_overflow:
            largest = float(self._buffer.abs().max()) if self._is_started else math.nan
            if not math.isfinite(largest):
                largest = self._agree_on_largest()
                scale = _scale_for(largest)
                self._pack_and_reduce(scale, async_op=False)
            elif scale is not None:
                largest /= scale
            # Nothing is known of a bucket of zeros: agree again next time.
            self._scale = _scale_for(largest) if largest > 0 else None
        assert scale is not None
        self._unpack(1.0 / scale)
        self._gradients = []

    def _pack_and_reduce(self, scale: float, async_op: bool) -> None:
        sources = [gradient.resolve_neg().contiguous() for gradient in self._gradients]
        blocks = [(source.data_ptr(), source.numel()) for source in sources]
        _C.kernels.pack(self._name, self._buffer.data_ptr(), "float32", blocks, scale * self._factor)
        # direct: every element is accumulated in float32 by its owner and rounded once
        work = self._comm.all_reduce(self._buffer, op="avg", async_op=async_op, algorithm="direct")
        self._work = work if async_op else None

    def _agree_on_largest(self) -> float:
        """The largest finite magnitude in the bucket's gradients on any rank."""
        mine = torch.zeros(1)
        for gradient in self._gradients:
            if gradient.numel() > 0:
                finite = torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)
                mine[0] = torch.maximum(mine[0], finite.abs().max())
        mine *= self._factor
        self._comm.all_reduce(mine, op="max")
        return float(mine)

    def _unpack(self, scale: float) -> None:
        targets = [
            g if g.is_contiguous() and not g.is_neg() else torch.empty(g.shape) for g in self._gradients
        ]
        blocks = [(target.data_ptr(), target.numel()) for target in targets]
        _C.kernels.unpack("float32", blocks, self._name, self._buffer.data_ptr(), scale)
        for gradient, target in zip(self._gradients, targets, strict=True):
            if target is not gradient:
                gradient.copy_(target)


def _scale_for(largest: float) -> float:
    """The power of two that brings ``largest`` into [2^9, 2^10); 1 for 0."""
    if largest == 0.0:
        return 1.0
    exponent = TARGET_EXPONENT - math.frexp(largest)[1]
    return math.ldexp(1.0, max(-MAX_EXPONENT, min(MAX_EXPONENT, exponent)))
