"""What the wrapper tells about itself: times, buckets, and whether replicas are still replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pycomm.communicator import Communicator
from pycomm.ddp.consistency import compare, tensors_of
from pycomm.ddp.stats import Times, described_buckets, described_rates, described_step

if TYPE_CHECKING:
    from pycomm.ddp.reducer import Reducer

__all__ = ["Facts"]


class Facts:
    """The part of the wrapper that measures and compares."""

    communicator: Communicator
    module: nn.Module
    gradient_as_bucket_view: bool
    parameters_to_ignore: set[str]
    _reducer: Reducer | None
    _global_batch: float | None

    @property
    def exposed_s(self) -> float:
        """Seconds that backward has spent in communication so far: launching, reducing and waiting."""
        return self._reducer.times.exposed_s if self._reducer is not None else 0.0

    @property
    def buckets(self) -> list[list[str]]:
        """The parameters' names in each bucket, in the order of reduction; empty with one rank."""
        return self._reducer.buckets if self._reducer is not None else []

    def stats(self, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
        """Facts about the last synchronised step. Local, and always kept: a few clock readings a step.

        Args:
            optimizers: whose learning rates, and what ``pycomm.optim.scale_lr`` did to them, are told as
                well.

        Returns:
            A dict. ``world_size``, ``rank``; ``step``: synchronised backwards so far; ``forward_s``,
            ``backward_s`` (without communication), ``exposed_s`` (communication on backward's thread):
            seconds; ``arrival_s``: for each rank, how long after the first its gradients were ready;
            ``last_rank``, ``skew_s``: who came last, and by how much; ``buckets``: for each bucket
            ``n_parameters``, ``dtype``, ``bytes``, ``wire_bytes`` and ``algorithm``; ``global_batch``: the
            sum of the numbers given to the last ``weighted``, or None; ``optimizers``: for each one
            ``learning_rates``, ``scaling_rule`` and ``scaling_factor``. With one rank nothing is measured:
            ``step`` and the times are 0, and ``buckets`` is empty.

        Example:
            >>> import pycomm, torch
            >>> comm = pycomm.init()
            >>> model = pycomm.DistributedDataParallel(torch.nn.Linear(8, 2), communicator=comm)
            >>> model(torch.ones(4, 8)).sum().backward()
            >>> model.stats()["world_size"]
            1
        """
        facts: dict[str, Any] = {"world_size": self.communicator.size, "rank": self.communicator.rank}
        reducer = self._reducer
        if reducer is None:
            facts |= described_step(Times(self.communicator.rank, self.communicator.size))
            facts["buckets"] = []
        else:
            facts |= described_step(reducer.times)
            in_arena = self.gradient_as_bucket_view
            facts["buckets"] = described_buckets(self.communicator, reducer.plan.buckets, in_arena)
        facts["global_batch"] = self._global_batch
        facts["optimizers"] = [described_rates(optimizer) for optimizer in optimizers]
        return facts

    def check_consistency(self, *optimizers: torch.optim.Optimizer) -> None:
        """Raises unless parameters, buffers and the optimizers' states are equal on all ranks. Collective.

        One exchange of 8 bytes; about 1 ns of checksum a byte. Running statistics of normalisation layers in
        training mode are each rank's own until the next forward, and not compared.

        Args:
            optimizers: whose states and settings are compared, too.

        Raises:
            RuntimeError: on every rank: replicas differ; names the first tensor that does, and the ranks that
                dissent from most.

        Example:
            >>> import pycomm, torch
            >>> comm = pycomm.init()
            >>> model = pycomm.DistributedDataParallel(torch.nn.Linear(8, 2), communicator=comm)
            >>> model.check_consistency(torch.optim.SGD(model.parameters(), lr=0.1))
        """
        named = [
            item
            for item in (*self.module.named_parameters(), *self.module.named_buffers())
            if item[0] not in self.parameters_to_ignore
        ]
        compare(
            self.communicator,
            "DistributedDataParallel.check_consistency",
            tensors_of(named, self.module, optimizers),
        )
