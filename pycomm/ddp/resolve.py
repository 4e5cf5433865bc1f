"""When the status of a backward is not zero: all ranks learn of all problems, then all do the same.

What has a meaning is done: a parameter that some ranks did not use counts as zeros there (with
find_unused_parameters), a gradient that turned out sparse is gathered, a parameter that was frozen, unfrozen,
added, replaced or cast since the last backward, on all ranks alike, is averaged as it is now. Everything else
is one error with the same words on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pycomm.ddp import asleep
from pycomm.ddp.agree import check_agreement, digest
from pycomm.ddp.averaging import average
from pycomm.ddp.late import reduce_late
from pycomm.ddp.problems import Problem, Whole, report
from pycomm.ddp.sparse import sparse_average
from pycomm.ddp.structure import Structure, is_refused

if TYPE_CHECKING:
    from pycomm.ddp.reducer import Reducer

__all__ = ["agree_on_structure", "resolve"]

_WHO = "DistributedDataParallel"


def resolve(reducer: Reducer) -> bool:
    """Settles one backward. Collective.

    Returns:
        True when the reducer has taken another set of parameters.

    Raises:
        RuntimeError: the same on every rank, naming parameters, ranks and the remedy.
        Exception: what the communication hook raised on this rank; the others raise RuntimeError.
    """
    comm, problems = reducer.comm, reducer.problems
    mine = torch.zeros(len(reducer.names) + 1, dtype=torch.uint8)
    for index, problem in problems.items():
        mine[index] = problem
    mine[-1] = int(reducer.whole)
    table = torch.empty(comm.size, mine.numel(), dtype=torch.uint8)
    comm.all_gather(table, mine)
    reducer.n_ranks_used = (table[:, :-1] != Problem.UNUSED).sum(dim=0, dtype=torch.int32)
    for index in reducer.plan.asleep:
        reducer.n_ranks_used[index] = (table[:, index] == Problem.WOKE).sum()
    is_broken = bool((table[:, -1] & int(Whole.BROKEN)).any())
    has_changed = bool((table[:, -1] & int(Whole.CHANGED)).any()) and not is_broken
    structure = _agreed_structure(reducer) if has_changed else reducer.structure
    allowed = {Problem.SPARSE}
    if has_changed:
        allowed.add(Problem.RETYPED)
    if reducer.settings.may_be_unused:
        allowed.add(Problem.UNUSED)
    if reducer.settings.overlap != "async":
        allowed.add(Problem.LATE)
    blamed = table
    if has_changed:
        # What is not trained any more need not have come.
        still = {id(p) for p in structure.parameters}
        gone = [i for i, p in enumerate(reducer.parameters) if id(p) not in still]
        blamed = table.clone()
        blamed[:, gone] = 0
    message = report(reducer.names, blamed.tolist(), frozenset(allowed))
    if message is not None:
        if bool((table[:, :-1] == Problem.LATE).any()):
            reducer.plan.forget()
        told = RuntimeError(message)
        if (failure := _hook_failure(reducer)) is not None:
            raise failure from told
        raise told
    _settle_stand_ins(reducer, table)
    asleep.wake(reducer, table)
    reduce_late(reducer, table)
    _loosen(reducer, table)
    if has_changed:
        _adopt(reducer, structure, table)
    else:
        asleep.put_to_sleep(reducer, table)
    if (failure := _hook_failure(reducer)) is not None:
        raise failure  # by a gradient given to the hook in here: the other ranks do not know
    return has_changed


def _hook_failure(reducer: Reducer) -> Exception | None:
    """What the communication hook has raised on this rank."""
    hook = reducer.settings.hook
    return None if hook is None else hook.failure


def _settle_stand_ins(reducer: Reducer, table: Tensor) -> None:
    """What only other ranks used has their average; what no rank used keeps what it had."""
    unused = (table[:, :-1] == Problem.UNUSED) | (table[:, :-1] == Problem.JOINED)
    is_used_by_none = unused.all(dim=0).tolist()
    for index, stand_in in reducer.stand_ins.items():
        problem, parameter = reducer.problems[index], reducer.parameters[index]
        if is_used_by_none[index]:
            continue
        if problem is Problem.JOINED or (problem is Problem.UNUSED and parameter.grad is None):
            parameter.grad = stand_in
        elif problem is Problem.UNUSED and parameter.grad is not None:
            parameter.grad.copy_(stand_in)


def _loosen(reducer: Reducer, table: Tensor) -> None:
    """Gradients that turned out sparse: averaged now, and outside of buckets from now on."""
    found = (table[:, :-1] == Problem.SPARSE).any(dim=0).nonzero().flatten().tolist()
    if not found:
        return
    for index in found:
        parameter = reducer.parameters[index]
        is_sparse = reducer.problems.get(index) is Problem.SPARSE
        # The bucket holds the average of those that were dense; a sparse rank counted as zeros in it.
        dense = reducer.stand_ins[index] if is_sparse else parameter.grad
        mine = parameter.grad if is_sparse else None
        average = sparse_average(reducer.comm, parameter, mine, reducer.weight, reducer.loose_hook(0))
        if reducer.problems.get(index) is Problem.JOINED:
            continue
        if bool((table[:, index] == Problem.NONE).any()):
            assert dense is not None
            average = dense + average
        parameter.grad = average
    reducer.plan.loose.update(found)
    reducer.rebuild()


def _agreed_structure(reducer: Reducer) -> Structure:
    """The module's parameters as they are now, on all ranks alike, or an error."""
    structure = reducer.look()
    refused = is_refused(structure.named)
    lines = [f"the error that {refused}"] if refused else structure.lines()
    try:
        check_agreement(reducer.comm, f"{_WHO}: the module has changed since it was wrapped, and", lines)
    except ValueError as error:
        raise RuntimeError(
            f"{error}. Freeze, unfreeze, add, replace and cast parameters on all ranks alike, between a "
            "backward and the next forward, or wrap the module again"
        ) from None
    if refused:
        raise RuntimeError(f"{_WHO}: the module has changed since it was wrapped: {refused}")
    return structure


