"""Pipelines on pycomm: every line that must hold.

    python bench/pipeline.py [--launches 3] [--steps 3] [--json FILE]

1. The bubble of 4 stages that *sleep* (20 ms forward, 20 ms backward, so that 2 cores suffice), against the
   simulator with that run's own forwards, backwards, latency and dispatch; and the same stages under
   ``torch.distributed.pipelining`` on gloo. Libraries take turns, step by step, in the same processes.
   A step is timed on every rank from a barrier to its end, the slowest rank's counts. A bubble is the share
   of the step in which the mean rank does not sleep; by the formula it is (p - 1)/(v m + p - 1).
2. The overhead of an action: 2 ranks, stages of one small layer; a step's time, less that of the same
   forwards and backwards of one stage without a pipeline, over the actions of a rank (forward, backward,
   send, receive: 4 for a microbatch). Median of many steps.
3. Peak activations of 1F1B against GPipe, p = 4, m = 16: bytes of resident memory above what the process had
   before the step, of the rank that holds most. Fresh processes for each.
4. Partition by time: 12 layers that sleep unevenly on 3 stages, against all cuts, by what they are known to
   sleep.

The machine must otherwise be quiet; takes about three minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from as_ranks import found_by_ranks, peak_bytes

P, SLEEP_S = 4, 0.02
CASES = (("1F1B", 8, 1), ("1F1B", 16, 1), ("Interleaved1F1B", 8, 2), ("Interleaved1F1B", 16, 2))
BUBBLE_LIMIT, STEP_LIMIT, CLOSER_LIMIT, OVERHEAD_LIMIT, MEMORY_LIMIT = 0.10, 1.0, 1.0, 1 / 3, 0.15
OVERHEAD_MICROBATCHES = 16
SLEEPS_MS = (3, 11, 5, 2, 17, 4, 9, 6, 13, 3, 8, 7)
LIBRARIES = ("pycomm", "torch")


def sleeper(seconds: float) -> Any:
    """A layer that sleeps in its forward, and as long in its backward; it notes how long it slept."""
    import torch
    from torch import nn

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, layer: Any) -> Any:
            ctx.layer = layer
            layer.sleep()
            return x * weight

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
            ctx.layer.sleep()
            return gradient, gradient.sum().reshape(1), None

    class Sleeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.slept_s = 0.0

        def sleep(self) -> None:
            began = time.monotonic()
            time.sleep(seconds)
            self.slept_s += time.monotonic() - began

        def forward(self, x: Any) -> Any:
            return Sleep.apply(x, self.weight, self)

    return Sleeper()


def schedule_of(library: str, name: str, m: int, v: int, layers: list[Any], loss: Any) -> Any:
    """A schedule of either library over this rank's layers."""
    import torch
    import torch.distributed as dist
    import torch.distributed.pipelining as theirs

    import pycomm.pipeline as ours

    rank, size = dist.get_rank(), dist.get_world_size()
    numbers = [rank + size * turn for turn in range(v)]
    made: Any
    if library == "pycomm":
        stages: Any = [
            ours.PipelineStage(layer, s, size * v) for layer, s in zip(layers, numbers, strict=True)
        ]
        made = ours.get_schedule_class(name)
    else:
        stages = [
            theirs.PipelineStage(layer, s, size * v, torch.device("cpu"), group=dist.group.WORLD)
            for layer, s in zip(layers, numbers, strict=True)
        ]
        made = theirs.schedules.get_schedule_class(name)
    return made(stages if v > 1 else stages[0], m, loss_fn=loss)


def stepping(schedule: Any, width: int, m: int) -> Callable[[], None]:
    """One step, with what this rank gives to it."""
    import torch
    import torch.distributed as dist

    batch, target = torch.ones(m, width), torch.zeros(m, width)
    rank, last = dist.get_rank(), dist.get_world_size() - 1

    def step() -> None:
        if rank == 0 and rank == last:
            schedule.step(batch, target=target)
        elif rank == 0:
            schedule.step(batch)
        elif rank == last:
            schedule.step(target=target)
        else:
            schedule.step()

    return step


def sleeping(n_steps: int, result: Path) -> None:
    """Rank 0 writes for each case and library the steps' seconds and slept shares, and what was measured."""
    import torch

    from pycomm.tensor_parallel.group import communicator_of

    comm = communicator_of()
    found = []
    for name, m, v in CASES:
        layers = {library: [sleeper(SLEEP_S) for _ in range(v)] for library in LIBRARIES}
        loss = torch.nn.functional.mse_loss
        schedules = {
            library: schedule_of(library, name, m, v, layers[library], loss) for library in LIBRARIES
        }
        steps = {library: stepping(schedules[library], 8, m) for library in LIBRARIES}
        case: dict[str, Any] = {"case": [name, m, v], "runs": []}
        for library in LIBRARIES:
            case[library] = {"step_s": [], "bubble": []}
        for i in range(-1, n_steps):
            for library in LIBRARIES:
                for layer in layers[library]:
                    layer.slept_s = 0.0
                comm.barrier()
                began = time.perf_counter()
                steps[library]()
                took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
                slept = torch.tensor([sum(layer.slept_s for layer in layers[library])], dtype=torch.float64)
                comm.all_reduce(took, op="max")
                comm.all_reduce(slept, op="avg")
                if i >= 0:
                    case[library]["step_s"].append(took.item())
                    case[library]["bubble"].append(1 - slept.item() / took.item())
                    if library == "pycomm":
                        case["runs"].append(bubbles(schedules[library]))
        found.append(case)
    if comm.rank == 0:
        result.write_text(json.dumps(found))


