"""Life and death of processes: forks, DataLoader workers, garbage collection, exits, waiting, leftovers."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import pycomm
from cases import raises
from interpreters import run_interpreters
from ranks import HOST, Died, run_ranks


def _child_status(pid: int, seconds: float = 20.0) -> int:
    """The exit code of a forked child; it is killed when it does not end in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the forked child did not end within {seconds} s")


def forks(rank: int, size: int, how: str) -> None:
    comm = pycomm.init(timeout=30)
    t = torch.ones(100)
    comm.all_reduce(t.clone(), async_op=True).wait()  # there is a progress thread
    comm.isend(torch.ones(1), rank)
    pending = comm.irecv(torch.ones(1), (rank + 1) % size, tag=9)  # and one for transfers, that waits
    future = pending.get_future()  # and one of Python
    shared = comm.empty(10).fill_(7.0)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            for call in (
                comm.barrier,
                lambda: comm.all_reduce(t),
                lambda: comm.all_reduce(t, async_op=True).wait(),
                lambda: comm.send(t, 0),
                lambda: comm.recv(t),
                lambda: comm.split(0),
            ):
                with raises(pycomm.CommError, "forked"):
                    call()
            with pycomm.init() if how == "init" else raises(pycomm.CommError, "forked") as mine:
                (mine or comm).barrier()
            if how == "collect":
                del comm, pending, future
                gc.collect()
            code = 0
        finally:
            if how == "exit":
                os._exit(code)
            sys.stdout.flush()
            _leave(code)
    assert _child_status(pid) == 0
    assert bool((shared == 7).all())
    comm.all_reduce(t)
    assert bool((t == size).all())
    comm.send(torch.ones(1), (rank - 1) % size, tag=9)
    pending.wait()
    comm.barrier()
    comm.close()


def _leave(code: int) -> None:
    """What a child does that ends like a script: its atexit functions, and its objects go."""
    import atexit

    atexit._run_exitfuncs()
    gc.collect()
    os._exit(code)


@pytest.mark.parametrize("how", ["exit", "collect", "normal"])
def test_a_forked_child_is_told_and_does_no_harm(how: str) -> None:
    run_ranks(2, forks, how)


def forked_worker_outlives(rank: int, size: int) -> float:
    """A forked child holds copies of its parent's sockets: the parent's death is seen all the same."""
    comm = pycomm.init(timeout=60)
    comm.barrier()
    if rank == 1:
        if os.fork() == 0:
            time.sleep(5.0)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with raises(pycomm.PeerLostError, f"rank 1 (host {HOST}, pid"):
        comm.barrier()
    return time.monotonic() - begin


def test_death_is_seen_past_a_forked_worker() -> None:
    took = run_ranks(2, forked_worker_outlives, may_die=[1])
    assert took[1] == Died(-signal.SIGKILL)
    assert took[0] < 3.0


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([float(i * i)])


def loads_data(rank: int, size: int) -> float:
    with pycomm.init(timeout=60) as comm:
        comm.all_reduce(torch.ones(3), async_op=True).wait()
        loader = torch.utils.data.DataLoader(
            Squares(), batch_size=8, num_workers=2, multiprocessing_context="fork"
        )
        total = 0.0
        for _ in range(2):
            for batch in loader:
                total += float(comm.all_reduce(batch).sum()) / size
        return total


def test_dataloader_with_forked_workers() -> None:
    assert run_ranks(2, loads_data, timeout=90) == [2.0 * sum(i * i for i in range(64))] * 2


def collected(rank: int, size: int) -> None:
    """Communicators that are only forgotten: threads end, peers are told, memory goes with the last use."""
    before = threading.active_count()
    for _ in range(10):
        comm = pycomm.init(timeout=30)
        kept = comm.empty(1000).fill_(2.0)
        comm.all_reduce(kept, async_op=True).wait()
        comm.isend(torch.ones(3), rank)
        comm.barrier()
        del comm
        gc.collect()
        assert bool((kept == 2.0 * size).all())
    assert threading.active_count() == before
    assert len(os.listdir("/proc/self/task")) < 8, "threads are left"
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in _descriptors()]
    assert sum("pycomm-arena" in name for name in names) <= 1, names  # that of `kept`
    comm = pycomm.init(timeout=30)
    comm.barrier()
    if rank == 1:
        del comm
        gc.collect()
    else:
        with raises(pycomm.PeerLostError, "rank 1", "closed its communicator"):
            comm.barrier()


