"""Matrix products with what is sharded along the sequence, communication beside them: forward and backward.

Words: rows are positions of the sequence. Each rank has its part of the rows; parts may differ in size.

    gather_linear          each rank's rows of x -> all rows of x, times this rank's weight
    linear_reduce_scatter  all rows of x times this rank's weight, summed over ranks -> each rank's rows

Each is the other's backward. Every part is cut in chunks: while one chunk is on its way, another is
multiplied (a rank's own rows need not wait at all). That needs a core beside the one that multiplies, so the
number of chunks is 4 where every rank has two cores and 1, without a thread, where not; ``PYCOMM_TP_OVERLAP``
gives another, and the ranks take the smallest of what they want. Chunks are rows, so sums are over the same
terms.

For a weight gradient the rows are gathered again in backward rather than kept, as Megatron does.
Source: V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022; S. Wang
et al., "Overlap Communication with Dependent Computation via Decomposition", 2023.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
from torch import Tensor

from pycomm.communicator import Communicator
from pycomm.ddp.arguments import has_a_core_each
from pycomm.tensor_parallel.regions import (
    _apply,
    _GatherPartial,
    split_of_shards,
)
from pycomm.tensor_parallel.shards import Split, chunks, even
from pycomm.tensor_parallel.untraced import untraced

__all__ = ["gather_linear", "linear_reduce_scatter", "n_chunks_of"]

OVERLAP_VARIABLE = "PYCOMM_TP_OVERLAP"
_DEFAULT_CHUNKS = 4
_agreed: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()


def n_chunks_of(comm: Communicator) -> int:
    """In how many chunks a part travels beside the products. The first call is collective.

    Raises:
        ValueError: ``PYCOMM_TP_OVERLAP`` is no integer of at least 1.
    """
    if comm not in _agreed:
        text = os.environ.get(OVERLAP_VARIABLE, "")
        with comm._refusing:
            if text and (not text.isdecimal() or int(text) < 1):
                raise ValueError(f"{OVERLAP_VARIABLE} must be a number of chunks, at least 1, got {text!r}")
        # Of the machine, not of the group only: data-parallel ranks need cores as well.
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        n_local_ranks = max(comm.size, int(local) if local.isdecimal() else 1)
        wanted = int(text) if text else _DEFAULT_CHUNKS if has_a_core_each(n_local_ranks) else 1
        smallest = torch.tensor([wanted], dtype=torch.int64, device="cpu")
        comm.all_reduce(smallest, op="min")
        _agreed[comm] = int(smallest)
    return _agreed[comm]


def _rows(split: Split) -> list[tuple[int, int]]:
    """Each rank's part of the rows."""
    found, at = [], 0
    for length in split.lengths:
        found.append((at, at + length))
        at += length
    return found


