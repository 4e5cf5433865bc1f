"""Which positions of a sequence each rank of a context-parallel group holds, and the way there and back.

A *piece* is a run of neighbouring positions. Order ``"contiguous"`` cuts the sequence into one piece for each
of the n ranks. Order ``"zigzag"`` cuts it into 2n pieces and gives rank r the pieces r and 2n−1−r: under a
causal mask early positions see few keys and late ones see many, so that every rank gets the same work (the
order of Llama 3, ring-flash-attention and torch's head-tail balancer). Sizes of pieces differ by one at most,
the larger first; a piece may be empty. A rank's shard is its pieces one after the other.

Everything here follows from (length, n, order) alone, so no rank has to ask another. Cost of a shard: a copy;
of an unshard: one all_gather of uneven counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch

from pycomm import arguments
from pycomm.communicator import Communicator
from pycomm.tensor_parallel.group import (
    communicator_of,
    get_context_parallel_group,
    model_parallel_is_initialized,
)
from pycomm.tensor_parallel.regions import lengths_of
from pycomm.tensor_parallel.untraced import untraced

__all__ = [
    "Order",
    "Piece",
    "context_parallel_positions",
    "context_parallel_shard",
    "context_parallel_unshard",
]

Order = Literal["zigzag", "contiguous"]
ORDERS: tuple[Order, ...] = ("zigzag", "contiguous")


@dataclass(frozen=True)
class Piece:
    """Positions [begin, end) of the sequence, the ``index``-th of its pieces, at ``offset`` of its shard."""

    index: int
    begin: int
    end: int
    offset: int

    @property
    def size(self) -> int:
        return self.end - self.begin

    @property
    def local(self) -> slice:
        """Where the piece lies in its rank's shard."""
        return slice(self.offset, self.offset + self.size)


def context_communicator(name: str, group: Any) -> Communicator:
    """The ranks that share a sequence: ``group``, or those of initialize_model_parallel, or all."""
    if group is None and model_parallel_is_initialized():
        return get_context_parallel_group()
    return communicator_of(group, who=f"{name}: group")


def check_order(name: str, order: Any) -> Order:
    """``order``, or a ValueError that says what it may be."""
    for known in ORDERS:
        if order == known:
            return known
    raise ValueError(f"{name}: order must be 'zigzag' or 'contiguous', got {arguments.short(order)}")


