"""Where activations pass between replicated and sharded: Megatron's region functions, differentiable.

Words: a tensor is *replicated* when every rank has the same; *sharded* when each has its shard of one
dimension (:mod:`pycomm.tensor_parallel.shards`; shards may differ in size and be empty); *partial* when the
value is the sum over the ranks. The gradient of a replicated tensor is replicated, of a sharded one sharded.

    function                                     forward                      backward
    copy_to_tensor_model_parallel_region         replicated -> used by each   all_reduce
    reduce_from_tensor_model_parallel_region     all_reduce of partial        identity
    scatter_to_tensor_model_parallel_region      own shard of replicated      all_gather
    gather_from_tensor_model_parallel_region     all_gather of shards         own shard
    scatter_to_sequence_parallel_region          own shard of replicated      all_gather
    gather_from_sequence_parallel_region         all_gather of shards         reduce_scatter (or own shard)
    reduce_scatter_to_sequence_parallel_region   reduce_scatter of partial    all_gather

Each backward is made of the function beside it, so all may be differentiated any number of times. With one
rank each returns its input. Every rank must call them, and their backwards, in the same order.

Source: M. Shoeybi et al., "Megatron-LM", 2019 (f and g); V. Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022 (sequence parallelism).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pycomm.communicator import Communicator
from pycomm.tensor_parallel.group import Group, communicator_of
from pycomm.tensor_parallel.shards import Split, even
from pycomm.tensor_parallel.untraced import untraced

__all__ = [
    "copy_many",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "lengths_of",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "split_of_shards",
]


# ---- without autograd ------------------------------------------------------------------------------------


def lengths_of(local: int, comm: Communicator) -> list[int]:
    """Every rank's number, in rank order. Collective."""
    # On the CPU, also where a default device is set (as for a model that is made on "meta").
    everyones = torch.empty(comm.size, dtype=torch.int64, device="cpu")
    comm.all_gather(everyones, torch.tensor([local], dtype=torch.int64, device="cpu"))
    lengths: list[int] = everyones.tolist()
    return lengths


def split_of_shards(local: int, comm: Communicator) -> Split:
    """How a dimension is split of which this rank has ``local`` elements, lower ranks first. Collective."""
    pieces, at = [], 0
    for length in lengths_of(local, comm):
        pieces.append(((at, at + length),) if length else ())
        at += length
    return Split(at, tuple(pieces))


def _gathered(shard: Tensor, dim: int, split: Split, comm: Communicator) -> Tensor:
    """The whole of which each rank has a shard."""
    shape = list(shard.shape)
    with comm._refusing:
        if shape[dim] != split.lengths[comm.rank]:
            raise ValueError(
                f"rank {comm.rank} of {comm.size} must give {split.lengths[comm.rank]} of the {split.size} "
                f"elements of dimension {dim}, got a tensor of shape {tuple(shape)}"
            )
    sizes = [[length if d == dim else n for d, n in enumerate(shape)] for length in split.lengths]
    in_order = all(len(rank) <= 1 for rank in split.pieces)
    if in_order and all(n == 1 for n in shape[:dim]):  # shards are whole rows
        shape[dim] = split.size
        whole = shard.new_empty(shape)
        comm.all_gather(list(torch.split(whole, split.lengths, dim)), shard)
        return whole
    parts = [shard.new_empty(size) for size in sizes]
    comm.all_gather(parts, shard)
    if in_order:
        return torch.cat(parts, dim)
    shape[dim] = split.size
    whole = shard.new_empty(shape)
    for rank, part in enumerate(parts):
        split.put(whole, dim, rank, part)
    return whole


def _reduce_scattered(partial: Tensor, dim: int, split: Split, comm: Communicator) -> Tensor:
    """This rank's shard of the sum over the ranks."""
    parts = [split.take(partial, dim, rank).contiguous() for rank in range(comm.size)]
    mine = torch.empty_like(parts[comm.rank])
    comm.reduce_scatter(mine, parts)
    return mine


def _sums(partials: list[Tensor], comm: Communicator) -> list[Tensor]:
    """The sums over the ranks; one call for each dtype."""
    partials = [p.contiguous() for p in partials]
    totals = [torch.empty_like(p) for p in partials]
    for dtype in {p.dtype: None for p in partials}:
        alike = [i for i, p in enumerate(partials) if p.dtype == dtype]
        comm.all_reduce([partials[i] for i in alike], out=[totals[i] for i in alike])
    return totals