def _descriptors() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")]


def test_a_garbage_collected_communicator() -> None:
    run_ranks(2, collected)


SCRIPT = """
import os, sys, torch, pycomm
comm = pycomm.init(timeout=20)
t = torch.ones(10_000)
comm.all_reduce(t)
work = comm.all_reduce(t, async_op=True)
future = work.get_future() if "future" in sys.argv else None
if "transfer" in sys.argv:
    comm.irecv(t, 1 - comm.rank, tag=5)
if "pending" in sys.argv and comm.rank == 0:
    comm.barrier(async_op=True)
if "global" not in sys.argv:
    del comm
if "error" in sys.argv and comm.rank == 0:
    raise SystemExit(3)
print("bye", flush=True)
"""


@pytest.mark.parametrize(
    "what", ["global", "pending global", "future global", "transfer global", "error global"]
)
def test_the_interpreter_ends_with_no_close(what: str, tmp_path: Path) -> None:
    """Real interpreters, from start to end: pending work, no close; they end in time, with their own code."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    ended = run_interpreters(
        SCRIPT,
        [what.split()] * 2,
        env=lambda rank: {"RANK": str(rank), "WORLD_SIZE": "2", "PYCOMM_RUN_DIR": str(run)},
        timeout=60,
    )
    for rank, (status, output) in enumerate(ended):
        assert status == (3 if "error" in what and rank == 0 else 0), (rank, output)
    assert list(run.iterdir()) == []


def waits(rank: int, size: int, form: str) -> float:
    """CPU seconds that this process used while it waited 2 s for rank 0."""
    with pycomm.init(timeout=60) as comm:
        comm.barrier()
        if rank == 0:
            time.sleep(2.0)
        begin = resource.getrusage(resource.RUSAGE_SELF)
        if form == "collective":
            comm.all_reduce(torch.ones(10))
        elif form == "asynchronous":
            comm.all_reduce(torch.ones(10), async_op=True).wait()
        elif rank == 0:
            for q in range(1, size):
                comm.send(torch.ones(1), q)
        elif form == "recv":
            comm.recv(torch.ones(1), 0)
        else:
            comm.irecv(torch.ones(1), 0).wait()
        end = resource.getrusage(resource.RUSAGE_SELF)
    return end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime


@pytest.mark.parametrize("form", ["collective", "asynchronous", "recv", "irecv"])
def test_waiting_costs_no_processor(form: str) -> None:
    cores = len(os.sched_getaffinity(0))
    for n in (2, cores + 2):
        for used in run_ranks(n, waits, form)[1:]:
            assert used < 0.05 * 2.0, (n, used)


def _left_behind(temp: Path) -> set[str]:
    return {str(p) for p in [*Path("/dev/shm").iterdir(), *temp.glob("pycomm-[!r]*")]}


def leaves_nothing(rank: int, size: int) -> Any:
    comm = pycomm.init(timeout=30)
    comm.empty(100_000).fill_(1.0)
    comm.isend(torch.ones(10), (rank + 1) % size)
    comm.split(0)
    comm.all_reduce(torch.ones(300_000), async_op=True).wait()
    found = os.listdir(os.environ["PYCOMM_RUN_DIR"]), comm._c.pid(rank)
    comm.barrier()
    if rank > 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with raises(pycomm.PeerLostError, "died"):
        comm.barrier()
    return found


def test_killed_ranks_leave_nothing_behind(tmp_path: Path) -> None:
    before = _left_behind(tmp_path)
    found = run_ranks(
        3, leaves_nothing, may_die=[1, 2], env=dict.fromkeys(("XDG_RUNTIME_DIR", "TMPDIR"), str(tmp_path))
    )
    assert found[0][0] == []  # the run folder is empty as soon as all have met
    assert _left_behind(tmp_path) - before == set()
