"""How a tensor lies over the ranks between two modules, and the way from one layout to another.

A :class:`Layout` is *replicate* (all ranks have the same values and the same gradient), *shard* along a
dimension (each has its part of both), or *partial* (the value is the sum over the ranks). These are torch's
placements, which plans are written with; here they are plain, because importing torch's DTensor takes half a
second. A fourth has no name there: *used*, the same values on all ranks, each using them with shards of its
own, so that the gradient is the sum over the ranks; several column-parallel layers then share one sum.
``converted`` is differentiable, to any order, and its gradients keep the same meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from pycomm import arguments
from pycomm.communicator import Communicator
from pycomm.tensor_parallel.regions import (
    copy_many,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from pycomm.tensor_parallel.shards import Split

__all__ = ["Layout", "converted", "layout_of"]


@dataclass(frozen=True)
class Layout:
    """``dim`` is that of a shard; it may count from the end."""

    kind: Literal["replicate", "shard", "partial", "used"]
    dim: int = 0

    def __str__(self) -> str:
        return f"Shard({self.dim})" if self.kind == "shard" else f"{self.kind.capitalize()}()"


def layout_of(what: str, placement: Any) -> Layout:
    """The layout that a placement of torch.distributed.tensor means.

    Raises:
        TypeError: it is none. ValueError: one that pycomm does not have.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> str(layout_of("input_layouts", Shard(1)))
        'Shard(1)'
    """
    if isinstance(placement, Layout):
        return placement
    if isinstance(placement, (tuple, list)) and len(placement) == 1:
        placement = placement[0]  # torch keeps one for each dimension of the mesh
    if not hasattr(placement, "is_shard"):
        raise TypeError(
            f"{what} must be Replicate(), Shard(dim) or Partial() of torch.distributed.tensor, "
            f"got {arguments.short(placement)}"
        )
    if placement.is_replicate():
        return Layout("replicate")
    name = type(placement).__name__
    if name == "Shard":
        return Layout("shard", placement.dim)
    if placement.is_partial() and placement.reduce_op == "sum":
        return Layout("partial")
    raise ValueError(f"{what}: {placement} is none of Replicate(), Shard(dim), Partial('sum')")


def converted(
    x: Tensor, here: Layout, there: Layout, comm: Communicator, split: Split | None = None
) -> Tensor:
    """``x`` in another layout; every rank calls it.

    Args:
        x: this rank's tensor in layout ``here``.
        here, there: the layouts.
        comm: the ranks.
        split: how the sharded dimension is cut, where one is; None: as ``torch.chunk`` cuts (from a shard:
            ranks tell each other).

    Returns:
        This rank's tensor in layout ``there``.
    """
    if comm.size == 1 or (here.kind == there.kind and here.kind != "shard"):
        return x
    if here.kind == there.kind == "shard":
        if here.dim % x.dim() == there.dim % x.dim():
            return x
        x = gather_from_tensor_model_parallel_region(x, comm, dim=here.dim, split=split)
        return scatter_to_tensor_model_parallel_region(x, comm, dim=there.dim)
    if here.kind == "replicate" and there.kind == "shard":
        return scatter_to_tensor_model_parallel_region(x, comm, dim=there.dim, split=split)
    if here.kind == "shard" and there.kind == "replicate":
        return gather_from_tensor_model_parallel_region(x, comm, dim=here.dim, split=split)
    if here.kind == "replicate" and there.kind == "used":
        return copy_many(comm, x)[0]
    if here.kind == "shard" and there.kind == "used":
        return gather_from_sequence_parallel_region(x, comm, dim=here.dim, split=split)
    if here.kind == "partial" and there.kind == "replicate":
        return reduce_from_tensor_model_parallel_region(x, comm)
    if here.kind == "partial" and there.kind == "shard":
        return reduce_scatter_to_sequence_parallel_region(x, comm, dim=there.dim, split=split)
    raise ValueError(f"a tensor cannot go from {here} to {there}")