def bubbles(schedule: Any) -> dict[str, float]:
    """The last step's bubble as its actions show it, and as simulated with that step's own costs."""
    from pycomm.pipeline.schedule.measured import costs_of
    from pycomm.pipeline.schedule.simulate import simulate

    timeline = schedule.timeline()
    costs = costs_of(timeline)
    return {
        "measured": timeline.bubble,
        "simulated": simulate(timeline.order, costs).bubble,
        "latency_s": costs.latency,
        "dispatch_s": costs.dispatch,
    }


def overhead(n_steps: int, result: Path) -> None:
    """Rank 0 writes the seconds of every step of both libraries, and of one stage's computations alone."""
    import torch
    from torch import nn

    from pycomm.tensor_parallel.group import communicator_of

    comm, m, width = communicator_of(), OVERHEAD_MICROBATCHES, 16
    kinds = ("alone", *LIBRARIES)
    layers = {kind: nn.Linear(width, width) for kind in kinds}
    loss = nn.functional.mse_loss
    steps = {
        library: stepping(schedule_of(library, "1F1B", m, 1, [layers[library]], loss), width, m)
        for library in LIBRARIES
    }
    x = torch.ones(1, width, requires_grad=True)

    def alone() -> None:
        for _ in range(m):
            loss(layers["alone"](x), torch.zeros(1, width)).backward()

    steps["alone"] = alone
    times = torch.zeros(len(kinds), n_steps, dtype=torch.float64)
    for i in range(-10, n_steps):
        for number, kind in enumerate(kinds):
            layers[kind].zero_grad(set_to_none=True)
            comm.barrier()
            began = time.perf_counter()
            steps[kind]()
            if i >= 0:
                times[number, i] = time.perf_counter() - began
    comm.all_reduce(times, op="max")
    if comm.rank == 0:
        result.write_text(json.dumps(dict(zip(kinds, times.tolist(), strict=True))))


def memory(name: str, result: Path) -> None:
    """Rank 0 writes the peak of the rank that holds most, above what it had before the step."""
    import torch
    from torch import nn

    from pycomm.tensor_parallel.group import communicator_of

    comm, m, width = communicator_of(), 16, 256

    class Layers(nn.Module):
        """16 layers that keep 1 MiB each of a microbatch."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Any) -> Any:
            for _ in range(16):
                x = torch.tanh(x)
            return x * self.weight.detach()

    class Summed(nn.Module):
        """The last stage gives little."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = Layers()

        def forward(self, x: Any) -> Any:
            return self.inner(x).mean(1)

    stage = Summed() if comm.rank == comm.size - 1 else Layers()
    if comm.rank == 0:  # so that its activations are kept, too
        stage = nn.Sequential(nn.Linear(width, width), stage)
    schedule = schedule_of("pycomm", name, m, 1, [stage], lambda out, _: out.square().mean())
    rows = 1024
    batch = torch.ones(m * rows, width)
    small = torch.ones(m, width)

    def step(given: Any) -> None:
        if comm.rank == 0:
            schedule.step(given)
        elif comm.rank == comm.size - 1:
            schedule.step(target=given[:, 0])
        else:
            schedule.step()

    step(small)  # what is loaded or made once
    peak = torch.tensor([peak_bytes(lambda: step(batch))])
    comm.all_reduce(peak, op="max")
    if comm.rank == 0:
        result.write_text(json.dumps(peak.item()))


def launch(what: str, n_ranks: int, n_steps: int = 0) -> Any:
    """One run in fresh processes."""
    # Large tensors are then given back when they are freed, so that resident memory is what is used.
    return found_by_ranks(n_ranks, __file__, what, n_steps, MALLOC_MMAP_THRESHOLD_="65536")


def as_rank(what: str, n_steps: int, result: Path) -> None:
    """What every rank runs."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{os.environ['PYCOMM_RUN_DIR']}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    if what == "sleeping":
        sleeping(n_steps, result)
    elif what == "overhead":
        overhead(n_steps, result)
    else:
        memory(what, result)
    dist.destroy_process_group()


def partition() -> tuple[float, float]:
    """The longest stage's milliseconds by our plan, and by the best of all cuts."""
    import torch

    from pycomm.pipeline import plan

    layers = [sleeper(ms / 2e3) for ms in SLEEPS_MS]
    cut = plan(layers, 3, "time", sample=torch.ones(1, 8))
    ours = max(sum(SLEEPS_MS[i] for i in part) for part in cut.parts)
    n = len(SLEEPS_MS)
    best = min(
        max(sum(SLEEPS_MS[:a]), sum(SLEEPS_MS[a:b]), sum(SLEEPS_MS[b:]))
        for a, b in itertools.combinations(range(1, n), 2)
    )
    return ours, best


