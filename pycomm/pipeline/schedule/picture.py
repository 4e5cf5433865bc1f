"""A timeline as text and as a drawing."""

from __future__ import annotations

import math
from pathlib import Path

from pycomm.pipeline.schedule.action import REDUCE
from pycomm.pipeline.schedule.simulate import Span, Timeline

__all__ = ["draw", "text"]

_COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#54a24b", "W": "#b79a20", REDUCE: "#bab0ac"}


def text(timeline: Timeline) -> str:
    """A line for each rank, a column for each unit of time; one unit is the shortest action.

    Actions are written without their stage where a rank has one stage only. Reductions, which run beside the
    computations, are on a line of their own below these, as R.

    Example:
        >>> from pycomm.pipeline.schedule.gpipe import gpipe
        >>> from pycomm.pipeline.schedule.simulate import Costs, simulate
        >>> print(text(simulate(gpipe(2, 2), Costs(1, 0.5, 0.5))))
        F0 F1 .  .  B0 B1
        .  F0 F1 B0 B1 .
    """
    spans = [span for row in timeline.spans for span in row]
    if not spans:
        return ""
    unit = min(span.end - span.start for span in spans)
    origin = min(span.start for span in spans)
    n_columns = math.ceil(timeline.makespan / unit - 1e-9) if unit > 0 else 1
    lines = []
    many = timeline.order.n_stages > timeline.order.n_ranks

    def line(row: tuple[Span, ...], empty: str) -> list[str]:
        cells = [empty] * n_columns
        for span in row:
            first = round((span.start - origin) / unit) if unit > 0 else 0
            last = round((span.end - origin) / unit) if unit > 0 else 1
            name = str(span.action).replace(REDUCE, "R")
            name = name if many else name.lstrip("0123456789")
            cells[first:last] = [name, *["-"] * (last - first - 1)][: max(last - first, 0)]
        return cells

    for rank, row in enumerate(timeline.spans):
        lines.append(line(row, "."))
        if timeline.reductions:
            lines.append(line(timeline.reductions[rank], ""))
    width = max(len(cell) for cells in lines for cell in cells)
    return "\n".join(" ".join(cell.ljust(width) for cell in cells).rstrip() for cells in lines)


def draw(timelines: dict[str, Timeline], path: str | Path, unit: str = "") -> None:
    """Timelines below each other on one time axis, as PNG, SVG or whatever matplotlib writes.

    Args:
        timelines: by their titles; a simulated and a measured run, say.
        path: of the file; its ending says the format.
        unit: of the times.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (``pip install 'pycomm-collectives[plot]'``).
    """
    from matplotlib.figure import Figure

    n_ranks = max(len(timeline.spans) for timeline in timelines.values())
    figure = Figure(figsize=(14, 1.2 + len(timelines) * (0.8 + 0.45 * n_ranks)), layout="constrained")
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, timeline) in zip(axes, timelines.items(), strict=True):
        origin = min((span.start for row in timeline.spans for span in row), default=0.0)
        for rank, row in enumerate(timeline.spans):
            for span in row:
                width, left = span.end - span.start, span.start - origin
                axis.barh(rank, width, left=left, color=_COLOURS[span.action.kind], edgecolor="white")
                axis.text(left + width / 2, rank, str(span.action), ha="center", va="center", fontsize=6)
            for span in timeline.reductions[rank] if timeline.reductions else ():
                width, left = span.end - span.start, span.start - origin
                axis.barh(rank + 0.45, width, 0.12, left=left, color=_COLOURS[REDUCE])
        axis.set_title(f"{title}: {timeline.makespan:.4g} {unit}, {timeline.bubble:.1%} idle", loc="left")
        axis.set_yticks(range(len(timeline.spans)), [f"rank {rank}" for rank in range(len(timeline.spans))])
        axis.invert_yaxis()
    axes[-1].set_xlabel(f"time {unit}".strip())
    figure.savefig(path)