def _matmul(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out = x · weightᵀ, over rows that lie one after another."""
    torch.mm(x.flatten(0, -2), weight.t(), out=out.flatten(0, -2))


def _gather_linear(
    part: Tensor, weight: Tensor | None, split: Split, comm: Communicator, n_chunks: int
) -> tuple[Tensor, Tensor | None]:
    """All rows, and their product with the weight where one is given. Rows are dimension 0."""
    part = part.contiguous()
    whole = part.new_empty(split.size, *part.shape[1:])
    out = None if weight is None else part.new_empty(split.size, *part.shape[1:-1], weight.shape[0])
    rows = _rows(split)
    if n_chunks == 1:
        comm.all_gather([whole[a:b] for a, b in rows], part)
        if weight is not None and out is not None:
            _matmul(whole, weight, out)
        return whole, out
    cuts = [chunks(b - a, n_chunks) for a, b in rows]
    works = []
    for i in range(n_chunks):
        targets = [whole[a + cut[i][0] : a + cut[i][1]] for (a, _), cut in zip(rows, cuts, strict=True)]
        mine = part[slice(*cuts[comm.rank][i])]
        works.append((comm.all_gather(targets, mine, async_op=True), targets))
    if weight is not None and out is not None:
        own = slice(*rows[comm.rank])
        _matmul(part, weight, out[own])
    for i, (work, targets) in enumerate(works):
        work.wait()
        if weight is None or out is None:
            continue
        for rank, target in enumerate(targets):
            if rank != comm.rank and target.numel() > 0:
                start = rows[rank][0] + cuts[rank][i][0]
                _matmul(target, weight, out[start : start + target.shape[0]])
    return whole, out


def _linear_reduce_scatter(
    x: Tensor, weight: Tensor, split: Split, comm: Communicator, n_chunks: int
) -> Tensor:
    """This rank's rows of the sum over ranks of x · weightᵀ. Rows are dimension 0."""
    x = x.contiguous()
    partial = x.new_empty(*x.shape[:-1], weight.shape[0])
    rows = _rows(split)
    mine = partial.new_empty(split.lengths[comm.rank], *partial.shape[1:])
    if n_chunks == 1:
        _matmul(x, weight, partial)
        comm.reduce_scatter(mine, [partial[a:b] for a, b in rows])
        return mine
    cuts = [chunks(b - a, n_chunks) for a, b in rows]
    works = []
    for i in range(n_chunks):
        sources = []
        for (a, _), cut in zip(rows, cuts, strict=True):
            at = slice(a + cut[i][0], a + cut[i][1])
            _matmul(x[at], weight, partial[at])
            sources.append(partial[at])
        target = mine[slice(*cuts[comm.rank][i])]
        works.append(comm.reduce_scatter(target, sources, async_op=True))
    for work in works:
        work.wait()
    return mine


def _weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, split: Split, comm: Communicator, n: int) -> Tensor:
        ctx.save_for_backward(part, weight)
        ctx.how = split, comm, n
        _, out = _gather_linear(part, weight, split, comm, n)
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        part, weight = ctx.saved_tensors
        split, comm, n = ctx.how
        d_part = d_weight = None
        if ctx.needs_input_grad[0]:
            d_part = _apply(_LinearReduceScatter, gradient, weight.t(), split, comm, n)
        if ctx.needs_input_grad[1]:
            if torch.is_grad_enabled():  # create_graph
                whole = _apply(_GatherPartial, part, 0, split, comm)
            else:
                whole, _ = _gather_linear(part, None, split, comm, 1)
            d_weight = _weight_gradient(gradient, whole)
        return d_part, d_weight, None, None, None


class _LinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, split: Split, comm: Communicator, n: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = split, comm, n
        return _linear_reduce_scatter(x, weight, split, comm, n)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        split, comm, n = ctx.how
        if torch.is_grad_enabled():  # create_graph
            d_x = _apply(_GatherLinear, gradient, weight.t(), split, comm, n)
            whole = _apply(_GatherPartial, gradient, 0, split, comm)
        else:
            needed = weight.t() if ctx.needs_input_grad[0] else None
            whole, d_x = _gather_linear(gradient, needed, split, comm, n)
        d_weight = _weight_gradient(whole, x) if ctx.needs_input_grad[1] else None
        return d_x, d_weight, None, None, None


def _cast(tensor: Tensor) -> Tensor:
    """As autocast would for a matrix product: what is inside a Function, it does not see."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.dtype == torch.float32:
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


@untraced
def gather_linear(part: Tensor, weight: Tensor, comm: Communicator, dim: int = 0) -> Tensor:
    """``F.linear`` of the whole sequence with this rank's weight.

    Args:
        part: this rank's part along ``dim``, (…, K).
        weight: (N, K), this rank's own.
        comm: whose ranks have the parts.
        dim: that of the sequence, not the last.

    Returns:
        (…, N) with the whole sequence in ``dim``, contiguous.
    """
    part, weight = _cast(part), _cast(weight)
    split = split_of_shards(part.shape[dim], comm)
    out: Tensor = _apply(_GatherLinear, part.movedim(dim, 0), weight, split, comm, n_chunks_of(comm))
    return out.movedim(0, dim).contiguous()


@untraced
def linear_reduce_scatter(x: Tensor, weight: Tensor, comm: Communicator, dim: int = 0) -> Tensor:
    """This rank's part along ``dim`` of the sum over ranks of ``F.linear(x, weight)``.

    Args:
        x: the whole sequence, (…, K), with this rank's K features.
        weight: (N, K), this rank's own.
        comm: whose ranks get the parts, as ``torch.chunk`` cuts.
        dim: that of the sequence, not the last.

    Returns:
        (…, N) with this rank's part in ``dim``, contiguous.
    """
    x, weight = _cast(x), _cast(weight)
    split = even(x.shape[dim], comm.size)
    part: Tensor = _apply(_LinearReduceScatter, x.movedim(dim, 0), weight, split, comm, n_chunks_of(comm))
    return part.movedim(0, dim).contiguous()
