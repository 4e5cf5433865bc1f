"""What one rank of the demo does: ``torchrun … -m pycomm.demo.train pycomm FOLDER`` (or gloo; alone: one).

Every rank runs the same loop on its share of the rows and writes FOLDER/<way>.rank<r>.json; rank 0 prints a
JSON line per step for the progress bar. Losses are of the rank's own rows: their mean over the ranks is the
loss of the global batch, since the shares are equal.

*Exposed* communication of a step is the time that the rank's own thread spends in it instead of computing:
with pycomm all time inside its DDP (launching, reducing, waiting); with gloo the time from the rank's last
gradient until backward returns (launches before that are not counted). Waiting for a slower rank counts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from pycomm.demo.data import load_text, rows_of_step
from pycomm.demo.model import GPT, ModelConfig

__all__ = ["RankResult", "TrainConfig", "train"]

WAYS = ("pycomm", "one", "gloo")


@dataclass(frozen=True)
class TrainConfig:
    """The same for every way of training."""

    n_steps: int = 64
    n_rows: int = 16  # of the global batch
    seed: int = 2026
    learning_rate: float = 1e-3
    n_warmup: int = 10
    max_norm: float = 1.0
    model: ModelConfig = field(default_factory=ModelConfig)


@dataclass
class RankResult:
    """What a rank saw, one entry per step: nats per byte, gradient norm before clipping, and seconds."""

    way: str
    rank: int
    size: int
    n_parameters: int
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    weights: str = ""  # digest of the bits of the trained weights


@dataclass
class Replica:
    """A model ready for training by this rank, and how long it has been exposed to communication so far."""

    model: nn.Module
    rank: int
    size: int
    exposed_s: Callable[[], float]
    after_backward: Callable[[], None]
    close: Callable[[], None]


def nothing() -> None:
    """Where a way of training has nothing to do."""


def replicate(way: str, model: nn.Module) -> Replica:
    """Wraps the model for the way of training."""
    if way == "one":
        return Replica(model, 0, 1, lambda: 0.0, nothing, nothing)
    if way == "pycomm":
        import pycomm

        comm = pycomm.init()
        ddp = pycomm.DistributedDataParallel(model, communicator=comm)
        return Replica(ddp, comm.rank, comm.size, lambda: ddp.exposed_s, nothing, comm.close)

    import torch.distributed as dist

    clock = {"last gradient": 0.0, "exposed": 0.0}

    def gradient_came(_: Tensor) -> None:
        clock["last gradient"] = time.perf_counter()

    def backward_returned() -> None:
        clock["exposed"] += time.perf_counter() - clock["last gradient"]

    for parameter in model.parameters():  # before torch's own hooks, so that these run first
        cast(Any, parameter).register_post_accumulate_grad_hook(gradient_came)  # untyped in torch
    dist.init_process_group("gloo")
    wrapped = nn.parallel.DistributedDataParallel(model)
    return Replica(
        wrapped,
        dist.get_rank(),
        dist.get_world_size(),
        lambda: clock["exposed"],
        backward_returned,
        dist.destroy_process_group,
    )


def train(way: str, config: TrainConfig, on_step: Callable[[int, float], None]) -> RankResult:
    """Trains, and returns what this rank saw.

    Weights start different on every rank; DDP must make them equal.
    """
    torch.manual_seed(config.seed + int(os.environ.get("RANK", "0")))
    replica = replicate(way, GPT(config.model))
    parameters = list(replica.model.parameters())
    result = RankResult(way, replica.rank, replica.size, sum(p.numel() for p in parameters))
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    text = load_text()
    for step in range(config.n_steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (step + 1) / config.n_warmup)
        rows = rows_of_step(
            text, step, config.seed, config.n_rows, config.model.n_positions + 1, replica.rank, replica.size
        )
        started, exposed_before = time.perf_counter(), replica.exposed_s()
        optimizer.zero_grad(set_to_none=True)
        loss = replica.model(rows)
        loss.backward()
        replica.after_backward()
        norm = nn.utils.clip_grad_norm_(parameters, config.max_norm)
        optimizer.step()
        result.losses.append(loss.item())
        result.norms.append(norm.item())
        result.step_s.append(time.perf_counter() - started)
        result.exposed_s.append(replica.exposed_s() - exposed_before)
        on_step(step, result.losses[-1])
    digest = hashlib.blake2b(digest_size=16)
    for parameter in parameters:
        digest.update(parameter.detach().numpy().tobytes())
    result.weights = digest.hexdigest()
    replica.close()
    return result


def main(arguments: list[str]) -> None:
    """The entry point of a rank; see the header."""
    parser = argparse.ArgumentParser(prog="python -m pycomm.demo.train")
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=TrainConfig.n_steps)
    options = parser.parse_args(arguments)
    is_first = os.environ.get("RANK", "0") == "0"

    def on_step(step: int, loss: float) -> None:
        if is_first:
            print(json.dumps({"step": step, "loss": loss}), flush=True)

    result = train(options.way, TrainConfig(n_steps=options.steps), on_step)
    path = options.folder / f"{result.way}.rank{result.rank}.json"
    path.write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    main(sys.argv[1:])
