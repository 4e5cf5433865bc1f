"""Gradients that travel as codes of 8 (or 16) bits with a scale for each block; error feedback.

float32, float16 and bfloat16 gradients. A bucket is packed into one float32 vector, cut into blocks of 256
elements; with M the largest magnitude in a block on any rank (times this rank's weight, and with error
feedback what was left behind before), m the mean over the ranks of an element's magnitudes, the result is
within

    2.1 u m + 2.1 f M + 2^-21 M + 2^-99    of the exact average, plus its rounding to the gradient's dtype,

where u and f are 0 and 1/254 ("int8"), 2^-4 and 2^-17 ("fp8", float8_e4m3fn), 2^-11 and 2^-38 ("fp16"), 2^-8
and 2^-132 ("bf16"). A block with an infinity, a NaN, or a magnitude from 2^127 up on any rank is NaN on all;
other blocks are not harmed.

Steps (csrc/kernels/blocks.h): ranks agree on each block's M, encode, and exchange the codes, so that each
rank owns a part of the blocks and has all ranks' codes of it; the owner adds them up (int8 exactly, as
integers), divides, encodes the mean; all gather the means and decode. Per element and rank that moves twice
(n - 1)/n codes, and 2/256 float32 maxima twice.

**Error feedback** (F. Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; S. P. Karimireddy et al. 2019,
"Error Feedback Fixes SignSGD"): what encoding lost, on the way to the owner and in the owner's mean, stays
behind as a *residual* and is added to the next step's gradient. The sum of the results over any number of
steps is then within one step's error of the sum of the exact averages. Residuals are this rank's own, one
for each parameter, and outlive the buckets (pycomm/ddp/error_feedback.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pycomm import _C
from pycomm.communicator import Communicator
from pycomm.ddp.error_feedback import ErrorFeedback
from pycomm.ddp.kernels import name_of, pack, unpack
from pycomm.ddp.wire import WIRE_DTYPES, Compression
from pycomm.work import Work

__all__ = ["CODED_DTYPES", "BlockWire"]

CODED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Gradients that a compression makes smaller; others travel as they are."""

_BLOCK = _C.kernels.BLOCK_ELEMS


class BlockWire:
    """Averages a bucket in codes; the header has the steps and the bound.

    Args:
        comm: whose ranks average.
        compression: the codes.
        parameters: of the bucket.
        feedback: keeps what is lost; None: it is lost.
        before: the wire before this one, whose exchange is launched when this one starts.
    """

    algorithm: str | None = "all_to_all, all_gather"

    def __init__(
        self,
        comm: Communicator,
        compression: Compression,
        parameters: Sequence[nn.Parameter],
        feedback: ErrorFeedback | None,
        before: BlockWire | None,
    ) -> None:
        self._comm = comm
        self._dtype = WIRE_DTYPES[compression]
        self._code = name_of(self._dtype)
        self._feedback = feedback
        self._before = before
        n = self._n = sum(p.numel() for p in parameters)
        n_blocks = -(-n // _BLOCK)
        edges = [min(n, n_blocks * r // comm.size * _BLOCK) for r in range(comm.size + 1)]
        self._counts = [end - begin for begin, end in pairwise(edges)]
        self._begin, self._mine = edges[comm.rank], self._counts[comm.rank]
        self._values = torch.empty(n) if feedback is None else feedback.vector(parameters)
        self._views: list[Tensor] | None = None
        self._maxima = comm.empty((n_blocks,), dtype=torch.float32)
        self._codes = comm.empty((n,), dtype=self._dtype)
        self._parts = comm.empty((comm.size * self._mine,), dtype=self._dtype)
        self._gradients: list[Tensor] = []
        self._work: Work | None = None
        self._is_async = False
        self._is_exchanged = True

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the codes."""
        return self._dtype

    def start(self, gradients: list[Tensor], weight: float | None, async_op: bool) -> None:
        """Launches the agreement on the blocks' maxima, and the exchange of the wire before."""
        self._gradients = gradients
        factor = 1.0 if weight is None else weight * self._comm.size
        if self._feedback is None:
            pack(self._values, gradients, factor)
        else:
            torch._foreach_add_(self._views_like(gradients), gradients, alpha=factor)
        _C.kernels.block_maxima(self._values.data_ptr(), self._n, self._maxima.data_ptr())
        self._is_async, self._is_exchanged = async_op, False
        self._launch(self._comm.all_reduce(self._maxima, op="max", async_op=async_op))
        if not async_op:
            self.exchange()
        elif self._before is not None:
            self._before.exchange()

    def exchange(self) -> None:
        """When the maxima are agreed: encodes, and launches the exchange of the codes. Once."""
        if self._is_exchanged:
            return
        self._is_exchanged = True
        self._wait()
        keeps = self._feedback is not None
        _C.kernels.quantize(
            self._code,
            self._codes.data_ptr(),
            self._values.data_ptr(),
            self._n,
            self._maxima.data_ptr(),
            keeps,
        )
        mine = [self._mine] * self._comm.size
        self._launch(
            self._comm.all_to_all(self._parts, self._codes, mine, self._counts, async_op=self._is_async)
        )

    def finish(self) -> None:
        """The owner's mean, everybody's means, decoded into the gradients."""
        self.exchange()
        self._wait()
        mine = self._codes[self._begin : self._begin + self._mine]
        size, item = self._comm.size, self._dtype.itemsize
        lost = 0 if self._feedback is None else self._values.data_ptr() + 4 * self._begin
        maxima = self._maxima.data_ptr() + 4 * (self._begin // _BLOCK)
        if self._mine > 0:
            parts = [self._parts.data_ptr() + r * self._mine * item for r in range(size)]
            _C.kernels.combine(self._code, mine.data_ptr(), parts, self._mine, maxima, lost)
        self._comm.all_gather(self._codes, mine, counts=self._counts)
        decoded = self._values if self._feedback is None else self._feedback.scratch(self._n)
        _C.kernels.dequantize(
            self._code, decoded.data_ptr(), self._codes.data_ptr(), self._n, self._maxima.data_ptr()
        )
        unpack(self._gradients, decoded, 1.0)
        self._gradients = []

    def _launch(self, work: Any) -> None:
        self._work = work if self._is_async else None

    def _wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def _views_like(self, gradients: list[Tensor]) -> list[Tensor]:
        """The residuals in the shapes of the gradients, which are the same in every step."""
        if self._views is None:
            pieces = torch.split(self._values, [g.numel() for g in gradients])
            self._views = [piece.view(g.shape) for piece, g in zip(pieces, gradients, strict=True)]
        return self._views
