"""The schedules by their names, with what each promises: its idle time and its activations.

Names are torch's where torch has the schedule (``get_schedule_class`` takes the same).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pycomm.pipeline.schedule.dual_pipe_v import dual_pipe_v
from pycomm.pipeline.schedule.gpipe import gpipe, looped_bfs
from pycomm.pipeline.schedule.interleaved import groups_of, interleaved_one_f_one_b
from pycomm.pipeline.schedule.one_f_one_b import eager_one_f_one_b, one_f_one_b
from pycomm.pipeline.schedule.order import Order
from pycomm.pipeline.schedule.zero_bubble import (
    interleaved_zero_bubble,
    zbv,
    zero_bubble_h1,
    zero_bubble_h2,
)

__all__ = ["CATALOG", "Entry", "build"]


@dataclass(frozen=True)
class Entry:
    """One schedule.

    Attributes:
        name: torch's, or this project's where torch has none.
        build: of p, v and m.
        stages_per_rank: the only v that it can, None for any.
        peak: of p, v, m and a rank: the most activations (stage, microbatch) that the rank keeps.
        idle: of p, v, m, F, I and W (of all of a rank's stages, for one microbatch): how long every rank does
            not compute in a step. Exact where m >= 2 p; where F = I = W for DualPipeV, and for ZBVZeroBubble,
            which may also need up to F more.
        summary: one line.
    """

    name: str
    build: Callable[[int, int, int], Order]
    stages_per_rank: int | None
    peak: Callable[[int, int, int, int], int]
    idle: Callable[[int, int, int, float, float, float], float]
    summary: str


def _idle_flushed(p: int, v: int, m: int, f: float, i: float, w: float) -> float:
    return (p - 1 + (v - 1) * max(0, p - m)) * (f + i + w) / v


def _idle_late_weights(p: int, v: int, m: int, f: float, i: float, w: float) -> float:
    return (p - 1) * (f + i - min(i, w)) / v


def _ahead(p: int, v: int, m: int, rank: int) -> int:
    slack = 2 if v > 1 else 1
    return slack * (p - rank - 1) + (v - 1) * len(groups_of(p, m)[0])


CATALOG = {
    entry.name: entry
    for entry in (
        Entry(
            "GPipe",
            lambda p, v, m: gpipe(p, m),
            1,
            lambda p, v, m, r: m,
            _idle_flushed,
            "all forwards, all backwards",
        ),
        Entry(
            "1F1B",
            lambda p, v, m: one_f_one_b(p, m),
            1,
            lambda p, v, m, r: min(m, p - r),
            _idle_flushed,
            "a forward, a backward (PipeDream-flush)",
        ),
        Entry(
            "Eager1F1B",
            lambda p, v, m: eager_one_f_one_b(p, m),
            1,
            lambda p, v, m, r: min(m, 2 * (p - r) - 1),
            _idle_flushed,
            "1F1B, further ahead: hides slow links",
        ),
        Entry(
            "Interleaved1F1B",
            interleaved_one_f_one_b,
            None,
            lambda p, v, m, r: min(m * v, _ahead(p, v, m, r) + 1),
            _idle_flushed,
            "1F1B with several stages on a rank",
        ),
        Entry(
            "LoopedBFS",
            looped_bfs,
            None,
            lambda p, v, m, r: m * v,
            _idle_flushed,
            "GPipe with several stages on a rank",
        ),
        Entry(
            "ZeroBubbleH1",
            lambda p, v, m: zero_bubble_h1(p, m),
            1,
            lambda p, v, m, r: min(m, p),
            _idle_late_weights,
            "weight gradients fill the gaps, 1F1B's memory",
        ),
        Entry(
            "ZeroBubbleH2",
            lambda p, v, m: zero_bubble_h2(p, m),
            1,
            lambda p, v, m, r: min(m, 2 * p - 1),
            lambda p, v, m, f, i, w: (p - 1) * max(f, f + i - 2 * w),
            "no gaps, for twice the memory",
        ),
        Entry(
            "InterleavedZeroBubble",
            interleaved_zero_bubble,
            None,
            lambda p, v, m, r: min(m * v, _ahead(p, v, m, r) + r + 1),
            _idle_late_weights,
            "H1 with several stages on a rank",
        ),
        Entry(
            "ZBVZeroBubble",
            lambda p, v, m: zbv(p, m),
            2,
            lambda p, v, m, r: min(2 * m, 2 * p),
            _idle_late_weights,
            "two stages on a rank in a V, 1F1B's memory",
        ),
        Entry(
            "DualPipeV",
            lambda p, v, m: dual_pipe_v(p, m),
            2,
            lambda p, v, m, r: min(2 * m, 2 * p + 1),
            _idle_late_weights,
            "a V; forwards beside backwards",
        ),
    )
}


def build(name: str, n_ranks: int, n_microbatches: int, stages_per_rank: int | None = None) -> Order:
    """The order of a schedule.

    Args:
        name: as in :data:`CATALOG`; upper and lower case do not matter.
        n_ranks: p, at least 1.
        n_microbatches: m, at least 1.
        stages_per_rank: v; None: what the schedule needs, or 2 where it may have any.

    Raises:
        ValueError: an unknown name, a number below 1, or a v that the schedule cannot.

    Example:
        >>> build("1f1b", 2, 3).to_csv()
        '0F0,0F1,0B0,0F2,0B1,0B2\\n1F0,1B0,1F1,1B1,1F2,1B2\\n'
    """
    known = {key.lower(): entry for key, entry in CATALOG.items()}
    entry = known.get(name.lower())
    if entry is None:
        more = (
            ""
            if name.lower() != "pipedream2bw"
            else "; PipeDream2BW runs on from step to step, and is a class only"
        )
        raise ValueError(f"there is no pipeline schedule {name!r}; there are {', '.join(CATALOG)}{more}")
    v = stages_per_rank if stages_per_rank is not None else entry.stages_per_rank or 2
    for what, number in (("ranks", n_ranks), ("microbatches", n_microbatches), ("stages per rank", v)):
        if number < 1:
            raise ValueError(f"{entry.name}: the number of {what} must be at least 1, got {number}")
    if entry.stages_per_rank not in (None, v):
        stages = "1 stage" if entry.stages_per_rank == 1 else f"{entry.stages_per_rank} stages"
        any_number = ", ".join(e.name for e in CATALOG.values() if e.stages_per_rank is None)
        raise ValueError(f"{entry.name} has {stages} on a rank, not {v}; any number may have {any_number}")
    return entry.build(n_ranks, v, n_microbatches)
