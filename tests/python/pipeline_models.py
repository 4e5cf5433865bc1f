"""Models in stages for the tests of pipelines: for any number of stages, with batches of changing shapes.

Each is a :class:`Model`: its stages one after the other are the model in one process too (a skip is stashed
and popped either way). All are float64 and treat every sample for itself, so that one process on the whole
batch is the reference, whatever the microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pycomm.pipeline import pop, stash

VOCABULARY, WIDTH, IGNORED = 11, 6, -100


@dataclass(frozen=True)
class Model:
    """A model and its data.

    Attributes:
        stages: of a number of stages.
        batch: of a number of samples and a step: (args, target); shapes change with the step.
        loss_fn: of output and target, a mean over ...
        count: ... what this says of a target; None: samples.
        skips, tied: of a number of stages, as the schedules take them.
    """

    stages: Callable[[int], nn.ModuleList]
    batch: Callable[[int, int], tuple[tuple[Any, ...], Any]]
    loss_fn: Callable[[Any, Any], Tensor]
    count: Callable[[Any], float] | None = None
    skips: Callable[[int], Mapping[str, tuple[int, int]]] = lambda n: {}
    tied: Callable[[int], Sequence[Sequence[tuple[int, str]]]] = lambda n: ()


def in_one_process(stages: nn.ModuleList, args: tuple[Any, ...]) -> Any:
    """The stages one after the other; a tuple is the next one's arguments."""
    for stage in stages:
        output = stage(*args)
        args = output if isinstance(output, tuple) else (output,)
    return output


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- a GPT whose embedding is its head, too ------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x_btd: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.before(x_btd)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_btd = x_btd + self.out(attended.transpose(1, 2).flatten(2))
        return x_btd + self.down(nn.functional.gelu(self.up(self.between(x_btd))))


class _GptStage(nn.Module):
    def __init__(self, index: int, n_stages: int) -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == n_stages - 1
        if self.is_first:
            self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(8, WIDTH)
        self.block = _Block()
        if self.is_last:
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.embed(x) + self.places(torch.arange(x.shape[1]))
        x = self.block(x)
        return self.head(self.norm(x)) if self.is_last else x


def _gpt(n_stages: int) -> nn.ModuleList:
    torch.manual_seed(1)
    stages = nn.ModuleList([_GptStage(i, n_stages) for i in range(n_stages)]).double()
    stages[-1].head.weight = stages[0].embed.weight
    return stages


def _tokens(n: int, step: int) -> tuple[tuple[Tensor], Tensor]:
    """Of 5 tokens in even steps, 7 in odd ones; targets are ignored unevenly."""
    made = _random(step)
    ids = torch.randint(VOCABULARY, (n, 5 + 2 * (step % 2)), generator=made)
    target = torch.randint(VOCABULARY, ids.shape, generator=made)
    share = torch.linspace(0.95, 0.05, n).unsqueeze(1)
    target[torch.rand(ids.shape, generator=made) < share] = IGNORED
    target[0] = IGNORED  # a microbatch may have nothing that counts
    return (ids,), target


def _token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def n_counted(target: Tensor) -> float:
    """Targets that are not ignored."""
    return float((target != IGNORED).sum())


# ---- a U-Net, whose stage i gives a skip to stage n - 1 - i ------------------------------------------------


class _UNetStage(nn.Module):
    def __init__(self, index: int, n_stages: int) -> None:
        super().__init__()
        self.opposite = n_stages - 1 - index
        self.is_down, self.is_up = index < n_stages // 2, self.opposite < n_stages // 2
        self.key = f"level {min(index, self.opposite)}"
        self.scales = min(index, self.opposite) < 2  # 8 x 8 pixels, halved twice
        self.block = nn.Conv2d(6 if self.is_up else 3, 3, 3, padding=1)
        self.norm = nn.GroupNorm(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_up:
            x = nn.functional.interpolate(x, scale_factor=2.0) if self.scales else x
            x = torch.cat([x, pop(self.key)], 1)
        x = torch.tanh(self.norm(self.block(x)))
        if self.is_down:
            stash(self.key, x)
            x = nn.functional.avg_pool2d(x, 2) if self.scales else x
        return x


def _u_net(n_stages: int) -> nn.ModuleList:
    torch.manual_seed(2)
    return nn.ModuleList([_UNetStage(i, n_stages) for i in range(n_stages)]).double()


def _images(n: int, step: int) -> tuple[tuple[Tensor], Tensor]:
    x = torch.randn(n, 3, 8 + 4 * (step % 2), 8, dtype=torch.float64, generator=_random(step))
    return (x,), x.flip(-1)


# ---- sequences of different lengths: dicts with an int mask, a number, None, several arguments -----------


class _Masked(nn.Module):
    def __init__(self, index: int, n_stages: int) -> None:
        super().__init__()
        self.is_first, self.is_last = index == 0, index == n_stages - 1
        if self.is_first:
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.Linear(WIDTH, VOCABULARY if self.is_last else WIDTH)

    def forward(self, first: Any, second: Any, more: dict[str, Any] | None = None) -> Any:
        if self.is_first:
            ids, lengths = first, second
            mask = (torch.arange(ids.shape[1]) < lengths.unsqueeze(1)).to(torch.int32)
            first, second, more = {"x": self.embed(ids), "mask": mask}, None, {"depth": 1, "sums": []}
        assert second is None and more is not None
        x, mask, depth = first["x"], first["mask"], more["depth"]
        x = x * mask.unsqueeze(-1)
        y = self.layer(x + x.sum(1, keepdim=True) / depth)
        if self.is_last:
            return {"logits": y + sum(more["sums"]).unsqueeze(-1), "mask": mask}
        return (
            {"x": torch.tanh(y), "mask": mask},
            None,
            {"depth": depth + 1, "sums": [*more["sums"], y.sum(2)][-2:]},
        )


def _masked(n_stages: int) -> nn.ModuleList:
    torch.manual_seed(3)
    return nn.ModuleList([_Masked(i, n_stages) for i in range(n_stages)]).double()


def _sequences(n: int, step: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    (ids,), target = _tokens(n, step)
    lengths = torch.randint(1, ids.shape[1] + 1, (n,), generator=_random(100 + step))
    target[torch.arange(ids.shape[1]) >= lengths.unsqueeze(1)] = IGNORED
    target[-1, 0] = 1
    return (ids, lengths), target


def _dict_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return _token_loss(output["logits"], target)


MODELS = {
    "gpt": Model(
        _gpt, _tokens, _token_loss, n_counted, tied=lambda n: [[(0, "embed.weight"), (n - 1, "head.weight")]]
    ),
    "u-net": Model(
        _u_net,
        _images,
        nn.functional.mse_loss,
        skips=lambda n: {f"level {i}": (i, n - 1 - i) for i in range(n // 2)},
    ),
    "masked": Model(_masked, _sequences, _dict_loss, n_counted),
}
