"""Which parameters are shards, and of what: noted with the module that holds them.

The note is the module's, not the parameter's, since parameters come and go: ``to_empty``, ``deepcopy`` and
FSDP2 make new ones without the old ones' attributes. A tied parameter is noted by one of its modules, which
is enough. :func:`shard_index` finds the note of a parameter given by itself, as a gradient clip needs it.

A layer made elsewhere takes part with one call of :func:`mark_sharded`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pycomm.communicator import Communicator
from pycomm.tensor_parallel.shards import Split

__all__ = ["ParameterShard", "check_notes", "fill", "mark_sharded", "named_shards", "shard_index"]

_ATTRIBUTE = "_pycomm_shards"


@dataclass(frozen=True)
class ParameterShard:
    """A parameter is this rank's shard of dimension ``dim`` of a whole, cut by ``split`` over ``comm``."""

    dim: int
    split: Split
    comm: Communicator

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterShard:
        """Itself: nothing in it changes."""
        return self

    def whole_shape(self, local: torch.Size) -> torch.Size:
        """The shape of the whole, given the shard's."""
        return torch.Size(self.split.size if d == self.dim else n for d, n in enumerate(local))

    def take(self, whole: Tensor) -> Tensor:
        """This rank's shard of a whole."""
        return self.split.take(whole, self.dim, self.comm.rank)


class _Notes:
    """What is known of one module's own parameters. A copy of the module has a copy of it."""

    def __init__(self, module: nn.Module) -> None:
        # Weak, so that a model's memory is given back with its last reference, and not some time later.
        self._module = weakref.ref(module)
        self.by_name: dict[str, ParameterShard] = {}
        _all_notes.add(self)

    @property
    def module(self) -> nn.Module | None:
        return self._module()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Notes:
        copied = memo.get(id(self.module))  # it holds this, so its copy was begun before
        if copied is None:
            return self
        notes = _Notes(copied)
        notes.by_name = dict(self.by_name)
        return notes


_all_notes: weakref.WeakSet[_Notes] = weakref.WeakSet()


def mark_sharded(module: nn.Module, name: str, dim: int, split: Split, comm: Communicator) -> ParameterShard:
    """Notes that ``module``'s own parameter ``name`` is a shard; replaces an earlier note.

    Args:
        module: any module.
        name: of one of its own parameters, without dots.
        dim: the sharded dimension, not negative.
        split: how the whole's dimension is cut.
        comm: the ranks that have the other shards.

    Raises:
        ValueError: there is no such parameter, or its size is not that of this rank's shard.

    Example:
        >>> import pycomm
        >>> from pycomm.tensor_parallel.shards import even
        >>> comm = pycomm.init()
        >>> layer = nn.Linear(2, 6 // comm.size)
        >>> mark_sharded(layer, "weight", 0, even(6, comm.size), comm).dim
        0
    """
    parameter = module._parameters.get(name)
    if parameter is None:
        raise ValueError(f"mark_sharded: {type(module).__name__} has no parameter {name!r} of its own")
    want = split.lengths[comm.rank] if split.degree == comm.size else None
    if not 0 <= dim < parameter.dim() or parameter.shape[dim] != want:
        raise ValueError(
            f"mark_sharded: {name!r} of {type(module).__name__} has the shape {tuple(parameter.shape)}; rank "
            f"{comm.rank} of {comm.size} must have {want} of the {split.size} elements of dimension {dim}"
        )
    notes = module.__dict__.get(_ATTRIBUTE)
    if notes is None or notes.module is not module:
        notes = module.__dict__[_ATTRIBUTE] = _Notes(module)
    shard = ParameterShard(dim, split, comm)
    notes.by_name[name] = shard
    return shard


def named_shards(module: nn.Module) -> Iterator[tuple[str, ParameterShard]]:
    """The full names, as in ``state_dict``, of all sharded parameters below ``module``, also of tied ones."""
    index = shard_index()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if (shard := index.get(id(parameter))) is not None:
            yield name, shard


def check_notes(who: str, module: nn.Module) -> None:
    """Whether what is noted below ``module`` is still so.

    Raises:
        ValueError: a sharded parameter is another one since: it would be taken for a whole.
    """
    for where, each in module.named_modules():
        notes: _Notes | None = each.__dict__.get(_ATTRIBUTE)
        for name, shard in {} if notes is None else notes.by_name.items():
            parameter = each._parameters.get(name)
            is_parametrized = parameter is None and name not in each._parameters
            want = shard.split.lengths[shard.comm.rank]
            if is_parametrized or (parameter is not None and parameter.shape[shard.dim] != want):
                now = "parametrized" if parameter is None else f"of the shape {tuple(parameter.shape)}"
                raise ValueError(
                    f"{who}: {where or 'the module'} ({type(each).__name__}) has dimension {shard.dim} of "
                    f"its {name!r} cut over {shard.comm.size} ranks, of which this one has {want} elements; "
                    f"but it is {now} since. Undo that (parametrize.remove_parametrizations), or call "
                    "mark_sharded"
                )


def shard_index() -> dict[int, ParameterShard]:
    """By ``id(parameter)``: the shards among all parameters that live now."""
    return {
        id(parameter): shard
        for notes in list(_all_notes)
        if (module := notes.module) is not None
        for name, shard in notes.by_name.items()
        if (parameter := module._parameters.get(name)) is not None
    }


@torch.no_grad()
def fill(parameter: nn.Parameter, shard: ParameterShard | None, init: Callable[[Tensor], Any]) -> None:
    """Initialises the whole with ``init`` and keeps this rank's shard; None: it has all of it.

    So the values are those of one process, and a seeded generator is afterwards where it would be there, for
    every degree. The whole exists while it is cut: memory for one whole parameter at a time.
    """
    if parameter.is_meta:
        return
    target: Any = parameter
    is_cut_further = hasattr(target, "placements")  # by FSDP2
    if not is_cut_further and (shard is None or shard.comm.size == 1):
        init(parameter)
        return
    shape = parameter.shape if shard is None else shard.whole_shape(parameter.shape)
    whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    init(whole)
    part: Any = whole if shard is None else shard.take(whole)
    if is_cut_further:
        from torch.distributed.tensor import distribute_tensor

        # Nothing is sent: all of FSDP2's ranks have drawn the same.
        part = distribute_tensor(part.contiguous(), target.device_mesh, target.placements, src_data_rank=None)
    parameter.copy_(part)
