"""What a step's activations take, by schedule and by what is computed again.

    torchrun --nproc-per-node 2 examples/pipeline_memory.py

Each rank has 8 layers of 512, and a batch is 16 microbatches of 64 samples: 128 KiB of activations for a
layer and microbatch, and 8 MiB of gradients.
"""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would say when it begins and ends

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import pycomm
from pycomm.pipeline import PipelineStage, get_schedule_class

N_LAYERS, WIDTH, N_MICROBATCHES, SAMPLES = 8, 512, 16, 64


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that torch's CPU allocator had given out during a call, beyond what it had before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    now = most = 0
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def main() -> None:
    """See the file's text."""
    comm = pycomm.init()
    x = torch.randn(N_MICROBATCHES * SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
    for name in ("GPipe", "1F1B"):
        for checkpoint in ("never", "except_last", "always"):
            layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(N_LAYERS)]
            stage = PipelineStage(nn.Sequential(*layers), comm.rank, comm.size, checkpoint=checkpoint)
            schedule = get_schedule_class(name)(stage, N_MICROBATCHES, loss_fn=nn.functional.mse_loss)
            peak = peak_bytes(lambda schedule=schedule: schedule.step(x, target=x))  # type: ignore[misc]
            if comm.rank == 0:
                print(f"{name:6} checkpoint={checkpoint:12} peak {peak / 2**20:.1f} MiB on rank 0")


if __name__ == "__main__":
    main()
