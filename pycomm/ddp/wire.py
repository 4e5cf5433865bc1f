"""How the gradients of one bucket travel: as they lie, or compressed (half_wire.py and block_wire.py on
one host, coded_wire.py between hosts and between GPUs).

A wire has two steps. ``start`` launches the reduction of a list of gradients (and may return before it is
done); ``finish`` returns when every gradient holds the average over the ranks. All ranks start and finish
their wires in the same order, and all start before any finish, so collectives inside ``finish`` pair up.

**As they lie**: one coalesced all_reduce on the list, no packing (docs/architecture.md says why).
"""

from __future__ import annotations

from operator import is_
from typing import Literal, Protocol

import torch
from torch import Tensor

from pycomm.communicator import Communicator
from pycomm.ddp.averaging import operation
from pycomm.work import Work

__all__ = ["Compression", "PlainWire", "WIRE_DTYPES", "Wire"]

Compression = Literal["fp16", "bf16", "fp8", "int8"]

WIRE_DTYPES: dict[str, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


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
        whole = self._views is not None and all(map(is_, gradients, self._views))
        # A list counts as the concatenation of its tensors, so ranks may differ in which they give.
        tensors = self._buffer if whole else gradients
        work = self._comm.all_reduce(tensors, op=operation(weight), async_op=async_op)
        self._work = work if async_op else None

    def finish(self) -> None:
        """Waits where ``start`` did not."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
