"""Uneven inputs: ranks that have none left shadow the collectives of those that still train.

Within ``join()`` (or torch's ``Join`` over several joinables) every forward of an *active* rank tells the
others three things, in this order, and a *joined* rank's hook answers each of them:

1. somebody is still active (torch's ``Join`` does it through its group, ours through the communicator);
2. where buffers are synchronised: which active rank's count, for rank 0's may be stale;
3. whether the backward will be synchronised, and how many ranks are active.

A joined rank then contributes zeros to every bucket, and has the averages until all have joined (an optimizer
that is sharded over the ranks steps there, too). When all have joined, all get the parameters and buffers
of the last one that did. Collectives of the module itself are not shadowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.algorithms.join import Join, JoinHook

from pycomm.communicator import Communicator
from pycomm.ddp.agree import broadcast_tensors

if TYPE_CHECKING:
    from pycomm.ddp.torch_names import TorchNames

__all__ = ["Joining"]


def _sum(comm: Communicator, *numbers: int) -> list[int]:
    vector = torch.tensor(numbers, dtype=torch.int64)
    comm.all_reduce(vector)
    return [int(number) for number in vector]


def _common_rank(comm: Communicator, is_candidate: bool) -> int:
    """The highest rank that is a candidate. Collective."""
    vector = torch.tensor([comm.rank if is_candidate else -1], dtype=torch.int64)
    comm.all_reduce(vector, op="max")
    return int(vector)


class _JoinByCommunicator(Join):
    """torch's Join where torch.distributed is not initialised: the communicator counts the active ranks."""

    _communicator: Communicator

    def _extract_dist_info(self) -> None:
        joinable: Any = self._joinables[0]
        self._communicator = joinable.communicator
        self._rank = self._communicator.rank
        self._device = torch.device("cpu")

    def _get_num_nonjoined_procs(self) -> int:
        return _sum(self._communicator, 0)[0]

    def _notify_procs_to_terminate(self) -> None:
        _sum(self._communicator, 1)
        raise RuntimeError(f"Rank {self._rank} exhausted all inputs.")


class _Shadow(JoinHook):
    """What a joined rank does in place of a forward and a backward, and when all have joined."""

    def __init__(self, ddp: TorchNames, divide_by_initial_world_size: bool) -> None:
        self._ddp = ddp
        self._own: list[tuple[Any, Any]] | None = None  # parameters and the gradients they had when joining
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        ddp._has_joined = True

    def main_hook(self) -> None:
        ddp: Any = self._ddp
        if ddp._sync_before_forward():
            ddp._sync_module_buffers(_common_rank(ddp.communicator, False))
        if self._own is None:
            self._own = [(p, p.grad) for p in ddp._look().parameters]
        n_synced, n_active = _sum(ddp.communicator, 0, 0)
        ddp.require_forward_param_sync = n_synced > 0
        if n_synced > 0 and ddp._reducer is not None:
            ddp._reducer.shadow(None if ddp._divide_by_initial_world_size else 1.0 / max(1, n_active))

    def post_hook(self, is_last_joiner: bool) -> None:
        ddp: Any = self._ddp
        for parameter, gradient in self._own or ():
            parameter.grad = gradient
        last = ddp._authoritative_rank = _common_rank(ddp.communicator, is_last_joiner)
        tensors = list(ddp._look().named.values())
        if ddp.forward_sync_buffers:
            tensors += ddp._buffers_now()
        broadcast_tensors(ddp.communicator, tensors, last)


class Joining:
    """The part of the wrapper that makes it a ``torch.distributed.algorithms.join.Joinable``."""

    communicator: Communicator
    process_group: Any
    _join_config: Any
    _divide_by_initial_world_size: bool
    _n_active: int

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context for training with uneven inputs: a rank without any left shadows the others' collectives.

        Args:
            divide_by_initial_world_size: True: gradients are sums over the active ranks divided by all ranks;
                False: by the active ones.
            enable: False: inputs are known to be even, and the context does nothing.
            throw_on_early_termination: when a rank has no input left, all raise RuntimeError instead.

        Example:
            >>> import pycomm, torch
            >>> comm = pycomm.init()
            >>> model = pycomm.DistributedDataParallel(torch.nn.Linear(8, 2), communicator=comm)
            >>> with model.join():
            ...     for batch in [torch.ones(4, 8)] * 3:
            ...         model(batch).sum().backward()
        """
        kind = Join if self.process_group is not None else _JoinByCommunicator
        joinables: Any = [self]
        return kind(
            joinables,
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's ``Join``; takes ``divide_by_initial_world_size``, see :meth:`join`."""
        ddp: Any = self
        return _Shadow(ddp, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """Where torch's ``Join`` makes its tensors: beside the parameters, as its group's backend may ask."""
        device: torch.device = cast(Any, self).device
        return device

    @property
    def join_process_group(self) -> Any:
        """The torch group through which torch's ``Join`` counts the active ranks."""
        return self.process_group

    def _authoritative(self) -> int:
        """Whose buffers all ranks get. Collective within join()."""
        return _common_rank(self.communicator, True) if self._join_config.enable else 0

    def _before_joined_forward(self) -> None:
        """Tells the joined ranks that this one is active; raises where they want all to stop."""
        if self.process_group is not None:
            joinable: Any = self
            work = Join.notify_join_context(joinable)
            if work is not None:
                work.wait()
            return
        if not self._join_config.is_first_joinable:
            return
        _sum(self.communicator, 1)
        if self._join_config.throw_on_early_termination and _sum(self.communicator, 0)[0] > 0:
            raise RuntimeError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")

    def _tell_joined_ranks(self, is_synced: bool) -> None:
        self._n_active = _sum(self.communicator, int(is_synced), 1)[1]

    def _share_of_active(self) -> float | None:
        """This rank's share of the average within join()."""
        if not self._join_config.enable or self._divide_by_initial_world_size:
            return None
        return 1.0 / self._n_active
