"""Gradients that are compressed where they cross between hosts, and nowhere else.

Where ranks are on several hosts: one coalesced all_reduce on the gradients where they lie, with
``compression=`` (docs/numerics.md has its bound, csrc/engine/compressed.h its steps). Inside a host all is
added up in full precision, and only the hosts' sums lose something. What is not finite is NaN in its block of
256 elements, on all ranks.

**Error feedback**: each rank keeps what its own codes lost, which are those of its share of the bucket, in
units of the gradient (pycomm/ddp/error_feedback.py).

With ``deterministic`` communicators the wires of one host are used (half_wire.py, block_wire.py): their
results do not depend on which rank runs where.
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
from pycomm.ddp.wire import WIRE_DTYPES, Compression
from pycomm.work import Work

__all__ = ["HostsWire", "spans_hosts"]


def spans_hosts(comm: Communicator) -> bool:
    """Whether buckets of ``comm`` are compressed between its hosts only."""
    return len(set(comm._c.hosts)) > 1 and not comm.deterministic


class HostsWire:
    """Averages a bucket where it lies, in codes between hosts; the header has the rest.

    Args:
        comm: of ranks on several hosts.
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
        self._work: Work | None = None

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of the codes."""
        return WIRE_DTYPES[self._compression]

    def start(self, gradients: list[Tensor], weight: float | None, async_op: bool) -> None:
        """One coalesced call."""
        if self._feedback is not None and weight is not None:
            # Not premul_sum: what it loses would have another unit than what an average loses.
            torch._foreach_mul_(gradients, weight * self._comm.size)
            weight = None
        whole = self._views is not None and all(map(is_, gradients, self._views))
        work = self._comm.all_reduce(
            self._buffer if whole else gradients,
            op=operation(weight),
            async_op=async_op,
            compression=self._compression,
            error_feedback=self._feedback,
        )
        self._work = work if async_op else None

    def finish(self) -> None:
        """Waits where ``start`` did not."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
