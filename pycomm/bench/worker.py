"""One rank of a bench run: joins the others, sweeps the sizes, on rank 0 prints rows and returns the report.

Run as a module it is what the launcher starts: ``python -m pycomm.bench.worker RUN_DIR`` reads
``RUN_DIR/options.json`` and rank 0 writes ``RUN_DIR/report.json``.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from pycomm.bench import device_sweep, table
from pycomm.bench.buffers import Contents, Memory, Slots, n_slots_for
from pycomm.bench.collectives import bus_factor, places, shape_of
from pycomm.bench.control import Control, launched_by, load_mpi
from pycomm.bench.libraries import Library, Mpi, Pycomm, Torch
from pycomm.bench.limit import Limit
from pycomm.bench.options import Options
from pycomm.bench.report import Report, Row
from pycomm.bench.sweep import first_case, machine, measurement, sweep
from pycomm.bench.timing import measure

__all__ = ["run"]

_CONTROL_TIMEOUT_S = 120.0


def run(options: Options) -> Report | None:
    """Runs this rank's part of the bench; collective over the ranks that were launched together.

    Returns:
        The report on rank 0, None on the others.

    Raises:
        ValueError: the root is not a rank, or pycomm refuses the dtype or operation.
        RuntimeError: no launcher's environment, several hosts (on the CPU), the mpi peer without mpirun, or
            no CUDA device where one is asked for.
    """
    torch.set_num_threads(1)
    if "mpi" in options.peers and "OMPI_COMM_WORLD_RANK" not in os.environ:
        raise RuntimeError("bench: the mpi peer needs ranks that Open MPI's mpirun started (not torchrun)")
    on_cuda = options.device == "cuda"
    control = Control(_CONTROL_TIMEOUT_S, one_host=not on_cuda)
    try:
        if options.root >= control.n_ranks:
            raise ValueError(f"bench: root {options.root}: expected a rank below {control.n_ranks}")
        return device_sweep.run(options, control) if on_cuda else _Sweep(options, control).run()
    finally:
        control.close()


class _Sweep:
    """The state of a run on CPU tensors, on one rank."""

    def __init__(self, options: Options, control: Control) -> None:
        self.options, self.control = options, control
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self.limit = Limit(control, options.max_bytes)
        self.comm: Any = Pycomm.init() if options.buffers else None
        self.libraries = self._libraries()
        self.report = Report(options, control.n_ranks, machine(options))
        if "mpi" in options.peers:
            version: str = load_mpi().Get_library_version()
            self.report.machine["mpi"] = version.split(",")[0].strip()
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
            libraries.append(Torch("gloo", ordinary, None))
        if "mpi" in options.peers:
            libraries.append(Mpi(ordinary))
        return [*libraries, self.limit]

    def run(self) -> Report | None:
        report = sweep(self.report, self.control, self._measure)
        if self.comm is not None:
            self.comm.close()
        if report is not None:
            print(table.footer(report), flush=True)
        return report

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
        gate, notes = self.limit.probe.exchange, self.report.notes
        for library in self.libraries:
            for place in places(options.collective):
                slots = Slots(library.memory, limit_contents if library is self.limit else contents, place)
                case = first_case(library, slots, gate, control, notes, ("pycomm", "limit"))
                if case is not None:
                    cases.append(case)
        measure(cases, control, gate, options.n_iters, options.n_warmup, budget_s)
        factor = bus_factor(options.collective, control.n_ranks)
        return Row(real_bytes, shape.count, regime, [measurement(case, real_bytes, factor) for case in cases])


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
