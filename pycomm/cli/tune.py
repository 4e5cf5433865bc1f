"""``pycomm tune``: measures this machine's algorithms and prints the selection table that jobs will use.

It starts the ranks itself, as subprocesses with a private run folder, or runs as one of them under torchrun,
mpirun or srun. Rank 0 writes the cache (``pycomm.tuning.cache_file``); ``--show`` only prints what is there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from typing import Annotated, Any

import typer
from rich.table import Table

from pycomm.cli import units
from pycomm.cli.output import bad_argument, console, print_json

__all__ = ["tune"]

#: What a measurement may take beyond its seconds: starting Python and torch on a slow machine.
_START_S = 120.0
_LAUNCHED = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID")


def tune(
    ranks: Annotated[int, typer.Option("--ranks", help="Ranks to start (not under torchrun, mpirun).")] = 2,
    seconds: Annotated[float, typer.Option("--seconds", help="About how long to measure.")] = 5.0,
    show: Annotated[bool, typer.Option("--show", help="Print the cached table, measure nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measures which algorithm serves which size, and keeps it for later jobs of as many ranks."""
    if ranks < 1:
        bad_argument(f"tune: --ranks is {ranks}, expected 1 or more")
    if not seconds > 0:
        bad_argument(f"tune: --seconds is {seconds}, expected more than 0")
    launched = any(name in os.environ for name in _LAUNCHED)
    if launched and not show:
        _run_as_rank(seconds, as_json)
        return
    if ranks == 1:
        bad_argument("tune: one rank has nothing to choose; give --ranks 2 or more")
    if not show:
        _run_ranks(ranks, seconds)
    _print_cached(ranks, as_json)


def _run_as_rank(seconds: float, as_json: bool) -> None:
    import pycomm
    from pycomm import tuning

    with pycomm.init() as comm:
        comm.tune(seconds)
        if comm.rank == 0:
            _print_table(comm.size, tuning.read(comm), str(tuning.cache_file(comm.size)), as_json)


def _run_ranks(ranks: int, seconds: float) -> None:
    """Starts the ranks and waits; the first that fails ends the others, and the command with 1."""
    code = f"import pycomm\nwith pycomm.init(timeout={_START_S}) as comm:\n    comm.tune({seconds!r})\n"
    with tempfile.TemporaryDirectory(prefix="pycomm-tune-") as folder:
        processes = []
        for rank in range(ranks):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks),
                "PYCOMM_RUN_DIR": folder,
                "PYCOMM_TUNE": "off",  # init need not measure what tune is about to
            }
            environment.setdefault("OMP_NUM_THREADS", "1")
            processes.append(subprocess.Popen([sys.executable, "-c", code], env=environment))
        try:
            _wait(processes, time.monotonic() + seconds * 2 + _START_S)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> None:
    while any(p.poll() is None for p in processes):
        failed = [(rank, p.returncode) for rank, p in enumerate(processes) if p.returncode not in (None, 0)]
        if failed:
            break
        if time.monotonic() > deadline:
            late = [str(rank) for rank, p in enumerate(processes) if p.poll() is None]
            typer.echo(f"pycomm: tune: ranks {', '.join(late)} did not finish in time", err=True)
            raise typer.Exit(1)
        time.sleep(0.02)
    failed = [(rank, p.returncode) for rank, p in enumerate(processes) if p.returncode not in (None, 0)]
    if failed:
        rank, code = failed[0]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        typer.echo(f"pycomm: tune: rank {rank} failed ({how}); its message is above", err=True)
        raise typer.Exit(1)


def _print_cached(ranks: int, as_json: bool) -> None:
    from pycomm import tuning

    path = tuning.cache_file(ranks)
    table = tuning._load(path)
    if table is None:
        typer.echo(
            f"pycomm: no selection table for {ranks} ranks in {path}: run pycomm tune --ranks {ranks}",
            err=True,
        )
        raise typer.Exit(1)
    _print_table(ranks, table, str(path), as_json)


def _print_table(ranks: int, table: Any, path: str, as_json: bool) -> None:
    if as_json:
        names = ("max_bytes", "algorithm", "arena_algorithm", "tile_bytes")
        rows = {name: [dict(zip(names, row, strict=True)) for row in rows] for name, rows in table.items()}
        print_json({"ranks": ranks, "file": path, "table": rows})
        return
    shown = Table("collective", "up to", "algorithm", "with arena tensors", "tile", title=f"{ranks} ranks")
    shown.title_justify = "left"
    for name, rows in table.items():
        for i, (max_bytes, algorithm, arena, tile) in enumerate(rows):
            up_to = "any size" if max_bytes >= 2**64 - 1 else units.bytes_text(max_bytes)
            shown.add_row(name if i == 0 else "", up_to, algorithm, arena, units.bytes_text(tile))
        shown.add_section()
    out = console()
    out.print(shown)
    out.print(f"kept in {path}", markup=False, highlight=False, soft_wrap=True)
