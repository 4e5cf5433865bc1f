"""Interleaved 1F1B: v stages on each rank, so that the pipeline fills in 1/v of the time.

::

    Interleaved1F1B, p = 2, m = 2, v = 2    0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1
                                            .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 .

Microbatches go in groups of at least p: a rank takes a group through its first stage, then through its
second, and so on. It runs 2 (p - r - 1) + (v - 1) q forwards ahead, q being a group's size, then one
forward and one backward in turns. The idle time is (p - 1)(F + B)/v, F and B being all of a rank's stages',
and where m < p (v - 1)(p - m)(F + B)/v more; the activations kept are those ahead, and one.

Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2021); for groups
that are larger than p, Llama 3's report (2024).
"""

from __future__ import annotations

from pycomm.pipeline.schedule.action import Action
from pycomm.pipeline.schedule.order import Order, loop_placement

__all__ = ["groups_of", "interleaved_one_f_one_b"]


def groups_of(n_ranks: int, n_microbatches: int) -> list[range]:
    """The microbatches in groups as equal as can be, none smaller than p (unless m is).

    Example:
        >>> groups_of(2, 5)
        [range(0, 3), range(3, 5)]
    """
    n_groups = max(1, n_microbatches // n_ranks)
    small, larger = divmod(n_microbatches, n_groups)
    groups, first = [], 0
    for i in range(n_groups):
        size = small + (i < larger)
        groups.append(range(first, first + size))
        first += size
    return groups


def interleaved_one_f_one_b(n_ranks: int, stages_per_rank: int, n_microbatches: int) -> Order:
    """See the file's text.

    Args:
        n_ranks: p.
        stages_per_rank: v; with 1 it is 1F1B with another warm-up.
        n_microbatches: m, any number.
    """
    groups = groups_of(n_ranks, n_microbatches)
    actions = []
    for rank in range(n_ranks):
        stages = range(rank, n_ranks * stages_per_rank, n_ranks)
        forwards = [Action(stage, "F", k) for group in groups for stage in stages for k in group]
        backwards = [Action(stage, "B", k) for group in groups for stage in reversed(stages) for k in group]
        slack = 2 if stages_per_rank > 1 else 1
        ahead = slack * (n_ranks - rank - 1) + (stages_per_rank - 1) * len(groups[0])
        ahead = min(ahead, len(forwards))
        turns = [a for pair in zip(forwards[ahead:], backwards, strict=False) for a in pair]
        actions.append((*forwards[:ahead], *turns, *backwards[len(forwards) - ahead :]))
    placement = loop_placement(n_ranks, stages_per_rank)
    return Order("Interleaved1F1B", placement, n_microbatches, tuple(actions))
