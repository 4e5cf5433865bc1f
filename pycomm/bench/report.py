"""What a bench run found: rows of measurements, the machine, the options; to and from JSON.

Times are microseconds per call, bandwidths GB/s (10^9 bytes). A time is the median over iterations of the
largest of the ranks' own durations. ``busbw`` is nccl-tests' bus bandwidth: bytes / time x a factor of the
collective that makes it comparable between rank counts (``pycomm.bench.collectives.bus_factor``).
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from pycomm.bench.options import Options

__all__ = ["Measurement", "Regime", "Report", "Row"]


@dataclasses.dataclass
class Measurement:
    """One library on one kind of buffer, in or out of place, at one size.

    Attributes:
        library: ``pycomm``, ``pycomm/NAME`` (with that algorithm), a peer, or ``limit`` (the zero-copy memory
            probe).
        buffer: ``ordinary``, ``arena``, ``probe`` for the limit's own shared pages, or which of
            ``torch-symm-mem``'s kernels it is, ``one-shot`` or ``two-shot``, each on memory of its own kind.
        place: ``out`` or ``in``.
        time_us: median of a call on dirtied buffers; ``best_us``, ``p90_us``: minimum and 90th percentile.
        hot_us: median of a call in a loop on the same buffers; on CUDA all times are of such loops.
        n_samples: timed iterations behind ``time_us``; on CUDA loops.
        algbw, busbw, hot_busbw: GB/s, of the medians.
        wrong: elements that differ from the exact result, added up over ranks and checked calls.
    """

    library: str
    buffer: str
    place: str
    time_us: float
    best_us: float
    p90_us: float
    hot_us: float
    n_samples: int
    algbw: float
    busbw: float
    hot_busbw: float
    wrong: int


@dataclasses.dataclass
class Regime:
    """How near the cores were to each other just before a size was measured (virtual cores move).

    Attributes:
        exchange_us: one exchange of flags between all ranks, as a 4-byte message would need.
        fresh_256k_us: zero-copy all-reduce of 256 KiB that was just rewritten.
    """

    exchange_us: float
    fresh_256k_us: float


@dataclasses.dataclass
class Row:
    """All measurements at one size (bytes); ``count`` is nccl-tests' count column, in elements."""

    n_bytes: int
    count: int
    regime: Regime | None
    measurements: list[Measurement]

    def find(self, library: str, buffer: str | None = None, place: str | None = None) -> Measurement | None:
        """The fastest (dirtied) measurement that matches, or ``None`` when there is none."""
        found = [
            m
            for m in self.measurements
            if m.library == library and buffer in (None, m.buffer) and place in (None, m.place)
        ]
        return min(found, key=lambda m: m.time_us) if found else None


@dataclasses.dataclass
class Report:
    """A whole run.

    Attributes:
        notes: what was left out and why, one sentence each.
        warning: why the times do not say what a reader would take them to say; "" when they do.
    """

    options: Options
    n_ranks: int
    machine: dict[str, str]
    rows: list[Row] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    warning: str = ""

    def n_wrong(self) -> int:
        """Wrong elements over all measurements: 0 for a run whose numbers mean something."""
        return sum(m.wrong for row in self.rows for m in row.measurements)

    def to_json(self) -> str:
        """The report as indented JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The inverse of ``to_json``."""
        fields: dict[str, Any] = json.loads(text)
        rows = [
            Row(
                row["n_bytes"],
                row["count"],
                Regime(**row["regime"]) if row["regime"] else None,
                [Measurement(**m) for m in row["measurements"]],
            )
            for row in fields["rows"]
        ]
        options = Options.from_json(json.dumps(fields["options"]))
        return cls(options, fields["n_ranks"], fields["machine"], rows, fields["notes"], fields["warning"])
