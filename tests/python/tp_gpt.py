"""A GPT twice: of torch's layers in one process, and of parallel layers. Tied embedding, fused queries, keys,
values, grouped heads, dropout on embedding, attention and residuals.

Both make their parts in the same order, so from one seed they begin with the same values. The masks of one
process come from pycomm's dropout of whole tensors; everything else in it is torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pycomm.tensor_parallel as tp

F64 = torch.float64


@dataclass(frozen=True)
class Sizes:
    vocabulary: int = 29
    n_channels: int = 12
    n_heads: int = 4
    n_kv_heads: int = 2
    n_hidden: int = 30
    n_layers: int = 2
    n_positions: int = 10
    p: float = 0.1


def attend(qkv: tuple[Tensor, ...], head_size: int, drop: Callable[[Tensor], Tensor]) -> Tensor:
    """(B, T, heads x head_size) each; keys and values may have fewer heads."""
    q, k, v = (t.unflatten(-1, (-1, head_size)).transpose(1, 2) for t in qkv)
    if q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / head_size**0.5
    t = scores.shape[-1]
    hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
    return (drop(scores.masked_fill(hidden, -torch.inf).softmax(-1)) @ v).transpose(1, 2).flatten(2)


class PlainBlock(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        d, self.size, self.p = s.n_channels, s.n_channels // s.n_heads, s.p
        self.widths = [d, s.n_kv_heads * self.size, s.n_kv_heads * self.size]
        self.norm1 = nn.LayerNorm(d, dtype=F64)
        self.qkv = nn.Linear(d, sum(self.widths), dtype=F64)
        self.out = nn.Linear(d, d, dtype=F64)
        self.norm2 = nn.LayerNorm(d, dtype=F64)
        self.up = nn.Linear(d, s.n_hidden, dtype=F64)
        self.down = nn.Linear(s.n_hidden, d, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        def drop(t: Tensor) -> Tensor:
            return tp.dropout(t, self.p)

        qkv = self.qkv(self.norm1(x)).split(self.widths, -1)
        x = x + drop(self.out(attend(qkv, self.size, drop)))
        return x + drop(self.down(F.gelu(self.up(self.norm2(x)))))


class PlainGPT(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.p = s.p
        self.ids = nn.Embedding(s.vocabulary, s.n_channels, dtype=F64)
        self.positions = nn.Embedding(s.n_positions, s.n_channels, dtype=F64)
        self.blocks = nn.ModuleList(PlainBlock(s) for _ in range(s.n_layers))
        self.norm = nn.LayerNorm(s.n_channels, dtype=F64)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = tp.dropout(self.ids(ids) + self.positions.weight[: ids.shape[1]], self.p)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.ids.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


class ParallelBlock(nn.Module):
    def __init__(self, s: Sizes, sequence: bool, data: Any) -> None:
        super().__init__()
        d, self.size = s.n_channels, s.n_channels // s.n_heads
        more: dict[str, Any] = {"sequence_parallel": sequence, "sequence_dim": 1, "dtype": F64}
        self.norm1 = tp.LayerNorm(d, sequence_parallel=sequence, dtype=F64)
        self.qkv = tp.FusedColumnParallelLinear.for_attention(d, s.n_heads, s.n_kv_heads, self.size, **more)
        self.out = tp.RowParallelLinear(d, d, split=self.qkv.head_split, **more)
        self.norm2 = tp.LayerNorm(d, sequence_parallel=sequence, dtype=F64)
        self.up = tp.ColumnParallelLinear(d, s.n_hidden, **more)
        self.down = tp.RowParallelLinear(s.n_hidden, d, **more)
        self.of_heads = tp.ParallelDropout(s.p, sharded={0: data, 1: None})
        self.of_stream = tp.ParallelDropout(s.p, sharded={0: data, 1: None} if sequence else {0: data})

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).split(self.qkv.local_sizes, -1)
        x = x + self.of_stream(self.out(attend(qkv, self.size, self.of_heads)))
        return x + self.of_stream(self.down(F.gelu(self.up(self.norm2(x)))))


class ParallelGPT(nn.Module):
    def __init__(self, s: Sizes, *, sequence: bool, data: Any, recompute: bool = False) -> None:
        super().__init__()
        self.sequence, self.recompute = sequence, recompute
        self.ids = tp.VocabParallelEmbedding(
            s.vocabulary, s.n_channels, None, sequence, sequence_dim=1, dtype=F64
        )
        self.positions = nn.Embedding(s.n_positions, s.n_channels, dtype=F64)
        self.blocks = nn.ModuleList(ParallelBlock(s, sequence, data) for _ in range(s.n_layers))
        self.norm = tp.LayerNorm(s.n_channels, sequence_parallel=sequence, dtype=F64)
        self.drop = tp.ParallelDropout(s.p, sharded={0: data, 1: None} if sequence else {0: data})

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        positions = self.positions.weight[: ids.shape[1]]
        if self.sequence:
            positions = tp.scatter_to_sequence_parallel_region(positions)
        x = self.drop(self.ids(ids) + positions)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        x = self.norm(x)
        logits = tp.parallel_lm_logits(x, self.ids.weight, sequence_parallel=self.sequence, sequence_dim=1)
        return tp.vocab_parallel_cross_entropy(logits, targets, label_smoothing=0.1)


def batch(step: int, s: Sizes, n_rows: int = 4) -> tuple[Tensor, Tensor]:
    """ids and targets, (n_rows, n_positions); targets are ignored here and there, unevenly over rows."""
    generator = torch.Generator().manual_seed(1000 + step)
    text = torch.randint(s.vocabulary, (n_rows, s.n_positions + 1), generator=generator)
    targets = text[:, 1:].clone()
    targets[0, : 2 + step % 5] = -100
    targets[-1, -1] = -100
    return text[:, :-1], targets
