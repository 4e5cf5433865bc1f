"""What torch asks of the backend of a group for a device: a group of pycomm's is its own backend.

``group._get_backend(device)`` leads here; FSDP2 may take its buffers from it, torch 2.14 asks it in every
``batch_isend_irecv``.

``torch.distributed._coalescing_manager(device=…)``: the calls made inside have one handle. torch itself turns
the all_reduces, all_gathers and reduce_scatters of a manager into one coalesced call, with or without a
device. With one it also asks the group to begin and to end; what is called in between (also sends, receives,
broadcasts) is made at once, and the end gives the work of all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pycomm._setup import DTYPE_CODES
from pycomm.torch_backend.works import Done, Pending

__all__ = ["Backend"]


class Backend:
    """Of a group whose works are all made by its ``_maker``."""

    _comm: Any
    _maker: Any
    _collected: list[Done | Pending] | None = None
    supports_splitting = False
    supports_time_estimate = False
    supports_coalescing = False  #: batch_isend_irecv gives a work for each transfer, as gloo's does

    def _get_backend(self, device: Any) -> Any:
        """For torch.

        Raises:
            RuntimeError: for another device than the CPU.
        """
        kind = torch.device(device).type
        if kind != "cpu":
            raise RuntimeError(f"No backend type associated with device type {kind}: pycomm has cpu only")
        return self

    def _get_sequence_number_for_group(self) -> int:
        """For torch: how many collectives the group has made."""
        n: int = self._maker.n_made
        return n

    def _set_sequence_number_for_group(self) -> None:
        """For torch: it is 0."""

    # ---- memory -----------------------------------------------------------------------------------------

    def supports_tensor_alloc(self, device: Any) -> bool:
        """For FSDP2's ``set_allocate_memory_from_process_group_for_comm``."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: Any) -> Tensor:
        """``size`` elements, not initialised, in memory from which the engine does not copy.

        A dtype that the engine does not know has ordinary memory: it is moved as bytes.
        """
        self._get_backend(device)
        if dtype not in DTYPE_CODES:
            return torch.empty(size, dtype=dtype)
        tensor: Tensor = self._comm.empty(size, dtype=dtype)
        return tensor

    # ---- the coalescing manager -------------------------------------------------------------------------

    def _start_coalescing(self, device: Any) -> None:
        """For torch. One whose end never came, for an error inside of the manager, is forgotten."""
        # Shadowed on the maker's object, so that calls outside of a manager pay nothing for it.
        shadowed = self._maker.__dict__
        shadowed.pop("make", None)
        shadowed.pop("transfer", None)
        collected: list[Done | Pending] = []

        def collecting(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                work = method(*arguments)
                collected.append(work)
                return work

            return call

        shadowed.update(make=collecting(self._maker.make), transfer=collecting(self._maker.transfer))
        self._collected = collected

    def _end_coalescing(self, device: Any = None) -> Done | Pending:
        """For torch: the work of all calls since the start.

        Raises:
            RuntimeError: there was no start.
        """
        collected, self._collected = self._collected, None
        if collected is None:
            raise RuntimeError("_end_coalescing: there was no _start_coalescing before it")
        del self._maker.make, self._maker.transfer
        outputs = [tensor for each in collected for tensor in each.result()]
        pending = [each for each in collected if isinstance(each, Pending)]
        if not pending:
            return Done(outputs)

        def finish() -> None:
            for each in pending:
                each.wait()

        works = [work for each in pending for work in each.works]
        return Pending(works, outputs, self._maker.explained, finish=finish)
