"""``python -m pycomm.demo``: trains three ways, compares, shows; see ``pycomm.demo``.

Writes to ./demo_out/: loss.png, report.txt, a JSON file for each rank, and the bench's all_reduce.json and
.png. Exits with 1, saying what is wrong, when the runs differ by more than float tolerance or something
failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pycomm.demo.check import Summary, faults, summarise
from pycomm.demo.launch import N_RANKS, run_way
from pycomm.demo.report import NAMES, check_plot_possible, curves_as_text, picture, table
from pycomm.demo.train import WAYS, TrainConfig

BENCH_SECONDS = 25.0


def train_all(folder: Path, config: TrainConfig, console: Console) -> dict[str, Summary]:
    """Trains every way, one after the other, with a progress bar each."""
    summaries = {}
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=console) as progress:
        for way in WAYS:
            bar = progress.add_task(NAMES[way], total=config.n_steps, loss="starting")

            def on_step(step: int, loss: float, bar: object = bar) -> None:
                progress.update(bar, completed=step + 1, loss=f"loss {loss:.3f}")  # type: ignore[arg-type]

            summaries[way] = summarise(run_way(way, folder, config.n_steps, on_step))
    return summaries


def bench(folder: Path) -> int:
    """The all_reduce table, next to gloo's; returns the exit status."""
    arguments = ["all_reduce", "-b", "4", "-e", "64M", "-f", "4", "--peer", "gloo"]
    arguments += ["--ranks", str(N_RANKS), "--max-seconds", str(BENCH_SECONDS)]
    arguments += ["--json", str(folder / "all_reduce.json"), "--plot", str(folder / "all_reduce.png")]
    command = [sys.executable, "-m", "pycomm.cli", "bench", *arguments]
    return subprocess.run(command, check=False).returncode


def main(arguments: list[str]) -> int:
    """Runs the demo and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m pycomm.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for the results")
    parser.add_argument("--steps", type=int, default=TrainConfig.n_steps, help="training steps of each run")
    parser.add_argument("--no-bench", action="store_true", help="leave out the all_reduce table")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    console = Console(record=True)
    config = TrainConfig(n_steps=options.steps)
    folder: Path = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        check_plot_possible()
        summaries = train_all(folder, config, console)
    except RuntimeError as error:
        console.print(str(error), markup=False, highlight=False, style="red")
        return 1
    picture(summaries, folder / "loss.png")
    curves = {"o": summaries["pycomm"].losses, "x": summaries["one"].losses}
    console.print("\nLoss (nats per byte) over the steps: o pycomm, x one process, * both\n")
    console.print(curves_as_text(curves), markup=False, highlight=False)
    console.print()
    console.print(table(summaries, config))
    found = faults(summaries["pycomm"], summaries["one"])
    if not options.no_bench:
        console.print("\nall_reduce between two ranks, beside gloo (fp32):\n")
        status = bench(folder)
        if status != 0:
            found.append(f"the bench ended with status {status}")
    if found:
        for fault in found:
            console.print(f"FAILED: {fault}", markup=False, highlight=False, style="bold red")
    else:
        console.print(
            "OK: two ranks with pycomm train like one process, within float tolerance.", style="bold green"
        )
    console.print(f"{time.monotonic() - started:.0f} s. Curves: {folder / 'loss.png'}", highlight=False)
    console.save_text(str(folder / "report.txt"))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
