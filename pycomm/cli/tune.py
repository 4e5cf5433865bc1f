"""``pycomm tune``: measures this machine's algorithms and prints the selection table that jobs will use.

It starts the ranks itself, as subprocesses with a private run folder, or runs as one of them under torchrun,
mpirun or srun. Rank 0 writes the cache (``pycomm.tuning.cache_file``); ``--show`` only prints what is there.
With ``--device cuda`` it is for CUDA tensors, a GPU for each rank (``pycomm.tuning_cuda``).
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

from pycomm import cache_files
from pycomm.children import child_environment
from pycomm.cli import selection, units
from pycomm.cli.output import bad_argument, console, print_json

__all__ = ["tune"]

#: What a measurement may take beyond its seconds: starting Python and torch on a slow machine.
_START_S = 120.0
_LAUNCHED = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID")


def tune(
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", help="Ranks to start (not under torchrun, mpirun); default: 2, or one for each GPU."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="About how long to measure.")] = 5.0,
    show: Annotated[bool, typer.Option("--show", help="Print the cached table, measure nothing.")] = False,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda: where the tensors are.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measures which algorithm serves which size, and keeps it for later jobs of as many ranks."""
    if device not in ("cpu", "cuda"):
        bad_argument(f"tune: --device is {device!r}, expected cpu or cuda")
    on_cuda = device == "cuda"
    if on_cuda and not show:
        _need_devices()
    asked = ranks
    if ranks is None:
        ranks = max(2, _n_devices()) if on_cuda and not show else 2
    if ranks < 1:
        bad_argument(f"tune: --ranks is {ranks}, expected 1 or more")
    if not seconds > 0:
        bad_argument(f"tune: --seconds is {seconds}, expected more than 0")
    launched = any(name in os.environ for name in _LAUNCHED)
    if launched and not show:
        _run_as_rank(seconds, on_cuda, as_json)
        return
    if ranks == 1:
        bad_argument("tune: one rank has nothing to choose; give --ranks 2 or more")
    if not show:
        _run_ranks(ranks, seconds, on_cuda)
    if on_cuda:
        _print_cuda(asked if show else ranks, as_json)
    else:
        _print_cached(ranks, as_json)


def _need_devices() -> None:
    from pycomm import devices

    if why := devices.prepare():
        typer.echo(f"pycomm: tune: no CUDA device: {why}", err=True)
        raise typer.Exit(1)


def _n_devices() -> int:
    from pycomm import devices

    return 2 if devices.is_emulated() else devices.count()


def _run_as_rank(seconds: float, on_cuda: bool, as_json: bool) -> None:
    import pycomm
    from pycomm import devices, tuning, tuning_hosts

    if on_cuda:
        devices.take()
    with pycomm.init() as comm:
        comm.tune(seconds, device="cuda" if on_cuda else None)
        if comm.rank != 0:
            return
        if on_cuda:
            _print_cuda(comm.size, as_json)
            return
        if not tuning_hosts.several_hosts(comm):
            _print_table(comm.size, tuning.read(comm), str(tuning.cache_file(comm.size)), as_json)
            return
        here = comm._c.hosts.count(comm._c.hosts[0])
        within = (here, tuning.read(comm), str(tuning.cache_file(here)))
        _print_levels(within, tuning_hosts.read(comm), str(tuning_hosts.cache_file(comm)), as_json)


def _run_ranks(ranks: int, seconds: float, on_cuda: bool) -> None:
    """Starts the ranks and waits; the first that fails ends the others, and the command with 1."""
    code = (
        ("from pycomm import devices\ndevices.take()\n" if on_cuda else "")
        + f"import pycomm\nwith pycomm.init(timeout={_START_S}) as comm:\n"
        + f"    comm.tune({seconds!r}, device={'cuda' if on_cuda else 'cpu'!r})\n"
    )
    with tempfile.TemporaryDirectory(prefix="pycomm-tune-") as folder:
        processes = []
        for rank in range(ranks):
            environment = {
                **child_environment(),
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
    table = tuning.load_file(ranks)
    if table is None:
        typer.echo(
            f"pycomm: no selection table for {ranks} ranks in {path}: run pycomm tune --ranks {ranks}",
            err=True,
        )
        raise typer.Exit(1)
    _print_table(ranks, table, str(path), as_json)


def _print_cuda(ranks: int | None, as_json: bool) -> None:
    """The newest table of so many ranks, or of any number."""
    found = selection.kept(ranks)
    if not found:
        of_ranks, option = ("", "") if ranks is None else (f" of {ranks} ranks", f" --ranks {ranks}")
        typer.echo(
            f"pycomm: no selection table for CUDA tensors{of_ranks} in {cache_files.folder()}: "
            f"run pycomm tune --device cuda{option}",
            err=True,
        )
        raise typer.Exit(1)
    if as_json:
        print_json(found[0])
    else:
        selection.show(found[0], console())


def _rows(ranks: int, table: Any, path: str) -> dict[str, Any]:
    names = ("max_bytes", "algorithm", "arena_algorithm", "tile_bytes")
    rows = {name: [dict(zip(names, row, strict=True)) for row in rows] for name, rows in table.items()}
    return {"ranks": ranks, "file": path, "table": rows}


def _print_levels(within: tuple[int, Any, str], between: Any, path: str, as_json: bool) -> None:
    """Rank 0's host, and what goes between the hosts."""
    if as_json:
        names = ("max_bytes", "algorithm", "sockets")
        rows = {name: [dict(zip(names, row, strict=True)) for row in rows] for name, rows in between.items()}
        print_json({"within_host": _rows(*within), "between_hosts": {"file": path, "table": rows}})
        return
    if within[0] > 1:
        _print_table(*within, as_json=False)
    shown = Table("collective", "a rank's share up to", "algorithm", "sockets", title="between hosts")
    shown.title_justify = "left"
    for name, rows in between.items():
        for i, (max_bytes, algorithm, sockets) in enumerate(rows):
            shown.add_row(
                name if i == 0 else "", selection.up_to(max_bytes), algorithm, str(sockets or "all")
            )
        shown.add_section()
    out = console()
    out.print(shown)
    out.print(f"kept in {path}", markup=False, highlight=False, soft_wrap=True)


def _print_table(ranks: int, table: Any, path: str, as_json: bool) -> None:
    if as_json:
        print_json(_rows(ranks, table, path))
        return
    shown = Table("collective", "up to", "algorithm", "with arena tensors", "tile", title=f"{ranks} ranks")
    shown.title_justify = "left"
    for name, rows in table.items():
        for i, (max_bytes, algorithm, arena, tile) in enumerate(rows):
            shown.add_row(
                name if i == 0 else "", selection.up_to(max_bytes), algorithm, arena, units.bytes_text(tile)
            )
        shown.add_section()
    out = console()
    out.print(shown)
    out.print(f"kept in {path}", markup=False, highlight=False, soft_wrap=True)
