"""Zero-bubble schedules: the gradients of weights, which nobody waits for, fill the gaps.

::

    ZeroBubbleH1, p = 3, m = 4    F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
                                  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
                                  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    ZeroBubbleH2, p = 3, m = 5    F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
                                  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
                                  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

*H1* is 1F1B whose rank r is r weight gradients late, so that every rank keeps at most p activations, as
1F1B's first does. Idle time (p - 1)(F + I - W) where W <= I and m >= p, against (p - 1)(F + I + W) of 1F1B;
where W > I there is none but the forwards' (p - 1) F; where m < p it is (p - m) W more.

*H2* runs further ahead, up to 2 p - 1 activations on a rank. Between a rank's first and last action there
is no idle time where F = I = W and m >= 2 p, and (p - r - 1)(F + I - 2 W) on rank r where that is above 0;
of the whole step it is (p - 1) max(F, F + I - 2 W). What is idle at the ends goes when steps follow each
other without a flush.

*Interleaved* is H1 with v stages on a rank in a loop; idle time is H1's divided by v. *ZBV* has two stages on
a rank in a V and keeps at most 2 p half-size activations, as much memory as 1F1B's first rank on every rank;
where F = I = W and m >= 2 p it is idle for (p - 1)(F + I - W)/2, or up to F more.

H2 and ZBV are found by :mod:`pycomm.pipeline.schedule.greedy` under these limits.

Source: Qi et al., Zero Bubble Pipeline Parallelism (2023), and for ZBV, Pipeline Parallelism with
Controllable Memory (2024).
"""

from __future__ import annotations

from pycomm.pipeline.schedule.action import Action
from pycomm.pipeline.schedule.greedy import greedy
from pycomm.pipeline.schedule.interleaved import groups_of
from pycomm.pipeline.schedule.order import Order, loop_placement, v_placement

__all__ = ["interleaved_zero_bubble", "zbv", "zero_bubble_h1", "zero_bubble_h2"]


def zero_bubble_h1(n_ranks: int, n_microbatches: int) -> Order:
    """As much memory as 1F1B."""
    return _late_weights("ZeroBubbleH1", n_ranks, 1, n_microbatches)


def zero_bubble_h2(n_ranks: int, n_microbatches: int) -> Order:
    """Twice the memory of 1F1B, nearly."""
    limits = [2 * n_ranks - 1] * n_ranks
    return greedy("ZeroBubbleH2", loop_placement(n_ranks), n_ranks, n_microbatches, limits)


def interleaved_zero_bubble(n_ranks: int, stages_per_rank: int, n_microbatches: int) -> Order:
    """Several stages on a rank, in a loop."""
    return _late_weights("InterleavedZeroBubble", n_ranks, stages_per_rank, n_microbatches)


def zbv(n_ranks: int, n_microbatches: int) -> Order:
    """Two stages on a rank, in a V."""
    limits = [2 * n_ranks] * n_ranks
    return greedy("ZBVZeroBubble", v_placement(n_ranks), n_ranks, n_microbatches, limits)


def _late_weights(name: str, n_ranks: int, stages_per_rank: int, m: int) -> Order:
    """Interleaved 1F1B with its backwards in halves, and rank r's weight gradients r late."""
    groups = groups_of(n_ranks, m)
    actions = []
    for rank in range(n_ranks):
        stages = range(rank, n_ranks * stages_per_rank, n_ranks)
        forwards = [Action(stage, "F", k) for group in groups for stage in stages for k in group]
        backwards = [(stage, k) for group in groups for stage in reversed(stages) for k in group]
        slack = 2 if stages_per_rank > 1 else 1
        ahead = slack * (n_ranks - rank - 1) + (stages_per_rank - 1) * len(groups[0])
        ordered = forwards[:ahead]
        for i, (stage, k) in enumerate(backwards):
            ordered += forwards[ahead + i : ahead + i + 1]
            ordered.append(Action(stage, "I", k))
            if i >= rank:
                ordered.append(Action(backwards[i - rank][0], "W", backwards[i - rank][1]))
        ordered += [Action(stage, "W", k) for stage, k in backwards[max(len(backwards) - rank, 0) :]]
        actions.append(tuple(ordered))
    return Order(name, loop_placement(n_ranks, stages_per_rank), m, tuple(actions))
