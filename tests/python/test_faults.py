"""Real processes that die, stop, close, disagree or make bad calls: who is told what, how soon, what remains.

Refused calls leave a communicator usable; mismatches, losses and timeouts end it (docs/architecture.md).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pycomm
from cases import raises
from ranks import HOST, Died, run_ranks

SOON_S = 3.0  # the promise is a second; this machine may be busy


def folder() -> Path:
    return Path(os.environ["PYCOMM_RUN_DIR"])


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ---- death, stop, leaving -------------------------------------------------------------------------------


def killed(rank: int, size: int, when: str) -> tuple[float, str]:
    """Rank 1 is killed before the call, while it waits in the call, or while data moves."""
    comm = pycomm.init(timeout=60)
    pid, mine = comm._c.pid(1), torch.ones(200_000)
    comm.barrier()
    if rank == 1:
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            comm.all_reduce(mine)
    begin = time.time()
    with raises(pycomm.PeerLostError, f"rank 1 (host {HOST}, pid {pid}", "died"):
        for i in range(10**9):
            if when == "waiting" and i == 1 and rank == 2:
                wait_for(lambda: not os.path.exists(f"/proc/{pid}") or _dead(pid))
                begin = time.time()
            comm.all_reduce(mine)
    took = time.time() - begin
    with raises(pycomm.PeerLostError, "rank 1"):  # the same again, at once
        comm.barrier()
    error = None
    try:
        comm.all_reduce(mine, async_op=True).wait()
    except pycomm.PeerLostError as e:
        error = str(e)
    assert error is not None
    return took, error


def _dead(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"


@pytest.mark.parametrize("when", ["before", "waiting", "moving"])
def test_a_killed_rank_is_named_to_all(when: str) -> None:
    results = run_ranks(4, killed, when, may_die=[1])
    assert results[1] == Died(-signal.SIGKILL)
    for rank in (0, 2, 3):
        took, error = results[rank]
        assert took < SOON_S + (0.3 if when != "before" else 0.0), (rank, took, error)


def stopped(rank: int, size: int) -> None:
    comm = pycomm.init(timeout=30)
    pid = comm._c.pid(1)
    comm.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # the end of the test kills it
    wait_for(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    comm.timeout = 0.5
    with raises(
        pycomm.CommTimeoutError,
        f"rank 1 (host {HOST}, pid {pid}, stopped)",
        "all_reduce/one_shot #2",
        "barrier",
    ):
        comm.all_reduce(torch.ones(10))
    os.kill(pid, signal.SIGKILL)


def test_a_stopped_rank_is_named() -> None:
    assert run_ranks(2, stopped, may_die=[1])[1] == Died(-signal.SIGKILL)


def closes(rank: int, size: int) -> None:
    comm = pycomm.init(timeout=30)
    comm.barrier()
    if rank == 2:
        comm.close()
        comm.close()
        for call in (
            comm.barrier,
            lambda: comm.all_reduce(torch.ones(1)),
            lambda: comm.send(torch.ones(1), 0),
        ):
            with raises(pycomm.CommError, "closed"):
                call()
        with raises(pycomm.CommError, "closed"):
            comm.all_reduce(torch.ones(1), "nonsense")
        assert "closed" in repr(comm)
        return
    begin = time.monotonic()
    with raises(pycomm.PeerLostError, "rank 2", "closed its communicator"):
        comm.all_reduce(torch.ones(3))
    assert time.monotonic() - begin < SOON_S
    assert "failed" in repr(comm)
    with raises(pycomm.PeerLostError, "rank 2"):
        comm.barrier()


def test_a_rank_that_closes() -> None:
    run_ranks(3, closes)


def aborts(rank: int, size: int) -> None:
    """abort from another thread ends the blocked call here, and the peers' calls."""
    comm = pycomm.init(timeout=60)
    comm.barrier()
    begin = time.monotonic()
    if rank == 0:
        pending = comm.irecv(torch.zeros(1), 1)
        threading.Timer(0.2, comm.abort, ("enough is enough",)).start()
        with raises(pycomm.CommError, "enough is enough"):
            comm.all_reduce(torch.ones(5))
        with raises(pycomm.CommError):
            pending.wait()
    elif rank == 1:
        with raises(pycomm.CommError, f"rank 0 (host {HOST}, pid", "enough is enough"):
            comm.recv(torch.zeros(1), 0)
    else:
        with raises(pycomm.CommError, f"rank 0 (host {HOST}, pid", "enough is enough"):
            comm.barrier(async_op=True).wait()
    assert time.monotonic() - begin < SOON_S
    begin = time.monotonic()
    comm.abort("again")
    comm.close()
    assert time.monotonic() - begin < SOON_S
    folder().joinpath(str(rank)).touch()  # nobody leaves before all have looked
    wait_for(lambda: len(list(folder().iterdir())) == size)


def test_abort_from_another_thread() -> None:
    run_ranks(3, aborts)


def ctrl_c(rank: int, size: int, form: str) -> None:
    comm = pycomm.init(timeout=60)
    comm.barrier()
    if rank > 0:
        with raises(pycomm.CommError, f"rank 0 (host {HOST}, pid", "interrupted"):
            time.sleep(1.0)  # so that rank 0 is blocked in its call
            _calls(comm, form)
            comm.barrier()
        return
    begin = time.monotonic()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with raises(KeyboardInterrupt):
        _calls(comm, form)
    assert time.monotonic() - begin < SOON_S
    with raises(pycomm.CommError, "interrupted"):
        comm.barrier()


