"""Which way serves which size on CUDA: measured on the GPUs, decided by rank 0, kept in a cache file.

A *way* is what runs a collective on devices: ``nccl`` (NCCL's own), ``peer`` or ``peer_one_shot`` and
``peer_two_shot`` (kernels on peers' memory), or an algorithm of the catalog over NCCL. For each collective a
table has rows (at most so many bytes of the whole vector, way). Times are the slowest rank's, by CUDA events
over calls in a row. NCCL's own is always a candidate, and what others must beat: the choice is never slower
than NCCL was when it was measured. Where NCCL cannot be had (several ranks on one GPU), the first way is.

:func:`measure` is what ``pycomm tune --device cuda`` and ``Communicator.tune(device="cuda")`` do.
``pycomm.init`` measures nothing on GPUs: it would have to take a device, and time and memory there, in
programs that may use none; it reads the table that was kept for these GPUs, driver, NCCL and number of ranks.
A call therefore never measures, and a captured stream sees none of this. ``split`` hands the table on.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pycomm import _C, cache_files, devices, measuring
from pycomm.calling import KINDS

if TYPE_CHECKING:
    from pycomm.communicator import Communicator

Row = tuple[int, str]
Table = dict[str, list[Row]]

ANY_SIZE = 2**64 - 1
#: Those that have a table.
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter")
#: Those that are measured, all_reduce first: it gets most of the time.
MEASURED = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
SIZES = tuple(4**k << 10 for k in range(1, 9))
"""Bytes of the whole vector, 4 KiB to 64 MiB; a row reaches to twice its size, the last to any."""
MARGIN = 1.05


def cache_file(comm: Communicator, facts: Mapping[str, str]) -> Path:
    """The file of rank 0's machine for as many ranks on as many hosts, and these ``devices.facts()``."""
    return cache_files.cuda_file(facts, len(set(comm._c.hosts)), comm.size)


def read(comm: Communicator) -> Table:
    """The present table."""
    return {name: comm._c.device_selection(KINDS[name]) for name in COLLECTIVES}


def apply(comm: Communicator, table: Mapping[str, Sequence[Row]]) -> None:
    """Makes ``table`` the communicator's, of all the collectives that it names. Collective.

    Raises:
        ValueError: it names no collective or no way that there is, or its sizes do not rise; or the ranks
            gave different tables. Nothing has changed then.
        CommError: another rank's table was refused.

    Example:
        >>> import pycomm
        >>> from pycomm import tuning_cuda
        >>> comm = pycomm.init()
        >>> rows = [(1 << 20, "peer"), (tuning_cuda.ANY_SIZE, "nccl")]
        >>> tuning_cuda.apply(comm, {"all_reduce": rows})  # doctest: +SKIP
        >>> tuning_cuda.read(comm)["all_reduce"]  # doctest: +SKIP
        [(1048576, 'peer'), (18446744073709551615, 'nccl')]
    """
    with comm._refusing:
        if why := devices.why_none():
            raise ValueError(f"selection on CUDA: there is no CUDA device: {why}")
    comm.barrier()  # all ranks chose by the table of before for the calls that are queued
    before = read(comm)
    try:
        with comm._refusing:
            given = _set(comm, table)
        _compare(comm, given)
    except Exception:
        _set(comm, before)
        raise


def _set(comm: Communicator, table: Any) -> Table:
    """This rank's part: no other rank is asked. Returns what was set."""
    if not isinstance(table, Mapping):
        raise ValueError(f"selection on CUDA: expected a table for each collective, got {table!r:.100}")
    if unknown := [name for name in table if name not in COLLECTIVES]:
        raise ValueError(
            f"selection on CUDA: {unknown[0]!r} has no table; those that have: {', '.join(COLLECTIVES)}"
        )
    given: Table = {}
    for name, rows in table.items():
        try:
            given[name] = [(int(max_bytes), str(way)) for max_bytes, way in rows]
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"selection on CUDA, {name}: expected rows (largest number of bytes, way), got {rows!r:.200}"
            ) from error
        for max_bytes, _ in given[name]:
            if not 0 <= max_bytes <= ANY_SIZE:
                raise ValueError(f"selection on CUDA, {name}: {max_bytes} bytes is not in [0, 2^64)")
        if given[name] and given[name][-1][0] != ANY_SIZE:
            raise ValueError(
                f"selection on CUDA, {name}: the last row must be for any size (2**64 - 1 bytes), "
                f"got {given[name][-1][0]}"
            )
    for name, rows in given.items():
        comm._c.set_device_selection(KINDS[name], rows)
    return given


def _compare(comm: Communicator, table: Table) -> None:
    """Raises on every rank when ranks gave different tables."""
    n_bytes = hashlib.sha256().digest_size
    mine = hashlib.sha256(json.dumps(table, sort_keys=True).encode()).digest()
    everyones = torch.empty(comm.size * n_bytes, dtype=torch.uint8)
    comm.all_gather(everyones, torch.tensor(list(mine), dtype=torch.uint8), algorithm="direct")
    rows = everyones.view(comm.size, n_bytes)
    differing = [rank for rank in range(comm.size) if not torch.equal(rows[rank], rows[0])]
    if differing:
        raise ValueError(
            f"selection on CUDA: the tables of ranks {', '.join(map(str, differing))} differ from rank 0's; "
            f"give every rank the same (rank {comm.rank} has {json.dumps(table)[:300]})"
        )


