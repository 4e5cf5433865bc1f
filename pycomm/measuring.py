"""What the measurements of :mod:`pycomm.tuning` and :mod:`pycomm.tuning_hosts` have in common.

Rank 0 decides for all: its clock ends a measurement, its times choose, and its table, as JSON, goes to the
others and into the cache file.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pycomm.communicator import Communicator


def go_on(comm: Communicator, deadline: float) -> bool:
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


def caller(comm: Communicator, name: str, n_bytes: int) -> Any:
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


def cache_folder() -> Path:
    """``PYCOMM_CACHE_DIR``, or the user's cache folder."""
    root = os.environ.get("PYCOMM_CACHE_DIR")
    if root is None:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "pycomm")
    return Path(root)


def load(path: Path, version: int) -> Any:
    """The table in the file; None when there is none for this version, or it cannot be read."""
    try:
        content = json.loads(path.read_text())
        return content["table"] if content["format"] == version else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        ignored(path, error)
        return None


def ignored(path: Path, error: Exception) -> None:
    """Warns: a damaged cache costs a second of measuring, not a job."""
    warnings.warn(f"pycomm: ignoring the selection cache {path}: {error}", RuntimeWarning, stacklevel=2)


def save(path: Path, version: int, table: Any) -> None:
    """Atomic: a reader sees the old file or the new one. A read-only home costs the next job a second."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as f:
            json.dump({"format": version, "table": table}, f, indent=1)
        os.replace(f.name, path)
    except OSError as error:
        warnings.warn(
            f"pycomm: the selection table was not cached in {path}: {error}", RuntimeWarning, stacklevel=2
        )
