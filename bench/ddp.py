"""Exposed communication of DistributedDataParallel, next to torch's over gloo: every line that must hold.

    python bench/ddp.py [--launches 5] [--steps 40] [--json FILE]

Exposed communication is the time of a step (zero_grad, forward, backward) with DDP, less that of the same
model and batch without. Both ranks hold three copies of the model (plain, ours, torch's); the copies take
turns, step by step, all ranks starting each step together, one thread each; a step's time is the slower
rank's. A figure is the median over steps of the paired differences, and the table shows the median over
launches (fresh processes each). With one rank: the step under our wrapper against the plain one. Peak memory
is of processes that hold one wrapper only: the kernel's high-water mark of resident memory, shared arenas
included.

The machine must otherwise be quiet; takes about five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from as_ranks import run_as_ranks

GPT_SIZES = {"n_layers": 5, "n_heads": 8, "n_channels": 528, "n_positions": 128}  # 16.9 million parameters
KINDS = ("plain", "pycomm", "torch")
WARMUP = 5


@dataclass(frozen=True)
class Line:
    """One requirement: ours ÷ torch's exposed communication of a model is at most ``limit``."""

    name: str
    model: str
    rows: int
    positions: int
    limit: float
    step_too: bool = False  # and the step is no longer than torch's


LINES = (
    Line("GPT, 17 M parameters, batch 1 x 64", "gpt", 1, 64, 1 / 5),
    Line("GPT, 17 M parameters, batch 4 x 128", "gpt", 4, 128, 1 / 3, step_too=True),
    Line("1,000 parameters of 1,000 elements", "many", 0, 0, 1 / 3),
)
ONE_RANK_LIMIT = 1.02


def build(line: Line) -> tuple[Callable[[], Any], Any]:
    """A maker of the model, and its input."""
    import torch
    from torch import nn

    from pycomm.demo.model import GPT, ModelConfig

    if line.model == "gpt":
        return lambda: GPT(ModelConfig(**GPT_SIZES)), torch.randint(256, (line.rows, line.positions + 1))

    class Many(nn.Module):
        """The mean of x * p over 1,000 parameters p."""

        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(1000) for _ in range(1000))

        def forward(self, x: Any) -> Any:
            """x: (1000,). Returns a 0-dim tensor."""
            for weight in self.weights:
                x = x * weight
            return x.mean()

    return Many, torch.ones(1000)


def wrap(kind: str, model: Any, comm: Any) -> Any:
    """The model as ``kind`` trains it."""
    from torch.nn.parallel import DistributedDataParallel

    import pycomm

    if kind == "plain":
        return model
    if kind == "pycomm":
        return pycomm.DistributedDataParallel(model, communicator=comm)
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def step(model: Any, batch: Any) -> None:
    """What is timed."""
    model.zero_grad(set_to_none=True)
    model(batch).backward()


def rank_main(line: Line, kinds: tuple[str, ...], n_steps: int, result: Path) -> None:
    """What every rank runs; rank 0 writes the slower rank's seconds of every step, and the peak memory."""
    import torch
    import torch.distributed as dist

    import pycomm

    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder = os.environ["PYCOMM_RUN_DIR"]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if "torch" in kinds:
        dist.init_process_group("gloo", f"file://{folder}/gloo", rank=rank, world_size=size)
    with pycomm.init() as comm:
        make, batch = build(line)
        models = {kind: wrap(kind, make(), comm) for kind in kinds}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for i in range(WARMUP + n_steps):
            for kind in kinds[i % len(kinds) :] + kinds[: i % len(kinds)]:
                comm.barrier()
                began = time.perf_counter()
                step(models[kind], batch)
                took = time.perf_counter() - began
                if i >= WARMUP:
                    times[kind].append(took)
        slower = torch.tensor([times[kind] for kind in kinds], dtype=torch.float64)
        comm.all_reduce(slower, op="max")
        peak = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10])
        comm.all_reduce(peak, op="max")
        if rank == 0:
            found = {"times": dict(zip(kinds, slower.tolist(), strict=True)), "peak_bytes": peak.item()}
            result.write_text(json.dumps(found))
    if "torch" in kinds:
        dist.destroy_process_group()


