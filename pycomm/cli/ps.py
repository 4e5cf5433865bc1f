"""``pycomm ps``: what every rank on this machine is in, and for whom it waits; also while its job hangs.

Nothing is asked of the ranks. Each process shows what it is in, in its shared memory, which this command
finds as ``/proc/PID/fd/N`` (the kernel opens that to the same user only) and reads. So a process that is
stopped is shown as well, nothing is left behind when one dies, and watching a job costs it nothing.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pycomm import _C
from pycomm.cli.output import bad_argument, console, print_json
from pycomm.errors import CommError

__all__ = ["ps"]

_ARENA = "/memfd:pycomm-arena"
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "sleeping",
    "T": "stopped",
    "t": "stopped",
    "Z": "dead",
    "X": "dead",
}


@dataclass(frozen=True)
class Row:
    """One rank's place in one communicator."""

    job: str
    rank: int  # in the job
    pid: int
    host: str
    state: str  # the kernel's word
    group: str  # "" for the communicator of pycomm.init; "1", "1.2" … for those made from it
    group_rank: int
    group_size: int
    call: str  # the latest: "all_reduce #12"; "" before the first
    inside: bool  # that call has not returned
    waits_for: int | None  # a rank of the group; -1: any; None: it waits for nobody
    waited_s: float
    transfer: str  # "send" or "recv" in which a caller waits, or ""
    transfer_peer: int | None
    transfer_s: float
    failed: str  # why the communicator has failed, or ""


def _stat(process: Path) -> str:
    try:
        letter = (process / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "unknown"
    return _STATES.get(letter, "unknown")


def _own_number(process: Path) -> int:
    """The process's pid as it knows it itself, in its namespace."""
    for line in (process / "status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return int(process.name)


def _rows_of(process: Path) -> list[Row]:
    """Of one process; nothing when it is none of ours, or has just gone."""
    rows = []
    try:
        if process.stat().st_uid != os.geteuid():
            return []
        for descriptor in (process / "fd").iterdir():
            if not os.readlink(descriptor).startswith(_ARENA):
                continue
            number = _own_number(process)
            # A child has its parent's descriptors for a moment; the parent shows itself.
            found = [r for r in _C.read_arena(str(descriptor)) if r.pid == number]
            rows += [_row(r, int(process.name), _stat(process)) for r in found]
    except (OSError, CommError, ValueError):
        return rows  # it has ended meanwhile, or may not be looked at (prctl(PR_SET_DUMPABLE))
    return rows


def _row(r: _C.PsRow, pid: int, state: str) -> Row:
    return Row(
        job=r.job,
        rank=r.job_rank,
        pid=pid,
        host=r.host,
        state=state,
        group=r.label,
        group_rank=r.rank,
        group_size=r.size,
        call=f"{r.call} #{r.number}" if r.call else "",
        inside=r.inside,
        waits_for=None if r.waits_for < -1 else r.waits_for,
        waited_s=round(r.waited_s, 3),
        transfer=r.transfer,
        transfer_peer=None if r.transfer_peer < -1 else r.transfer_peer,
        transfer_s=round(r.transfer_s, 3),
        failed=r.why if r.failed else "",
    )


def look(job: str = "") -> list[Row]:
    """Every rank of this user's jobs on this machine, in order; ``job``: of those whose name begins so."""
    rows = [
        row for process in Path("/proc").iterdir() if process.name.isdecimal() for row in _rows_of(process)
    ]
    return sorted(
        (row for row in rows if row.job.startswith(job)), key=lambda r: (r.job, r.group, r.group_rank, r.pid)
    )


def _whom(rank: int | None) -> str:
    return "any rank" if rank is None or rank < 0 else f"rank {rank}"


def _waiting(row: Row) -> str:
    parts = []
    if row.waits_for is not None:
        parts.append(f"{row.waited_s:.1f} s for {_whom(row.waits_for)}")
    if row.transfer:
        parts.append(f"{row.transfer_s:.1f} s in {row.transfer} for {_whom(row.transfer_peer)}")
    return ", ".join(parts)


def _doing(row: Row) -> str:
    if row.failed:
        return f"failed: {row.failed}"
    if row.inside:
        return row.call
    return f"no collective (last: {row.call})" if row.call else "no collective yet"


def _table(rows: list[Row]) -> Table:
    table = Table("job", "rank", "pid", "host", "process", "group", "in", "has waited")
    for row in rows:
        group = f"{row.group or 'all'}: {row.group_rank} of {row.group_size}"
        style = "red" if row.failed or row.state in ("stopped", "dead") else ""
        cells = (row.job, str(row.rank), str(row.pid), row.host, row.state, group, _doing(row), _waiting(row))
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table


def _nothing(job: str) -> str:
    which = f"no job of this user whose name begins with {job}" if job else "no job of this user"
    return f"pycomm: {which} runs on this machine (jobs on other machines are shown there)"


def ps(
    job: Annotated[str, typer.Argument(help="Only jobs whose name begins so.")] = "",
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew every second, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Shows what every rank on this machine is in and for whom it waits, also while the job hangs."""
    if watch and as_json:
        bad_argument("ps: --watch is for people, --json for programs: give one of them")
    if watch:
        _watch(job)
        return
    rows = look(job)
    if as_json:
        print_json([asdict(row) for row in rows])
    elif rows:
        console().print(_table(rows))
    else:
        typer.echo(_nothing(job))


def _watch(job: str) -> None:
    with Live(console=console(), auto_refresh=False) as live:
        try:
            while True:
                rows = look(job)
                live.update(_table(rows) if rows else Text(_nothing(job)), refresh=True)
                time.sleep(1)
        except KeyboardInterrupt:
            return
