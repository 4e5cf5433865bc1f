"""The demo's result for people: the curves as text and as a picture, and a table of speed and differences."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from pycomm.demo.check import LOSS_TOLERANCE, NORM_TOLERANCE, Summary, differences
from pycomm.demo.train import TrainConfig

__all__ = ["check_plot_possible", "curves_as_text", "picture", "table"]

NAMES = {
    "pycomm": "pycomm, 2 ranks",
    "one": "one process",
    "gloo": "gloo, 2 ranks",
}


def check_plot_possible() -> None:
    """Raises RuntimeError when matplotlib is missing, so that the demo does not find out at its end."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError("demo: the picture of the curves needs matplotlib: pip install matplotlib")


def curves_as_text(curves: Mapping[str, Sequence[float]], width: int = 72, height: int = 16) -> str:
    """Curves over their index in characters: each one's mark, '*' where they fall on the same place.

    Example:
        >>> print(curves_as_text({"o": [2.0, 1.0], "x": [2.0, 2.0]}, width=2, height=2))
         2.00 ┤*x
         1.00 ┤ o
              └──
    """
    low = min(min(curve) for curve in curves.values())
    high = max(max(curve) for curve in curves.values())
    cells = [[" "] * width for _ in range(height)]
    for mark, curve in curves.items():
        for column in range(width):
            value = curve[round(column * (len(curve) - 1) / (width - 1))]
            row = round((high - value) / (high - low or 1.0) * (height - 1))
            cells[row][column] = mark if cells[row][column] == " " else "*"
    lines = []
    for row, line in enumerate(cells):
        value = high - row * (high - low) / (height - 1)
        lines.append(f"{value:5.2f} ┤{''.join(line).rstrip()}")
    return "\n".join([*lines, "      └" + "─" * width])


def picture(summaries: Mapping[str, Summary], path: Path) -> None:
    """Writes the loss curves, and below them each run's distance from the one process, as a PNG."""
    check_plot_possible()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    losses, distances = figure.subplots(2, 1, height_ratios=[2, 1], sharex=True)
    styles = {
        "one": ("#000000", "-", 4.0, 0.25),
        "gloo": ("#d62728", ":", 2.0, 1.0),
        "pycomm": ("#0b6e4f", "-", 1.2, 1.0),
    }
    reference = summaries["one"].losses
    for way, (color, line, width, alpha) in styles.items():
        style = {"color": color, "linestyle": line, "linewidth": width, "alpha": alpha, "label": NAMES[way]}
        losses.plot(summaries[way].losses, **style)
        if way != "one":
            apart = [max(abs(a - b), 1e-9) for a, b in zip(summaries[way].losses, reference, strict=True)]
            distances.plot(apart, **style)
    distances.axhline(LOSS_TOLERANCE, color="#555555", linestyle="--", linewidth=1, label="tolerance")
    losses.set_ylabel("loss (nats per byte)")
    losses.set_title("A small GPT on the source of Python's standard library")
    distances.set_yscale("log")
    distances.set_ylabel("|difference| to one process")
    distances.set_xlabel("step")
    for axes in (losses, distances):
        axes.grid(True, alpha=0.25)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def table(summaries: Mapping[str, Summary], config: TrainConfig) -> Table:
    """Speed, exposed communication and differences of every run."""
    n_tokens = config.n_rows * config.model.n_positions
    result = Table(title="The same training, three ways", title_justify="left")
    result.add_column("run", no_wrap=True)
    for name in ("loss", "tokens/s", "ms", "exposed", "Δ loss", "Δ norm"):
        result.add_column(name, justify="right", no_wrap=True)
    for way, run in summaries.items():
        largest = differences(run, summaries["one"])
        result.add_row(
            NAMES[way],
            f"{run.losses[-1]:.4f}",
            f"{n_tokens / run.step_s:,.0f}",
            f"{run.step_s * 1e3:.1f}",
            "–" if way == "one" else f"{run.exposed_share:.2%}",
            "–" if way == "one" else f"{largest.loss:.1e}",
            "–" if way == "one" else f"{largest.norm:.1e}",
        )
    result.caption = (
        "Each rank, and the one process, has one thread. loss: of the last step, nats per byte. tokens/s and "
        "ms: median step, of the slower rank. exposed: share of the step that the own thread spends in "
        "communication, waiting for the other rank included; pycomm: all time inside its DDP; gloo (under "
        "torch's DDP): from the rank's last gradient until backward returns. Δ: largest difference over all "
        "steps to one process, the norm's relative; "
        f"tolerance {LOSS_TOLERANCE:.0e} for the loss, {NORM_TOLERANCE:.0e} for the gradient's norm."
    )
    result.caption_justify = "left"
    return result
