"""What a rank of the matrix does: joins, calls until it is over or broken, closes, counts what is left.

Nothing here knows which fault it will meet, but for the two that a program makes itself: it is slow (the
board says when), or it makes another call than the others (``differ``).
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from hosts_network import enter

import pycomm
from hosts_ranks import place, store

from .board import Board, wait_until
from .operations import OPERATIONS, N, Step, warm_up

SETTLE_S = 3.0
"""How long a thread or a descriptor may take to go after close()."""
PACE_S = 0.002
"""Between two calls: the matrix runs several jobs on few cores."""


@dataclass(frozen=True)
class Job:
    """What every rank is told; picklable."""

    operation: str
    placement: list[int]  # the host of each rank
    hosts: list[str]  # their namespaces; empty: one machine, shared memory
    folder: str  # the job's own: board, run folder, temporary folder, errors of each rank
    slow_s: float = 0.0  # how slow the last rank is, when the board says so
    differ: str = ""  # what differs in the last rank's calls: op, dtype, count or order
    settings: dict[int, dict[str, str]] = field(default_factory=dict)  # environment by rank


@dataclass
class Report:
    """How a rank ended."""

    outcome: str  # "completed", "wrong result", or the exception's name
    text: str = ""  # of the exception
    at_s: float = 0.0  # time.monotonic() of the end
    joined: bool = False
    n_calls: int = 0
    leaks: list[str] = field(default_factory=list)
    close_s: float = 0.0
    again: str = ""  # what the next call raised


_stores: list[object] = []  # torch removes the file with the last store, and an insider wants to read it


def open_communicator(rank: int, job: Job) -> pycomm.Communicator:
    if not job.hosts:
        return pycomm.init(timeout=60.0)
    size = len(job.placement)
    place(rank, job.placement, PYCOMM_SOCKET_IFNAME="", **job.settings[rank])
    _stores.append(at := store(size))
    return pycomm.init(store=at, rank=rank, size=size, timeout=60.0)


def run(rank: int, size: int, job: Job) -> Report:
    """The whole life of a rank, after its process has begun."""
    descriptor = os.open(Path(job.folder) / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    if job.hosts:
        enter(job.hosts[job.placement[rank]])
    board = Board(Path(job.folder) / "board", size)
    warm_up()
    before = Resources.now()
    report = life(rank, job, board)
    gc.collect()
    report.leaks = before.left_behind()
    return report


def life(rank: int, job: Job, board: Board) -> Report:
    report = Report("completed")
    board.set(rank, "pid", os.getpid())
    comm: pycomm.Communicator | None = None
    try:
        wait_until(lambda: board.join, "the word to join")
        comm = open_communicator(rank, job)
        report.joined = True
        board.set(rank, "ready", 1)
        wait_until(lambda: board.go, "the word to go")
        if not calls(rank, job, board, comm, report):
            report.outcome = "wrong result"
    except Exception as error:
        report.outcome, report.text = type(error).__name__, str(error)
    report.at_s = time.monotonic()
    if comm is not None:
        if comm._c.failed:
            report.again = raised_by(comm.barrier)
        begin_s = time.monotonic()
        comm.close()
        report.close_s = time.monotonic() - begin_s
    return report


def raised_by(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return ""


def calls(rank: int, job: Job, board: Board, comm: pycomm.Communicator, report: Report) -> bool:
    """Calls until the board says that it is over; False at the first wrong result."""
    step = OPERATIONS[job.operation](comm)
    was_slow, i = False, 0
    while True:
        if rank == 0 and board.stop and board.last < 0:
            board.last = i
        board.set(rank, "call", i)
        if rank == comm.size - 1:
            if board.slow and not was_slow:
                was_slow = True
                board.fault_at = time.monotonic()
                time.sleep(job.slow_s)
            if job.differ and board.fault_at:
                different(comm, job, step, i)
        if not step(i):
            return False
        report.n_calls = i + 1
        if 0 <= board.last <= i:
            return True
        i += 1
        time.sleep(PACE_S)


def different(comm: pycomm.Communicator, job: Job, step: Step, i: int) -> None:
    """The call of a program with a bug, in place of the one that the others make."""
    dtype = torch.float64 if job.differ == "dtype" else torch.float32
    n = N - 7 * comm.size if job.differ == "count" else N
    if job.differ == "order":  # a call of another kind first: what the others do later, or never
        comm.barrier() if job.operation != "barrier" else comm.all_reduce(torch.ones(N))
    elif job.operation in ("all_reduce", "DDP step"):
        comm.all_reduce(torch.ones(n, dtype=dtype), "max" if job.differ == "op" else "sum")
    elif job.operation == "broadcast":
        comm.broadcast(torch.ones(n, dtype=dtype), 0)
    elif job.operation == "all_to_all":
        comm.all_to_all(torch.ones(n, dtype=dtype), torch.ones(n, dtype=dtype))


# ---- what is left ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resources:
    """What a process holds: descriptors, threads, children, mappings of shared memory of ours."""

    descriptors: dict[str, str]
    n_threads: int
    children: str
    n_mappings: int

    @staticmethod
    def now() -> Resources:
        descriptors = {}
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the one that lists the folder
                descriptors[number] = os.readlink(f"/proc/self/fd/{number}")
        tasks = os.listdir("/proc/self/task")
        children = ""
        for task in tasks:
            with contextlib.suppress(FileNotFoundError):
                children += Path(f"/proc/self/task/{task}/children").read_text()
        maps = Path("/proc/self/maps").read_text()
        return Resources(descriptors, len(tasks), children, maps.count("memfd:pycomm"))

    def left_behind(self) -> list[str]:
        """What there is now and was not then, in words; waits SETTLE_S for it to go."""
        end_s = time.monotonic() + SETTLE_S
        while (found := self._difference(Resources.now())) and time.monotonic() < end_s:
            time.sleep(0.02)
        return found

    def _difference(self, after: Resources) -> list[str]:
        found = [
            f"descriptor {number} ({what})"
            for number, what in after.descriptors.items()
            if self.descriptors.get(number) != what and "/proc/" not in what
        ]
        if after.n_threads > self.n_threads:
            found.append(f"{after.n_threads - self.n_threads} threads")
        if after.children != self.children:
            found.append(f"child {after.children}")
        if after.n_mappings > self.n_mappings:
            found.append(f"{after.n_mappings - self.n_mappings} mappings of a shared arena")
        return found
