"""Does it pay to reduce gradients while backward goes on? Step and exposed time of each overlap.

    torchrun --standalone --nproc-per-node 2 bench/ddp_overlap.py [--rounds 8] [--cap 25]

Trains the demo's model (1.4 million parameters) on random bytes; the variants take turns, so that they see
the same machine. Set OMP_NUM_THREADS to the threads of a rank. The answer goes into the default of
``DistributedDataParallel``'s ``overlap``: a thread beside backward needs a core of its own.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import pycomm
from pycomm.demo.model import GPT, ModelConfig

VARIANTS = [
    (overlap, compression) for compression in (None, "fp16", "bf16") for overlap in ("end", "inline", "async")
]
STEPS_PER_TURN = 5  # the first is not counted


def main() -> None:
    """Prints the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each variant")
    parser.add_argument("--rows", type=int, default=8, help="rows of 128 bytes of each rank")
    parser.add_argument("--cap", type=float, default=25.0, help="bucket_cap_mb")
    options = parser.parse_args()
    with pycomm.init() as comm:
        models = {
            (overlap, compression): pycomm.DistributedDataParallel(
                GPT(ModelConfig()),
                communicator=comm,
                bucket_cap_mb=options.cap,
                overlap=overlap,
                compression=compression,
            )
            for overlap, compression in VARIANTS
        }
        text = torch.randint(256, (options.rows, ModelConfig().n_positions + 1))
        steps: dict[object, list[float]] = {variant: [] for variant in models}
        exposed: dict[object, list[float]] = {variant: [] for variant in models}
        for _ in range(options.rounds):
            for variant, model in models.items():
                for step in range(STEPS_PER_TURN):
                    model.zero_grad()
                    comm.barrier()
                    before, started = model.exposed_s, time.perf_counter()
                    model(text).backward()
                    if step > 0:
                        steps[variant].append(time.perf_counter() - started)
                        exposed[variant].append(model.exposed_s - before)
        if comm.rank == 0:
            print(f"{'overlap':<8} {'compression':<12} {'step (ms)':>10} {'exposed (ms)':>13}")
            for variant in models:
                step, wait = (1e3 * statistics.median(times[variant]) for times in (steps, exposed))
                print(f"{variant[0]:<8} {variant[1] or '–':<12} {step:>10.1f} {wait:>13.2f}")
        comm.barrier()


if __name__ == "__main__":
    main()
