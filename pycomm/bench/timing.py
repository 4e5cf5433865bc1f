"""The clock: dirtied batches and hot loops, started together by all ranks.

Dirtied: every rank rewrites its buffers, all meet at the probe's spin exchange (sub-microsecond, and the same
for every library), then each reads the clock, makes the K calls of the batch, and reads it again. Nothing is
subtracted. An iteration's time is the largest over ranks, divided by K; the figure in the table is the median
over iterations. Iterations come in short blocks that alternate between the cases, so that a machine whose
speed changes within seconds changes it for all of them.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

from pycomm.bench.buffers import Slots
from pycomm.bench.control import Control
from pycomm.bench.libraries import Library

__all__ = ["Case", "measure"]

_BLOCK_S = 0.010  # a block of iterations of one case
_HOT_S = 0.005  # one hot loop
_MIN_ROUNDS = 3
_MAX_HOT_CALLS = 1000

Gate = Callable[[], object]


@dataclasses.dataclass
class Case:
    """One library on one kind of memory, in or out of place, at one size; times in nanoseconds per call."""

    library: Library
    slots: Slots
    calls: list[Callable[[], object]]
    dirtied_ns: list[float] = dataclasses.field(default_factory=list)
    hot_ns: list[float] = dataclasses.field(default_factory=list)
    wrong: int = 0
    n_block: int = 1
    n_hot: int = 1

    def batch(self, gate: Gate) -> float:
        """One dirtied batch; nanoseconds per call on this rank."""
        self.slots.dirty()
        calls = self.calls
        gate()
        start = time.perf_counter_ns()
        for call in calls:
            call()
        return (time.perf_counter_ns() - start) / len(calls)

    def checked_batch(self, gate: Gate) -> None:
        """One dirtied batch whose results are compared with the exact ones."""
        self.batch(gate)
        gate()  # a library may still be writing into a peer until every rank has returned
        self.wrong += self.slots.n_wrong()
        gate()

    def block(self, gate: Gate) -> None:
        """``n_block`` dirtied batches."""
        for _ in range(self.n_block):
            self.dirtied_ns.append(self.batch(gate))

    def hot(self, gate: Gate) -> None:
        """``n_hot`` calls in a row on the first slot, which holds zeros."""
        self.slots.zero()
        call, n = self.calls[0], self.n_hot
        gate()
        start = time.perf_counter_ns()
        for _ in range(n):
            call()
        self.hot_ns.append((time.perf_counter_ns() - start) / n)


def measure(
    cases: list[Case], control: Control, gate: Gate, n_iters: int, n_warmup: int, budget_s: float
) -> None:
    """Fills every case's samples; collective, with the same arguments, on cases that were called once.

    After it ``dirtied_ns`` and ``hot_ns`` hold, on every rank, the largest over ranks of each sample.
    """
    end = time.monotonic() + budget_s
    for case in cases:
        _warm_up(case, control, gate, n_iters, n_warmup, budget_s / (4 * len(cases)))
    n_rounds = 0
    while True:
        for case in cases:
            if len(case.dirtied_ns) < n_iters:
                case.block(gate)
                case.hot(gate)
        n_rounds += 1
        unfinished = any(len(case.dirtied_ns) < n_iters for case in cases)
        in_time = n_rounds < _MIN_ROUNDS or time.monotonic() < end
        if not control.decide(unfinished and in_time):
            break
    for case in cases:
        case.checked_batch(gate)
        case.dirtied_ns = control.max(case.dirtied_ns)
        case.hot_ns = control.max(case.hot_ns)
    for case, wrong in zip(cases, control.sum([case.wrong for case in cases]), strict=True):
        case.wrong = wrong


def _warm_up(case: Case, control: Control, gate: Gate, n_iters: int, n_warmup: int, budget_s: float) -> None:
    start = time.perf_counter()
    call_ns = case.batch(gate)
    batch_s = time.perf_counter() - start  # with the rewriting
    for i in range(n_warmup):
        batch_s, call_ns = control.max([batch_s, call_ns])
        if i > 0 and i * batch_s > budget_s:
            break
        start = time.perf_counter()
        call_ns = case.batch(gate)
        batch_s = time.perf_counter() - start
    batch_s, call_ns = control.max([batch_s, call_ns])
    # at least ten blocks, so that no case is measured within one mood of the machine
    case.n_block = max(1, min(math.ceil(n_iters / 10), int(_BLOCK_S / batch_s)))
    case.n_hot = max(1, min(_MAX_HOT_CALLS, int(_HOT_S * 1e9 / call_ns)))
