"""Which ranks share a model: what a ``group`` argument may be, and Megatron's names for the groups of a job.

``group`` means the same everywhere in this package: a :class:`pycomm.Communicator`, a torch process group
of any backend, a one-dimensional DeviceMesh, or None for the default: the tensor-parallel ranks given to
:func:`initialize_model_parallel`, else all ranks. :func:`communicator_of` turns it into a communicator. A
torch group gets one of its own, made once and kept with the group (so also for backend "pycomm": what a layer
sends in backward must keep no order with other calls on the group). Making it is collective over its ranks.

Rank order is Megatron's: tensor-parallel ranks are neighbours, then context-parallel, data-parallel, and
pipeline-parallel.
Source: M. Shoeybi et al., "Megatron-LM", 2019; megatron/core/parallel_state.py.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pycomm.communicator import Communicator
from pycomm.ddp.arguments import communicator_for, group_for

__all__ = [
    "communicator_of",
    "destroy_model_parallel",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "initialize_model_parallel",
    "model_parallel_is_initialized",
]

Group = Any
"""A Communicator, a torch process group, a one-dimensional DeviceMesh, or None."""


@dataclass
class _Groups:
    """The communicators of this rank, after initialize_model_parallel."""

    world: Communicator
    tensor: Communicator
    context: Communicator
    data: Communicator
    pipeline: Communicator


_groups: _Groups | None = None
_alone: list[Communicator] = []  # of all ranks, where torch has no groups; at most one
_of_torchs: weakref.WeakKeyDictionary[Any, Communicator] = weakref.WeakKeyDictionary()


def communicator_of(group: Group = None, *, who: str = "group") -> Communicator:
    """The communicator that a ``group`` argument means.

    Collective over the group's ranks when it is the first use of a torch group, or of all ranks.

    Args:
        group: a Communicator, a torch process group of any backend, a DeviceMesh with one dimension, or None.
        who: what an error names, such as "ColumnParallelLinear: group".

    Raises:
        TypeError: it is none of these.
        ValueError: the mesh has several dimensions, or this rank is not in the group.
        CommError: the ranks do not meet.

    Example:
        >>> communicator_of().size
        1
    """
    if group is None:
        return _groups.tensor if _groups is not None else _world()
    if isinstance(group, Communicator):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            named = group.mesh_dim_names
            raise ValueError(
                f"{who}: needs one dimension of the mesh, got one with {group.ndim}, "
                f"{named or 'without names'}; give that of the tensor-parallel ranks"
                f"{f', such as mesh[{named[-1]!r}]' if named else ''}"
            )
        group = group.get_group(mesh_dim=0)
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{who}: rank {dist.get_rank()} of torch's world is not in this group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{who}: must be a pycomm.Communicator, a torch process group, a DeviceMesh with one dimension "
            f"or None, got {type(group).__name__}"
        )
    comm = _of_torchs.get(group)
    if comm is None or comm._c.closed:
        comm = _of_torchs[group] = _made(group)
    return comm


def _made(group: Any) -> Communicator:
    # What is exchanged and measured then is on the CPU, also inside of ``with torch.device("meta")``.
    with torch.device("cpu"):
        return communicator_for(group)


def _world() -> Communicator:
    """Of all ranks: torch's, or where it has none those of ``pycomm.init()``."""
    group = group_for(None, None, None)
    if group is not None:
        return communicator_of(group)
    if not _alone or _alone[0]._c.closed:
        _alone[:] = [_made(None)]
    return _alone[0]


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    *,
    context_parallel_size: int = 1,
    group: Group = None,
) -> None:
    """Divides the ranks into groups: tensor-, pipeline-, context- and data-parallel. Collective.

    With t, p and c the arguments and d = n / (t p c), rank r of n is tensor-parallel rank r mod t,
    context-parallel rank (r div t) mod c, data-parallel rank (r div (t c)) mod d and pipeline-parallel rank
    r div (t c d).

    Args:
        tensor_model_parallel_size: ranks that share each layer; divides n.
        pipeline_model_parallel_size: ranks that have one after another of a model's stages.
        context_parallel_size: ranks that share each sequence; t p c divides n.
        group: whose ranks these are; None: all of torch's, else ``pycomm.init()``'s.

    Raises:
        TypeError, ValueError: a size is no positive integer, their product does not divide n, or ranks
            differ; the same on every rank where sizes differ.
        RuntimeError: called twice without :func:`destroy_model_parallel`.

    Example:
        >>> initialize_model_parallel(1)
        >>> get_tensor_model_parallel_world_size(), get_data_parallel_rank()
        (1, 0)
        >>> destroy_model_parallel()
    """
    global _groups
    if _groups is not None:
        raise RuntimeError(
            "initialize_model_parallel: the groups are initialised already; call destroy_model_parallel first"
        )
    world = communicator_of(group, who="initialize_model_parallel: group")
    sizes = {
        "tensor_model_parallel_size": tensor_model_parallel_size,
        "pipeline_model_parallel_size": pipeline_model_parallel_size,
        "context_parallel_size": context_parallel_size,
    }
    _check_sizes(world, sizes)
    t, c = tensor_model_parallel_size, context_parallel_size
    n_in_stage = world.size // pipeline_model_parallel_size
    stage, place = divmod(world.rank, n_in_stage)
    tensor_rank, context_rank, data_rank = place % t, place // t % c, place // (t * c)
    split: Any = world.split  # never None: every rank has a colour
    _groups = _Groups(
        world=world,
        tensor=split(world.rank // t),
        context=split((stage * n_in_stage + data_rank) * t + tensor_rank),
        data=split((stage * c + context_rank) * t + tensor_rank),
        pipeline=split(place),
    )


def _check_sizes(world: Communicator, sizes: dict[str, Any]) -> None:
    """The same outcome on every rank where ranks differ; a type that is wrong is refused for all."""
    with world._refusing:
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"initialize_model_parallel: {name} must be an integer, got {size!r}")
    mine = torch.tensor(list(sizes.values()), dtype=torch.int64, device="cpu")
    everyones = torch.empty(world.size, len(sizes), dtype=torch.int64, device="cpu")
    world.all_gather(everyones, mine)
    if not bool((everyones == everyones[0]).all()):
        raise ValueError(
            f"initialize_model_parallel: ranks gave different {' and '.join(sizes)}: {everyones.tolist()}, "
            "in rank order; give the same on every rank"
        )
    product = 1
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"initialize_model_parallel: {name} must be at least 1, got {size}")
        product *= size
    if world.size % product != 0:
        shown = " × ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"initialize_model_parallel: {shown} = {product} does not divide the {world.size} ranks; "
            f"start a multiple of {product} ranks or choose other sizes"
        )


