"""DualPipeV: two stages on a rank in a V, forwards of one beside backwards of the other.

A rank holds stage r (*down*) and stage 2 p - 1 - r (*up*). Its steps, with how often each is done:

====  ==================  =============================================
step  times               actions
====  ==================  =============================================
1     2 (p - r - 1)       F down
2     r + 1               F down, F up
3     p - r - 1           I up, W, F up
4     m - 2 p + r + 1     F down and B up, F up and B down: the steady phase
5     p - r - 1           B up, F up and B down
6     r + 1               B up, B down; the second half of them I only
7     p - r - 1           W, I down
8     r + 1               W
====  ==================  =============================================

Idle time (p - 1)(F + I - W)/2 where F = I = W and m >= 2 p, F, I and W being all of a rank's stages'.

The pairs of steps 4 and 5 are made so that one's transfers hide behind the other's computation. At most 2 p
+ 1 activations of half the size on a rank. With fewer than 2 p microbatches there is no steady phase, and
the order is that of ZBV.

Source: DeepSeek-AI, DualPipe (2025), and its V-shaped form by Sea AI Lab.
"""

from __future__ import annotations

from collections import deque

from pycomm.pipeline.schedule.action import Action
from pycomm.pipeline.schedule.order import Order, v_placement
from pycomm.pipeline.schedule.zero_bubble import zbv

__all__ = ["dual_pipe_v"]


class _Rank:
    """A rank's actions as they are written down."""

    def __init__(self, down: int, up: int) -> None:
        self.actions: list[Action] = []
        self._stages = {"down": down, "up": up}
        self._next = dict.fromkeys((a + b for a in "FB" for b in self._stages), 0)
        self._late: deque[Action] = deque()

    def forward(self, side: str) -> None:
        self._add("F", side, "F")

    def backward(self, side: str) -> None:
        self._add("B", side, "B")

    def backward_input(self, side: str) -> None:
        self._late.append(self._add("B", side, "I")._replace(kind="W"))

    def backward_weight(self) -> None:
        self.actions.append(self._late.popleft())

    def _add(self, counted: str, side: str, kind: str) -> Action:
        action = Action(self._stages[side], kind, self._next[counted + side])
        self._next[counted + side] += 1
        self.actions.append(action)
        return action


def dual_pipe_v(n_ranks: int, n_microbatches: int) -> Order:
    """See the file's text."""
    p, m = n_ranks, n_microbatches
    if m < 2 * p:
        found = zbv(p, m)
        return Order("DualPipeV", found.placement, m, found.actions)
    actions = tuple(tuple(_of_rank(p, m, rank)) for rank in range(p))
    return Order("DualPipeV", v_placement(p), m, actions)


def _of_rank(p: int, m: int, rank: int) -> list[Action]:
    to_come, here = p - rank - 1, rank + 1
    me = _Rank(rank, 2 * p - 1 - rank)
    for _ in range(2 * to_come):
        me.forward("down")
    for _ in range(here):
        me.forward("down")
        me.forward("up")
    for _ in range(to_come):
        me.backward_input("up")
        me.backward_weight()
        me.forward("up")
    for _ in range(m - 2 * p + rank + 1):
        me.forward("down")
        me.backward("up")
        me.forward("up")
        me.backward("down")
    for _ in range(to_come):
        me.backward("up")
        me.forward("up")
        me.backward("down")
    for i in range(2 * here):
        step = me.backward if i < here else me.backward_input
        step("down" if i % 2 else "up")
    for _ in range(to_come):
        me.backward_weight()
        me.backward_input("down")
    for _ in range(here):
        me.backward_weight()
    return me.actions
