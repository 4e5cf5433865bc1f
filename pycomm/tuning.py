"""Which algorithm serves which size: measured on this machine, decided by rank 0, kept in a cache file.

A selection table has, for each collective, rows (at most so many bytes, algorithm, algorithm when all tensors
are in the arena, tile bytes). At the first use on a machine :func:`pycomm.init` measures for at most a second
and writes the table under ``$PYCOMM_CACHE_DIR`` (or the user's cache folder); later jobs with as many ranks
and cores read it. Rank 0 alone reads, decides and writes; the others get its table. ``PYCOMM_TUNE=off``
keeps the built-in defaults; ``pycomm tune`` measures anew and prints the table.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pycomm import _C

if TYPE_CHECKING:
    from pycomm.communicator import Communicator

Row = tuple[int, str, str, int]
Table = dict[str, list[Row]]

FORMAT = 1
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter")
#: Measured size -> the table row that it decides (largest size in bytes of that row).
SIZES = {32 << 10: 64 << 10, 512 << 10: 1 << 20, 4 << 20: 2**64 - 1}
TILES = (128 << 10, 256 << 10)
#: What another algorithm must win by over the default, so that noise does not choose.
MARGIN = 1.15


def cache_file(size: int) -> Path:
    """The file that holds the table for ``size`` ranks on this machine."""
    root = os.environ.get("PYCOMM_CACHE_DIR")
    if root is None:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "pycomm")
    host = "".join(c if c.isalnum() else "_" for c in platform.node())
    return Path(root) / f"selection-v{FORMAT}-{host}-{_C.usable_cores()}cores-{size}ranks.json"


def read(comm: Communicator) -> Table:
    """The communicator's present table."""
    return {name: comm._c.selection(i) for i, name in enumerate(COLLECTIVES)}


def apply(comm: Communicator, table: Table) -> None:
    """Makes ``table`` the communicator's; every rank must apply the same.

    Raises:
        ValueError: a row names no algorithm of its collective, or sizes do not rise.
    """
    for i, name in enumerate(COLLECTIVES):
        if name in table:
            comm._c.set_selection(i, table[name])


def _several_hosts(comm: Communicator) -> bool:
    """Then the tables are those of each host's ranks, which keep the built-in ones."""
    return len(set(comm._c.hosts)) > 1


def load_or_measure(comm: Communicator) -> None:
    """What ``init`` does: the cached table, or a measured one (see the module's text). Collective."""
    mode = os.environ.get("PYCOMM_TUNE", "auto")
    if mode not in ("auto", "off"):
        raise ValueError(f"PYCOMM_TUNE must be auto or off, got {mode!r}")
    forced = os.environ.get("PYCOMM_ALGORITHM") or comm.deterministic  # would measure something else
    if comm.size == 1 or mode == "off" or forced or _several_hosts(comm):
        return
    cached = _cached(comm) if comm.rank == 0 else None
    table = _share(comm, cached)
    if table is not None:
        apply(comm, table)
    else:
        measure(comm, 1.0)


def inherit(parent: Communicator, child: Communicator) -> None:
    """The parent's table for as many ranks, else the cached one (``split``). Collective over child."""
    if child.size == 1 or _several_hosts(child):
        return
    if child.size == parent.size and not _several_hosts(parent):
        apply(child, read(parent))
        return
    off = os.environ.get("PYCOMM_TUNE", "auto") == "off"
    table = _share(child, _cached(child) if child.rank == 0 and not off else None)
    if table is not None:
        apply(child, table)


def measure(comm: Communicator, seconds: float) -> None:
    """Measures, agrees on rank 0's table, and lets rank 0 write it to the cache. Collective."""
    if comm.size == 1:
        return
    started = time.monotonic()
    default = read(comm)
    table: Table = {}
    for kind, name in enumerate(COLLECTIVES):
        table[name] = _measure_one(
            comm, kind, name, started + seconds * (0.4 + 0.6 * (kind + 1) / 7), default
        )
    agreed = _share(comm, table)
    if agreed is not None:
        apply(comm, agreed)
    if comm.rank == 0:
        _save(cache_file(comm.size), table)


