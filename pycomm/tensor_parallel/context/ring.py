"""Ring attention: keys and values travel round the ranks while each computes with those it has.

Each of n ranks holds the queries, keys and values of its positions. In step s rank r attends to the keys of
rank r − s, and meanwhile sends them on to r + 1 and receives the next from r − 1: n − 1 messages of a rank's
keys and values, under the matrix products. A block of keys adds to the running softmax of ``tiles.py``, so
the result is that of full attention, whatever n and the sizes.

Backward: keys and values travel once more; their gradients travel behind them, one step later, each rank
adding its part, and arrive at home after n steps. Gradients travel in the accumulation dtype, so that they
are rounded once.

Under a causal mask pieces of positions (``order.py``) are before, the same as, or after each other: a block
is whole, triangular, or left out. In zigzag order every rank computes the same number of scores.

Memory of a rank: its own tensors, two ranks' keys and values, and a tile of scores; never S × S.
Sources: Liu, Zaharia, Abbeel, Ring Attention (arXiv 2310.01889); Brandon et al., Striped Attention
(2311.09431); the block-wise backward of FlashAttention-2 (2307.08691).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from pycomm.communicator import Communicator
from pycomm.tensor_parallel.context.agree import Agreed, agree, autocast_to
from pycomm.tensor_parallel.context.order import Order, Piece, context_communicator, pieces_of
from pycomm.tensor_parallel.context.tiles import Rows, accumulation_dtype, attend, attend_backward
from pycomm.tensor_parallel.untraced import untraced
from pycomm.work import Work

__all__ = ["ring_attention"]

_KEYS_TAG, _GRADIENTS_TAG = 0x52494E47, 0x52494E48  # "RING": no tag that a user of send and recv picks


def _send_round(comm: Communicator, mine: torch.Tensor, theirs: torch.Tensor, tag: int) -> list[Work]:
    """Sends to the next rank, receives from the one before; of none, nothing: both know the sizes."""
    works = []
    if theirs.numel():
        works.append(comm.irecv(theirs, src=(comm.rank - 1) % comm.size, tag=tag))
    if mine.numel():
        works.append(comm.isend(mine, dst=(comm.rank + 1) % comm.size, tag=tag))
    return works


class _Keys:
    """The keys and values of one rank, in one buffer that travels."""

    def __init__(self, flat: torch.Tensor, key: torch.Tensor, value: torch.Tensor, size: int) -> None:
        batch, heads = key.shape[:2]
        n_key = batch * heads * size * key.shape[3]
        self.flat = flat[: n_key + batch * heads * size * value.shape[3]]
        self.k = self.flat[:n_key].view(batch, heads, size, key.shape[3])
        self.v = self.flat[n_key:].view(batch, heads, size, value.shape[3])

    @staticmethod
    def empty(key: torch.Tensor, value: torch.Tensor, size: int, dtype: torch.dtype) -> _Keys:
        n_row = key.shape[0] * key.shape[1] * (key.shape[3] + value.shape[3])
        return _Keys(key.new_empty(n_row * size, dtype=dtype), key, value, size)


def _travel(
    comm: Communicator, key: torch.Tensor, value: torch.Tensor, sizes: list[int]
) -> Iterator[tuple[int, _Keys]]:
    """Yields (owner, keys) n times, this rank's own first; while one is used the next is on its way."""
    now = _Keys.empty(key, value, sizes[comm.rank], key.dtype)
    now.k.copy_(key)
    now.v.copy_(value)
    for step in range(comm.size):
        works, coming = [], now
        if step < comm.size - 1:
            coming = _Keys.empty(key, value, sizes[(comm.rank - step - 1) % comm.size], key.dtype)
            works = _send_round(comm, now.flat, coming.flat, _KEYS_TAG)
        yield (comm.rank - step) % comm.size, now
        for work in works:
            work.wait()
        now = coming


class _Blocks:
    """Which parts of this rank's queries meet which parts of another rank's keys."""

    def __init__(self, comm: Communicator, agreed: Agreed, causal: bool) -> None:
        self.causal = causal
        self.rank = comm.rank
        self.agreed = agreed
        self.pieces = pieces_of(sum(agreed.query_sizes), comm.size, agreed.order) if causal else []

    def between(self, owner: int) -> Iterator[tuple[slice, slice, bool]]:
        """(queries of this rank, keys of ``owner``, same positions) of each block with scores."""
        if not self.causal:
            queries, keys = self.agreed.query_sizes[self.rank], self.agreed.key_sizes[owner]
            if queries and keys:
                yield slice(0, queries), slice(0, keys), False
            return
        for mine in self.pieces[self.rank]:
            for theirs in self.pieces[owner]:
                if mine.size and theirs.size and theirs.index <= mine.index:
                    yield mine.local, theirs.local, _same(mine, theirs)


def _same(a: Piece, b: Piece) -> bool:
    return a.index == b.index