Function = type[torch.autograd.Function]


# ---- with autograd ---------------------------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, *replicated: Tensor) -> tuple[Tensor, ...]:
        ctx.comm = comm
        return tuple(x.view_as(x) for x in replicated)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        wanted = [g for g, needed in zip(gradients, ctx.needs_input_grad[1:], strict=True) if needed]
        totals = iter(_apply(_Reduce, ctx.comm, *wanted))
        return None, *(next(totals) if needed else None for needed in ctx.needs_input_grad[1:])


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, *partial: Tensor) -> tuple[Tensor, ...]:
        ctx.comm = comm
        return tuple(_sums(list(partial), comm))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, *_apply(_Copy, ctx.comm, *gradients)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, split: Split, comm: Communicator) -> Tensor:
        ctx.how = dim, split, comm
        return split.take(whole, dim, comm.rank).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _apply(_Gather, gradient, *ctx.how), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, split: Split, comm: Communicator) -> Tensor:
        ctx.how = dim, split, comm
        return _gathered(shard, dim, split, comm)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _apply(_Scatter, gradient, *ctx.how), None, None, None


class _GatherPartial(torch.autograd.Function):
    """As _Gather, where each rank's gradient is a partial one."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, dim: int, split: Split, comm: Communicator) -> Tensor:
        ctx.how = dim, split, comm
        return _gathered(shard, dim, split, comm)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _apply(_ReduceScatter, gradient, *ctx.how), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, dim: int, split: Split, comm: Communicator) -> Tensor:
        ctx.how = dim, split, comm
        return _reduce_scattered(partial, dim, split, comm)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _apply(_GatherPartial, gradient, *ctx.how), None, None, None


def _apply(function: Function, *arguments: Any) -> Any:
    apply: Any = function.apply
    return apply(*arguments)


# ---- for users -------------------------------------------------------------------------------------------


def _dimension(who: str, input: Tensor, dim: int) -> int:
    if not -input.dim() <= dim < input.dim():
        raise ValueError(f"{who}: no dimension {dim} in a tensor of shape {tuple(input.shape)}")
    return dim % input.dim()


def _given(who: str, split: Split, size: int, comm: Communicator) -> Split:
    """The split, when it can serve: of as many ranks, nothing replicated, and ``size`` elements in all."""
    if split.degree != comm.size or split.is_replicated or split.size != size:
        raise ValueError(
            f"{who}: the dimension has {size} elements over {comm.size} ranks; got a split of {split.size} "
            f"over {split.degree}{', with pieces on several ranks' if split.is_replicated else ''}"
        )
    return split


def copy_to_tensor_model_parallel_region(input: Tensor, group: Group = None) -> Tensor:
    """The same values; the gradient is the sum over the ranks. For what every rank uses with its own shards.

    Args:
        input: replicated, any shape.
        group: see :mod:`pycomm.tensor_parallel.group`; the same for all functions here.

    Raises:
        CommError: as for the collectives of the table above; the same for all functions here.

    Example:
        >>> copy_to_tensor_model_parallel_region(torch.ones(2))
        tensor([1., 1.])
    """
    comm = communicator_of(group)
    return copy_many(comm, input)[0]


@untraced
def copy_many(comm: Communicator, *replicated: Tensor) -> tuple[Tensor, ...]:
    """:func:`copy_to_tensor_model_parallel_region` of several tensors, gradients summed in one call."""
    if comm.size == 1 or not torch.is_grad_enabled():
        return replicated
    copies: tuple[Tensor, ...] = _apply(_Copy, comm, *replicated)
    return copies


@untraced
def reduce_from_tensor_model_parallel_region(input: Tensor, group: Group = None) -> Tensor:
    """The sum over the ranks.

    Args:
        input: partial, the same shape on every rank.
        group: see above.

    Example:
        >>> reduce_from_tensor_model_parallel_region(torch.ones(2))
        tensor([1., 1.])
    """
    comm = communicator_of(group)
    if comm.size == 1:
        return input
    total: Tensor = _apply(_Reduce, comm, input)[0]
    return total


def scatter_to_tensor_model_parallel_region(
    input: Tensor, group: Group = None, *, dim: int = -1, split: Split | None = None
) -> Tensor:
    """This rank's shard.

    Args:
        input: replicated.
        group: see above.
        dim: which dimension is cut.
        split: how; None: as ``torch.chunk`` does.

    Returns:
        A contiguous tensor, which may have no elements.

    Raises:
        ValueError: there is no such dimension, or the split is of another size or number of ranks.

    Example:
        >>> scatter_to_tensor_model_parallel_region(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """
    return _scatter("scatter_to_tensor_model_parallel_region", input, group, dim, split, _Scatter)


@untraced
def _scatter(
    who: str, input: Tensor, group: Group, dim: int, split: Split | None, function: Function
) -> Tensor:
    comm = communicator_of(group)
    with comm._refusing:
        dim = _dimension(who, input, dim)
        size = input.shape[dim]
        split = even(size, comm.size) if split is None else _given(who, split, size, comm)
    if comm.size == 1:
        return input
    shard: Tensor = _apply(function, input, dim, split, comm)
    return shard


def gather_from_tensor_model_parallel_region(
    input: Tensor, group: Group = None, *, dim: int = -1, split: Split | None = None
) -> Tensor:
    """The whole. The gradient is this rank's shard of the whole's, which must be equal on all ranks.

    Args:
        input: this rank's shard.
        group: see above.
        dim: the sharded dimension.
        split: how it is split; None: ranks tell each other how much each has.

    Raises:
        ValueError: there is no such dimension, or the split does not fit.

    Example:
        >>> gather_from_tensor_model_parallel_region(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """
    return _gather("gather_from_tensor_model_parallel_region", input, group, dim, split, _Gather)


@untraced
def _gather(
    who: str, input: Tensor, group: Group, dim: int, split: Split | None, function: Function
) -> Tensor:
    comm = communicator_of(group)
    with comm._refusing:
        dim = _dimension(who, input, dim)
        if split is not None:
            split = _given(who, split, split.size, comm)
    if comm.size == 1:
        return input
    if split is None:
        split = split_of_shards(input.shape[dim], comm)
    whole: Tensor = _apply(function, input, dim, split, comm)
    return whole


def scatter_to_sequence_parallel_region(
    input: Tensor, group: Group = None, *, dim: int = 0, split: Split | None = None
) -> Tensor:
    """This rank's part of the sequence: see :func:`scatter_to_tensor_model_parallel_region`.

    Args:
        input: replicated, such as an embedding that all ranks have computed.
        group: see above.
        dim: that of the sequence; 0 in Megatron's (S, B, H), 1 in (B, S, H).
        split: how; None: as ``torch.chunk`` does.

    Example:
        >>> scatter_to_sequence_parallel_region(torch.ones(4, 2)).shape
        torch.Size([4, 2])
    """
    return _scatter("scatter_to_sequence_parallel_region", input, group, dim, split, _Scatter)


def gather_from_sequence_parallel_region(
    input: Tensor,
    group: Group = None,
    *,
    dim: int = 0,
    split: Split | None = None,
    tensor_parallel_output_grad: bool = True,
) -> Tensor:
    """The whole sequence.

    Args:
        input: this rank's part.
        group: see above.
        dim: that of the sequence.
        split: how it is split; None: ranks tell each other how much each has.
        tensor_parallel_output_grad: True: each rank uses the whole with shards of its own, so its gradient is
            partial and is reduced and scattered. False: all do the same with it; each takes its part.

    Example:
        >>> gather_from_sequence_parallel_region(torch.ones(4, 2)).shape
        torch.Size([4, 2])
    """
    function = _GatherPartial if tensor_parallel_output_grad else _Gather
    return _gather("gather_from_sequence_parallel_region", input, group, dim, split, function)


def reduce_scatter_to_sequence_parallel_region(
    input: Tensor, group: Group = None, *, dim: int = 0, split: Split | None = None
) -> Tensor:
    """This rank's part of the sequence, summed over the ranks.

    Args:
        input: partial, the whole sequence.
        group: see above.
        dim: that of the sequence.
        split: how; None: as ``torch.chunk`` does.

    Example:
        >>> reduce_scatter_to_sequence_parallel_region(torch.ones(4, 2)).shape
        torch.Size([4, 2])
    """
    return _scatter("reduce_scatter_to_sequence_parallel_region", input, group, dim, split, _ReduceScatter)
