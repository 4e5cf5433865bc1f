"""What the measurements of ``pycomm.tuning``, ``tuning_hosts`` and ``tuning_cuda`` have in common.

Rank 0 decides for all: its clock ends a measurement, its times choose, and its table, as JSON, goes to the
others and into the cache file (:mod:`pycomm.cache_files`).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from pycomm.communicator import Communicator

T = TypeVar("T")

#: What another candidate must win by over the default, so that noise does not choose.
MARGIN = 1.15


def go_on(comm: Communicator, deadline: float) -> bool:
    """Rank 0's clock decides for all, or the ranks would measure different candidates."""
    flag = torch.tensor([time.monotonic() < deadline], dtype=torch.uint8)
    comm.broadcast(flag, algorithm="direct")
    return bool(flag.item())


def fastest(
    comm: Communicator,
    deadline: float,
    candidates: Iterable[T],
    seconds: Callable[[T], float],
    is_default: Callable[[T], bool],
    margin: float = MARGIN,
) -> T | None:
    """The candidate that took least, by this rank's clock; collective.

    Args:
        deadline: of ``time.monotonic`` on rank 0: a candidate is not begun after it.
        candidates: the same on every rank; those that matter most first.
        seconds: measures a candidate, on all ranks together.
        is_default: of a candidate that the others must beat by ``margin``.

    Returns:
        None when there was no time for any.
    """
    best: tuple[float, T] | None = None
    for candidate in candidates:
        if not go_on(comm, deadline):
            break
        took = seconds(candidate) * (1.0 if is_default(candidate) else margin)
        if best is None or took < best[0]:
            best = (took, candidate)
    return None if best is None else best[1]


def median_s(comm: Communicator, call: Any, reps: int) -> float:
    """Seconds of a collective call on this rank: the median of ``reps``, all ranks starting together."""
    times = []
    for _ in range(reps + 1):  # the first lowers the plan
        comm.barrier()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def caller(
    comm: Communicator, name: str, n_bytes: int, device: torch.device | None = None
) -> Callable[..., object]:
    """A call of the collective on float32 tensors of which the largest has ``n_bytes``; device None: CPU.

    What it is given goes to the collective: ``algorithm``.
    """
    n, me = comm.size, comm.rank
    whole = torch.zeros(max(n_bytes // 4 // n, 1) * n, device=device)
    part = torch.zeros(whole.numel() // n, device=device)
    calls: dict[str, Callable[..., object]] = {
        "all_reduce": partial(comm.all_reduce, whole),
        "reduce_scatter": partial(comm.reduce_scatter, part, whole),
        "all_gather": partial(comm.all_gather, whole, part),
        "broadcast": partial(comm.broadcast, whole),
        "reduce": partial(comm.reduce, whole),
        "gather": partial(comm.gather, part, whole if me == 0 else None),
        "scatter": partial(comm.scatter, part, whole if me == 0 else None),
    }
    return calls[name]


def share(comm: Communicator, value: Any) -> Any:
    """Rank 0's value, through JSON, on every rank."""
    text = json.dumps(value).encode() if comm.rank == 0 else b""
    length = torch.tensor([len(text)])
    comm.broadcast(length, algorithm="direct")
    data = torch.zeros(int(length.item()), dtype=torch.uint8)
    if comm.rank == 0:
        data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    comm.broadcast(data, algorithm="direct")
    return json.loads(bytes(data.tolist()))
