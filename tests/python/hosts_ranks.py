"""Ranks on several hosts, for tests: one machine plays them (``PYCOMM_HOSTID``), over its loopback interface.

A *placement* is a list: the host of each rank. The ranks of ``run_ranks`` call ``join`` with it, and get the
communicator that ranks on so many machines would get: shared memory within a host, TCP between them. They
meet in a file (torch's FileStore) in the test's private folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import pycomm

#: By name: hosts of one rank; as many ranks on each; an uneven number; interleaved; both.
PLACEMENTS: dict[str, list[int]] = {
    "2x1": [0, 1],
    "3x1": [0, 1, 2],
    "2x2": [0, 0, 1, 1],
    "1+2": [0, 1, 1],
    "0101": [0, 1, 0, 1],
    "01022": [0, 1, 0, 2, 2],
}


def place(rank: int, placement: list[int], **settings: str) -> None:
    """Puts this process on its host; ``settings``: environment variables."""
    os.environ.update({"PYCOMM_HOSTID": f"host{placement[rank]}", "PYCOMM_SOCKET_IFNAME": "lo", **settings})


def store(size: int, name: str = "store") -> dist.FileStore:
    """Where the ranks of one test meet."""
    return dist.FileStore(str(Path(os.environ["PYCOMM_RUN_DIR"]) / name), size)


def join(
    rank: int, placement: list[int], *, timeout: float = 60.0, name: str = "store", **settings: str
) -> pycomm.Communicator:
    """The communicator of all ranks, this one being on host ``placement[rank]``."""
    size = len(placement)
    place(rank, placement, **settings)
    return pycomm.init(store=store(size, name), rank=rank, size=size, timeout=timeout)


def folder() -> Path:
    """The test's own."""
    return Path(os.environ["PYCOMM_RUN_DIR"])


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    """Looks until ``condition()``; an AssertionError when the time is over."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def meet(rank: int, size: int, name: str) -> None:
    """Nobody goes on before ``size`` ranks have come here; not a call of the communicator."""
    (folder() / f"{name}-{rank}").touch()
    wait_for(lambda: len(list(folder().glob(f"{name}-*"))) >= size)
