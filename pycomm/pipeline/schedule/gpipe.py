"""GPipe, and its form with several stages on a rank (looped BFS).

::

    GPipe, p = 3, m = 4               F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
                                      .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
                                      .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .

    LoopedBFS, p = 2, m = 2, v = 2    0F0 0F1 2F0 2F1 .   .   2B0 2B1 0B0 0B1
                                      .   1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1 .

All forwards, then all backwards. Share of time idle (p - 1)/(m + p - 1) with one stage on a rank. With v of
them a rank is idle for (p - 1)(F + B)/v of a step, F and B being all of a rank's stages', and where m < p for
(v - 1)(p - m)(F + B)/v more. Every rank keeps the activations of all m microbatches.

Sources: Huang et al., GPipe (2019); Lamy-Poirier, Breadth-First Pipeline Parallelism (2023).
"""

from __future__ import annotations

from pycomm.pipeline.schedule.action import Action
from pycomm.pipeline.schedule.order import Order, loop_placement

__all__ = ["forward_only", "gpipe", "looped_bfs"]


def gpipe(n_ranks: int, n_microbatches: int) -> Order:
    """One stage on a rank."""
    return _breadth_first("GPipe", n_ranks, 1, n_microbatches)


def looped_bfs(n_ranks: int, stages_per_rank: int, n_microbatches: int) -> Order:
    """Every stage of a rank takes all microbatches before the next one begins."""
    return _breadth_first("LoopedBFS", n_ranks, stages_per_rank, n_microbatches)


def _breadth_first(name: str, n_ranks: int, stages_per_rank: int, m: int) -> Order:
    actions = []
    for rank in range(n_ranks):
        stages = range(rank, n_ranks * stages_per_rank, n_ranks)
        forwards = [Action(stage, "F", k) for stage in stages for k in range(m)]
        backwards = [Action(stage, "B", k) for stage in reversed(stages) for k in range(m)]
        actions.append((*forwards, *backwards))
    return Order(name, loop_placement(n_ranks, stages_per_rank), m, tuple(actions))


def forward_only(placement: tuple[int, ...], n_ranks: int, n_microbatches: int) -> Order:
    """Evaluation, with the stages where training has them.

    A rank goes through its stages for one microbatch after the other as they arrive: with microbatches in
    groups of p, stage by stage.
    """
    actions: list[list[Action]] = [[] for _ in range(n_ranks)]
    for first in range(0, n_microbatches, n_ranks):
        group = range(first, min(first + n_ranks, n_microbatches))
        for stage, rank in enumerate(placement):
            actions[rank] += [Action(stage, "F", k) for k in group]
    return Order("ForwardOnly", placement, n_microbatches, tuple(map(tuple, actions)))
