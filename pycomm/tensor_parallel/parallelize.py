"""``parallelize_module``: from a module of one process and a plan to this rank's part of it.

A plan is a style, or a dict from names of submodules, or globs of them, to styles. It is read as a whole
before anything is touched: every key must match, no module may be matched by two, parameters that modules
share must be cut alike everywhere, and all ranks must have the same plan. Then parameters become those of one
rank (``src_data_rank``), so that ranks which were seeded differently agree, and then the changes are made. If
one fails, the module is as before.

Modules are changed in place (``swapped.py`` says how, and why so). Parameters that are cut become new
Parameters: make optimizers, DDP and FSDP2 afterwards.

Source: torch.distributed.tensor.parallel.parallelize_module, whose names and arguments these are.
"""

from __future__ import annotations

import difflib
import re
import zlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from pycomm import arguments
from pycomm.communicator import Communicator
from pycomm.tensor_parallel.changes import Change, ChangeClass, ShardParameter, Undo
from pycomm.tensor_parallel.group import communicator_of
from pycomm.tensor_parallel.styles import ParallelStyle

__all__ = ["Plan", "matches", "parallelize_module"]

Plan = ParallelStyle | Mapping[str, ParallelStyle | Sequence[ParallelStyle]]


def parallelize_module(
    module: nn.Module,
    device_mesh: Any = None,
    parallelize_plan: Plan | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Makes ``module`` this rank's part of it. Every rank calls it.

    Args:
        module: changed in place. On the meta device nothing is communicated, and shards stay meta.
        device_mesh: the tensor-parallel ranks: a 1-D DeviceMesh (``mesh["tp"]``), a Communicator, a process
            group; None: those of ``initialize_model_parallel``, else all ranks.
        parallelize_plan: a style for ``module`` itself, or a dict: names as in ``named_modules``, where each
            part between dots may be a glob (``"layers.*.mlp.w1"``); "" is the module itself. Values are
            styles, or lists of styles for one module.
        src_data_rank: the rank whose parameters and buffers all get first; None: each keeps its own, which
            must then be equal (so that no data travel).

    Returns:
        ``module``.

    Raises:
        TypeError: no module, no plan, or a style for a module that it cannot cut.
        ValueError: a key that matches nothing (the nearest names are shown), two keys for one module, shared
            parameters that would not be cut alike, sizes that do not fit, plans that differ between ranks.
        CommError: another rank's call was wrong.

    Example:
        >>> from pycomm.tensor_parallel import ColwiseParallel, RowwiseParallel
        >>> mlp = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
        >>> mlp = parallelize_module(mlp, None, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        >>> mlp(torch.ones(1, 4)).shape
        torch.Size([1, 4])
    """
    comm = communicator_of(device_mesh, who="parallelize_module: device_mesh")
    with comm._refusing:
        arguments.instance("parallelize_module: module", module, nn.Module, "an nn.Module")
        if src_data_rank is not None:
            src_data_rank = arguments.rank("parallelize_module: src_data_rank", src_data_rank, comm.size)
        found = _resolve(module, parallelize_plan)
        changes = [
            change
            for where, (_, styles) in found.items()
            for style in styles
            for change in style.changes(module.get_submodule(where), where or "the module", comm)
        ]
        _check_conflicts(changes)
        _check_shared(module, changes)
    _check_agreement(comm, found, src_data_rank)
    if src_data_rank is not None and comm.size > 1:
        take_from(comm, module, src_data_rank)
    _make(changes)
    return module


def _make(changes: list[Change]) -> None:
    """Makes the changes, or none of them."""
    undo: list[Undo] = []
    made: dict[int, nn.Parameter] = {}
    try:
        for change in changes:
            undo += change.do(made)
    except BaseException:
        for back in reversed(undo):
            back()
        raise


def matches(name: str, key: str) -> bool:
    """Whether a key of a plan means the module of that name: part by part, with globs.

    Example:
        >>> matches("layers.0.mlp", "layers.*.mlp"), matches("layers.0.mlp", "layers.*")
        (True, False)
    """
    parts, patterns = name.split("."), key.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _foreign(value: Any) -> str:
    """What a plan has in place of a style, for an error message."""
    for item in value if isinstance(value, (list, tuple)) else [value]:
        kind = type(item)
        if kind.__module__.startswith("torch.distributed.tensor.parallel"):
            return (
                f"{kind.__name__}, which is a style of torch's: import that of pycomm.tensor_parallel, "
                "which has the same names"
            )
    return arguments.short(value)


Found = dict[str, tuple[str, list[ParallelStyle]]]


def _resolve(module: nn.Module, plan: Any) -> Found:
    """For each module that the plan names, in the order of ``named_modules``: the key and its styles."""
    if isinstance(plan, ParallelStyle):
        return {"": ("", [plan])}
    if not isinstance(plan, Mapping):
        raise TypeError(
            "parallelize_module: parallelize_plan must be a style of pycomm.tensor_parallel or a dict of "
            f"them, got {arguments.short(plan)}"
        )
    names = [name for name, _ in module.named_modules()]
    found: Found = {}
    for key, value in plan.items():
        arguments.instance("parallelize_module: a key of the plan", key, str, "a string")
        styles = [value] if isinstance(value, ParallelStyle) else value
        if not isinstance(styles, (list, tuple)) or not all(isinstance(s, ParallelStyle) for s in styles):
            raise TypeError(
                f"parallelize_module: the plan's {key!r} must have a style of pycomm.tensor_parallel, or a "
                f"list of them, got {_foreign(value)}"
            )
        hits = [name for name in names if matches(name, key)]
        if not hits:
            raise ValueError(_nothing_matches(module, key, names))
        for name in hits:
            if name in found:
                raise ValueError(
                    f"parallelize_module: two keys of the plan match {name!r}: {found[name][0]!r} and "
                    f"{key!r}; give one a narrower pattern, or one key a list of styles"
                )
            found[name] = (key, list(styles))
    return {name: found[name] for name in names if name in found}


def _nothing_matches(module: nn.Module, key: str, names: list[str]) -> str:
    """Offers names that are like the key; numbers as globs, a model of 100 layers offers each once."""
    general = {re.sub(r"(?<![^.])\d+(?![^.])", "*", name): None for name in names if name}
    plain = re.sub(r"(?<![^.])\d+(?![^.])", "*", key)

    def likeness(name: str) -> float:
        same_end = name.rpartition(".")[2] == plain.rpartition(".")[2]
        return difflib.SequenceMatcher(None, plain, name).ratio() + same_end

    near = sorted(general, key=likeness, reverse=True)[:3]
    shown = ", ".join(map(repr, near)) or "no submodules at all"
    return (
        f"parallelize_module: the plan's key {key!r} matches no submodule of {type(module).__name__}; "
        f"nearest are {shown}"
    )


def _check_conflicts(changes: list[Change]) -> None:
    """A module's class changes once."""
    seen: dict[int, str] = {}
    for change in changes:
        if isinstance(change, ChangeClass):
            where = change.how.where
            if id(change.module) in seen:
                raise ValueError(f"parallelize_module: {where} has two styles that change what it computes")
            seen[id(change.module)] = where


def _check_shared(module: nn.Module, changes: list[Change]) -> None:
    """Whoever holds a parameter that is cut must have it cut alike, or the model would fall apart."""
    cuts = {(id(c.module), c.name): c for c in changes if isinstance(c, ShardParameter)}
    holders: dict[int, list[tuple[str, ShardParameter | None]]] = {}
    for where, holder in module.named_modules():
        for name, parameter in holder._parameters.items():
            if parameter is not None:
                full = f"{where}.{name}" if where else name
                holders.setdefault(id(parameter), []).append((full, cuts.get((id(holder), name))))
    for of in holders.values():
        cut = next(((full, c) for full, c in of if c is not None), None)
        if cut is None:
            continue
        for full, other in of:
            if other is None or (other.dim, other.split) != (cut[1].dim, cut[1].split):
                other_way = "left whole" if other is None else f"cut along dimension {other.dim}"
                raise ValueError(
                    f"parallelize_module: {cut[0]} and {full} are one parameter (tied), but the plan cuts "
                    f"the first along dimension {cut[1].dim}, and the second is {other_way} or else; give "
                    "both styles that cut alike, such as RowwiseParallel for the embedding and "
                    "ColwiseParallel for the head, or untie them"
                )


def _check_agreement(comm: Communicator, found: Found, source: int | None) -> None:
    """All ranks have the same plan, or all raise."""
    if comm.size == 1:
        return
    text = repr([(name, [repr(s) for s in styles]) for name, (_, styles) in found.items()])
    text = re.sub(r" at 0x[0-9a-f]+", "", text)  # functions differ in address only
    mine = torch.tensor([zlib.crc32(text.encode()), len(found), -1 if source is None else source])
    table = torch.empty(comm.size, 3, dtype=torch.int64)
    comm.all_gather(table, mine)
    for rank, row in enumerate(table.tolist()):
        if row != table[0].tolist():
            raise ValueError(
                f"parallelize_module: the plan of rank {rank} differs from rank 0's: they match {row[1]} and "
                f"{int(table[0, 1])} modules (same plan, module and src_data_rank are needed on every rank); "
                f"this rank's is {text[:300]}"
            )


@torch.no_grad()
def take_from(comm: Communicator, module: nn.Module, source: int) -> None:
    """All parameters and buffers become those of rank ``source``."""
    whole = {id(t): t for t in [*module.parameters(), *module.buffers()] if not t.is_meta and t.numel()}
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in whole.values():
        by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    for tensors in by_dtype.values():
        comm.broadcast(tensors, src=source)
