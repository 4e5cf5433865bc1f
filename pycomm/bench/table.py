"""nccl-tests' table as text: the header, the lines of one size, and the closing figures.

One line for each size and kind of pycomm's buffers: nccl-tests' columns out of place and in place, on the CPU
each with a hot column; then every peer's fastest call and ``x``, its time divided by pycomm's in that run.
"""

from __future__ import annotations

import statistics

from pycomm.bench.collectives import REDUCES, ROOTED
from pycomm.bench.options import Options
from pycomm.bench.report import Measurement, Report, Row

__all__ = ["footer", "header", "ratio", "row_lines"]

NEAR_EXCHANGE_US = 0.16  # two cores that share a cache exchange flags faster than this

_WHAT = {
    "cpu": (
        "# time: median over iterations of the slowest rank's own time, buffers rewritten before each call;",
        "# hot: in a loop without rewriting; x: peer's fastest time / pycomm's in place (else out of place)",
    ),
    "cuda": (
        "# time: of a call in a loop of calls, by CUDA events on the slowest rank; the median over loops;",
        "# x: peer's fastest time / pycomm's in place (else out of place)",
    ),
}


def header(report: Report) -> str:
    """Everything above the first row."""
    options = report.options
    machine = ", ".join(f"{key} {value}" for key, value in report.machine.items())
    hot = options.device == "cpu"
    width = 43 if hot else 33
    groups = f"{'out-of-place':^{width}}  {'in-place':^{width}}"
    columns = f"{'time':>9} {'algbw':>7} {'busbw':>7} {'#wrong':>7}" + (f" {'hot':>9}" if hot else "")
    units = f"{'(us)':>9} {'(GB/s)':>7} {'(GB/s)':>7} {'':>7}" + (f" {'(us)':>9}" if hot else "")
    first = f"{'':64}  {groups}"
    second = f"{_names()}  {columns}  {columns}"
    third = f"{_units()}  {units}  {units}"
    for peer in options.compared():
        first += f"  {peer:^26}"
        second += f"  {'time':>9} {'busbw':>7} {'x':>8}"
        third += f"  {'(us)':>9} {'(GB/s)':>7} {'':>8}"
    lines = [
        f"# {options.collective}, {report.n_ranks} ranks, {options.dtype}"
        + (f", {options.op}" if options.collective in REDUCES else "")
        + (", CUDA tensors" if options.device == "cuda" else ""),
        f"# {machine}",
        *([f"# *** {report.warning}"] if report.warning else []),
        *_WHAT[options.device],
        "#",
        f"#{first}",
        f"#{second}",
        f"#{third}",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _names() -> str:
    return f"{'size':>11} {'count':>11} {'type':>13} {'redop':>8} {'root':>4} {'buffer':>10}"


def _units() -> str:
    return f"{'(B)':>11} {'(elements)':>11} {'':>13} {'':>8} {'':>4} {'':>10}"


def row_lines(report: Report, row: Row) -> list[str]:
    """The lines of one size, one for each kind of buffer."""
    options = report.options
    lines = []
    for kind in options.buffers or ("-",):
        ours = {m.place: m for m in row.measurements if m.library == "pycomm" and m.buffer == kind}
        line = (
            f" {row.n_bytes:>11} {row.count:>11} {options.dtype:>13} {_op(options):>8} {_root(options):>4}"
            f" {kind:>10}  {_cells(ours.get('out'), options)}  {_cells(ours.get('in'), options)}"
        )
        for peer in options.compared():
            best = row.find(peer)
            if best is None:
                line += f"  {'-':>9} {'-':>7} {'-':>8}"
                continue
            x = ratio(row, kind, peer)
            flag = "!" if best.wrong else ""
            line += f"  {_number(best.time_us):>9} {best.busbw:>7.2f} {_times(x) + flag:>8}"
        lines.append(line)
    return lines


def _op(options: Options) -> str:
    return options.op if options.collective in REDUCES else "none"


def _root(options: Options) -> int:
    return options.root if options.collective in ROOTED else -1


def ratio(row: Row, kind: str, other: str, place: str | None = None) -> float | None:
    """``other``'s time divided by pycomm's on ``kind`` buffers: above 1, pycomm is faster.

    ``place`` compares like with like; without it the other's fastest call is compared with pycomm's in-place
    call (out of place where there is no other).
    """
    ours = row.find("pycomm", kind, place or "in") or row.find("pycomm", kind, place)
    theirs = row.find(other, place=place)
    return theirs.time_us / ours.time_us if ours and theirs else None


def footer(report: Report) -> str:
    """The closing lines: measured / limit for each size, the regime, wrong results, notes."""
    n_wrong = report.n_wrong()
    on_cpu = report.options.device == "cpu"
    lines = ["#", *_limit_lines(report), "#", *_regime_lines(report)] if on_cpu else ["#"]
    lines.append(f"# wrong elements: {n_wrong} {'OK' if n_wrong == 0 else 'FAILED'}")
    lines += [f"#   {line}" for line in _wrong_lines(report)]
    for kind in report.options.buffers:
        found = [row.find("pycomm", kind) for row in report.rows]
        busbw = [m.busbw for m in found if m is not None]
        if busbw:
            lines.append(f"# average bus bandwidth, {kind}: {statistics.mean(busbw):.3f} GB/s")
    lines += [f"# note: {note}" for note in report.notes]
    lines += [f"# *** {report.warning}"] if report.warning else []
    return "\n".join(line.rstrip() for line in lines)


def _limit_lines(report: Report) -> list[str]:
    """measured / limit: busbw over that of the zero-copy probe, dirtied (and hot), like place with like."""
    libraries = [("pycomm", kind) for kind in report.options.buffers]
    libraries += [(peer, "ordinary") for peer in report.options.peers]
    title = f"#{'size':>12}  {'limit (us)':>10} {'busbw':>7} {'hot':>9}"
    for library, kind in libraries:
        title += f"  {(library if library != 'pycomm' else kind):>16}"
    lines = ["# measured / limit (the zero-copy memory probe in this run), dirtied (hot)", title]
    for row in report.rows:
        limit = row.find("limit", place="in") or row.find("limit")
        if limit is None:
            continue
        line = f"#{row.n_bytes:>12}  {_number(limit.time_us):>10} {limit.busbw:>7.2f}"
        line += f" {_number(limit.hot_us):>9}"
        for library, kind in libraries:
            ours = row.find(library, kind, "in") or row.find(library, kind)
            bound = row.find("limit", place=ours.place) if ours else None
            if ours is None or bound is None:
                line += f"  {'-':>16}"
            else:
                share, hot = bound.time_us / ours.time_us, bound.hot_us / ours.hot_us
                line += f"  {f'{share:.3f} ({hot:.3f})':>16}"
        lines.append(line)
    return lines


def _regime_lines(report: Report) -> list[str]:
    regimes = [row.regime for row in report.rows if row.regime is not None]
    if not regimes:
        return []
    exchange, fresh = [r.exchange_us for r in regimes], [r.fresh_256k_us for r in regimes]
    n_near = sum(us < NEAR_EXCHANGE_US for us in exchange)
    return [
        f"# regime before each size: flag exchange {min(exchange):.2f} - {max(exchange):.2f} us,"
        f" fresh 256 KiB {min(fresh):.1f} - {max(fresh):.1f} us;"
        f" {n_near} of {len(regimes)} near (exchange below {NEAR_EXCHANGE_US} us)"
    ]


def _wrong_lines(report: Report) -> list[str]:
    return [
        f"{m.library} ({m.buffer}, {m.place} of place) at {row.n_bytes} bytes: {m.wrong} wrong"
        for row in report.rows
        for m in row.measurements
        if m.wrong
    ]


def _cells(m: Measurement | None, options: Options) -> str:
    hot = options.device == "cpu"
    if m is None:
        return f"{'-':>9} {'-':>7} {'-':>7} {'-':>7}" + (f" {'-':>9}" if hot else "")
    cells = f"{_number(m.time_us):>9} {m.algbw:>7.2f} {m.busbw:>7.2f} {m.wrong:>7}"
    return cells + (f" {_number(m.hot_us):>9}" if hot else "")


def _number(value: float) -> str:
    """Three or four significant digits, as nccl-tests prints times."""
    if value < 10:
        return f"{value:.3f}"
    if value < 100:
        return f"{value:.2f}"
    return f"{value:.1f}"


def _times(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}" if x < 100 else f"{x:.0f}"
