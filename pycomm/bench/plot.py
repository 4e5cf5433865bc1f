"""The run as a picture: bus bandwidth over size, one line for each library, limit dashed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pycomm.bench.options import format_size
from pycomm.bench.report import Report

__all__ = ["check_plot_possible", "plot"]

_STYLES = {
    ("pycomm", "arena"): ("#0b6e4f", "-", "o"),
    ("pycomm", "ordinary"): ("#1f77b4", "-", "o"),
    ("gloo", "ordinary"): ("#d62728", "-", "s"),
    ("mpi", "ordinary"): ("#ff7f0e", "-", "^"),
    ("nccl", "ordinary"): ("#76b900", "-", "s"),
    ("torch-symm-mem", "one-shot"): ("#ee4c2c", "-", "^"),
    ("torch-symm-mem", "two-shot"): ("#ee4c2c", "--", "v"),
    ("limit", "probe"): ("#555555", "--", ""),
}


def check_plot_possible() -> None:
    """Raises RuntimeError when matplotlib is missing, so that a run does not find out at its end."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError("--plot needs matplotlib: pip install matplotlib")


def plot(report: Report, path: Path) -> None:
    """Writes a picture (PNG, or what the suffix says) of the dirtied times: bandwidth, and latency beside it.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    check_plot_possible()
    from matplotlib.figure import Figure

    options = report.options
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    bandwidth, latency = figure.subplots(1, 2)
    for (library, kind), (color, line, marker) in _STYLES.items():
        found = [(row.n_bytes, m) for row in report.rows if (m := row.find(library, kind)) is not None]
        if not found:
            continue
        label = f"pycomm, {kind} tensors" if library == "pycomm" else library
        label += f", {kind}" if library == "torch-symm-mem" else ""
        sizes = [n_bytes for n_bytes, _ in found]
        style = {"color": color, "linestyle": line, "marker": marker, "markersize": 4, "label": label}
        bandwidth.plot(sizes, [m.busbw for _, m in found], **style)
        latency.plot(sizes, [m.time_us for _, m in found], **style)
    ticks = [row.n_bytes for row in report.rows]
    for axes, name in ((bandwidth, "bus bandwidth (GB/s)"), (latency, "time (µs)")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [format_size(n) for n in ticks], rotation=60, fontsize=8)
        axes.set_xlabel("size (bytes)")
        axes.set_ylabel(name)
        axes.grid(True, which="both", alpha=0.25)
    bandwidth.legend(fontsize=8)
    figure.suptitle(
        f"{options.collective}, {report.n_ranks} ranks, {options.dtype}, "
        + ("buffers rewritten before each call" if options.device == "cpu" else "CUDA tensors")
        + (f"\n{report.warning}" if report.warning else ""),
        fontsize=10,
    )
    figure.savefig(path, dpi=130)