def load(comm: Communicator) -> bool:
    """Takes rank 0's cached table; False when it has none. Collective; touches no GPU."""
    if comm.size == 1 or _C.cuda.build() == "off":
        return False
    table = measuring.share(comm, _cached(comm) if comm.rank == 0 else None)
    if table is None:
        return False
    _set(comm, table)
    return True


def _cached(comm: Communicator) -> Table | None:
    """Rank 0's: the cached table, when this version of pycomm can use it."""
    facts, before = devices.facts(), read(comm)
    path = cache_file(comm, facts)
    content = cache_files.load(path, cache_files.CUDA_FORMAT)
    if content is None:
        return None
    try:
        if any(content[key] != facts[key] for key in facts):
            return None  # a name of other signs that has the same letters
        return _set(comm, content["selection"])
    except (ValueError, KeyError, TypeError) as error:
        cache_files.ignored(path, error)
        return None
    finally:
        _set(comm, before)  # until all ranks have it


def measure(
    comm: Communicator, seconds: float, device: torch.device, sizes: Sequence[int] = SIZES
) -> dict[str, Any]:
    """Measures every way, takes the fastest for each size, and keeps that in the cache. Collective.

    Args:
        seconds: about how long; what is not measured by then keeps its row.
        device: where this rank's tensors are made (``devices.named``).
        sizes: rising bytes of the whole vector.

    Returns:
        What the cache file holds: facts, ranks, hosts, selection; the same on every rank.
    """
    deterministic, comm.deterministic = comm.deterministic, False  # or NCCL's own would be refused
    try:
        table = _measure(comm, seconds, device, sizes)
    finally:
        comm.deterministic = deterministic
    facts = devices.facts()
    content = {**facts, "ranks": comm.size, "hosts": len(set(comm._c.hosts)), "selection": table}
    content = dict(measuring.share(comm, content))
    _set(comm, content["selection"])
    if comm.rank == 0:
        cache_files.save(cache_file(comm, facts), cache_files.CUDA_FORMAT, content)
    return content


def _measure(comm: Communicator, seconds: float, device: torch.device, sizes: Sequence[int]) -> Table:
    table = read(comm)
    measuring.caller(comm, "all_reduce", sizes[0], device)()  # the communicator learns its device
    ways = {name: _candidates(comm._c.device_algorithms(KINDS[name])) for name in MEASURED}
    if "nccl" in ways["all_reduce"]:  # its communicator is made, which takes seconds
        measuring.caller(comm, "all_reduce", sizes[0], device)(algorithm="nccl")
    started = time.monotonic()
    for i, name in enumerate(MEASURED):
        deadline = started + seconds * (0.4 + 0.6 * i / (len(MEASURED) - 1))
        if len(ways[name]) > 1:
            table[name] = _measure_one(comm, name, ways[name], deadline, device, sizes, table[name])
    return table


def _measure_one(
    comm: Communicator,
    name: str,
    ways: list[str],
    deadline: float,
    device: torch.device,
    sizes: Sequence[int],
    present: list[Row],
) -> list[Row]:
    rows: list[Row] = []
    for i, n_bytes in enumerate(sizes):
        call = measuring.caller(comm, name, n_bytes, device)
        n_calls = 2 if devices.is_emulated() else 20 if n_bytes < 1 << 20 else 5

        def seconds(way: str) -> float:
            return slowest_s(comm, partial(call, algorithm=way), n_calls, device)  # noqa: B023

        best = measuring.fastest(comm, deadline, ways, seconds, lambda way: way == ways[0], MARGIN)
        chosen = best or next(way for max_bytes, way in present if n_bytes <= max_bytes)
        if rows and rows[-1][1] == chosen:
            rows.pop()
        rows.append((ANY_SIZE if i == len(sizes) - 1 else 2 * n_bytes, chosen))
    return rows


def _candidates(ways: Sequence[str]) -> list[str]:
    """NCCL's own first, then peers' memory, then the catalog's; ``peer`` where it is not one of two."""
    peers = [way for way in ways if way in ("peer_one_shot", "peer_two_shot")]
    peers = peers or [way for way in ways if way == "peer"]
    others = [way for way in ways if way != "nccl" and not way.startswith("peer")]
    return [way for way in ways if way == "nccl"] + peers + others


def slowest_s(comm: Communicator, call: Callable[[], object], n_calls: int, device: torch.device) -> float:
    """Seconds of a call on the device, of ``n_calls`` in a row: the slowest rank's, on every rank."""

    def calls() -> None:
        for _ in range(n_calls):
            call()

    call()  # allocates
    comm.barrier()
    call()  # the devices begin together at its end
    took = torch.tensor([devices.seconds_of(calls, device) / n_calls], dtype=torch.float64)
    everyones = torch.empty(comm.size, dtype=torch.float64)
    comm.all_gather(everyones, took, algorithm="direct")
    return float(everyones.max().item())