def launch(line: int, kinds: tuple[str, ...], n_ranks: int, n_steps: int) -> dict[str, Any]:
    """One run in fresh processes, as rank 0 reported it."""
    with tempfile.TemporaryDirectory(prefix="pycomm-ddp-") as folder:
        result = Path(folder, "result.json")
        arguments = ["--as-rank", str(result), "--line", str(line)]
        arguments += ["--kinds", ",".join(kinds), "--steps", str(n_steps)]
        run_as_ranks(n_ranks, folder, __file__, *arguments)
        report: dict[str, Any] = json.loads(result.read_text())
        return report


def paired(times: dict[str, list[float]], kind: str) -> float:
    """Seconds that a step of ``kind`` takes longer than the plain one beside it; median over steps."""
    return statistics.median(a - b for a, b in zip(times[kind], times["plain"], strict=True))


def main() -> int:
    """Measures, prints the table, returns 0 when every line is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write all reports here")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--line", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--kinds", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank is not None:
        rank_main(LINES[args.line], tuple(args.kinds.split(",")), args.steps, args.as_rank)
        return 0
    rows, reports, all_met = [], [], True

    def row(case: str, values: list[str], limit: str, met: bool) -> None:
        nonlocal all_met
        all_met = all_met and met
        rows.append(f"| {case} | {' | '.join(values)} | {limit} | {'met' if met else '**missed**'} |")

    for number, line in enumerate(LINES):
        runs = [launch(number, KINDS, 2, args.steps) for _ in range(args.launches)]
        alone = [launch(number, ("plain", "pycomm"), 1, args.steps) for _ in range(args.launches)]
        memory = {kind: launch(number, (kind,), 2, 5)["peak_bytes"] for kind in ("pycomm", "torch")}
        reports.append({"line": line.name, "two_ranks": runs, "one_rank": alone, "memory": memory})
        ours, torchs = ([1e3 * paired(run["times"], kind) for run in runs] for kind in ("pycomm", "torch"))
        ratio = statistics.median(a / b for a, b in zip(ours, torchs, strict=True))
        shown = [f"{statistics.median(ours):.2f} ms", f"{statistics.median(torchs):.2f} ms", f"{ratio:.2f}"]
        row(f"{line.name}: exposed communication", shown, f"{line.limit:.2f}", ratio <= line.limit)
        steps = [
            [1e3 * statistics.median(run["times"][kind]) for run in runs] for kind in ("pycomm", "torch")
        ]
        ratio = statistics.median(a / b for a, b in zip(*steps, strict=True))
        shown = [*(f"{statistics.median(s):.1f} ms" for s in steps), f"{ratio:.2f}"]
        row(f"{line.name}: step", shown, "1.00" if line.step_too else "–", not line.step_too or ratio <= 1)
        one, plain = (
            [1e3 * statistics.median(run["times"][kind]) for run in alone] for kind in ("pycomm", "plain")
        )
        ratio = statistics.median(
            1 + paired(run["times"], "pycomm") / statistics.median(run["times"]["plain"]) for run in alone
        )
        shown = [
            f"{statistics.median(one):.1f} ms",
            f"{statistics.median(plain):.1f} ms (plain)",
            f"{ratio:.3f}",
        ]
        row(f"{line.name}: step of 1 rank", shown, f"{ONE_RANK_LIMIT}", ratio <= ONE_RANK_LIMIT)
        shown = [*(f"{memory[kind] / 2**20:.0f} MiB" for kind in ("pycomm", "torch"))]
        ratio = memory["pycomm"] / memory["torch"]
        row(f"{line.name}: peak memory", [*shown, f"{ratio:.2f}"], "1.00", ratio <= 1)
        print(rows[-4], rows[-3], rows[-2], rows[-1], sep="\n", flush=True)
        if args.json:
            args.json.write_text(json.dumps(reports) + "\n")
    print("\n| case | pycomm | torch DDP + gloo | ratio | at most | |\n|---|---|---|---|---|---|")
    print(*rows, sep="\n")
    return 0 if all_met else 1


if __name__ == "__main__":
    sys.exit(main())
