"""What all examples of this folder train: a small classifier, in float64, on points that a seed gives.

The batches are the same whatever the number of ranks: each takes its share of the 16 samples of a step, and
the loss is a mean over them. So the parameters after training are those of one process up to the rounding of
float64, and the test of these examples (test_trainers.py) compares them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

BATCH = 16  #: samples of a step, over all ranks
EPOCHS = 3
LEARNING_RATE = 1e-2


def make_model() -> nn.Module:
    """The same parameters in every process."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)).double()


def make_data() -> TensorDataset:
    """128 points of 8 coordinates, float64, in 3 classes."""
    generator = torch.Generator().manual_seed(11)
    points = torch.randn(128, 8, generator=generator, dtype=torch.float64)
    classes = (points[:, :3] + 0.5 * points[:, 3:6]).argmax(dim=1)
    return TensorDataset(points, classes)


def options(description: str | None, **more: Any) -> argparse.Namespace:
    """The examples' command line; ``more`` are integers with their defaults."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--backend", default="pycomm", help="of torch.distributed, for a comparison: gloo")
    parser.add_argument("--out", type=Path, help="a file for the parameters, the loss and the backend's name")
    for name, default in more.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def report(out: Path | None, parameters: Iterable[tuple[str, torch.Tensor]], loss: float) -> None:
    """Says how it ended; to be called on rank 0, with the model's ``named_parameters()``."""
    backend = dist.get_backend() if dist.is_initialized() else "none"
    size = dist.get_world_size() if dist.is_initialized() else 1
    print(f"backend {backend}, {size} ranks: the last loss is {loss:.12f}", flush=True)
    if out is not None:
        plain = {name: p.detach() for name, p in parameters}
        torch.save({"backend": backend, "ranks": size, "loss": loss, "parameters": plain}, out)
