"""Elastic restarts on the backend "pycomm": a rank is killed, torchrun starts all again, training goes on.

    torchrun --standalone --nproc-per-node 2 --max-restarts 1 --monitor-interval 2 elastic_train.py \
        --folder checkpoints --die 7

With ``--die 7`` rank 1 kills itself in the backward of step 7 of its first life. The others learn so at once,
by name; torchrun ends them, and starts all ranks anew. They resume from the last checkpoint that is complete,
and end with the bits of a run that nothing disturbed. (``--monitor-interval``: torchrun looks for dead ranks
every 0.1 s and then ends the others, maybe before they have said what they saw. It happens less with 2 s.)
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import pycomm  # noqa: F401 (it registers the backend)
from small_model import BATCH, LEARNING_RATE, make_data, make_model, report

STEPS = 12
EVERY = 3  #: steps from one checkpoint to the next


def last_checkpoint(folder: Path) -> int:
    """The last step with a complete checkpoint, -1 for none: DCP writes .metadata when all else is there."""
    return max((int(found.parent.name) for found in folder.glob("*/.metadata")), default=-1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="pycomm")
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints")
    parser.add_argument("--die", type=int, help="the step in which rank 1 kills itself, once")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    done = last_checkpoint(args.folder)
    if done >= 0:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=args.folder / str(done))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    if rank == 0:
        print(f"life {life} begins with step {done + 1}", flush=True)

    points, classes = make_data().tensors
    loss = torch.zeros(())
    for step in range(done + 1, STEPS):
        mine = torch.arange(BATCH * step + rank, BATCH * (step + 1), size) % len(points)
        loss = cross_entropy(model(points[mine]), classes[mine])
        if step == args.die and rank == 1 and life == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=args.folder / str(step))

    mean = loss.detach() / size
    dist.all_reduce(mean)
    if rank == 0:
        report(args.out, model.module.named_parameters(), mean.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
