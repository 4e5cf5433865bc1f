"""Averages by tokens or samples: each rank's gradient counts by what it had, as in the concatenated batch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from pycomm.communicator import Communicator
from pycomm.ddp.sinks import Forward

__all__ = ["Weighing"]

_WHO = "DistributedDataParallel"


class Weighing:
    """The part of the wrapper that knows this rank's share of the average."""

    communicator: Communicator
    require_backward_grad_sync: bool
    _norms_communicator: Communicator | None
    _join_config: Any
    _global_batch: float | None
    _share: float | None

    def _share_of_active(self) -> float | None:
        raise NotImplementedError  # in pycomm/ddp/join.py

    def _told(self) -> Forward:
        share = self._share if self._share is not None else self._share_of_active()
        return Forward(self.require_backward_grad_sync, share)

    @contextlib.contextmanager
    def weighted(self, n: float) -> Iterator[None]:
        """Backward through forwards within it weighs this rank's gradients by ``n`` of all ranks' n.

        With a loss that is the mean over ``n`` tokens or samples on each rank, the average is the gradient of
        the mean over all of them: that of the concatenated batch, however uneven. One exchange of 8 bytes.

        Args:
            n: this rank's number, at least 0; not 0 on all ranks. With 0 its gradients count as zeros, also
                where they are NaN (a mean over nothing).

        Raises:
            RuntimeError: within join(), or with SyncBatchNorm layers (the message says what to do instead).
            ValueError: on every rank, when a rank's number is negative or not finite, or all are 0.

        Example:
            >>> import pycomm, torch
            >>> comm = pycomm.init()
            >>> model = pycomm.DistributedDataParallel(torch.nn.Linear(8, 2), communicator=comm)
            >>> with model.weighted(4):
            ...     model(torch.ones(4, 8)).mean().backward()
        """
        before, self._share = self._share, self._share_of(n)
        try:
            yield
        finally:
            self._share = before

    def _share_of(self, n: float) -> float | None:
        if self._norms_communicator is not None:
            raise RuntimeError(
                f"{_WHO}.weighted: SyncBatchNorm mixes the ranks' losses before weights come in; "
                "scale the loss itself, by n * size / (the sum of all ranks' n)"
            )
        if self._join_config.enable:
            raise RuntimeError(
                f"{_WHO}.weighted: joined ranks give no number; see join's divide_by_initial_world_size"
            )
        is_valid = 0 <= n < math.inf
        everyone = torch.empty(self.communicator.size, dtype=torch.float64)
        mine = torch.tensor([float(n) if is_valid else math.nan], dtype=torch.float64)
        self.communicator.all_gather(everyone, mine)
        if bool(everyone.isnan().any()):
            rank = int(everyone.isnan().nonzero()[0])
            given = f", got {n!r}" if rank == self.communicator.rank else ""
            raise ValueError(f"{_WHO}.weighted: the number of rank {rank} must be finite and >= 0{given}")
        total = float(everyone.sum())
        if total == 0:
            raise ValueError(f"{_WHO}.weighted: the numbers of all ranks are 0")
        self._global_batch = total
        return None if self.communicator.size == 1 else float(n) / total
