"""What the parameters' hooks do: count. This is the only code of ours that runs for every gradient.

A *tally* is plain data that hooks share with their reducer: the mode, and which gradients came, in which
order. Hooks hold the tally and the plan's countdown, and the reducer only weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from pycomm.ddp.plan import Plan
    from pycomm.ddp.reducer import Reducer

__all__ = ["IDLE", "LOCAL", "REDUCING", "Tally", "make_hook"]

IDLE, REDUCING, LOCAL = 0, 1, 2
"""No backward is under way; one that averages; one within no_sync."""


class Tally:
    """What hooks share with the reducer, without keeping it alive."""

    __slots__ = ("came", "mode")

    def __init__(self) -> None:
        self.mode = IDLE
        self.came: list[int] = []


def make_hook(
    owner: weakref.ref[Reducer], tally: Tally, plan: Plan, index: int
) -> Callable[[nn.Parameter], None]:
    """A hook that does not keep the reducer alive: the garbage collector cannot see through hooks."""
    note, left, bucket_of = tally.came.append, plan.left, plan.bucket_of

    def gradient_came(parameter: nn.Parameter) -> None:
        if not tally.mode:
            reducer = owner()
            if reducer is None:
                return
            reducer.begin()
        if parameter.grad is None:
            return  # an undefined gradient went through the graph: none has come
        note(index)
        at = bucket_of[index]
        left[at] -= 1
        if not left[at]:
            reducer = owner()
            if reducer is not None:
                reducer.bucket_complete()

    return gradient_came