class Table:
    """Prints each line as it is measured."""

    def __init__(self) -> None:
        self.all_met = True
        print("| case | ours | against | figure | at most | |\n|---|---|---|---|---|---|")

    def row(self, case: str, ours: str, against: str, figure: float, limit: float) -> None:
        met = figure <= limit
        self.all_met = self.all_met and met
        verdict = "met" if met else "**missed**"
        print(f"| {case} | {ours} | {against} | {figure:.3f} | {limit:.3f} | {verdict} |", flush=True)


def sleeping_rows(table: Table, runs: list[Any]) -> None:
    """The lines of ``sleeping``: medians over the launches of medians over the steps."""
    for number, (name, m, v) in enumerate(CASES):
        cases = [run[number] for run in runs]
        what = f"{name}, p = {P}, m = {m}{f', v = {v}' if v > 1 else ''}"
        steps = [step for case in cases for step in case["runs"]]
        measured, simulated = (statistics.median(s[k] for s in steps) for k in ("measured", "simulated"))
        latency_us = 1e6 * statistics.median(s["latency_s"] for s in steps)
        off = statistics.median(abs(s["measured"] / s["simulated"] - 1) for s in steps)
        dispatch_us = 1e6 * statistics.median(s["dispatch_s"] for s in steps)
        against = f"{simulated:.2%} (simulated, latency {latency_us:.0f} us, dispatch {dispatch_us:.0f} us)"
        table.row(f"{what}: bubble", f"{measured:.2%}", against, off, BUBBLE_LIMIT)
        formula = (P - 1) / (v * m + P - 1)
        median = {
            library: {
                key: statistics.median(statistics.median(case[library][key]) for case in cases)
                for key in ("step_s", "bubble")
            }
            for library in LIBRARIES
        }
        ours, torchs = median["pycomm"], median["torch"]
        table.row(
            f"{what}: step", f"{ours['step_s'] * 1e3:.1f} ms",
            f"{torchs['step_s'] * 1e3:.1f} ms (torch, gloo)", ours["step_s"] / torchs["step_s"], STEP_LIMIT,
        )  # fmt: skip
        away, torch_away = (abs(found["bubble"] - formula) for found in (ours, torchs))
        table.row(
            f"{what}: bubble's distance from {formula:.2%}", f"{away:.2%}", f"{torch_away:.2%} (torch, gloo)",
            away / torch_away, CLOSER_LIMIT,
        )  # fmt: skip


def main() -> int:
    """Measures, prints the table, returns 0 when every line is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=3, help="of the sleeping stages; 100 times as many of the rest"
    )
    parser.add_argument("--json", type=Path, help="write all reports here")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--what", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        as_rank(options.what, options.steps, options.as_rank)
        return 0
    table = Table()
    sleeps = [launch("sleeping", P, options.steps) for _ in range(options.launches)]
    sleeping_rows(table, sleeps)
    runs = [launch("overhead", 2, options.steps * 100) for _ in range(options.launches)]
    n_actions = 4 * OVERHEAD_MICROBATCHES
    each = {
        library: [
            statistics.median(a - b for a, b in zip(run[library], run["alone"], strict=True)) / n_actions
            for run in runs
        ]
        for library in LIBRARIES
    }
    ratio = statistics.median(a / b for a, b in zip(each["pycomm"], each["torch"], strict=True))
    mine, torchs = (f"{1e6 * statistics.median(each[library]):.1f} us" for library in LIBRARIES)
    table.row("overhead of an action, p = 2, m = 16", mine, f"{torchs} (torch, gloo)", ratio, OVERHEAD_LIMIT)
    peaks = {name: launch(name, 4) for name in ("1F1B", "GPipe")}
    share = peaks["1F1B"] / peaks["GPipe"]
    table.row(
        "peak activations of 1F1B over GPipe's, p = 4, m = 16: distance from 4/16",
        f"{peaks['1F1B'] / 2**20:.0f} MiB", f"{peaks['GPipe'] / 2**20:.0f} MiB (GPipe)",
        abs(share * 4 - 1), MEMORY_LIMIT,
    )  # fmt: skip
    ours, best = partition()
    table.row("12 uneven layers on 3 stages by time", f"{ours} ms", f"{best} ms (best cut)", ours / best, 1.0)
    if options.json:
        report = {"sleeping": sleeps, "overhead": runs, "memory": peaks, "partition": [ours, best]}
        options.json.write_text(json.dumps(report) + "\n")
    return 0 if table.all_met else 1


if __name__ == "__main__":
    sys.exit(main())
