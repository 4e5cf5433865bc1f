"""``skip_all_reduce_unused_params``: parameters that no rank uses take part in nothing, until one does.

Words: a parameter that no rank used in a synchronised backward falls *asleep*: it is in no bucket, nothing of
it travels, and it is no problem that the end of backward would have to settle. When a gradient of it comes on
some rank, that rank reports it *woke*, with the number of problems that ends every backward; so all ranks
learn of it in that same backward, average it there, and have it in a bucket from the next one on. It does not
fall asleep again: buckets would be built anew for ever.

torch asks that "unused parameters remain the same across all ranks throughout the entire training process",
and hangs or lets replicas differ where they don't. Here nothing is asked. Cost: the exchange that settles
unused parameters, once instead of in every backward; once more when one wakes.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

from torch import Tensor

from pycomm.ddp.problems import Problem
from pycomm.ddp.sparse import reduce_loose

if TYPE_CHECKING:
    from pycomm.ddp.reducer import Reducer

__all__ = ["note_woken", "put_to_sleep", "wake"]


def note_woken(reducer: Reducer, known: Set[int]) -> None:
    """Reports those asleep whose gradient is new on this rank; ``known`` are all whose gradient is."""
    for index in reducer.plan.asleep & known:
        reducer.problems[index] = Problem.WOKE


def wake(reducer: Reducer, table: Tensor) -> None:
    """Averages those that woke on any rank. Collective where there are some, which all ranks know alike.

    Args:
        table: every rank's problems (pycomm/ddp/resolve.py).
    """
    plan = reducer.plan
    if not plan.asleep:
        return
    woken = (table[:, :-1] == Problem.WOKE).any(dim=0).nonzero().flatten().tolist()
    if not woken:
        return
    parameters = [reducer.parameters[i] for i in woken]
    for index, parameter in zip(woken, parameters, strict=True):
        if reducer.problems.get(index) is Problem.JOINED:
            parameter.grad = None
    is_new = [reducer.problems.get(i) is Problem.WOKE for i in woken]
    reduce_loose(reducer.comm, parameters, is_new, reducer.weight, reducer.loose_hook(len(woken)))
    plan.asleep.difference_update(woken)
    plan.restless.update(woken)
    reducer.rebuild()


def put_to_sleep(reducer: Reducer, table: Tensor) -> None:
    """Lets those fall asleep that no rank used, and that have not woken before. Not collective."""
    if not reducer.settings.skips_unused:
        return
    plan = reducer.plan
    problems = table[:, :-1]
    unused = (problems == Problem.UNUSED).any(dim=0) & (
        (problems == Problem.UNUSED) | (problems == Problem.JOINED)
    ).all(dim=0)
    tired = set(unused.nonzero().flatten().tolist()) - plan.restless - plan.loose - plan.asleep
    if tired:
        plan.asleep.update(tired)
        reducer.rebuild()
