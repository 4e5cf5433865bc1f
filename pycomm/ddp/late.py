"""Gradients that come after their bucket has been launched, in the same backward.

A bucket is launched when as many gradients have come as in the backward that was learned from. Where a
reentrant checkpoint makes one parameter's gradient come more often than then, it is launched too early, and a
gradient that comes afterwards, of this or another parameter, is *late*.

With ``overlap="async"`` a late gradient may have been added to memory that was being reduced: an error on
every rank. Otherwise the reduction was over by then: what every rank holds is the average of what came in
time, and on some ranks the late gradients on top of it, so averaging once more is right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pycomm.ddp.averaging import average
from pycomm.ddp.problems import Problem

if TYPE_CHECKING:
    from pycomm.ddp.reducer import Reducer

__all__ = ["note_late", "reduce_late"]


def note_late(reducer: Reducer) -> None:
    """Reports the parameters whose gradients were late on this rank."""
    plan, tally, problems = reducer.plan, reducer.tally, reducer.problems
    if plan.is_learning:
        return
    left = {
        at: sum(plan.times[i] for i in plan.buckets[at].indices)
        for at in range(reducer.n_launched_early)
        if tally.left(at) < 0
    }
    in_time: set[int] = set()
    for index in tally.came if left else ():
        at = plan.bucket_of[index]
        if at not in left:
            continue
        left[at] -= 1
        if left[at] >= 0:
            in_time.add(index)
        # One that had come and was GONE is another mistake; one that is SPARSE or RETYPED is settled as that.
        elif index not in problems or (problems[index] is Problem.GONE and index not in in_time):
            problems[index] = Problem.LATE


def reduce_late(reducer: Reducer, table: Tensor) -> None:
    """Averages once more what was late on any rank. Collective where there is some.

    Args:
        table: every rank's problems (pycomm/ddp/resolve.py).
    """
    for index in (table[:, :-1] == Problem.LATE).any(dim=0).nonzero().flatten().tolist():
        gradient, problem = reducer.parameters[index].grad, reducer.problems.get(index)
        if gradient is None or problem is Problem.JOINED:
            gradient = torch.zeros_like(reducer.parameters[index])
        elif problem is Problem.LATE and index in reducer.stand_ins:
            gradient.add_(reducer.stand_ins[index])  # nothing had come when the bucket was launched
        average(reducer.comm, [gradient.detach()], reducer.weight)
