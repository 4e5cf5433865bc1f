"""Selection on two levels: within each host, and between hosts (:mod:`pycomm.tuning` is one level).

Within a host the table is that host's own, measured among its ranks (or read from its cache), so hosts may
differ. Between hosts there is one table for all: for each collective, rows (at most so many bytes of a *run*,
algorithm, connections to each peer; 0: all). A run is what one owner carries of a call or of a tile of it
(``csrc/engine/rounds.h``). Rank 0 measures, decides, and keeps it in its cache.

:func:`load_or_measure`, :func:`inherit` and :func:`measure` serve communicators of one host as well.
"""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycomm import _C, cache_files, measuring, tuning, tuning_cuda
from pycomm.hosts import MAX_MEASURED_SOCKETS, given_sockets

if TYPE_CHECKING:
    from pycomm.communicator import Communicator

Row = tuple[int, str, int]
Table = dict[str, list[Row]]

FORMAT = 1
ANY_SIZE = 2**64 - 1
#: Those that have a choice worth measuring: gather and scatter between hosts are `direct`.
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
#: Measured bytes of a run -> the table row that it decides (largest size in bytes of that row).
SIZES = {16 << 10: 64 << 10, 256 << 10: 512 << 10, 4 << 20: ANY_SIZE}
SOCKETS = tuple(n for n in (1, 2, 4, 8) if n <= MAX_MEASURED_SOCKETS)


def several_hosts(comm: Communicator) -> bool:
    """Whether the ranks are on more than one."""
    return len(set(comm._c.hosts)) > 1


def cache_file(comm: Communicator) -> Path:
    """The file of rank 0's machine that holds the table between these hosts."""
    parts = [platform.node(), os.environ.get("PYCOMM_SOCKET_IFNAME", "any")]
    name = "-".join(cache_files.plain(part) for part in parts)
    if os.environ.get("PYCOMM_ENCRYPT") == "1":
        name += "-encrypted"
    n_hosts = len(set(comm._c.hosts))
    return cache_files.folder() / f"hosts-v{FORMAT}-{name}-{n_hosts}hosts-{comm.size}ranks.json"


def read(comm: Communicator) -> Table:
    """The present table between the hosts."""
    return {name: comm._c.host_selection(tuning.COLLECTIVES.index(name)) for name in tuning.COLLECTIVES}


def apply(comm: Communicator, table: Table) -> None:
    """Makes ``table`` the communicator's; every rank must apply the same.

    Raises:
        ValueError: a row names no algorithm of its collective, or sizes do not rise.
    """
    for name, rows in table.items():
        comm._c.set_host_selection(tuning.COLLECTIVES.index(name), [_row(row) for row in rows])


def load_or_measure(comm: Communicator) -> None:
    """What ``init`` does: the cached tables, or measured ones; on CUDA the cached one only. Collective."""
    wanted = tuning.wanted(comm)
    _load_or_measure(comm, wanted)
    if wanted:
        tuning_cuda.load(comm)


def _load_or_measure(comm: Communicator, wanted: bool) -> None:
    if not several_hosts(comm):
        if wanted and comm.size > 1 and not tuning.load(comm):
            tuning.measure(comm, 1.0)
        return
    if given_sockets() is None:
        _use_sockets(comm, 1)
    if not wanted:
        return
    _within(comm, None)
    table = measuring.share(comm, _cached(comm) if comm.rank == 0 else None)
    if table is None:
        _measure_between(comm, 1.0)
        return
    apply(comm, table)
    if given_sockets() is not None:  # the table may be of a job that was given none
        _use_sockets(comm, 0)


def inherit(parent: Communicator, child: Communicator) -> None:
    """For ``split``: the parent's tables for as many ranks or hosts, else the cached ones. Collective."""
    off = os.environ.get("PYCOMM_TUNE", "auto") == "off"
    n_hosts = len(set(child._c.hosts))
    if n_hosts > 1:
        if n_hosts == len(set(parent._c.hosts)):
            apply(child, read(parent))
        elif given_sockets() is None:
            _use_sockets(child, 1)
        if Counter(child._c.hosts) == Counter(parent._c.hosts):
            tuning.apply(child, tuning.read(parent))
        return
    if child.size == 1:
        return
    if child.size == parent.size:
        tuning.apply(child, tuning.read(parent))
    elif not off:
        tuning.load(child)
        tuning_cuda.load(child)  # else the parent's, which the core has handed on