def _calls(comm: pycomm.Communicator, form: str) -> None:
    if form == "queued":
        comm.barrier(async_op=True)
    comm.all_reduce(torch.ones(4 if form == "small" else 500_000))


@pytest.mark.parametrize("form", ["small", "large", "queued"])
def test_ctrl_c_in_a_blocked_call(form: str) -> None:
    run_ranks(3, ctrl_c, form)


def ctrl_c_while_waiting(rank: int, size: int) -> None:
    """Ctrl-C in Work.wait interrupts the wait; the call goes on (a small one may be its waiter's own)."""
    with pycomm.init(timeout=60) as comm:
        if rank == 1:
            time.sleep(0.8)
        t = torch.ones(100_000)
        work = comm.all_reduce(t, async_op=True)
        if rank == 0:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            with raises(KeyboardInterrupt):
                work.wait()
        work.wait()
        assert t.unique().tolist() == [2.0]
        comm.barrier()


def test_ctrl_c_in_wait() -> None:
    run_ranks(2, ctrl_c_while_waiting)


def ctrl_c_in_close(rank: int, size: int, form: str) -> None:
    """close() waits for queued calls whose peer does not come: Ctrl-C ends the wait and the communicator."""
    comm = pycomm.init(timeout=60)
    comm.barrier()
    closed = folder() / "closed"
    if rank == 1:
        wait_for(closed.exists)
        with raises(pycomm.CommError, f"rank 0 (host {HOST}, pid", "interrupted while closing (Ctrl-C)"):
            comm.all_reduce(torch.ones(500_000))  # (a small one may find all that it needs)
        return
    works = [comm.all_reduce(torch.ones(500_000), async_op=True) for _ in range(3)]
    begin = time.monotonic()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with raises(KeyboardInterrupt):
        if form == "close":
            comm.close()
        else:
            with comm:
                pass
    assert 0.2 < time.monotonic() - begin < SOON_S
    for work in works:
        assert work.is_completed()
        assert type(work.exception()) is pycomm.CommError
    comm.close()  # again: nothing
    with raises(pycomm.CommError, "closed"):
        comm.barrier()
    closed.touch()


@pytest.mark.parametrize("form", ["close", "with"])
def test_ctrl_c_in_close(form: str) -> None:
    run_ranks(2, ctrl_c_in_close, form)


# ---- calls that differ ----------------------------------------------------------------------------------


def _make(comm: pycomm.Communicator, what: str, odd: bool) -> None:
    t, big = torch.ones(8), torch.ones(60_000)
    n = comm.size
    if what == "op":
        comm.all_reduce(t, "max" if odd else "sum")
    elif what == "dtype":
        comm.all_reduce(t.double() if odd else t)
    elif what == "count":
        comm.all_reduce(torch.ones(9) if odd else t)
    elif what == "large count":
        comm.all_reduce(t if odd else big)
    elif what == "root":
        comm.broadcast(t, 1 if odd else 0)
    elif what == "algorithm":
        comm.all_reduce(big, algorithm="direct" if odd else "ring")
    elif what == "deterministic":
        comm.all_reduce(t, deterministic=odd)
    elif what == "counts":
        counts = [2] * n if not odd else [2] * (n - 2) + [1, 3]
        comm.all_gather(torch.ones(2 * n), torch.ones(counts[comm.rank]), counts=counts)
    elif what == "collective":
        comm.barrier() if odd else comm.all_reduce(t)
    elif what == "order":
        comm.broadcast(big) if odd else comm.all_reduce(big)
        comm.all_reduce(big) if odd else comm.broadcast(big)
    elif what == "all_to_all":  # rank 1 sends rank 0 more than it expects
        sends = [3 if odd else 2] + [2] * (n - 1)
        comm.all_to_all(torch.ones(2 * n), torch.ones(sum(sends)), [2] * n, sends)
        comm.barrier()
    elif what == "asynchronous":
        comm.all_reduce(t, "min" if odd else "sum", async_op=True).wait()


#: what differs -> what the message has, of both sides
DIFFERENCES = {
    "op": ("sum, float32", "max, float32"),
    "dtype": ("float32", "float64"),
    "count": ("count 8", "count 9"),
    "large count": ("count 60000", "count 8"),
    "root": ("root 0", "root 1"),
    "algorithm": ("all_reduce/ring", "all_reduce/direct"),
    "deterministic": ("all_reduce",),
    "counts": ("all_gather",),
    "collective": ("barrier", "all_reduce"),
    "order": ("broadcast", "all_reduce"),
    "all_to_all": ("rank 1 sends 3 elements to rank 0, which expects 2",),
    "asynchronous": ("min, float32", "sum, float32"),
}


def differs(rank: int, size: int, what: str) -> float:
    comm = pycomm.init(timeout=60)
    comm.all_reduce(torch.ones(3))
    begin = time.monotonic()
    with raises(pycomm.MismatchError, *DIFFERENCES[what]):
        _make(comm, what, rank == 1)
    took = time.monotonic() - begin
    with raises(pycomm.MismatchError, *DIFFERENCES[what]):
        comm.barrier()
    with raises(pycomm.MismatchError):
        comm.all_reduce(torch.ones(3), async_op=True).wait()
    return took


@pytest.mark.parametrize("what", DIFFERENCES)
def test_calls_that_differ(what: str) -> None:
    for n in (2, 3):
        assert max(run_ranks(n, differs, what)) < SOON_S