def agree_on_structure(reducer: Reducer) -> None:
    """Raises unless the parameters, and the values of new ones, are alike on all ranks. Collective."""
    structure = _agreed_structure(reducer)
    known = {id(p) for p in reducer.parameters}
    named = zip(structure.names, structure.parameters, strict=True)
    _check_values(reducer, [(name, p) for name, p in named if id(p) not in known])


def _adopt(reducer: Reducer, structure: Structure, table: Tensor) -> None:
    """Averages what the old plan did not, and takes the new parameters."""
    comm = reducer.comm
    number = {id(p): i for i, p in enumerate(reducer.parameters)}
    retyped = (table[:, :-1] == Problem.RETYPED).any(dim=0).tolist()
    loose = {id(reducer.parameters[i]) for i in reducer.plan.loose}
    again: list[tuple[str, nn.Parameter]] = []
    added: list[tuple[str, nn.Parameter]] = []
    for name, parameter in zip(structure.names, structure.parameters, strict=True):
        index = number.get(id(parameter))
        if index is None:
            added.append((name, parameter))
        if index is None or retyped[index]:
            again.append((name, parameter))
    _check_values(reducer, added)
    counts = torch.tensor([p.grad is not None for _, p in again], dtype=torch.int64)
    comm.all_reduce(counts)
    for (name, parameter), count in zip(again, counts.tolist(), strict=True):
        if count == 0 and reducer.settings.may_be_unused:
            continue
        if count < comm.size and not reducer.settings.may_be_unused:
            raise RuntimeError(
                f"{_WHO}: parameter '{name}', new or cast since the last backward, got no gradient on "
                f"{comm.size - count} of {comm.size} ranks; let it take part in the loss, or wrap with "
                "find_unused_parameters=True"
            )
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        if parameter.grad.layout is not torch.strided:
            parameter.grad = parameter.grad.to_dense()
        average(comm, [parameter.grad.detach()], reducer.weight)
    reducer.adopt(structure)
    still = {id(p): i for i, p in enumerate(reducer.parameters)}
    reducer.plan.loose.update(still[key] for key in loose if key in still)
    if reducer.plan.loose:
        reducer.rebuild()


def _check_values(reducer: Reducer, added: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Parameters that came after wrapping were given to the ranks by nobody: are they equal?"""
    for name, parameter in added:
        mine = torch.tensor(list(digest(parameter)), dtype=torch.uint8)
        table = torch.empty(reducer.comm.size, mine.numel(), dtype=torch.uint8)
        reducer.comm.all_gather(table, mine)
        differing = [rank for rank, row in enumerate(table) if not torch.equal(row, table[0])]
        if differing:
            raise RuntimeError(
                f"{_WHO}: parameter '{name}' came into the module after it was wrapped, and its values on "
                f"rank {differing[0]} are not those of rank 0; wrap the module again: all get rank 0's"
            )