def measure(comm: Communicator, seconds: float) -> None:
    """Measures both levels, takes the fastest, and keeps that in the caches. Collective."""
    if not several_hosts(comm):
        if comm.size > 1:
            tuning.measure(comm, seconds)
        return
    _within(comm, seconds / 2)
    _measure_between(comm, seconds / 2)


def _within(comm: Communicator, seconds: float | None) -> None:
    """Each host's own table; ``seconds`` None: the cached one where there is one."""
    hosts = comm._c.hosts
    child = comm._c.split(hosts[comm.rank], comm.rank, 0)
    assert child is not None  # no rank gave a negative color
    local = type(comm)(child)
    if local.size > 1:
        if seconds is not None or not tuning.load(local):
            tuning.measure(local, seconds or 1.0)
        tuning.apply(comm, tuning.read(local))
    comm.barrier()  # a host that has no need to measure must not run into its timeout for one that does
    local.close()


def _use_sockets(comm: Communicator, n: int) -> None:
    table = read(comm)
    apply(comm, {name: [(up_to, a, n) for up_to, a, _ in rows] for name, rows in table.items()})


def _measure_between(comm: Communicator, seconds: float) -> None:
    started, default = time.monotonic(), read(comm)
    n_owners = min(Counter(comm._c.hosts).values())
    table = dict(default)
    for i, name in enumerate(COLLECTIVES):
        share = 0.5 + 0.5 * i / (len(COLLECTIVES) - 1)  # all_reduce is what counts
        table[name] = _measure_one(comm, name, n_owners, started + seconds * share, default[name])
    table = measuring.share(comm, table)
    apply(comm, table)
    if comm.rank == 0:
        cache_files.save(cache_file(comm), FORMAT, table)


def _measure_one(
    comm: Communicator, name: str, n_owners: int, deadline: float, default: list[Row]
) -> list[Row]:
    kind = tuning.COLLECTIVES.index(name)
    names = [str(a.name) for a in _C.schedule.catalog() if a.collective == name]
    n_sockets = given_sockets() or 0
    rows: list[Row] = []
    for n_bytes, up_to in SIZES.items():
        call = measuring.caller(comm, name, n_bytes * n_owners)
        fallback = next(row for row in default if n_bytes <= row[0])

        def seconds(candidate: tuple[str, int]) -> float:
            comm._c.set_host_selection(kind, [(ANY_SIZE, *candidate)])
            return measuring.median_s(comm, call, 3)  # noqa: B023

        ordered = sorted(names, key=lambda a: a != fallback[1])
        candidates = [(a, n_sockets or 1) for a in ordered]
        best = measuring.fastest(comm, deadline, candidates, seconds, lambda c: c[0] == fallback[1])  # noqa: B023
        if n_sockets == 0 and n_bytes >= 1 << 20:
            winner = measuring.share(comm, best[0] if best is not None else fallback[1])
            several = [(winner, n) for n in SOCKETS]
            best = measuring.fastest(comm, deadline, several, seconds, lambda c: c[1] == 1) or best
        comm._c.set_host_selection(kind, default)
        algorithm, sockets = best or (fallback[1], n_sockets or 1)
        rows.append((up_to, algorithm, sockets))
    return rows


def _row(row: Any) -> Row:
    return (int(row[0]), str(row[1]), int(row[2]))


def _cached(comm: Communicator) -> Table | None:
    """Rank 0's: the cached table for these hosts, when this version of pycomm can use it; tried, not kept."""
    path, before = cache_file(comm), read(comm)
    table = cache_files.load(path, FORMAT)
    if table is None:
        return None
    try:
        apply(comm, table)
        return read(comm)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        cache_files.ignored(path, error)
        return None
    finally:
        apply(comm, before)
