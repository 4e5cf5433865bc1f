"""torch.distributed on pycomm, next to gloo: every line that must hold.

    python bench/torch_backend.py [--launches 3] [--seconds 1.0] [--json FILE]

Two ranks, one thread each, both backends as groups of the same processes, in turns: a block of calls on one,
the same on the other, and again, until the seconds of the line are over. A block's time is the slower rank's;
a figure is the median over blocks, the table's the median over launches (fresh processes each). Tensors are
ordinary ones and rewritten before each block. FSDP2's "time not spent computing" is that of a step, less that
of the same model and batch without FSDP.

A second table shows what comparing the ranks' calls costs: pycomm does it in every call (what it adds to one
is timed by itself, signing and comparing a signature that has come with the flag), gloo in torch's wrapper of
TORCH_DISTRIBUTED_DEBUG=DETAIL.

The machine must otherwise be quiet; takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from as_ranks import run_as_ranks

BACKENDS = ("pycomm", "gloo")
MIB = 1 << 20


@dataclass(frozen=True)
class Line:
    """One requirement: pycomm's time ÷ gloo's is at most ``limit``."""

    name: str
    call: str
    n_bytes: int
    limit: float


LINES = (
    Line("dist.all_reduce, 4 B", "all_reduce", 4, 1 / 8),
    Line("functional all_reduce + wait, 4 B", "functional", 4, 1 / 4),
    *(
        Line(f"dist.{call}, {n} MiB", call, n * MIB, 1 / 4)
        for call in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
        for n in (1, 4, 16, 64)
    ),
    Line("FSDP2 step, GPT of 17 M parameters: not computing", "fsdp2", 0, 1 / 3),
    Line("all_gather_object, 1 KiB", "objects", 1024, 1 / 2),
)
CHECKED = Line("comparing the ranks' calls", "checked", 4, 1.0)


def small(call: str, n_bytes: int, group: Any, size: int) -> Callable[[], Any]:
    """One call of a line, on a group."""
    import torch
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    whole = torch.zeros(max(n_bytes // 4, 1))
    part = torch.zeros(max(n_bytes // 4 // size, 1))
    text, found = "x" * n_bytes, [None] * size
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "functional": lambda: functional.wait_tensor(functional.all_reduce(whole, "sum", group)),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "objects": lambda: dist.all_gather_object(found, text, group=group),
    }
    made = calls[call]

    def dirtied(n_calls: int) -> float:
        whole.fill_(0.0)
        part.fill_(0.0)
        dist.barrier(group=group)
        began = time.perf_counter()
        for _ in range(n_calls):
            made()
        return (time.perf_counter() - began) / n_calls

    return dirtied


def checked(groups: dict[str, Any], size: int) -> dict[str, Callable[[int], float]]:
    """all_reduce of 4 bytes on pycomm, on gloo, and on gloo with torch's check of the ranks' calls."""
    import torch.distributed as dist

    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    wrapped = dist.new_group(backend="gloo")
    dist.set_debug_level(level)
    return {
        name: small("all_reduce", 4, group, size)
        for name, group in {**groups, "gloo, checked": wrapped}.items()
    }


def training(group: Any, rank: int, size: int) -> Callable[[int], float]:
    """A training step of a GPT: sharded over a group, or alone (group None)."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    from pycomm.demo.model import GPT, ModelConfig

    torch.manual_seed(0)
    model: Any = GPT(ModelConfig(n_layers=5, n_heads=8, n_channels=528, n_positions=128))
    if group is not None:
        mesh = DeviceMesh.from_group(group, "cpu")
        for block in [m for m in model.modules() if type(m).__name__ == "Block"]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    batch = torch.randint(256, (1, 65))

    def step(n_calls: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(n_calls):
            model.zero_grad(set_to_none=True)
            model(batch).backward()
        return (time.perf_counter() - began) / n_calls

    return step


def rank_main(line: Line, seconds: float, result: Path) -> None:
    """What every rank runs; rank 0 writes the slower rank's seconds of every block."""
    import torch
    import torch.distributed as dist

    import pycomm

    assert pycomm
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{os.environ['PYCOMM_RUN_DIR']}/store", size)
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=size)
    groups = {"pycomm": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    if line.call == "checked":
        run = checked(groups, size)
    elif line.call == "fsdp2":
        run = {name: training(group, rank, size) for name, group in groups.items()}
        run["alone"] = training(None, rank, size)
    else:
        run = {name: small(line.call, line.n_bytes, group, size) for name, group in groups.items()}
    n_calls = 20 if line.n_bytes <= 1024 and line.call != "fsdp2" else 1
    times: dict[str, list[float]] = {name: [] for name in run}
    for block in run.values():
        block(n_calls)
        block(n_calls)
    deadline = time.monotonic() + seconds
    more = torch.ones(1)
    while more.item() or min(map(len, times.values())) < 5:
        for name, block in run.items():
            took = torch.tensor([block(n_calls)], dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            times[name].append(took.item())
        more.fill_(float(time.monotonic() < deadline))
        dist.broadcast(more, 0)
    if rank == 0:
        result.write_text(json.dumps(times))
    dist.destroy_process_group()


def launch(number: int, seconds: float) -> dict[str, float]:
    """One run in fresh processes: median seconds of a call on each backend."""
    with tempfile.TemporaryDirectory(prefix="pycomm-bench-") as folder:
        result = Path(folder, "result.json")
        arguments = ["--as-rank", str(result), "--line", str(number), "--seconds", str(seconds)]
        run_as_ranks(2, folder, __file__, *arguments)
        times: dict[str, list[float]] = json.loads(result.read_text())
    alone = times.pop("alone", None)
    if alone is not None:
        times = {n: [a - b for a, b in zip(found, alone, strict=True)] for n, found in times.items()}
    return {name: statistics.median(found) for name, found in times.items()}


def show_price_of_checking(launches: int, seconds: float, reports: dict[str, Any]) -> None:
    """The second table."""
    from pycomm import _C

    runs = [launch(len(LINES), seconds) for _ in range(launches)]
    added = min(_C.seconds_per_agreement(1_000_000) for _ in range(5))
    reports["comparing the ranks' calls"] = [*runs, {"pycomm, a call": added}]
    ours, plain, compared = (
        statistics.median(run[name] for run in runs) * 1e6 for name in (*BACKENDS, "gloo, checked")
    )
    print("\n| all_reduce of 4 B, the ranks' calls compared | without | with | times |\n|---|---|---|---|")
    print(f"| pycomm | {ours - added * 1e6:.3f} µs | {ours:.3f} µs | {ours / (ours - added * 1e6):.4f} |")
    gloos = f"{plain:.1f} µs | {compared:.1f} µs | {compared / plain:.2f}"
    print(f"| gloo, TORCH_DISTRIBUTED_DEBUG=DETAIL | {gloos} |")


def main() -> int:
    """Measures, prints the table, returns 0 when every line is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line and launch")
    parser.add_argument("--json", type=Path, help="write all medians here")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--line", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        rank_main((*LINES, CHECKED)[options.line], options.seconds, options.as_rank)
        return 0
    print("| case | pycomm | gloo | pycomm ÷ gloo | at most | |\n|---|---|---|---|---|---|")
    all_met, reports = True, {}
    for number, line in enumerate(LINES):
        runs = [launch(number, options.seconds) for _ in range(options.launches)]
        reports[line.name] = runs
        ours, theirs = (statistics.median(run[name] for run in runs) for name in BACKENDS)
        ratio = statistics.median(run["pycomm"] / run["gloo"] for run in runs)
        met = ratio <= line.limit
        all_met = all_met and met
        shown = f"{ours * 1e6:.1f} µs | {theirs * 1e6:.1f} µs | {ratio:.3f} | {line.limit:.3f}"
        print(f"| {line.name} | {shown} | {'met' if met else '**missed**'} |", flush=True)
    show_price_of_checking(options.launches, options.seconds, reports)
    if options.json:
        options.json.write_text(json.dumps(reports) + "\n")
    return 0 if all_met else 1


if __name__ == "__main__":
    sys.exit(main())
