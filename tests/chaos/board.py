"""A page that the ranks of one job and whoever breaks it share: numbers, one writer each.

The job ends in step: rank 0, when it finds ``stop``, writes the number of its next call to ``last`` before it
makes that call. No rank can be beyond it, since no call of the matrix ends anywhere before rank 0 has begun
it (rank 0 is the root of the rooted ones).
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

_JOB = ("join", "go", "stop", "last", "slow", "fault_at")
_RANK = ("pid", "ready", "call")


class Board:
    """``board.go``, ``board.stop``, … are the job's; ``board.pid(r)``, ``ready(r)`` and ``call(r)`` a rank's.

    Args:
        path: a file that all of them see.
        size: number of ranks.
        create: True for the first one.

    Example:
        >>> import tempfile
        >>> board = Board(Path(tempfile.mkdtemp()) / "board", 2, create=True)
        >>> board.set(1, "call", 7)
        >>> board.call(1), board.last
        (7, -1.0)
    """

    def __init__(self, path: Path, size: int, create: bool = False) -> None:
        n_bytes = 8 * (len(_JOB) + len(_RANK) * size)
        if create:
            path.write_bytes(bytes(n_bytes))
        descriptor = os.open(path, os.O_RDWR)
        self._cells = memoryview(mmap.mmap(descriptor, n_bytes)).cast("d")
        os.close(descriptor)
        self.size = size
        if create:
            self.last = -1.0

    def __getattr__(self, name: str) -> float:
        if name not in _JOB:
            raise AttributeError(name)
        return self._cells[_JOB.index(name)]

    def __setattr__(self, name: str, value: object) -> None:
        if name in _JOB:
            assert isinstance(value, float | int)
            self._cells[_JOB.index(name)] = float(value)
        else:
            object.__setattr__(self, name, value)

    def _index(self, rank: int, name: str) -> int:
        return len(_JOB) + len(_RANK) * rank + _RANK.index(name)

    def set(self, rank: int, name: str, value: float) -> None:
        self._cells[self._index(rank, name)] = value

    def pid(self, rank: int) -> int:
        return int(self._cells[self._index(rank, "pid")])

    def ready(self, rank: int) -> bool:
        return self._cells[self._index(rank, "ready")] != 0

    def call(self, rank: int) -> int:
        """The number of the call that the rank is in."""
        return int(self._cells[self._index(rank, "call")])


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Looks until it holds.

    Raises:
        TimeoutError: it did not come true in time; the text says what.
    """
    end_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.002)