def _by_kv_head(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """(batch, H, S, D) as (batch, H_kv, H / H_kv, S, D)."""
    n_kv = key.shape[1]
    return x.view(x.shape[0], n_kv, x.shape[1] // n_kv, *x.shape[2:])


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        comm: Communicator,
        agreed: Agreed,
        causal: bool,
    ) -> torch.Tensor:
        blocks = _Blocks(comm, agreed, causal)
        q = _by_kv_head(query, key)
        rows = Rows.start(q, value.shape[3])
        for owner, keys in _travel(comm, key, value, agreed.key_sizes):
            for mine, theirs, same in blocks.between(owner):
                attend(
                    q[..., mine, :], keys.k[..., theirs, :], keys.v[..., theirs, :], rows.at(mine),
                    scale=agreed.scale, causal=same,
                )  # fmt: skip
        out = rows.out().flatten(1, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, out, rows.lse())
        ctx.comm, ctx.agreed, ctx.blocks = comm, agreed, blocks
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            grads = _backward(ctx.comm, ctx.agreed, ctx.blocks, query, key, value, out, lse, grad)
        return (*grads, None, None, None)


def _backward(
    comm: Communicator,
    agreed: Agreed,
    blocks: _Blocks,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype = accumulation_dtype(query.dtype)
    q, grad_out = _by_kv_head(query, key), _by_kv_head(grad, key)
    delta = _by_kv_head((grad.to(dtype) * out.to(dtype)).sum(-1, keepdim=True), key)
    grad_q = torch.zeros_like(q, dtype=dtype)
    works: list[Work] = []
    coming: _Keys | None = None  # gradients of the keys in use, from the ranks that had them before
    for owner, keys in _travel(comm, key, value, agreed.key_sizes):
        part = _Keys.empty(key, value, agreed.key_sizes[owner], dtype)
        part.flat.zero_()
        for mine, theirs, same in blocks.between(owner):
            attend_backward(
                q[..., mine, :], keys.k[..., theirs, :], keys.v[..., theirs, :], grad_out[..., mine, :],
                lse[..., mine, :], delta[..., mine, :],
                grad_q[..., mine, :], part.k[..., theirs, :], part.v[..., theirs, :],
                scale=agreed.scale, causal=same,
            )  # fmt: skip
        for work in works:
            work.wait()
        if coming is not None:
            part.flat += coming.flat
        if comm.size > 1:
            coming = _Keys.empty(key, value, agreed.key_sizes[(owner - 1) % comm.size], dtype)
            works = _send_round(comm, part.flat, coming.flat, _GRADIENTS_TAG)
    for work in works:
        work.wait()
    home = part if coming is None else coming
    return grad_q.flatten(1, 2).to(query.dtype), home.k.to(key.dtype), home.v.to(value.dtype)


@untraced
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    group: Any = None,
    order: Order = "zigzag",
) -> torch.Tensor:
    """Scaled dot-product attention over a sequence that is split between ranks; keys travel in a ring.

    The names are those of ``torch.nn.functional.scaled_dot_product_attention``; every rank calls it, forward
    and backward. The result is that of attention over the whole sequence. There is no dropout and no mask but
    the causal one. ``torch.compile`` leaves it alone (a graph break). It is differentiable once.

    Args:
        query: (batch, H, S_r, D), this rank's positions; float64, float32, bfloat16 or float16.
        key: (batch, H_kv, S_r, D) with H a multiple of H_kv: query head h uses KV head h // (H / H_kv).
        value: (batch, H_kv, S_r, D_v).
        is_causal: position i sees the positions up to i. Then the shards must be those of
            :func:`context_parallel_shard` in this ``order``; without it keys may be split in any way, and
            queries and keys may be different sequences.
        scale: of the scores; None: 1/√D.
        group: the context-parallel ranks: a Communicator, process group or 1-D DeviceMesh; None: those of
            ``initialize_model_parallel(context_parallel_size=…)``, else all ranks.
        order: "zigzag" (balanced) or "contiguous"; the same on all ranks.

    Returns:
        (batch, H, S_r, D_v), the dtype of ``query``; sums are float32 (float64 for float64), rounded once.

    Raises:
        TypeError, ValueError: a wrong argument, or arguments that differ between ranks, on every rank.
        CommError: another rank's argument was wrong, or the communicator's errors.

    Example:
        >>> import pycomm, torch
        >>> q, kv = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8)
        >>> ring_attention(q, kv, kv, is_causal=True, group=pycomm.init()).shape
        torch.Size([1, 4, 3, 8])
    """
    comm = context_communicator("ring_attention", group)
    agreed = agree("ring_attention", comm, query, key, value, is_causal, scale, order)
    query, key, value = autocast_to((query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        out: torch.Tensor = _RingAttention.apply(query, key, value, comm, agreed, is_causal)  # type: ignore[no-untyped-call]
    return out
