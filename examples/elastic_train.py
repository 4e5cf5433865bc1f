"""Training that survives the death of a rank: torchrun restarts all ranks, and they resume from a checkpoint.

On each of two hosts (host-a is one of them; the folder must be one that both see):

    torchrun --nnodes 2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d \
        --rdzv-endpoint host-a:29400 --rdzv-id 1 examples/elastic_train.py --folder /shared/checkpoints

A small GPT learns the source of Python's standard library. Three things make the end the same, bit for bit,
however often ranks die: the batch of a step depends on its number only; a checkpoint has all that changes
(weights, moments, step); and ``deterministic`` fixes the order in which gradients are summed, wherever
torchrun puts which rank after a restart. ``--die 7:1`` kills rank 1 in the backward of step 7, once.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from pathlib import Path

import torch
from torch import Tensor, nn

import pycomm
from pycomm.demo.data import load_text, rows_of_step
from pycomm.demo.model import GPT, ModelConfig

SEED, ROWS = 2026, 16
MODEL = ModelConfig(n_layers=2, n_heads=2, n_channels=64, n_positions=32)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest one that is complete: it has its name only then."""
    return max(folder.glob("step-*.pt"), default=None)


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Writes, then renames: whoever is killed meanwhile leaves the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "unfinished"
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, part)
    part.rename(folder / f"step-{step:06}.pt")


def digest(model: nn.Module) -> str:
    """Of the bits of all weights."""
    bits = hashlib.sha256()
    for parameter in model.parameters():
        bits.update(parameter.detach().numpy().tobytes())
    return bits.hexdigest()[:16]


def die_when_asked(model: nn.Module, folder: Path, what: str, step: int, rank: int) -> None:
    """For ``--die STEP:RANK``: by SIGKILL in the next backward, once; a file says that it has been."""
    once = folder / "died"
    if what == f"{step}:{rank}" and not once.exists():

        def die(_: Tensor) -> None:
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)

        next(iter(model.parameters())).register_hook(die)


def main() -> None:
    """See the file's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints; all ranks see it")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=3, help="steps from one checkpoint to the next")
    parser.add_argument("--die", default="", help="STEP:RANK, to try it")
    options = parser.parse_args()

    torch.manual_seed(SEED)
    model = GPT(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if found := last_checkpoint(options.folder):
        saved = torch.load(found, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"] + 1

    with pycomm.init() as comm:
        comm.deterministic = True
        if comm.rank == 0:
            print(f"{comm.size} ranks begin with step {first}", flush=True)
        ddp = pycomm.DistributedDataParallel(model, communicator=comm)
        text, loss = load_text(), torch.zeros(())
        for step in range(first, options.steps):
            rows = rows_of_step(text, step, SEED, ROWS, MODEL.n_positions + 1, comm.rank, comm.size)
            die_when_asked(model, options.folder, options.die, step, comm.rank)
            optimizer.zero_grad()
            loss = ddp(rows)
            loss.backward()
            optimizer.step()
            if (step + 1) % options.every == 0:
                if comm.rank == 0:
                    save(options.folder, step, model, optimizer)
                comm.barrier()  # nobody begins what could fail before the checkpoint is there
        comm.all_reduce(mean := loss.detach().clone(), op="avg")
        if comm.rank == 0:
            print(f"loss {mean.item().hex()} = {mean.item():.6f}, weights {digest(model)}", flush=True)


if __name__ == "__main__":
    main()
