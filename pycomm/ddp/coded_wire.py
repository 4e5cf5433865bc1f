"""Gradients that travel as codes with a scale for each 256: between hosts, and between GPUs.

Where ranks are on several hosts: one coalesced all_reduce on the gradients where they lie, with
``compression=`` (docs/numerics.md has its bound, csrc/engine/compressed.h its steps). Inside a host all is
added up in full precision, and only the hosts' sums lose something. What is not finite is NaN in its block of
256 elements, on all ranks.

On CUDA the same call, in which every rank's gradients are codes, whatever the hosts are: NCCL carries them
(csrc/engine/cuda/nccl_rounds.h). The bound is that of as many hosts as ranks. The call takes float32; float16
and bfloat16 gradients (of which "int8" and "fp8" make codes) are packed into float32 by one kernel, and
unpacked by one.

**Error feedback**: each rank keeps what its own codes lost, which between hosts are those of its share of the
bucket, in units of the gradient (pycomm/ddp/error_feedback.py).

With ``deterministic`` communicators the wires of one host are used on the CPU (half_wire.py, block_wire.py):
their results do not depend on which rank runs where. On CUDA they do not anyway: every element has one owner,
by its place, which adds what all others sent in the canonical order.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor, nn

import pycomm.error_feedback as coding
from pycomm.communicator import Communicator
from pycomm.ddp.averaging import operation
from pycomm.ddp.error_feedback import ErrorFeedback
from pycomm.ddp.kernels import pack, unpack
from pycomm.ddp.wire import WIRE_DTYPES, Compression
from pycomm.placement import cuda_index
from pycomm.work import Work

__all__ = ["CodedWire", "suits"]


def suits(comm: Communicator, parameter: Tensor) -> bool:
    """Whether buckets of parameters such as this one are compressed by this wire."""
    return cuda_index(parameter) >= 0 or (len(set(comm._c.hosts)) > 1 and not comm.deterministic)


class CodedWire:
    """Averages a bucket in codes, where it lies if it can; the header has the rest.

    Args:
        comm: of ranks on several hosts, or with GPUs.
        compression: the codes.
        parameters: of the bucket.
        feedback: keeps what is lost; None: it is lost.
        buffer, views: as for :class:`pycomm.ddp.wire.PlainWire`.
    """

    algorithm: str | None = "direct"

    def __init__(
        self,
        comm: Communicator,
        compression: Compression,
        parameters: Sequence[nn.Parameter],
        feedback: ErrorFeedback | None,
        buffer: Tensor | None = None,
        views: list[Tensor] | None = None,
    ) -> None:
        self._comm = comm
        self._compression = compression
        self._feedback = None if feedback is None else coding.ErrorFeedback(feedback.vector(parameters))
        self._buffer = buffer
        self._views = views
        first = parameters[0]
        self._is_on_cuda = cuda_index(first) >= 0
        self._wide: Tensor | None = None
        if self._is_on_cuda and first.dtype is not torch.float32:
            n_elems = sum(p.numel() for p in parameters)
            self._wide = torch.empty(n_elems, dtype=torch.float32, device=first.device)
        self._gradients: list[Tensor] = []
        self._work: Work | None = None

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the codes."""
        return WIRE_DTYPES[self._compression]

    def start(self, gradients: list[Tensor], weight: float | None, async_op: bool) -> None:
        """One coalesced call."""
        factor = 1.0 if weight is None else weight * self._comm.size
        whole = self._views is not None and all(map(is_, gradients, self._views))
        tensors: Tensor | list[Tensor] = self._buffer if whole and self._buffer is not None else gradients
        if self._wide is not None:
            pack(self._wide, gradients, factor)
            self._gradients, tensors, weight = gradients, self._wide, None
        elif weight is not None and (self._is_on_cuda or self._feedback is not None):
            # Not premul_sum: codes on CUDA have none, and what it loses would have another unit than what an
            # average loses.
            torch._foreach_mul_(gradients, factor)
            weight = None
        work = self._comm.all_reduce(
            tensors,
            op=operation(weight),
            async_op=async_op,
            deterministic=False if self._is_on_cuda else None,  # the header says why nothing is lost
            compression=self._compression,
            error_feedback=self._feedback,
        )
        self._work = work if async_op else None

    def finish(self) -> None:
        """Waits where ``start`` did not."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        if self._wide is not None:
            unpack(self._gradients, self._wide, 1.0)
            self._gradients = []
