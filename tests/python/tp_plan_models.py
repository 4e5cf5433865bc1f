"""A small decoder with everything that a plan must get right, its plans, and how to compare a parallel one.

Fused queries, keys and values with 3 heads, tied embedding and head, biases, sizes that no degree divides.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from pycomm.tensor_parallel.parallelize import parallelize_module
from pycomm.tensor_parallel.parameters import named_shards
from pycomm.tensor_parallel.prepare import PrepareModuleInput, PrepareModuleOutput
from pycomm.tensor_parallel.shards import Split, blocks, fused
from pycomm.tensor_parallel.styles import (
    ColwiseParallel,
    LocalAttributes,
    RowwiseParallel,
    SequenceParallel,
)

HEADS, HEAD, VOCABULARY = 3, 5, 17
WIDTH = HEADS * HEAD


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.size = WIDTH

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).split([self.size] * 3, -1)
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, 11), nn.GELU(), nn.Linear(11, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.down(self.act(self.up(self.ln_2(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def by_heads(n: int) -> Split:
    return blocks(HEADS, HEAD, n)


def qkv(n: int) -> Split:
    return fused([by_heads(n)] * 3, n)


def plan(sequence_parallel: bool = False) -> dict[str, Any]:
    if not sequence_parallel:
        return {
            "embed": RowwiseParallel(),
            "blocks.*.attn": LocalAttributes(size=lambda n, rank: by_heads(n).lengths[rank]),
            "blocks.*.attn.qkv": ColwiseParallel(split=qkv),
            "blocks.*.attn.proj": RowwiseParallel(split=by_heads),
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
    whole = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    return {
        "embed": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.ln_?": SequenceParallel(),
        "blocks.*.attn": [
            LocalAttributes(size=lambda n, rank: by_heads(n).lengths[rank]),
            PrepareModuleInput(**whole),
        ],
        "blocks.*.attn.qkv": ColwiseParallel(split=qkv),
        "blocks.*.attn.proj": RowwiseParallel(split=by_heads, output_layouts=Shard(1)),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": [
            SequenceParallel(),
            PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
        ],
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def decoder(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder().double()


def ids(batch: int = 2, length: int = 7) -> torch.Tensor:
    drawn = torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))
    drawn[0, 0] = 1  # the padding id
    return drawn


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def assert_equal(
    model: nn.Module, whole: nn.Module, what: Any = "", rtol: float = 1e-9, atol: float = 1e-12
) -> None:
    """Every gradient of ``model`` is this rank's part of ``whole``'s."""
    shards, theirs = dict(named_shards(model)), dict(whole.named_parameters())
    ours = dict(model.named_parameters())
    assert list(ours) == list(theirs), what
    for name, p in ours.items():
        want = theirs[name].grad
        want = shards[name].take(want) if name in shards else want
        assert p.grad is not None and p.grad.shape == want.shape, (what, name)
        torch.testing.assert_close(p.grad, want, rtol=rtol, atol=atol, msg=f"{what} {name}")


def whole_and_parallel(comm: Any, the_plan: Any) -> tuple[nn.Module, nn.Module]:
    whole = decoder()
    return whole, parallelize_module(copy.deepcopy(whole), comm, the_plan)
