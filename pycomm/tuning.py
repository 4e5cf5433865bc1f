"""Which algorithm serves which size: measured on this machine, decided by rank 0, kept in a cache file.

A selection table has, for each collective, rows (at most so many bytes, algorithm, algorithm when all tensors
are in the arena, tile bytes). At the first use on a machine :func:`pycomm.init` measures for at most a second
and writes the table under ``$PYCOMM_CACHE_DIR`` (or the user's cache folder); later jobs with as many ranks
and cores read it. Rank 0 alone reads, decides and writes; the others get its table. ``PYCOMM_TUNE=off``
keeps the built-in defaults; ``pycomm tune`` measures anew and prints the table.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycomm import _C, cache_files, measuring

if TYPE_CHECKING:
    from pycomm.communicator import Communicator

Row = tuple[int, str, str, int]
Table = dict[str, list[Row]]

FORMAT = 1
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter")
#: Measured size -> the table row that it decides (largest size in bytes of that row).
SIZES = {32 << 10: 64 << 10, 512 << 10: 1 << 20, 4 << 20: 2**64 - 1}
TILES = (128 << 10, 256 << 10)


def cache_file(size: int) -> Path:
    """The file that holds the table for ``size`` ranks on this machine."""
    host = cache_files.plain(platform.node())
    return cache_files.folder() / f"selection-v{FORMAT}-{host}-{_C.usable_cores()}cores-{size}ranks.json"


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


def wanted(comm: Communicator) -> bool:
    """Whether ``init`` shall read or measure tables: PYCOMM_TUNE, and nothing forced.

    Raises:
        ValueError: PYCOMM_TUNE is neither auto nor off.
    """
    mode = os.environ.get("PYCOMM_TUNE", "auto")
    if mode not in ("auto", "off"):
        raise ValueError(f"PYCOMM_TUNE must be auto or off, got {mode!r}")
    forced = os.environ.get("PYCOMM_ALGORITHM") or comm.deterministic  # would measure something else
    return mode == "auto" and not forced


def load(comm: Communicator) -> bool:
    """Takes rank 0's cached table; False when it has none. Collective."""
    table = measuring.share(comm, _cached(comm) if comm.rank == 0 else None)
    if table is None:
        return False
    apply(comm, {name: [_row(row) for row in rows] for name, rows in table.items()})
    return True


def measure(comm: Communicator, seconds: float) -> None:
    """Measures, agrees on rank 0's table, and lets rank 0 write it to the cache. Collective."""
    started = time.monotonic()
    default = read(comm)
    table: Table = {}
    for kind, name in enumerate(COLLECTIVES):
        table[name] = _measure_one(
            comm, kind, name, started + seconds * (0.4 + 0.6 * (kind + 1) / 7), default
        )
    table = measuring.share(comm, table)
    apply(comm, table)
    if comm.rank == 0:
        cache_files.save(cache_file(comm.size), FORMAT, table)


def _measure_one(comm: Communicator, kind: int, name: str, deadline: float, default: Table) -> list[Row]:
    rows: list[Row] = []
    for n_bytes, up_to in SIZES.items():
        call = measuring.caller(comm, name, n_bytes)
        fallback = next(row for row in default[name] if n_bytes <= row[0])

        def seconds(candidate: tuple[str, int]) -> float:
            algorithm, tile = candidate
            comm._c.set_selection(kind, [(2**64 - 1, algorithm, algorithm, tile)])
            return measuring.median_s(comm, call, 5 if n_bytes < 1 << 20 else 3)  # noqa: B023

        tiles = TILES if name == "all_reduce" else TILES[1:]
        candidates = [(a, tile) for a in _candidates(name, fallback[1]) for tile in tiles]
        best = measuring.fastest(comm, deadline, candidates, seconds, lambda c: c[0] == fallback[1])  # noqa: B023
        comm._c.set_selection(kind, default[name])
        algorithm, tile = best or (fallback[1], fallback[3])
        rows.append((up_to, algorithm, fallback[2], tile))
    return rows


def _candidates(name: str, fallback: str) -> list[str]:
    """The collective's algorithms of the catalog, the default and `direct` first: time may run out."""
    names = [str(a.name) for a in _C.schedule.catalog() if a.collective == name]
    return sorted(names, key=lambda a: (a != fallback, a != "direct"))


def load_file(size: int) -> Table | None:
    """What the cache has for ``size`` ranks on this machine; None, with a warning, if it is of no use."""
    path = cache_file(size)
    table = cache_files.load(path, FORMAT)
    try:
        return None if table is None else {k: [_row(r) for r in table[k]] for k in COLLECTIVES}
    except (ValueError, KeyError, TypeError, IndexError) as error:
        cache_files.ignored(path, error)
        return None


def _row(row: list[Any]) -> Row:
    return (int(row[0]), str(row[1]), str(row[2]), int(row[3]))


def _cached(comm: Communicator) -> Table | None:
    """Rank 0's: the cached table for these ranks, when this version of pycomm can use it.

    It is tried, and not left in place: the calls that tell the other ranks of it need the same on all.
    """
    before = read(comm)
    table = load_file(comm.size)
    if table is not None:
        try:
            apply(comm, table)
        except (ValueError, TypeError) as error:  # written by another version, or by hand
            cache_files.ignored(cache_file(comm.size), error)
            return None
        finally:
            apply(comm, before)
    return table
