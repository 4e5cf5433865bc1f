"""1F1B (PipeDream-flush), its eager form, and PipeDream-2BW, which never flushes.

::

    1F1B, p = 3, m = 4          F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
                                .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
                                .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

    Eager1F1B, p = 3, m = 4     F0 F1 F2 F3 .  B0 .  B1 .  B2 .  B3
                                .  F0 F1 F2 B0 F3 B1 .  B2 .  B3 .
                                .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

(A backward takes as long as a forward here.) Rank r runs p - r - 1 forwards ahead, then one forward and one
backward in turns. Idle as GPipe, but rank r keeps at most min(m, p - r) activations. *Eager* runs 2 (p - r)
- 2 ahead: transfers that take time hide behind the forwards that are ready, for up to min(m, 2 (p - r) - 1)
activations.

*2BW*: the forwards of the next batch take the place of the drain. A batch's update waits for all of its
backwards, while forwards of the next batch are on their way; so these use the weights of the update before:
w(t+1) = w(t) - lr g(w(t-1)), and a rank keeps two versions of its weights.

Sources: Narayanan et al., PipeDream (2019) and Memory-Efficient Pipeline-Parallel DNN Training (2021);
Zhuang et al., On Optimizing the Communication of Model Parallelism (2023) for the eager form.
"""

from __future__ import annotations

from pycomm.pipeline.schedule.action import Action
from pycomm.pipeline.schedule.order import Order, loop_placement

__all__ = ["eager_one_f_one_b", "one_f_one_b", "pipedream_2bw", "two_bw_steps"]


def one_f_one_b(n_ranks: int, n_microbatches: int) -> Order:
    """PipeDream-flush."""
    ahead = [n_ranks - rank - 1 for rank in range(n_ranks)]
    return _in_turns("1F1B", ahead, n_microbatches)


def eager_one_f_one_b(n_ranks: int, n_microbatches: int) -> Order:
    """1F1B with the double number of forwards ahead."""
    ahead = [2 * (n_ranks - rank - 1) for rank in range(n_ranks)]
    return _in_turns("Eager1F1B", ahead, n_microbatches)


def pipedream_2bw(n_ranks: int, n_microbatches: int, n_batches: int) -> Order:
    """1F1B over several batches without a flush: microbatch k belongs to batch k // m.

    Args:
        n_ranks: p.
        n_microbatches: m, of each batch.
        n_batches: between two flushes.
    """
    ahead = [n_ranks - rank - 1 for rank in range(n_ranks)]
    return _in_turns("PipeDream2BW", ahead, n_microbatches * n_batches)


def two_bw_steps(n_ranks: int, n_microbatches: int, n_batches: int) -> list[Order]:
    """:func:`pipedream_2bw` cut into what each step does, and at the end the drain.

    A step has all forwards of its batch, and as many backwards; rank r's are p - r - 1 microbatches behind.
    So at the end of a step all backwards of the batch before are done. Microbatches count modulo 2 m here,
    since two batches are on their way.

    Args:
        n_ranks: p.
        n_microbatches: m, of each batch, at least p - 1.
        n_batches: at least 1.

    Returns:
        An order for each batch, and one of the backwards that are left.

    Raises:
        ValueError: too few microbatches.

    Example:
        >>> [" ".join(map(str, step.actions[0])) for step in two_bw_steps(2, 2, 2)]
        ['0F0 0F1 0B0', '0F2 0B1 0F3 0B2', '0B3']
    """
    p, m = n_ranks, n_microbatches
    if m < p - 1:
        raise ValueError(
            f"PipeDream2BW: {p} ranks need at least {p - 1} microbatches, got {m}: with fewer, more than two "
            "batches would be on their way, and more than two versions of the weights"
        )
    whole = pipedream_2bw(p, m, n_batches)
    steps = []
    for batch in range(n_batches + 1):
        actions = []
        for rank, ordered in enumerate(whole.actions):
            first, end = (2 * m * b - (p - rank - 1) for b in (batch, batch + 1))
            mine = ordered[max(first, 0) : end]
            actions.append(tuple(a._replace(microbatch=a.microbatch % (2 * m)) for a in mine))
        steps.append(Order(whole.name, whole.placement, 2 * m, tuple(actions)))
    return steps


def _in_turns(name: str, ahead: list[int], m: int) -> Order:
    actions = []
    for rank, n_ahead in enumerate(ahead):
        n_ahead = min(n_ahead, m)
        forwards, backwards = ([Action(rank, kind, k) for k in range(m)] for kind in "FB")
        turns = [a for pair in zip(forwards[n_ahead:], backwards, strict=False) for a in pair]
        actions.append((*forwards[:n_ahead], *turns, *backwards[m - n_ahead :]))
    return Order(name, loop_placement(len(ahead)), m, tuple(actions))
