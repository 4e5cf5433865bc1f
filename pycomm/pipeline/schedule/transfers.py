"""From computations to all that a rank does: sends behind what makes their data, receives before their use.

A send stands right behind its action and never blocks. A receive stands ``early`` computations before the
action that needs it (posted early, its data may come while others compute; memory for it is taken from then
on). Between two stages of one rank nothing is sent. Stages with no backward message between them (a frozen
front part of the model) are given as ``no_gradient``.
"""

from __future__ import annotations

from collections.abc import Collection

from pycomm.pipeline.schedule.action import REDUCE, Action
from pycomm.pipeline.schedule.order import Order

__all__ = ["with_transfers"]


def with_transfers(order: Order, early: int = 1, no_gradient: Collection[int] = ()) -> list[list[Action]]:
    """Every rank's actions, transfers included.

    Args:
        order: of computations.
        early: how many computations before its use a receive is posted, at least 0.
        no_gradient: stages whose input needs no gradient: nothing is sent back from them.

    Example:
        >>> from pycomm.pipeline.schedule.gpipe import gpipe
        >>> [" ".join(map(str, actions)) for actions in with_transfers(gpipe(2, 1), early=0)]
        ['0F0 0SEND_F0 0RECV_B0 0B0', '1RECV_F0 1F0 1B0 1SEND_B0']
    """
    if early < 0:
        raise ValueError(f"early must be at least 0, got {early}")
    result = []
    for actions in order.actions:
        before: list[list[Action]] = [[] for _ in actions]
        computations = [i for i, action in enumerate(actions) if action.kind != REDUCE]
        for j, i in enumerate(computations):
            received = _received_for(order, actions[i], no_gradient)
            if received is not None:
                before[computations[max(j - early, 0)]].append(received)
        ordered: list[Action] = []
        for action, receives in zip(actions, before, strict=True):
            ordered += [*receives, action]
            sent = _sent_by(order, action, no_gradient)
            if sent is not None:
                ordered.append(sent)
        result.append(ordered)
    return result


def _is_far(order: Order, a: int, b: int) -> bool:
    return min(a, b) >= 0 and max(a, b) < order.n_stages and order.placement[a] != order.placement[b]


def _received_for(order: Order, action: Action, no_gradient: Collection[int]) -> Action | None:
    stage, kind, k = action
    if kind == "F" and _is_far(order, stage - 1, stage):
        return Action(stage, "RECV_F", k)
    if kind in ("B", "I") and _is_far(order, stage, stage + 1) and stage + 1 not in no_gradient:
        return Action(stage, "RECV_B", k)
    return None


def _sent_by(order: Order, action: Action, no_gradient: Collection[int]) -> Action | None:
    stage, kind, k = action
    if kind == "F" and _is_far(order, stage, stage + 1):
        return Action(stage, "SEND_F", k)
    if kind in ("B", "I") and _is_far(order, stage - 1, stage) and stage not in no_gradient:
        return Action(stage, "SEND_B", k)
    return None
