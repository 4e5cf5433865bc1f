"""Is an order a right one? Every computation once, in an order that cannot deadlock, within its memory.

What an action needs: F of stage s needs F of stage s - 1; B or I of stage s needs F of stage s, and B or I of
stage s + 1, of the same microbatch; W needs I; REDUCE_GRAD, at most one of a stage, needs all of its
backwards. Sends never block and receives are matched by stage and microbatch, so an order can run if and only
if these needs and the ranks' own orders have no cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pycomm.pipeline.schedule.action import BACKWARDS, COMPUTATIONS, REDUCE, Action
from pycomm.pipeline.schedule.order import Order

__all__ = ["live_activations", "needs", "sequence", "verify"]


def needs(order: Order, action: Action) -> list[tuple[Action, ...]]:
    """What must have ended before: of each tuple one action (a backward is whole, or its first half)."""
    stage, kind, k = action
    if kind == REDUCE:
        return [tuple(Action(stage, last, i) for last in "BW") for i in range(order.n_microbatches)]
    if kind == "F":
        return [(Action(stage - 1, "F", k),)] if stage > 0 else []
    if kind == "W":
        return [(Action(stage, "I", k),)]
    before: list[tuple[Action, ...]] = [(Action(stage, "F", k),)]
    if stage < order.n_stages - 1:
        before.append(tuple(Action(stage + 1, backward, k) for backward in BACKWARDS))
    return before


def sequence(order: Order) -> Iterator[tuple[int, Action]]:
    """All (rank, action) in an order in which they can run.

    Raises:
        ValueError: they cannot: what every rank that is left waits for.
    """
    done: set[Action] = set()
    at = [0] * order.n_ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(order.actions):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                if not all(any(a in done for a in choice) for choice in needs(order, action)):
                    break
                done.add(action)
                at[rank] += 1
                moved = True
                yield rank, action
    stuck = []
    for rank, actions in enumerate(order.actions):
        if at[rank] < len(actions):
            action = actions[at[rank]]
            missing = [c[0] for c in needs(order, action) if not any(a in done for a in c)]
            waits = ", ".join(f"{a} of rank {order.placement[a.stage]}" for a in missing)
            stuck.append(f"rank {rank} at {action} (its action {at[rank]}) waits for {waits}")
    if stuck:
        raise ValueError(f"{order.name}: deadlock: {'; '.join(stuck)}")


def live_activations(order: Order, rank: int) -> list[int]:
    """How many (stage, microbatch) a rank keeps after each of its actions: from F to B, or to W."""
    curve, live = [], 0
    for action in order.actions[rank]:
        live += {"F": 1, "B": -1, "W": -1, "I": 0, REDUCE: 0}[action.kind] if order.has_backward else 0
        curve.append(live)
    return curve


def verify(order: Order, max_live: int | None = None) -> None:
    """Raises when an order is not right.

    Args:
        order: to look at.
        max_live: at most so many activations (stage, microbatch) on a rank at any time.

    Raises:
        ValueError: what is wrong: no microbatch, an action that is missing, twice, no computation or on
            another rank than its stage, a deadlock, too many activations.

    Example:
        >>> verify(Order.from_actions([["0F0", "0B0"], ["1B0", "1F0"]]))
        Traceback (most recent call last):
        ValueError: given: deadlock: rank 0 at 0B0 (its action 1) waits for 1B0 of rank 1; rank 1 at 1B0 ...
    """
    if order.n_microbatches < 1:
        raise ValueError(
            f"{order.name}: the number of microbatches must be at least 1, got {order.n_microbatches}"
        )
    for stage, holder in enumerate(order.placement):
        if not 0 <= holder < order.n_ranks:
            raise ValueError(f"{order.name}: stage {stage} is on rank {holder} of {order.n_ranks}")
    counts = Counter(action for actions in order.actions for action in actions)
    for rank, actions in enumerate(order.actions):
        for action in actions:
            if not 0 <= action.stage < order.n_stages or order.placement[action.stage] != rank:
                raise ValueError(f"{order.name}: rank {rank} has {action}, but does not hold that stage")
            if action.kind not in (*COMPUTATIONS, REDUCE):
                raise ValueError(
                    f"{order.name}: rank {rank} has {action}: an order holds computations only, transfers "
                    "follow"
                )
            if action.kind != REDUCE and not 0 <= action.microbatch < order.n_microbatches:
                raise ValueError(f"{order.name}: {action}: there are {order.n_microbatches} microbatches")
    for stage in range(order.n_stages):
        if counts[Action.reduce(stage)] > 1:
            raise ValueError(
                f"{order.name}: stage {stage}: expected one {REDUCE}, or none; there are "
                f"{counts[Action.reduce(stage)]}"
            )
        for k in range(order.n_microbatches):
            f, b, i, w = (counts[Action(stage, kind, k)] for kind in "FBIW")
            right = f == 1 and ((b, i, w) in ((1, 0, 0), (0, 1, 1)) if order.has_backward else True)
            if not right:
                raise ValueError(
                    f"{order.name}: stage {stage}, microbatch {k}: expected one F and one B, or one "
                    f"I and one W; there are {f} F, {b} B, {i} I, {w} W"
                )
    for _ in sequence(order):
        pass
    for rank in range(order.n_ranks):
        peak = max(live_activations(order, rank), default=0)
        if max_live is not None and peak > max_live:
            raise ValueError(f"{order.name}: rank {rank} keeps {peak} activations, at most {max_live} may be")
