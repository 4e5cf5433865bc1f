"""Where the gradients of a stage are averaged over its data-parallel replicas: once, as early as can be.

::

    1F1B, p = 2, m = 3         F0 F1 .  .  B0 -  F2 B1 -  .  B2 -  .  .
                                                                   R  -
                               .  F0 B0 -  F1 B1 -  F2 B2 -  .  .  .  .
                                                             R  -

``REDUCE_GRAD`` stands right behind the last action that adds to the stage's gradients (its last B or W), does
not block what follows, and is waited for at the end of the step. So the reductions of later stages run while
earlier ones still compute. Stages of one rank that share a parameter are *together*: none begins before the
last gradient of all of them.

Cost: each gradient travels once in a step, not once for each microbatch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from pycomm.pipeline.schedule.action import REDUCE, Action
from pycomm.pipeline.schedule.order import Order

__all__ = ["reduced", "with_reductions"]


def with_reductions(
    order: Order, stages: Collection[int] | None = None, together: Sequence[Collection[int]] = ()
) -> Order:
    """The order with a reduction of every stage that is named and has none yet.

    Args:
        order: of computations.
        stages: which have replicas; None: all.
        together: stages of one rank that share a parameter.

    Example:
        >>> from pycomm.pipeline.schedule.gpipe import gpipe
        >>> with_reductions(gpipe(2, 1)).to_csv()
        '0F0,0B0,0REDUCE_GRAD\\n1F0,1B0,1REDUCE_GRAD\\n'
    """
    wanted = set(range(order.n_stages)) if stages is None else set(stages)
    rows = []
    for actions in order.actions:
        last = {action.stage: i for i, action in enumerate(actions) if action.kind in ("B", "W")}
        given = {action.stage for action in actions if action.kind == REDUCE}
        after: dict[int, list[Action]] = {}
        for stage in last:
            if stage in wanted and stage not in given:
                at = max(last[s] for group in ({stage}, *together) if stage in group for s in group)
                after.setdefault(at, []).append(Action.reduce(stage))
        row: list[Action] = []
        for i, action in enumerate(actions):
            row += [action, *sorted(after.get(i, ()), reverse=True)]
        rows.append(tuple(row))
    return replace(order, actions=tuple(rows))


def reduced(order: Order) -> list[int]:
    """The stages whose gradients an order reduces.

    Example:
        >>> from pycomm.pipeline.schedule.gpipe import gpipe
        >>> reduced(gpipe(2, 1)), reduced(with_reductions(gpipe(2, 1)))
        ([], [0, 1])
    """
    return sorted(action.stage for actions in order.actions for action in actions if action.kind == REDUCE)
