"""torch.distributed.split_group for pycomm's groups: torch's own wants one bound to an accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["split_group"]


def split_group(
    parent_pg: Any,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: Any = None,
) -> Any:
    """See torch.distributed.split_group: one list of the parent's ranks for each new group.

    Returns:
        The group of this rank; None where no list has it.

    Raises:
        ValueError: no lists, or a rank that is not the parent's, or in two of them.
    """
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    of_world = dist.get_process_group_ranks(parent_pg)
    listed = [rank for ranks in split_ranks for rank in ranks]
    if len(set(listed)) < len(listed) or not all(ranks for ranks in split_ranks):
        raise ValueError(
            f"split_group: every rank belongs to one group at most, and none is empty: {split_ranks}"
        )
    strange = [rank for rank in listed if not 0 <= rank < len(of_world)]
    if strange:
        raise ValueError(f"split_group: the parent group has {len(of_world)} ranks, got rank {strange[0]}")
    if backend is not None and str(backend) not in ("pycomm", "cpu:pycomm"):
        raise ValueError(
            f"split_group: the parent's backend is cpu:pycomm, so the new group's cannot be {backend}"
        )
    mine = next((ranks for ranks in split_ranks if parent_pg.rank() in ranks), None)
    if mine is None:
        return None
    return dist.new_group(
        sorted(of_world[rank] for rank in mine),
        timeout=timedelta(seconds=parent_pg.communicator.timeout) if timeout is None else timeout,
        backend="pycomm",
        pg_options=pg_options,
        use_local_synchronization=True,  # the other ranks of the world need not be here
        group_desc=group_desc,
    )
