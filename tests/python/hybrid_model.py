"""A small GPT of tensor-parallel layers with a tied vocabulary, cut into stages; and itself in one process.

Made the same way at every degree: the parallel layers draw whole weights from one generator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import pycomm
import pycomm.tensor_parallel as tp

VOCABULARY, WIDTH = 7, 6


class Embed(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.embedding = tp.VocabParallelEmbedding(VOCABULARY, WIDTH, group=group, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)


class Block(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        more: dict[str, Any] = {"group": group, "dtype": torch.float64}
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.up = tp.ColumnParallelLinear(WIDTH, 10, **more)
        self.down = tp.RowParallelLinear(10, WIDTH, **more)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Head(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.embedding = tp.VocabParallelEmbedding(VOCABULARY, WIDTH, group=group, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return tp.parallel_lm_logits(x, self.embedding.weight, group=self.group)


def layers(group: Any, n_blocks: int = 4) -> list[nn.Module]:
    """Of the whole model; the head's weight is the embedding's own object."""
    torch.manual_seed(11)
    made = [Embed(group), *(Block(group) for _ in range(n_blocks)), Head(group)]
    with torch.no_grad():
        for layer in made[1:-1]:
            layer.norm.weight.add_(torch.randn(WIDTH, dtype=torch.float64) * 0.1)
    made[-1].embedding.weight = made[0].embedding.weight
    return made


def loss_over(group: Any) -> Any:
    """Mean cross entropy of (n, T, vocabulary) logits and (n, T) targets."""
    return lambda logits, target: tp.vocab_parallel_cross_entropy(logits, target, group=group)


def batch(step: int, n: int = 8) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (n, 3), generator=torch.Generator().manual_seed(step))
    return ids, (ids * 3 + 1) % VOCABULARY


# ---- the same model in one process, of torch's own functions ---------------------------------------------


def weights(n_blocks: int = 4) -> dict[str, Tensor]:
    """The whole model's, by the names that ``nn.Sequential(*layers)`` has; leaves that require gradients."""
    alone = pycomm.init().split(pycomm.init().rank)  # a group of this rank only
    named = nn.Sequential(*layers(alone, n_blocks)).named_parameters()
    return {name: p.detach().clone().requires_grad_() for name, p in named}


def reference_loss(w: dict[str, Tensor], ids: Tensor, target: Tensor) -> Tensor:
    f = nn.functional
    x = w["0.embedding.weight"][ids]
    i = 1
    while f"{i}.up.weight" in w:
        y = f.layer_norm(x, (WIDTH,), w[f"{i}.norm.weight"], w[f"{i}.norm.bias"])
        y = torch.tanh(y @ w[f"{i}.up.weight"].T + w[f"{i}.up.bias"])
        x = x + y @ w[f"{i}.down.weight"].T + w[f"{i}.down.bias"]
        i += 1
    return f.cross_entropy((x @ w["0.embedding.weight"].T).flatten(0, -2), target.flatten())
