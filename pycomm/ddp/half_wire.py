"""Gradients that travel as 16-bit numbers.

float32 gradients only. They are packed with cast and scale in one pass into a buffer in the shared
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
from typing import Literal

import torch
from torch import Tensor

from pycomm.communicator import Communicator
from pycomm.ddp.kernels import pack, unpack
from pycomm.ddp.wire import WIRE_DTYPES
from pycomm.work import Work

__all__ = ["HalfWire"]

TARGET_EXPONENT = 10
"""M s is below 2^10 and at least half of it: 64-fold room below float16's 65504, 2^33 above its 2^-24."""
MAX_EXPONENT = 120
"""s and 1/s stay normal float32 numbers, whatever M is."""


class HalfWire:
    """float32 gradients are averaged as float16 or bfloat16; the header has the error bound."""

    algorithm: str | None = "direct"

    def __init__(self, comm: Communicator, compression: Literal["fp16", "bf16"], n_elems: int) -> None:
        self._comm = comm
        self._dtype = WIRE_DTYPES[compression]
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
        unpack(self._gradients, self._buffer, 1.0 / scale)
        self._gradients = []

    def _pack_and_reduce(self, scale: float, async_op: bool) -> None:
        pack(self._buffer, self._gradients, scale * self._factor)
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


def _scale_for(largest: float) -> float:
    """The power of two that brings ``largest`` into [2^9, 2^10); 1 for 0."""
    if largest == 0.0:
        return 1.0
    exponent = TARGET_EXPONENT - math.frexp(largest)[1]
    return math.ldexp(1.0, max(-MAX_EXPONENT, min(MAX_EXPONENT, exponent)))
