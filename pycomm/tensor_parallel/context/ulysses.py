"""All-to-all attention (DeepSpeed-Ulysses): from a split sequence to split heads, and back.

One all_to_all gives every rank some heads of the whole sequence, a local attention computes them, a second
all_to_all brings the outputs back. It moves (H + 2 H_kv) and then H head vectors a position, whatever n is,
where the ring moves n − 1 times 2 H_kv; but ranks beyond the number of query heads have nothing to compute.

Query heads are split evenly (n need not divide them); a rank gets the KV heads that its query heads use, so
that with fewer KV heads than ranks a KV head goes to several ranks, and its gradients come back added up.

Source: Jacobs et al., DeepSpeed-Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from pycomm.communicator import Communicator
from pycomm.tensor_parallel.context.agree import Agreed, agree, autocast_to
from pycomm.tensor_parallel.context.order import Order, context_communicator, in_sequence, in_shards
from pycomm.tensor_parallel.untraced import untraced

__all__ = ["ulysses_attention"]


class _AllToAll(torch.autograd.Function):
    """``send[p]`` elements to each rank p, ``receive[p]`` from it; the backward is the way back."""

    @staticmethod
    def forward(
        ctx: Any, flat: torch.Tensor, comm: Communicator, send: list[int], receive: list[int]
    ) -> torch.Tensor:
        ctx.comm, ctx.send, ctx.receive = comm, send, receive
        out = flat.new_empty(sum(receive))
        comm.all_to_all(out, flat, receive, send)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        back = _AllToAll.apply(grad.contiguous(), ctx.comm, ctx.receive, ctx.send)  # type: ignore[no-untyped-call]
        return back, None, None, None


Parts = list[list[torch.Tensor]]
Shapes = list[list[tuple[int, ...]]]


def _exchange(comm: Communicator, parts: Parts, shapes: Shapes) -> Parts:
    """Sends the tensors ``parts[p]`` to rank p; from rank p come tensors of ``shapes[p]``."""
    flat = torch.cat([tensor.reshape(-1) for tensors in parts for tensor in tensors])
    sizes = [[torch.Size(shape).numel() for shape in of] for of in shapes]
    send = [sum(t.numel() for t in tensors) for tensors in parts]
    out: torch.Tensor = _AllToAll.apply(flat, comm, send, [sum(of) for of in sizes])  # type: ignore[no-untyped-call]
    split = iter(torch.split(out, [size for of in sizes for size in of]))
    return [[next(split).view(shape) for shape in of] for of in shapes]


def head_ranges(n_heads: int, n_ranks: int) -> list[tuple[int, int]]:
    """The query heads [begin, end) of each rank; sizes differ by one at most.

    Example:
        >>> head_ranges(5, 3)
        [(0, 2), (2, 4), (4, 5)]
    """
    ends = [(r + 1) * (n_heads // n_ranks) + min(r + 1, n_heads % n_ranks) for r in range(n_ranks)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _kv_range(heads: tuple[int, int], group: int) -> tuple[int, int]:
    """The KV heads that query heads [begin, end) use, ``group`` query heads to each."""
    begin, end = heads
    return (begin // group, -(-end // group)) if end > begin else (0, 0)


def _local(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    use: list[int],
    attention: Callable[..., Any],
    **options: Any,
) -> torch.Tensor:
    """Attention of this rank's heads over the whole sequence; query head i uses KV head ``use[i]``."""
    if not use:  # more ranks than heads: no score, but the backward must come by here
        return (q @ k.transpose(-1, -2)) @ v
    n_kv = k.shape[1]
    group = len(use) // n_kv
    if use == [i // group for i in range(len(use))] and len(use) % n_kv == 0:
        if group > 1:
            options["enable_gqa"] = True
    else:
        k, v = k[:, use], v[:, use]
    out: torch.Tensor = attention(q, k, v, **options)
    return out


@untraced
def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    group: Any = None,
    order: Order = "zigzag",
    attention: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """Scaled dot-product attention over a sequence that is split between ranks, by exchanging heads.

    Arguments and result are those of :func:`ring_attention`; any number of heads works with any number of
    ranks, ranks beyond the number of query heads being idle.

    Args:
        query: (batch, H, S_r, D), this rank's positions; float64, float32, bfloat16 or float16.
        key: (batch, H_kv, S_r, D) with H a multiple of H_kv.
        value: (batch, H_kv, S_r, D_v).
        is_causal, scale, group, order: as for :func:`ring_attention`.
        attention: what computes whole sequences, called as ``attention(q, k, v, is_causal=…, scale=…)``, with
            ``enable_gqa=True`` where KV heads are fewer; None: torch's scaled_dot_product_attention.

    Returns:
        (batch, H, S_r, D_v), the dtype of ``query``.

    Raises:
        TypeError, ValueError, CommError: as :func:`ring_attention`.

    Example:
        >>> import pycomm, torch
        >>> q, kv = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8)
        >>> ulysses_attention(q, kv, kv, is_causal=True, group=pycomm.init()).shape
        torch.Size([1, 4, 3, 8])
    """
    comm = context_communicator("ulysses_attention", group)
    agreed = agree("ulysses_attention", comm, query, key, value, is_causal, scale, order)
    query, key, value = autocast_to((query, key, value))
    heads = head_ranges(query.shape[1], comm.size)
    shared = query.shape[1] // key.shape[1]
    kv_heads = [_kv_range(of, shared) for of in heads]
    q, k, v = _to_heads(comm, query, key, value, heads, kv_heads, agreed, is_causal)
    begin, end = heads[comm.rank]
    use = [h // shared - kv_heads[comm.rank][0] for h in range(begin, end)]
    local = attention or F.scaled_dot_product_attention
    out = _local(q, k, v, use, local, is_causal=is_causal, scale=agreed.scale)
    return _to_sequence(comm, out, heads, agreed, is_causal)


def _to_heads(
    comm: Communicator,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: list[tuple[int, int]],
    kv_heads: list[tuple[int, int]],
    agreed: Agreed,
    causal: bool,
) -> list[torch.Tensor]:
    """This rank's heads of the whole sequence."""
    parts = [
        [query[:, slice(*heads[p])], key[:, slice(*kv_heads[p])], value[:, slice(*kv_heads[p])]]
        for p in range(comm.size)
    ]
    n_heads, n_kv = (end - begin for begin, end in (heads[comm.rank], kv_heads[comm.rank]))
    batch, d, d_value = query.shape[0], query.shape[3], value.shape[3]
    shapes: Shapes = [
        [(batch, n_heads, n_query, d), (batch, n_kv, n_key, d), (batch, n_kv, n_key, d_value)]
        for n_query, n_key in zip(agreed.query_sizes, agreed.key_sizes, strict=True)
    ]
    got = [list(of) for of in zip(*_exchange(comm, parts, shapes), strict=True)]
    # Without a mask the order of keys does not matter, and that of queries is undone on the way back.
    return [in_sequence(of, 2, agreed.order) if causal else torch.cat(of, 2) for of in got]


def _to_sequence(
    comm: Communicator, out: torch.Tensor, heads: list[tuple[int, int]], agreed: Agreed, causal: bool
) -> torch.Tensor:
    """This rank's positions of all heads."""
    sizes = agreed.query_sizes
    shards = in_shards(out, 2, comm.size, agreed.order) if causal else list(torch.split(out, sizes, 2))
    batch, d_value, mine = out.shape[0], out.shape[3], sizes[comm.rank]
    shapes: Shapes = [[(batch, end - begin, mine, d_value)] for begin, end in heads]
    return torch.cat([of for [of] in _exchange(comm, [[s] for s in shards], shapes)], 1)