def destroy_model_parallel() -> None:
    """Forgets the groups and closes their communicators; layers that use them raise afterwards.

    Example:
        >>> destroy_model_parallel()  # nothing to do is no error
    """
    global _groups
    if _groups is not None:
        for comm in (_groups.pipeline, _groups.data, _groups.context, _groups.tensor):
            comm.close()
        _groups = None


def model_parallel_is_initialized() -> bool:
    """Whether :func:`initialize_model_parallel` holds.

    Example:
        >>> model_parallel_is_initialized()
        False
    """
    return _groups is not None


def _initialised(name: str) -> _Groups:
    if _groups is None:
        raise RuntimeError(f"{name}: call initialize_model_parallel(tensor_model_parallel_size) first")
    return _groups


def get_tensor_model_parallel_group() -> Communicator:
    """The communicator of the ranks that share this rank's layers.

    Raises:
        RuntimeError: :func:`initialize_model_parallel` was not called. The same for all functions below.

    Example:
        >>> initialize_model_parallel()
        >>> get_tensor_model_parallel_group()
        <pycomm.Communicator rank 0 of 1, open>
        >>> destroy_model_parallel()
    """
    return _initialised("get_tensor_model_parallel_group").tensor


def get_tensor_model_parallel_rank() -> int:
    """This rank's number among those that share its layers; see :func:`get_tensor_model_parallel_group`."""
    return _initialised("get_tensor_model_parallel_rank").tensor.rank


def get_tensor_model_parallel_world_size() -> int:
    """How many ranks share this rank's layers; see :func:`get_tensor_model_parallel_group`."""
    return _initialised("get_tensor_model_parallel_world_size").tensor.size


def get_context_parallel_group() -> Communicator:
    """The communicator of the ranks that share this rank's sequences."""
    return _initialised("get_context_parallel_group").context


def get_context_parallel_rank() -> int:
    """This rank's number among those that share its sequences."""
    return _initialised("get_context_parallel_rank").context.rank


def get_context_parallel_world_size() -> int:
    """How many ranks share this rank's sequences."""
    return _initialised("get_context_parallel_world_size").context.size


def get_data_parallel_group() -> Communicator:
    """The communicator of the ranks that hold the same shards; for ``DistributedDataParallel``."""
    return _initialised("get_data_parallel_group").data


def get_data_parallel_rank() -> int:
    """This rank's number among those that hold the same shards."""
    return _initialised("get_data_parallel_rank").data.rank


def get_data_parallel_world_size() -> int:
    """How many ranks hold the same shards."""
    return _initialised("get_data_parallel_world_size").data.size


def get_pipeline_model_parallel_group() -> Communicator:
    """The communicator of the ranks that have the other stages of this rank's model."""
    return _initialised("get_pipeline_model_parallel_group").pipeline


def get_pipeline_model_parallel_rank() -> int:
    """This rank's number among those that have the model's stages."""
    return _initialised("get_pipeline_model_parallel_rank").pipeline.rank


def get_pipeline_model_parallel_world_size() -> int:
    """How many ranks have the model's stages."""
    return _initialised("get_pipeline_model_parallel_world_size").pipeline.size
