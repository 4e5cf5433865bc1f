"""The models of test_ddp_models.py, small enough to train in seconds, their batches and optimizers.

Activations are smooth: at the kink of a ReLU the rounding of float32 would choose another gradient, and
the comparison with float64 would measure luck.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pycomm.demo.model import GPT, ModelConfig

ROWS = 4  # of each rank's batch


class BasicBlock(nn.Module):
    """ResNet's: two convolutions with BatchNorm, and the input (projected where shapes differ) added."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(n_out)
        self.project = nn.Sequential()
        if stride != 1 or n_in != n_out:
            self.project = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(y)) + self.project(x))


class ResNet(nn.Module):
    """The 18 layers of ResNet-18 with few channels. (K. He et al., 2015, table 1.)"""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.SiLU())
        widths = [4, 4, 8, 12, 16]
        blocks = []
        for at, (n_in, n_out) in enumerate(itertools.pairwise(widths)):
            blocks += [BasicBlock(n_in, n_out, 2 if at else 1), BasicBlock(n_out, n_out, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.blocks(self.stem(images)).mean(dim=(2, 3))
        return F.cross_entropy(self.head(features), labels)


class Recommender(nn.Module):
    """Most parameters are rows of tables, of which a batch touches a few; their gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(1000, 8, sparse=True)
        self.items = nn.Embedding(2000, 8, sparse=True)
        self.genres = nn.EmbeddingBag(50, 8, mode="sum", sparse=True)
        self.deep = nn.Sequential(nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, users: Tensor, items: Tensor, genres: Tensor, ratings: Tensor) -> Tensor:
        user, item = self.users(users), self.items(items)
        guess = self.deep(torch.cat([user, item, self.genres(genres)], dim=1)).squeeze(1)
        return F.mse_loss(guess + (user * item).sum(dim=1), ratings)


class Lstm(nn.Module):
    """Next-symbol prediction by two layers of LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(30, 12)
        self.lstm = nn.LSTM(12, 16, num_layers=2, batch_first=True)
        self.head = nn.Linear(16, 30)

    def forward(self, text: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.symbols(text[:, :-1]))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), text[:, 1:].flatten())


def images(g: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randn(ROWS, 3, 16, 16, generator=g), torch.randint(10, (ROWS,), generator=g)


def text(g: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randint(256, (ROWS, 17), generator=g),)


def ratings(g: torch.Generator) -> tuple[Tensor, ...]:
    # Few users and items come often, so rows meet within a batch, between ranks and between steps.
    users = torch.randint(1000, (ROWS,), generator=g) % 7
    items = torch.randint(2000, (ROWS,), generator=g) % 11
    return users, items, torch.randint(50, (ROWS, 3), generator=g), torch.randn(ROWS, generator=g)


def symbols(g: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randint(30, (ROWS, 10), generator=g),)


def momentum(module: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9, weight_decay=1e-3)]


def sparse_adam(module: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    tables = [p for name, p in module.named_parameters() if "deep" not in name]
    # eps of the gradients' size: a step is then a smooth function of the gradient, not its sign
    return [
        torch.optim.SparseAdam(tables, lr=lr, eps=1e-1),
        torch.optim.SGD([p for name, p in module.named_parameters() if "deep" in name], lr=lr),
    ]


@dataclass(frozen=True)
class Case:
    """A model, its batches, and how it is trained."""

    make: Callable[[], nn.Module]
    batch_of: Callable[[torch.Generator], tuple[Tensor, ...]]
    optimizers_of: Callable[[nn.Module, float], list[torch.optim.Optimizer]]
    lr: float
    clip: float | None = None

    def module(self, seed: int, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(seed)
        return self.make().to(dtype)

    def batch(self, step: int, part: int, rank: int, dtype: torch.dtype) -> list[Tensor]:
        """Part ``part`` of a rank's batch of a step."""
        generator = torch.Generator().manual_seed(10_000 * step + 100 * part + rank)
        return [t.to(dtype) if t.is_floating_point() else t for t in self.batch_of(generator)]

    def update(self, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), self.clip)
        for optimizer in optimizers:
            optimizer.step()


def small_gpt() -> GPT:
    return GPT(ModelConfig(n_layers=2, n_heads=2, n_channels=32, n_positions=16))


CASES = {
    "resnet": Case(ResNet, images, momentum, 0.005),
    "gpt": Case(small_gpt, text, momentum, 0.2),
    "recommender": Case(Recommender, ratings, sparse_adam, 0.05),
    "lstm": Case(Lstm, symbols, momentum, 0.4, clip=0.5),
}
