"""monitored_barrier: a barrier through the group's store, whose error names the ranks that did not come.

Rank 0 waits for a key of each other rank, then tells all of them the outcome in one more key. No call of the
engine is involved: a barrier that fails leaves the group usable, and one on a group that has failed tells who
still lives. Keys are removed by who reads them last.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

__all__ = ["MonitoredBarrier"]


class MonitoredBarrier:
    """The barriers of one group, counted; all ranks call them in the same order.

    Args:
        store: of this group alone.
        rank, size: this process's in the group.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._made = 0

    def __call__(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Returns when all ranks have come.

        Raises:
            RuntimeError: on rank 0, naming the first rank (or with ``wait_all_ranks`` all ranks) that did not
                come within ``timeout``; on the others, that rank 0 did not come, or that it failed.
        """
        self._made += 1
        key = f"monitored_barrier/{self._made}"
        if self._rank == 0:
            self._lead(key, timeout, wait_all_ranks)
        else:
            self._follow(key, timeout)

    def _lead(self, key: str, timeout: timedelta, wait_all_ranks: bool) -> None:
        limit_s = timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        missing: list[int] = []
        outcome = ""
        for peer in range(1, self._size):
            left = deadline - time.monotonic()
            if left <= 0 and not wait_all_ranks and not missing:
                outcome = f"Rank 0 timed out in monitoredBarrier after {limit_s * 1e3:g} ms."
                break
            if not self._came(f"{key}/{peer}", left):
                missing.append(peer)
                if not wait_all_ranks:
                    break
        if missing:
            who = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            outcome = f"{who} failed to pass monitoredBarrier in {limit_s * 1e3:g} ms"
        if self._size > 1:
            self._store.set(f"{key}/outcome", outcome)
        if outcome:
            raise RuntimeError(f"[Rank 0]: {outcome}")

    def _follow(self, key: str, timeout: timedelta) -> None:
        self._store.set(f"{key}/{self._rank}", "here")
        reached = (
            f"[Rank {self._rank}]: Rank {self._rank} successfully reached monitoredBarrier, but received "
            "errors while waiting for send/recv from rank 0"
        )
        # Rank 0 may come at the end of the timeout, and then wait as long for others.
        if not self._came(f"{key}/outcome", 2 * timeout.total_seconds()):
            raise RuntimeError(f"{reached}: it did not come within {timeout.total_seconds() * 1e3:g} ms")
        outcome = self._store.get(f"{key}/outcome").decode()
        if self._store.add(f"{key}/read", 1) == self._size - 1:
            for name in ("outcome", "read", *map(str, range(1, self._size))):
                self._store.delete_key(f"{key}/{name}")
        if outcome:
            raise RuntimeError(f"{reached}: {outcome}")

    def _came(self, key: str, within_s: float) -> bool:
        try:
            self._store.wait([key], timedelta(seconds=max(within_s, 1e-3)))
        except RuntimeError:
            # With whatever kind of store, it was too long; a store that is gone says so now.
            return bool(self._store.check([key]))
        return True
