"""The table "what must hold" within a node: measures every line of it and says met or missed.

Five launches (fresh processes each) with 2 ranks against gloo, Open MPI and the memory's limit, and five with
4 ranks against gloo; fp32 sum, buffers dirtied, every ratio taken within one run, the median over launches
for each size, and for a line of the table the lowest of its sizes. A line against Open MPI compares MPI's
call out of place with the slower of pycomm's two places; gloo has only the call in place. Takes about ten
minutes, on a machine that must otherwise be quiet.

Run: python bench/table.py [--launches 5] [--seconds 60] [--json FILE] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from late_peer import late_peer_shares

from pycomm.bench import Options, Report, Row, launch
from pycomm.bench.options import format_size
from pycomm.bench.table import ratio

KIB, MIB = 1 << 10, 1 << 20
LATE_LIMIT = 0.05


def _like_place(kind: str, other: str) -> Callable[[Row], float | None]:
    """In place against in place."""
    return lambda row: ratio(row, kind, other, "in")


def _against_mpi(kind: str) -> Callable[[Row], float | None]:
    def worse_place(row: Row) -> float | None:
        mpi = row.find("mpi", place="out")
        ours = [row.find("pycomm", kind, place) for place in ("out", "in")]
        times = [m.time_us for m in ours if m is not None]
        return mpi.time_us / max(times) if mpi and times else None

    return worse_place


@dataclasses.dataclass(frozen=True)
class Line:
    """One requirement: of these sizes (bytes, inclusive), the ratio is at least ``required``."""

    case: str
    against: str
    n_ranks: int
    low: int
    high: int
    required: float
    ratio_of: Callable[[Row], float | None]


_ARENA, _ORDINARY = "arena tensors", "ordinary tensors"
LINES = (
    Line(f"{_ARENA}, 1–4 MiB", "gloo busbw", 2, MIB, 4 * MIB, 30, _like_place("arena", "gloo")),
    Line(f"{_ARENA}, 16 MiB", "gloo busbw", 2, 16 * MIB, 16 * MIB, 15, _like_place("arena", "gloo")),
    Line(f"{_ARENA}, 64 MiB", "gloo busbw", 2, 64 * MIB, 64 * MIB, 6, _like_place("arena", "gloo")),
    Line(f"{_ARENA}, 1–64 MiB", "zero-copy probe", 2, MIB, 64 * MIB, 0.6, _like_place("arena", "limit")),
    Line(f"{_ORDINARY}, 4 B–64 MiB", "gloo", 2, 4, 64 * MIB, 4, _like_place("ordinary", "gloo")),
    Line(f"{_ORDINARY}, ≤ 1 KiB", "Open MPI", 2, 4, KIB, 2, _against_mpi("ordinary")),
    Line(f"{_ORDINARY}, from 64 KiB", "Open MPI", 2, 64 * KIB, 64 * MIB, 2, _against_mpi("ordinary")),
    Line(f"{_ORDINARY}, 64 MiB", "Open MPI", 2, 64 * MIB, 64 * MIB, 4, _against_mpi("ordinary")),
    Line(f"{_ARENA}, from 64 KiB", "Open MPI", 2, 64 * KIB, 64 * MIB, 5, _against_mpi("arena")),
    Line(f"4 ranks, {_ORDINARY}, 4 B–64 MiB", "gloo", 4, 4, 64 * MIB, 4, _like_place("ordinary", "gloo")),
    Line(f"4 ranks, {_ARENA}, 4 B–64 MiB", "gloo", 4, 4, 64 * MIB, 8, _like_place("arena", "gloo")),
)


def ratios(line: Line, reports: Sequence[Report]) -> dict[int, list[float]]:
    """For each size of the line, its ratio in each launch that measured it."""
    found: dict[int, list[float]] = {}
    for report in reports:
        for row in report.rows:
            value = line.ratio_of(row) if line.low <= row.n_bytes <= line.high else None
            if report.n_ranks == line.n_ranks and value is not None:
                found.setdefault(row.n_bytes, []).append(value)
    return found


def markdown(reports: Sequence[Report], late: dict[str, float]) -> tuple[str, bool]:
    """The table, the ratios behind it, and whether every line is met."""
    lines = [
        "| case | against | at least | measured | at | |",
        "|---|---|---|---|---|---|",
    ]
    all_met = True
    details = []
    for line in LINES:
        medians = {size: statistics.median(values) for size, values in ratios(line, reports).items()}
        if not medians:
            lines.append(f"| {line.case} | {line.against} | {line.required:g}× | – | – | not measured |")
            all_met = False
            continue
        worst = min(medians, key=lambda size: medians[size])
        met = medians[worst] >= line.required
        all_met &= met
        lines.append(
            f"| {line.case} | {line.against} | {line.required:g}× | {medians[worst]:.2f}× |"
            f" {format_size(worst)} | {'met' if met else '**missed**'} |"
        )
        details.append((line, ratios(line, reports)))
    for name, share in late.items():
        met = share < LATE_LIMIT
        all_met &= met
        lines.append(
            f"| rank waiting 2 s for a late peer, {name} | its own CPU time | < {LATE_LIMIT:.0%} |"
            f" {share:.2%} | | {'met' if met else '**missed**'} |"
        )
    n_wrong = sum(
        m.wrong for r in reports for row in r.rows for m in row.measurements if m.library == "pycomm"
    )
    lines += ["", f"Wrong elements of pycomm in all runs: {n_wrong}.", "", *_detail_lines(details)]
    return "\n".join([*lines, "", *_regime_lines(reports)]) + "\n", all_met and n_wrong == 0


def _detail_lines(details: Sequence[tuple[Line, dict[int, list[float]]]]) -> list[str]:
    lines = ["Median over launches (lowest – highest) for each size:", ""]
    for line, found in details:
        cells = [
            f"{format_size(size)}: {statistics.median(v):.2f} ({min(v):.2f}–{max(v):.2f})"
            for size, v in found.items()
        ]
        lines.append(f"- {line.case} against {line.against}, at least {line.required:g}: {'; '.join(cells)}")
    return lines


def _regime_lines(reports: Sequence[Report]) -> list[str]:
    lines = []
    for n_ranks in sorted({report.n_ranks for report in reports}):
        rows = [row for report in reports if report.n_ranks == n_ranks for row in report.rows]
        regimes = [row.regime for row in rows if row.regime]
        if regimes:
            exchange = _spread([regime.exchange_us for regime in regimes])
            fresh = _spread([regime.fresh_256k_us for regime in regimes])
            lines.append(f"Regime, {n_ranks} ranks: flag exchange {exchange} µs, fresh 256 KiB {fresh} µs.")
    return lines


def _spread(values: Sequence[float]) -> str:
    """Lowest / median / highest."""
    return f"{min(values):.2f} / {statistics.median(values):.2f} / {max(values):.2f}"


def main() -> int:
    """Measures, prints, and returns 0 when every line is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="measuring time of each launch")
    parser.add_argument("--no-mpi", action="store_true", help="leave Open MPI out (its lines: not measured)")
    parser.add_argument("--json", type=Path, help="all reports, a list, rewritten after each launch")
    parser.add_argument("--markdown", type=Path, help="the table so far, likewise; printed at the end")
    args = parser.parse_args()
    has_mpi = importlib.util.find_spec("mpi4py") is not None and shutil.which("mpirun") is not None
    if not args.no_mpi and not has_mpi:
        parser.error("the peer Open MPI needs mpi4py and mpirun: install them, or give --no-mpi")
    two_rank_peers = ("gloo",) if args.no_mpi else ("gloo", "mpi")
    reports: list[Report] = []
    late = late_peer_shares()
    text, met = "", False
    for i in range(args.launches):
        for n_ranks, peers in ((2, two_rank_peers), (4, ("gloo",))):
            print(f"## launch {i + 1} of {args.launches}, {n_ranks} ranks", flush=True)
            report = launch(Options(ranks=n_ranks, peers=peers, max_seconds=args.seconds))
            assert report is not None, "run this script by itself, not under torchrun or mpirun"
            reports.append(report)
        # after each launch, so that a run which is cut short leaves what it has found
        text, met = markdown(reports, late)
        if args.json:
            args.json.write_text(json.dumps([json.loads(report.to_json()) for report in reports]) + "\n")
        if args.markdown:
            args.markdown.write_text(text)
    print(text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