def _measure_one(comm: Communicator, kind: int, name: str, deadline: float, default: Table) -> list[Row]:
    rows: list[Row] = []
    for n_bytes, up_to in SIZES.items():
        call = _caller(comm, name, n_bytes)
        fallback = next(row for row in default[name] if n_bytes <= row[0])
        best: tuple[float, str, int] | None = None
        for algorithm in _candidates(name, fallback[1]):
            for tile in TILES if name == "all_reduce" else TILES[1:]:
                if not _go_on(comm, deadline):
                    break
                comm._c.set_selection(kind, [(2**64 - 1, algorithm, algorithm, tile)])
                took = median_s(comm, call, 5 if n_bytes < 1 << 20 else 3)
                if algorithm != fallback[1]:
                    took *= MARGIN
                if best is None or took < best[0]:
                    best = (took, algorithm, tile)
        comm._c.set_selection(kind, default[name])
        chosen = (fallback[1], fallback[3]) if best is None else best[1:]
        rows.append((up_to, chosen[0], fallback[2], chosen[1]))
    return rows


def _candidates(name: str, fallback: str) -> list[str]:
    """The collective's algorithms of the catalog, the default and `direct` first: time may run out."""
    names = [str(a.name) for a in _C.schedule.catalog() if a.collective == name]
    return sorted(names, key=lambda a: (a != fallback, a != "direct"))


def _go_on(comm: Communicator, deadline: float) -> bool:
    """Rank 0's clock decides for all, or the ranks would measure different candidates."""
    flag = torch.tensor([time.monotonic() < deadline], dtype=torch.uint8)
    comm.broadcast(flag, algorithm="direct")
    return bool(flag.item())


def median_s(comm: Communicator, call: Any, reps: int) -> float:
    """Seconds of a collective call on this rank: the median of ``reps``, all ranks starting together."""
    times = []
    for _ in range(reps + 1):  # the first lowers the plan
        comm.barrier()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _caller(comm: Communicator, name: str, n_bytes: int) -> Any:
    n, me = comm.size, comm.rank
    whole = torch.zeros(max(n_bytes // 4 // n, 1) * n)
    part = torch.zeros(whole.numel() // n)
    calls: dict[str, Any] = {
        "all_reduce": lambda: comm.all_reduce(whole),
        "reduce_scatter": lambda: comm.reduce_scatter(part, whole),
        "all_gather": lambda: comm.all_gather(whole, part),
        "broadcast": lambda: comm.broadcast(whole),
        "reduce": lambda: comm.reduce(whole),
        "gather": lambda: comm.gather(part, whole if me == 0 else None),
        "scatter": lambda: comm.scatter(part, whole if me == 0 else None),
    }
    return calls[name]


def _share(comm: Communicator, table: Table | None) -> Table | None:
    """Rank 0's table (or None) on every rank."""
    text = json.dumps(table).encode() if comm.rank == 0 else b""
    length = torch.tensor([len(text)])
    comm.broadcast(length, algorithm="direct")
    data = torch.zeros(int(length.item()), dtype=torch.uint8)
    if comm.rank == 0:
        data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    comm.broadcast(data, algorithm="direct")
    shared = json.loads(bytes(data.tolist()))
    return None if shared is None else {k: [_row(r) for r in rows] for k, rows in shared.items()}


def _row(row: list[Any]) -> Row:
    return (int(row[0]), str(row[1]), str(row[2]), int(row[3]))


def _cached(comm: Communicator) -> Table | None:
    """Rank 0's: the cached table for these ranks, when this version of pycomm can use it."""
    path, before = cache_file(comm.size), read(comm)
    table = _load(path)
    if table is not None:
        try:
            apply(comm, table)
        except ValueError as error:  # written by another version, or by hand
            apply(comm, before)
            _ignored(path, error)
            return None
    return table


def _ignored(path: Path, error: Exception) -> None:
    # A damaged cache costs a second of measuring, not a job.
    warnings.warn(f"pycomm: ignoring the selection cache {path}: {error}", RuntimeWarning, stacklevel=2)


def _load(path: Path) -> Table | None:
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            return None
        return {k: [_row(r) for r in content["table"][k]] for k in COLLECTIVES}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        _ignored(path, error)
        return None


def _save(path: Path, table: Table) -> None:
    """Atomic: a reader sees the old file or the new one. A read-only home costs the next job a second."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as f:
            json.dump({"format": FORMAT, "table": table}, f, indent=1)
        os.replace(f.name, path)
    except OSError as error:
        warnings.warn(
            f"pycomm: the selection table was not cached in {path}: {error}", RuntimeWarning, stacklevel=2
        )
