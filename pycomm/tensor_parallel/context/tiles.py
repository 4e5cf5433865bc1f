"""Attention of one block of queries against one block of keys, tile by tile, in the accumulation dtype.

The forward keeps, for every query row, the running maximum m of its scores, the sum l of exp(score − m) and
the values weighted alike (*online softmax*: Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv
2205.14135), so that blocks of keys may come one after the other, in any order, and no matrix of scores larger
than a tile exists. The backward takes lse = m + log l and delta = Σ out·grad_out of the *whole* row; then
each block's part of the gradients is independent of the others.

Shapes, with G query heads for each KV head (GQA): queries (B, H_kv, G, S_q, D), keys (B, H_kv, S_k, D),
values (B, H_kv, S_k, D_v). Heads that share keys are rows of one matrix product: keys are not repeated.
Scores, sums and gradients are float64 for float64 inputs, else float32. Only torch operations: any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["Rows", "accumulation_dtype", "attend", "attend_backward"]

TILE = 512
"""Rows and columns of a tile of scores, for each head: 1 MiB in float32."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class Rows:
    """The running state of query rows: (B, H_kv, G, S_q, 1), the same, and (B, H_kv, G, S_q, D_v)."""

    m: torch.Tensor
    l: torch.Tensor  # noqa: E741 (the paper's name)
    acc: torch.Tensor

    @staticmethod
    def start(query: torch.Tensor, d_value: int) -> Rows:
        """Of rows that have seen no key yet."""
        dtype = accumulation_dtype(query.dtype)
        one = (*query.shape[:-1], 1)
        return Rows(
            m=query.new_full(one, -torch.inf, dtype=dtype),
            l=query.new_zeros(one, dtype=dtype),
            acc=query.new_zeros((*query.shape[:-1], d_value), dtype=dtype),
        )

    def at(self, rows: slice) -> Rows:
        return Rows(self.m[..., rows, :], self.l[..., rows, :], self.acc[..., rows, :])

    def out(self) -> torch.Tensor:
        return self.acc / self.l

    def lse(self) -> torch.Tensor:
        return self.m + self.l.log()


def _tiles(n_rows: int, n_columns: int, causal: bool) -> Iterator[tuple[slice, slice, bool]]:
    """Tiles that have a score to compute, and whether the diagonal crosses them. Columns from 0 up."""
    for r in range(0, n_rows, TILE):
        rows = slice(r, min(r + TILE, n_rows))
        for c in range(0, n_columns, TILE):
            if causal and c >= rows.stop:
                break
            columns = slice(c, min(c + TILE, n_columns))
            yield rows, columns, causal and columns.stop - 1 > rows.start


def _flat(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(B, H_kv, G, S, D) as (B, H_kv, G·S, D)."""
    return x.to(dtype).flatten(2, 3)


def _scores(
    q: torch.Tensor, k: torch.Tensor, scale: float, rows: slice, columns: slice, crossed: bool
) -> torch.Tensor:
    """(B, H_kv, G·rows, columns): scaled products, −inf where a key lies after the query."""
    scores = (q @ k.transpose(-1, -2)).mul_(scale)
    if crossed:
        at = torch.arange(rows.start, rows.stop, device=q.device)
        key_at = torch.arange(columns.start, columns.stop, device=q.device)
        later = key_at[None, :] > at[:, None]
        by_head = scores.view(*scores.shape[:2], scores.shape[2] // len(at), *later.shape)
        by_head.masked_fill_(later, -torch.inf)
    return scores


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: Rows, *, scale: float, causal: bool
) -> None:
    """Adds a block of keys to the state of queries. ``causal``: both blocks are the same positions."""
    dtype = state.m.dtype
    for rows, columns, crossed in _tiles(q.shape[-2], k.shape[-2], causal):
        k_tile, v_tile = k[..., columns, :].to(dtype), v[..., columns, :].to(dtype)
        scores = _scores(_flat(q[..., rows, :], dtype), k_tile, scale, rows, columns, crossed)
        here = state.at(rows)
        old_m, old_l, old_acc = here.m.flatten(2, 3), here.l.flatten(2, 3), here.acc.flatten(2, 3)
        m = torch.maximum(old_m, scores.amax(-1, keepdim=True))
        p = scores.sub_(m).exp_()
        keep = (old_m - m).exp_()
        here.l.copy_((old_l * keep + p.sum(-1, keepdim=True)).view(here.l.shape))
        here.acc.copy_((old_acc * keep).add_(p @ v_tile).view(here.acc.shape))
        here.m.copy_(m.view(here.m.shape))


def attend_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_out: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    grad_q: torch.Tensor,
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
    *,
    scale: float,
    causal: bool,
) -> None:
    """Adds what one block of queries and keys gives to ``grad_q``, ``grad_k`` and ``grad_v``."""
    dtype = lse.dtype
    for rows, columns, crossed in _tiles(q.shape[-2], k.shape[-2], causal):
        q_tile, do_tile = _flat(q[..., rows, :], dtype), _flat(grad_out[..., rows, :], dtype)
        k_tile, v_tile = k[..., columns, :].to(dtype), v[..., columns, :].to(dtype)
        scores = _scores(q_tile, k_tile, scale, rows, columns, crossed)
        p = scores.sub_(_flat(lse[..., rows, :], dtype)).exp_()
        grad_v[..., columns, :] += p.transpose(-1, -2) @ do_tile
        grad_s = (do_tile @ v_tile.transpose(-1, -2)).sub_(_flat(delta[..., rows, :], dtype)).mul_(p)
        grad_s.mul_(scale)
        here = grad_q[..., rows, :]
        here += (grad_s @ k_tile).view(here.shape)
        grad_k[..., columns, :] += grad_s.transpose(-1, -2) @ q_tile