def pieces_of(length: int, n_ranks: int, order: Order) -> list[list[Piece]]:
    """The pieces of every rank, in rank order.

    Example:
        >>> [[(p.begin, p.end) for p in own] for own in pieces_of(10, 2, "zigzag")]
        [[(0, 3), (8, 10)], [(3, 6), (6, 8)]]
    """
    n_pieces = n_ranks if order == "contiguous" else 2 * n_ranks
    sizes = [length // n_pieces + (i < length % n_pieces) for i in range(n_pieces)]
    ends = list(accumulate(sizes))
    held = [[r] if order == "contiguous" else [r, n_pieces - 1 - r] for r in range(n_ranks)]
    out = []
    for indices in held:
        offsets = [0, *accumulate(sizes[i] for i in indices)]
        out.append(
            [Piece(i, ends[i] - sizes[i], ends[i], at) for i, at in zip(indices, offsets, strict=False)]
        )
    return out


def shard_sizes(length: int, n_ranks: int, order: Order) -> list[int]:
    """How many positions each rank holds."""
    return [sum(p.size for p in own) for own in pieces_of(length, n_ranks, order)]


def length_of(sizes: list[int], order: Order) -> int | None:
    """The length whose shards have these sizes; None when no length has."""
    return sum(sizes) if shard_sizes(sum(sizes), len(sizes), order) == sizes else None


def in_sequence(shards: list[torch.Tensor], dim: int, order: Order) -> torch.Tensor:
    """The whole sequence from every rank's shard."""
    length = sum(s.shape[dim] for s in shards)
    parts = []
    for shard, own in zip(shards, pieces_of(length, len(shards), order), strict=True):
        parts += [(p.begin, p.index, shard.narrow(dim, p.offset, p.size)) for p in own]
    parts.sort(key=lambda part: part[:2])
    return torch.cat([part for _, _, part in parts], dim)


def in_shards(whole: torch.Tensor, dim: int, n_ranks: int, order: Order) -> list[torch.Tensor]:
    """Every rank's shard of a whole sequence."""
    held = pieces_of(whole.shape[dim], n_ranks, order)
    return [torch.cat([whole.narrow(dim, p.begin, p.size) for p in own], dim) for own in held]


def _dim(name: str, tensor: torch.Tensor, dim: int) -> int:
    arguments.instance(f"{name}: tensor", tensor, torch.Tensor, "a tensor")
    if tensor.dim() == 0:
        raise ValueError(f"{name}: a tensor without dimensions has no sequence to split")
    return arguments.integer(f"{name}: dim", dim, -tensor.dim(), tensor.dim()) % tensor.dim()


def context_parallel_positions(
    length: int, group: Any = None, *, order: Order = "zigzag", device: torch.device | str | None = None
) -> torch.Tensor:
    """The positions that this rank holds, for rotary or learned position embeddings (HF's ``position_ids``).

    Args:
        length: positions of the whole sequence, at least 0.
        group: the context-parallel ranks: a Communicator, process group or 1-D DeviceMesh; None: those of
            ``initialize_model_parallel(context_parallel_size=…)``, else all ranks.
        order: "zigzag" (balanced under a causal mask) or "contiguous".
        device: where the result lies; None: the CPU.

    Returns:
        int64 tensor of shape (positions of this rank,), in the order of the shard.

    Raises:
        TypeError, ValueError: a wrong argument, named.

    Example:
        >>> import pycomm
        >>> context_parallel_positions(4, pycomm.init())
        tensor([0, 1, 2, 3])
    """
    comm = context_communicator("context_parallel_positions", group)
    length = arguments.integer("context_parallel_positions: length", length, 0, 2**62)
    order = check_order("context_parallel_positions", order)
    own = pieces_of(length, comm.size, order)[comm.rank]
    return torch.cat([torch.arange(p.begin, p.end, device=device) for p in own])


def context_parallel_shard(
    tensor: torch.Tensor, dim: int = 1, group: Any = None, *, order: Order = "zigzag"
) -> torch.Tensor:
    """This rank's part of a tensor that every rank has whole.

    Shift the labels of next-token prediction *before* this: the last position of a piece is followed by a
    position of another rank. The gradient is this rank's part alone, zeros elsewhere, as of any indexing.

    Args:
        tensor: any dtype; dimension ``dim`` is the sequence.
        dim: the dimension to split.
        group: the context-parallel ranks; None: the default.
        order: "zigzag" or "contiguous", the same in all calls for one sequence.

    Returns:
        The shard: the shape of ``tensor`` but for ``dim``, contiguous.

    Raises:
        TypeError, ValueError: a wrong argument, named.

    Example:
        >>> import pycomm, torch
        >>> context_parallel_shard(torch.ones(2, 5), group=pycomm.init()).shape
        torch.Size([2, 5])
    """
    comm = context_communicator("context_parallel_shard", group)
    dim = _dim("context_parallel_shard", tensor, dim)
    order = check_order("context_parallel_shard", order)
    own = pieces_of(tensor.shape[dim], comm.size, order)[comm.rank]
    return torch.cat([tensor.narrow(dim, p.begin, p.size) for p in own], dim)


class _Unshard(torch.autograd.Function):
    """Concatenates the shards of all ranks along ``dim``; every rank's gradient of a shard is summed."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, comm: Communicator, sizes: list[int], dim: int
    ) -> torch.Tensor:
        ctx.comm, ctx.sizes, ctx.dim = comm, sizes, dim
        first = tensor.movedim(dim, 0).contiguous()
        row = math.prod(first.shape[1:])
        whole = first.new_empty((sum(sizes), *first.shape[1:]))
        comm.all_gather(whole, first, counts=[size * row for size in sizes])
        return whole.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Shard.apply(grad, ctx.comm, ctx.sizes, ctx.dim), None, None, None  # type: ignore[no-untyped-call]


class _Shard(torch.autograd.Function):
    """The backward of ``_Unshard``: a reduce_scatter."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, comm: Communicator, sizes: list[int], dim: int) -> torch.Tensor:
        ctx.comm, ctx.sizes, ctx.dim = comm, sizes, dim
        first = grad.movedim(dim, 0).contiguous()
        row = math.prod(first.shape[1:])
        own = first.new_empty((sizes[comm.rank], *first.shape[1:]))
        comm.reduce_scatter(own, first, counts=[size * row for size in sizes])
        return own.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Unshard.apply(grad, ctx.comm, ctx.sizes, ctx.dim), None, None, None  # type: ignore[no-untyped-call]


@untraced
def context_parallel_unshard(
    tensor: torch.Tensor, dim: int = 1, group: Any = None, *, order: Order = "zigzag"
) -> torch.Tensor:
    """The whole sequence, from the shards of all ranks; every rank calls it.

    The gradient of a shard is the sum over the ranks' gradients of the whole (a reduce_scatter): of a loss
    that every rank computes from the whole, count one.

    Args:
        tensor: this rank's shard; the other dimensions and the dtype are the same on all ranks.
        dim: the dimension that is split.
        group: the context-parallel ranks; None: the default.
        order: as given to :func:`context_parallel_shard`.

    Returns:
        A tensor of the shape of ``tensor``, but all positions along ``dim``.

    Raises:
        TypeError, ValueError, CommError: a wrong argument, or shards that are no shards of one sequence.

    Example:
        >>> import pycomm, torch
        >>> context_parallel_unshard(torch.ones(2, 5), group=pycomm.init()).shape
        torch.Size([2, 5])
    """
    comm = context_communicator("context_parallel_unshard", group)
    with comm._refusing:
        dim = _dim("context_parallel_unshard", tensor, dim)
        order = check_order("context_parallel_unshard", order)
    if comm.size == 1:
        return tensor.clone()
    sizes = agreed_sizes(comm, "context_parallel_unshard", tensor.shape[dim], order)
    whole: torch.Tensor = _Unshard.apply(tensor, comm, sizes, dim)  # type: ignore[no-untyped-call]
    return in_sequence(list(torch.split(whole, sizes, dim)), dim, order)


def agreed_sizes(comm: Communicator, name: str, size: int, order: Order) -> list[int]:
    """The sizes of all ranks' shards, or a ValueError on every rank when no sequence splits into them."""
    sizes = lengths_of(size, comm)
    if length_of(sizes, order) is None:
        raise ValueError(wrong_sizes(name, sizes, order))
    return sizes


def wrong_sizes(name: str, sizes: list[int], order: Order) -> str:
    """What to say of shards that are no shards of one sequence."""
    expected = shard_sizes(sum(sizes), len(sizes), order)
    return (
        f"{name}: the ranks hold {sizes} positions, but a sequence of {sum(sizes)} in {order} order splits "
        f"into {expected}; split every tensor with context_parallel_shard(…, order={order!r})"
    )
