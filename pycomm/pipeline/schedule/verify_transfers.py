"""Are the sends and receives of an order the right ones? Each value that a rank needs of another, once.

A *message* is what one stage makes for its neighbour on another rank, of one microbatch and direction. It
needs one send, on the rank that makes it, behind the action that does; and one receive, on the rank that
uses it, before the action that does. Sends never block, receives wait where their value is used, and each
message has a tag of its own between two ranks, so none can be taken for another. What is left to look for
is a send that stands too late: behind an action that, over other ranks, waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pycomm.pipeline.schedule.action import TRANSFERS, Action
from pycomm.pipeline.schedule.order import Order
from pycomm.pipeline.schedule.verify import needs

__all__ = ["verify_transfers"]


def verify_transfers(
    order: Order, lists: Sequence[Sequence[Action]], no_gradient: Collection[int] = ()
) -> None:
    """Raises when the actions of some rank are not the order's with the transfers that it needs.

    Args:
        order: of computations, a right one.
        lists: of every rank, as :func:`pycomm.pipeline.schedule.transfers.with_transfers` makes them.
        no_gradient: stages whose input needs no gradient: nothing is sent back from them.

    Raises:
        ValueError: a computation that is not as in the order; a transfer that is missing, twice, on another
            rank, or where it is too early or too late, with the rank and both actions; a deadlock.

    Example:
        >>> from pycomm.pipeline.schedule.gpipe import gpipe
        >>> from pycomm.pipeline.schedule.order import parse
        >>> lists = ["0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1RECV_F0 1B0 1SEND_B0"]
        >>> verify_transfers(gpipe(2, 1), [parse(text) for text in lists])
        Traceback (most recent call last):
        ValueError: GPipe: rank 1: 1RECV_F0 (its action 1) must be before 1F0 (its action 0)
    """
    if len(lists) != order.n_ranks:
        raise ValueError(f"{order.name}: {order.n_ranks} ranks, and actions of {len(lists)}")
    for rank, (actions, computed) in enumerate(zip(lists, order.actions, strict=True)):
        where = f"{order.name}: rank {rank}"
        found = [a for a in actions if a.kind not in TRANSFERS]
        for i, (mine, wanted) in enumerate(zip(found, computed, strict=False)):
            if mine != wanted:
                raise ValueError(f"{where}: its computation {i} is {mine}, in the order it is {wanted}")
        if len(found) != len(computed):
            raise ValueError(f"{where}: {len(found)} computations, in the order there are {len(computed)}")
        _verify_rank(where, actions, _wanted(order, rank, no_gradient))
    _verify_progress(order, lists, no_gradient)


def _wanted(order: Order, rank: int, no_gradient: Collection[int]) -> dict[Action, Action]:
    """For each transfer of a rank the computation that it must be behind (a send) or before (a receive)."""
    wanted: dict[Action, Action] = {}
    for action in order.actions[rank]:
        stage, kind, k = action
        below = stage > 0 and order.placement[stage - 1] != rank
        above = stage < order.n_stages - 1 and order.placement[stage + 1] != rank
        if kind == "F":
            if below:
                wanted[Action(stage, "RECV_F", k)] = action
            if above:
                wanted[Action(stage, "SEND_F", k)] = action
        elif kind in ("B", "I"):
            if below and stage not in no_gradient:
                wanted[Action(stage, "SEND_B", k)] = action
            if above and stage + 1 not in no_gradient:
                wanted[Action(stage, "RECV_B", k)] = action
    return wanted


def _verify_rank(where: str, actions: Sequence[Action], wanted: dict[Action, Action]) -> None:
    place = {action: i for i, action in enumerate(actions)}
    seen: set[Action] = set()
    for i, action in enumerate(actions):
        if action.kind not in TRANSFERS:
            continue
        if action not in wanted:
            raise ValueError(f"{where}: {action} (its action {i}): nothing is to be transferred there")
        if action in seen:
            raise ValueError(f"{where}: {action} (its action {i}) is there twice")
        seen.add(action)
        other = wanted[action]
        is_send = action.kind.startswith("SEND")
        if (i < place[other]) == is_send:
            raise ValueError(
                f"{where}: {action} (its action {i}) must be {'behind' if is_send else 'before'} {other} "
                f"(its action {place[other]})"
            )
    missing = [action for action in wanted if action not in seen]
    if missing:
        raise ValueError(f"{where}: {missing[0]} is missing, which {wanted[missing[0]]} needs")


def _verify_progress(order: Order, lists: Sequence[Sequence[Action]], no_gradient: Collection[int]) -> None:
    """Runs the lists in thought: a computation waits for what was computed here and sent elsewhere."""
    done: set[Action] = set()
    at = [0] * len(lists)

    def missing(rank: int, action: Action) -> list[Action]:
        if action.kind in TRANSFERS:
            return []
        found = []
        for choice in needs(order, action):
            first = choice[0]
            if order.placement[first.stage] != rank:
                if first.kind != "F" and first.stage in no_gradient:
                    continue
                choice = (Action(first.stage, "SEND_F" if first.kind == "F" else "SEND_B", first.microbatch),)
            if not any(a in done for a in choice):
                found.append(choice[0])
        return found

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while at[rank] < len(actions) and not missing(rank, actions[at[rank]]):
                done.add(actions[at[rank]])
                at[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} at {actions[at[rank]]} (its action {at[rank]}) waits for "
        + ", ".join(f"{a} of rank {order.placement[a.stage]}" for a in missing(rank, actions[at[rank]]))
        for rank, actions in enumerate(lists)
        if at[rank] < len(actions)
    ]
    if stuck:
        raise ValueError(f"{order.name}: deadlock: {'; '.join(stuck)}")
