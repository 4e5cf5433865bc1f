"""One rank of a bench run on CUDA tensors: nccl-tests' way of measuring, and its table.

All libraries work on tensors of this rank's GPU, in turns. A *loop* is so many calls in a row on the same
buffers, begun by all ranks together and timed by CUDA events on torch's current stream; a sample is a loop's
time divided by its calls, the largest over ranks. Before and after the loops a call on fresh exact inputs is
compared with the right result. Where CUDA is emulated everything runs on the host and times mean nothing.
"""

from __future__ import annotations

import math
import os
import time

import torch
import torch.distributed as dist

from pycomm import devices
from pycomm.bench import table
from pycomm.bench.buffers import Contents, Memory, Slots
from pycomm.bench.collectives import bus_factor, places, shape_of
from pycomm.bench.control import Control
from pycomm.bench.libraries import Library, Pycomm, SymmetricMemory, Torch
from pycomm.bench.options import Options
from pycomm.bench.report import Report, Row
from pycomm.bench.sweep import first_case, machine, measurement, sweep
from pycomm.bench.timing import Case, Gate
from pycomm.errors import CommError

__all__ = ["run"]

_LOOP_S = 0.010
_MIN_ROUNDS = 3
_ALIGNMENT = 256
_EMULATED = "emulated: no time here means anything"
_SHARED = "SEVERAL RANKS SHARE A GPU: they wait for each other, and no time is that of a GPU a rank"


def run(options: Options, control: Control) -> Report | None:
    """Sweeps the sizes; the report on rank 0.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    return _DeviceSweep(options, control).run()


class _DeviceSweep:
    """The state of a run on one rank."""

    def __init__(self, options: Options, control: Control) -> None:
        self.options, self.control = options, control
        self.device = devices.take()
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        self._n_bytes = max(options.max_bytes, 16 * control.n_ranks) + _ALIGNMENT
        os.environ.setdefault("PYCOMM_DEVICE_ARENA", str(2 * (self._n_bytes + (1 << 20))))
        self.report = Report(options, control.n_ranks, {**machine(options), **devices.facts()})
        self.report.warning = self._warning()
        self.comm = Pycomm.init()
        self._ordinary = self._memory()
        ours = self._ours()
        self.required = [library.name for library in ours]
        self.libraries = [*ours, *self._peers()]

    def _warning(self) -> str:
        if devices.is_emulated():
            return _EMULATED
        gpu = str(torch.cuda.get_device_properties(self.device).uuid)
        gpus = self.control.exchange("gpu", gpu)
        return _SHARED if len(set(gpus)) < len(gpus) else ""

    def _memory(self) -> Memory:
        both = (torch.zeros(self._n_bytes, dtype=torch.uint8, device=self.device) for _ in range(2))
        return Memory("ordinary", *both)

    def _ours(self) -> list[Library]:
        """pycomm's own choice on each kind of buffer, and the algorithm that was asked for."""
        options = self.options
        ours: list[Library] = []
        for kind in options.buffers:
            memory = self._arena() if kind == "arena" else self._ordinary
            if memory is not None:
                ours.append(Pycomm(self.comm, memory, None))
        if (name := options.beside()) is not None:
            ours.append(Pycomm(self.comm, self._ordinary, options.algorithm, name))
        return ours

    def _arena(self) -> Memory | None:
        """Memory that peers reach; None, and a note of the report, where some rank has none.

        Raises:
            CommError: nothing else was asked for.
        """
        memory, problem = None, ""
        where = f"cuda:{self.control.rank}" if devices.is_emulated() else self.device
        try:
            memory = Pycomm.arena(self.comm, self._n_bytes, where)
        except CommError as error:
            if self.options.buffers == ("arena",) or not self.comm.device_description:  # a rank has no device
                raise
            problem = str(error)
        [n_failed] = self.control.sum([int(bool(problem))])
        if n_failed == 0:
            return memory
        self.report.notes.append(f"no arena: {problem or f'failed on {n_failed} ranks'}")
        return None

    def _peers(self) -> list[Library]:
        peers: list[Library] = []
        if not self.options.peers:
            return peers
        group = dist.new_group(backend="nccl")
        if "nccl" in self.options.peers:
            peers.append(Torch("nccl", self._ordinary, group))
        if SymmetricMemory.name in self.options.peers:
            made, problem = SymmetricMemory.both(group, self._n_bytes, self.device)
            [n_failed] = self.control.sum([int(bool(problem))])
            peers += made if n_failed == 0 else []
            if n_failed:
                self.report.notes.append(problem or f"{SymmetricMemory.name}: failed on {n_failed} ranks")
        return peers

    def run(self) -> Report | None:
        report = sweep(self.report, self.control, self._measure)
        self.comm.close()
        if report is not None:
            print(table.footer(report), flush=True)
        return report

    def _gate(self) -> None:
        """The device has done what it was given, on every rank."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.control.barrier()

    def _measure(self, n_bytes: int, budget_s: float) -> Row:
        options, control = self.options, self.control
        shape = shape_of(
            options.collective, n_bytes, self.dtype.itemsize, control.n_ranks, control.rank, options.root
        )
        real_bytes = shape.n_buffer * self.dtype.itemsize
        contents = Contents(shape, options.op, self.dtype, 1, self.device)
        cases = []
        for library in self.libraries:
            for place in places(options.collective):
                slots = Slots(library.memory, contents, place)
                case = first_case(library, slots, self._gate, control, self.report.notes, self.required)
                if case is not None:
                    cases.append(case)
        _time(cases, control, self._gate, self.device, options, budget_s)
        factor = bus_factor(options.collective, control.n_ranks)
        measured = [measurement(case, real_bytes, factor) for case in cases]
        return Row(real_bytes, shape.count, None, measured)


def _loop(case: Case, n_calls: int, gate: Gate, device: torch.device) -> float:
    """Nanoseconds of a call of a loop, on this rank."""
    call = case.calls[0]

    def calls() -> None:
        for _ in range(n_calls):
            call()

    gate()
    call()  # all ranks' devices begin the loop at its end
    return devices.seconds_of(calls, device) / n_calls * 1e9


def _time(
    cases: list[Case], control: Control, gate: Gate, device: torch.device, options: Options, budget_s: float
) -> None:
    """Fills every case's samples, in rounds over the cases; collective, on cases that were called once."""
    end = time.monotonic() + budget_s
    for case in cases:
        case.slots.zero()  # which every reduction maps to itself
        [call_ns] = control.max([_loop(case, max(1, options.n_warmup), gate, device)])
        case.n_hot = max(1, min(options.n_iters, int(_LOOP_S * 1e9 / max(call_ns, 1.0))))
    n_rounds = 0
    while True:
        for case in cases:
            case.slots.zero()
            case.hot_ns.append(_loop(case, case.n_hot, gate, device))
        n_rounds += 1
        unfinished = any(n_rounds < math.ceil(options.n_iters / case.n_hot) for case in cases)
        again = n_rounds < _MIN_ROUNDS or (unfinished and time.monotonic() < end)
        if not control.decide(again):
            break
    for case in cases:
        case.checked_batch(gate)
        case.hot_ns = control.max(case.hot_ns)
        case.dirtied_ns = case.hot_ns
    for case, wrong in zip(cases, control.sum([case.wrong for case in cases]), strict=True):
        case.wrong = wrong
