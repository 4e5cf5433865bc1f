"""One rank of a bench run: joins the others, sweeps the sizes, on rank 0 prints rows and returns the report.

Run as a module it is what the launcher starts: ``python -m pycomm.bench.worker RUN_DIR`` reads
``RUN_DIR/options.json`` and rank 0 writes ``RUN_DIR/report.json``.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from pycomm.bench import table
from pycomm.bench.buffers import Contents, Memory, Slots, n_slots_for
from pycomm.bench.collectives import bus_factor, places, shape_of
from pycomm.bench.control import Control, launched_by, load_mpi
from pycomm.bench.libraries import Gloo, Library, Mpi, Pycomm
from pycomm.bench.limit import Limit
from pycomm.bench.options import Options
from pycomm.bench.report import Measurement, Report, Row
from pycomm.bench.timing import Case, measure

__all__ = ["run"]

_CONTROL_TIMEOUT_S = 120.0
_PACKAGE = "pycomm-collectives"


def run(options: Options) -> Report | None:
    """Runs this rank's part of the bench; collective over the ranks that were launched together.

    Returns:
        The report on rank 0, None on the others.

    Raises:
        ValueError: the root is not a rank, or pycomm refuses the dtype or operation.
        RuntimeError: no launcher's environment, several hosts, or the mpi peer without mpirun.
    """
    torch.set_num_threads(1)
    if "mpi" in options.peers and "OMPI_COMM_WORLD_RANK" not in os.environ:
        raise RuntimeError("bench: the mpi peer needs ranks that Open MPI's mpirun started (not torchrun)")
    control = Control(_CONTROL_TIMEOUT_S)
    try:
        if options.root >= control.n_ranks:
            raise ValueError(f"bench: root {options.root}: expected a rank below {control.n_ranks}")
        return _Sweep(options, control).run()
    finally:
        control.close()


class _Sweep:
    """The state of a run on one rank."""

    def __init__(self, options: Options, control: Control) -> None:
        self.options, self.control = options, control
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.limit = Limit(control, options.max_bytes)
        self.comm: Any = Pycomm.init() if options.buffers else None
        self.libraries = self._libraries()
        self.report = Report(options, control.n_ranks, _machine(options))
        if options.op == "premul_sum" and options.peers:
            self.report.notes.append("premul_sum: gloo and MPI have no such operation")

    def _libraries(self) -> list[Library]:
        options = self.options
        n_bytes = Memory.n_bytes_for(max(options.max_bytes, 16 * self.control.n_ranks))
        store = [torch.zeros(n_bytes, dtype=torch.uint8) for _ in range(2)]
        ordinary = Memory("ordinary", *store)  # one for all, so that all work on the same pages
        libraries: list[Library] = []
        for kind in options.buffers:
            memory = ordinary if kind == "ordinary" else Pycomm.arena(self.comm, n_bytes)
            libraries.append(Pycomm(self.comm, memory, options.algorithm))
        if "gloo" in options.peers:
            libraries.append(Gloo(ordinary))
        if "mpi" in options.peers:
            libraries.append(Mpi(ordinary))
        return [*libraries, self.limit]

    def run(self) -> Report | None:
        options, show = self.options, self.control.rank == 0
        if show:
            print(table.header(self.report), flush=True)
        sizes = options.sizes()
        end = time.monotonic() + options.max_seconds
        gc.disable()
        for i, n_bytes in enumerate(sizes):
            # agreed, since what the ranks do next depends on it
            [budget_s] = self.control.max([max(0.0, end - time.monotonic()) / (len(sizes) - i)])
            row = self._measure(n_bytes, budget_s)
            self.report.rows.append(row)
            if show:
                print("\n".join(table.row_lines(self.report, row)), flush=True)
            gc.collect()
        gc.enable()
        if self.comm is not None:
            self.comm.close()
        if show:
            print(table.footer(self.report), flush=True)
        return self.report if show else None

    def _measure(self, n_bytes: int, budget_s: float) -> Row:
        options, control = self.options, self.control
        shape = shape_of(
            options.collective, n_bytes, self.dtype.itemsize, control.n_ranks, control.rank, options.root
        )
        real_bytes = shape.n_buffer * self.dtype.itemsize
        contents = Contents(shape, options.op, self.dtype, n_slots_for(real_bytes))
        limit_contents = contents
        if (options.dtype, options.op) != ("float32", "sum"):
            limit_contents = self.limit.contents(shape, self.dtype.itemsize, contents.n_slots)
        regime = self.limit.regime()
        cases = []
        for library in self.libraries:
            for place in places(options.collective):
                slots = Slots(library.memory, limit_contents if library is self.limit else contents, place)
                case = self._try(library, slots)
                if case is not None:
                    cases.append(case)
        gate = self.limit.probe.exchange
        measure(cases, control, gate, options.n_iters, options.n_warmup, budget_s)
        factor = bus_factor(options.collective, control.n_ranks)
        return Row(
            real_bytes, shape.count, regime, [_measurement(case, real_bytes, factor) for case in cases]
        )

    def _try(self, library: Library, slots: Slots) -> Case | None:
        """Binds and makes a first, checked batch; None (and a note) when a peer lacks this call."""
        gate = self.limit.probe.exchange
        problem = ""
        case = None
        try:
            calls = [library.bind(slots, k) for k in range(len(slots.pairs))]
            if calls[0] is not None:
                case = Case(library, slots, [call for call in calls if call is not None])
                case.batch(gate)
        except (RuntimeError, ValueError, TypeError, NotImplementedError, KeyError) as error:
            if library not in self.libraries or library.name in ("pycomm", "limit"):
                raise
            problem = f"{library.name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        [n_failed] = self.control.sum([int(bool(problem))])
        if n_failed:
            note = problem or f"{library.name}: failed on {n_failed} of {self.control.n_ranks} ranks"
            if note not in self.report.notes:
                self.report.notes.append(note)
            return None
        if case is not None:
            case.checked_batch(gate)
        return case


def _measurement(case: Case, n_bytes: int, factor: float) -> Measurement:
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


def _machine(options: Options) -> dict[str, str]:
    cpu = platform.machine()
    with open("/proc/cpuinfo") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    machine = {
        "cpu": f"{models[0]} ({cpu})" if models else cpu,
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if options.buffers:
        machine["pycomm"] = importlib.metadata.version(_PACKAGE) if _installed(_PACKAGE) else "source tree"
    if "mpi" in options.peers:
        machine["mpi"] = load_mpi().Get_library_version().split(",")[0].strip()
    return machine


def _installed(name: str) -> bool:
    return any(True for _ in importlib.metadata.distributions(name=name))


def _main() -> None:
    run_dir = Path(sys.argv[1])
    if launched_by() != "bench":
        sys.exit("pycomm.bench.worker: started by the bench's launcher only; use `pycomm bench`")
    rank = os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
    log = os.open(run_dir / f"rank {rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)  # under mpirun too, every rank's last words are its own
    try:
        report = run(Options.from_json((run_dir / "options.json").read_text()))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # not sys.exit: MPI would wait in its finalisation for ranks that wait for this one
        os._exit(1)
    if report is not None:
        (run_dir / "report.json").write_text(report.to_json())


if __name__ == "__main__":
    _main()
