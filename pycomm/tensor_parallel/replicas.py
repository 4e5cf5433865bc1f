"""Rows of a weight that several ranks hold, such as key-value heads fewer than ranks: one gradient for all.

Each rank's gradient of a replicated row comes from its own query heads; the row's gradient is the sum over
the ranks that hold it. So the sum travels as all rows that are replicated anywhere, zeros where a rank has
none, in one all_reduce: as many bytes as those rows of the whole, whatever the degree.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pycomm.communicator import Communicator
from pycomm.tensor_parallel.regions import _apply, _sums
from pycomm.tensor_parallel.shards import Split
from pycomm.tensor_parallel.untraced import untraced

__all__ = ["with_summed_gradients"]


def _places(split: Split, rank: int) -> tuple[list[tuple[slice, slice]], int]:
    """Where this rank's replicated rows lie, in its shard and in the vector of all, and how long that is."""
    holders: dict[tuple[int, int], int] = {}
    for pieces in split.pieces:
        for piece in pieces:
            holders[piece] = holders.get(piece, 0) + 1
    at, starts = 0, {}
    for piece in sorted(holders):
        if holders[piece] > 1:
            starts[piece] = at
            at += piece[1] - piece[0]
    found = []
    for piece, local in split.placed(rank):
        if piece in starts:
            n = piece[1] - piece[0]
            found.append((slice(local, local + n), slice(starts[piece], starts[piece] + n)))
    return found, at


class _Copies(torch.autograd.Function):
    """The same values; gradients of replicated rows are summed."""

    @staticmethod
    def forward(ctx: Any, split: Split, comm: Communicator, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.how = split, comm
        return tuple(shard.view_as(shard) for shard in shards)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_apply(_Sums, *ctx.how, *gradients)


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, split: Split, comm: Communicator, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.how = split, comm
        places, n_rows = _places(split, comm.rank)
        vectors = [shard.new_zeros(n_rows, *shard.shape[1:]) for shard in shards]
        for shard, vector in zip(shards, vectors, strict=True):
            for local, among_all in places:
                vector[among_all] = shard[local]
        totals = _sums(vectors, comm)
        results = tuple(shard.clone() for shard in shards)
        for result, total in zip(results, totals, strict=True):
            for local, among_all in places:
                result[local] = total[among_all]
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_apply(_Copies, *ctx.how, *gradients)


@untraced
def with_summed_gradients(split: Split, comm: Communicator, *shards: Tensor) -> tuple[Tensor, ...]:
    """The shards, sharded by ``split`` in dimension 0, with gradients summed over the holders of each row."""
    if not split.is_replicated or not torch.is_grad_enabled():
        return shards
    copies: tuple[Tensor, ...] = _apply(_Copies, split, comm, *shards)
    return copies
