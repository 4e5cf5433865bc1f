"""What a rank does at every size, wherever its tensors are: first calls, the order of things, the report."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pycomm.bench import table
from pycomm.bench.buffers import Slots
from pycomm.bench.control import Control
from pycomm.bench.libraries import Library
from pycomm.bench.options import Options
from pycomm.bench.report import Measurement, Report, Row
from pycomm.bench.timing import Case, Gate

__all__ = ["first_case", "machine", "measurement", "sweep"]

_PACKAGE = "pycomm-collectives"


def sweep(report: Report, control: Control, measure: Callable[[int, float], Row]) -> Report | None:
    """Calls ``measure(bytes, seconds)`` for every size; rank 0 prints what it gives, and gets the report."""
    options, show = report.options, control.rank == 0
    if show:
        print(table.header(report), flush=True)
    sizes = options.sizes()
    end = time.monotonic() + options.max_seconds
    gc.disable()
    for i, n_bytes in enumerate(sizes):
        # agreed, since what the ranks do next depends on it
        [budget_s] = control.max([max(0.0, end - time.monotonic()) / (len(sizes) - i)])
        row = measure(n_bytes, budget_s)
        report.rows.append(row)
        if show:
            print("\n".join(table.row_lines(report, row)), flush=True)
        gc.collect()
    gc.enable()
    return report if show else None


def first_case(
    library: Library, slots: Slots, gate: Gate, control: Control, notes: list[str], required: Sequence[str]
) -> Case | None:
    """Binds and makes a first, checked batch; None (and a note) when a peer lacks this call.

    ``required``: names of the libraries whose failure ends the run.
    """
    problem = ""
    case = None
    try:
        calls = [library.bind(slots, k) for k in range(len(slots.pairs))]
        if calls[0] is not None:
            case = Case(library, slots, [call for call in calls if call is not None])
            case.batch(gate)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, KeyError) as error:
        if library.name in required:
            raise
        problem = f"{library.name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    [n_failed] = control.sum([int(bool(problem))])
    if n_failed:
        note = problem or f"{library.name}: failed on {n_failed} of {control.n_ranks} ranks"
        if note not in notes:
            notes.append(note)
        return None
    if case is not None:
        case.checked_batch(gate)
    return case


def measurement(case: Case, n_bytes: int, factor: float) -> Measurement:
    """A case's samples as what the report keeps."""
    samples = sorted(case.dirtied_ns)
    time_ns, hot_ns = statistics.median(samples), statistics.median(case.hot_ns)
    return Measurement(
        library=case.library.name,
        buffer=case.library.memory.kind,
        place=case.slots.place,
        time_us=time_ns / 1e3,
        best_us=samples[0] / 1e3,
        p90_us=samples[int(0.9 * (len(samples) - 1))] / 1e3,
        hot_us=hot_ns / 1e3,
        n_samples=len(samples),
        algbw=n_bytes / time_ns,
        busbw=n_bytes / time_ns * factor,
        hot_busbw=n_bytes / hot_ns * factor,
        wrong=case.wrong,
    )


def machine(options: Options) -> dict[str, str]:
    """The processor and the versions of what runs."""
    cpu = platform.machine()
    with open("/proc/cpuinfo") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    facts: dict[str, Any] = {
        "cpu": f"{models[0]} ({cpu})" if models else cpu,
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if options.buffers:
        facts["pycomm"] = importlib.metadata.version(_PACKAGE) if _installed(_PACKAGE) else "source tree"
    return facts


def _installed(name: str) -> bool:
    return any(True for _ in importlib.metadata.distributions(name=name))
