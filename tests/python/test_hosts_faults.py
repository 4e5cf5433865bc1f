"""Ranks on several hosts that die, stop, leave, disagree or make bad calls: who is told what, how soon.

As test_faults.py, with ranks that only TCP joins: a rank that is to blame must be named on every host, be it
an owner of a share (engine/hierarchy.h) or not, and within the same times.
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
from hosts_ranks import folder, join, meet, wait_for
from ranks import Died, run_ranks

SOON_S = 3.0  # the promise is a second; this machine may be busy

UNEVEN = [0, 1, 1]  # rank 2 owns no share
PAIRS = [0, 0, 1, 1]
APART = [0, 1, 2]


def dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def tell_pid(rank: int) -> None:
    path = folder() / f"pid-{rank}"
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").rename(path)


def pid_of(rank: int) -> int:
    wait_for((folder() / f"pid-{rank}").exists)
    return int((folder() / f"pid-{rank}").read_text())


# ---- death ----------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[pycomm.Communicator, int], Any]] = {
    "small all_reduce": lambda comm, victim: comm.all_reduce(torch.ones(3)),
    "all_reduce": lambda comm, victim: comm.all_reduce(torch.ones(3_000_000)),
    "broadcast": lambda comm, victim: comm.broadcast(torch.ones(100_000), victim),
    "small broadcast": lambda comm, victim: comm.broadcast(torch.ones(3), victim),
    "all_to_all": lambda comm, victim: comm.all_to_all(
        torch.ones(comm.size * 50_000), torch.ones(comm.size * 50_000)
    ),
    "barrier": lambda comm, victim: comm.barrier(),
}


def killed(rank: int, size: int, placement: list[int], victim: int, call: str, when: str) -> list[Any]:
    comm = join(rank, placement)
    tell_pid(rank)
    pid = pid_of(victim)
    if when != "first":
        comm.barrier()
    meet(rank, size, "begin")
    if rank == victim:
        if when != "moving":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        while True:
            CALLS[call](comm, victim)
    if when == "idle":
        wait_for(lambda: dead(pid))
        time.sleep(0.3)
    begin = time.monotonic()
    with raises(pycomm.PeerLostError, f"rank {victim} (host", f"pid {pid}"):
        while True:
            CALLS[call](comm, victim)
    took = time.monotonic() - begin
    with raises(pycomm.PeerLostError, f"rank {victim} (host"):  # the same again, at once
        comm.barrier()
    with raises(pycomm.PeerLostError, f"rank {victim} (host"):
        comm.all_reduce(torch.ones(3), async_op=True).wait()
    meet(rank, size - 1, "end") if rank != victim else None
    return [took]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("when", ["first", "moving"])
def test_a_killed_rank_is_named_on_all_hosts(call: str, when: str) -> None:
    everywhere = ((APART, 1), (UNEVEN, 2)) if when == "moving" else ((APART, 1), (PAIRS, 3))
    for placement, victim in everywhere[:1] if "broadcast" in call else everywhere:
        results = run_ranks(
            len(placement), killed, placement, victim, call, when, may_die=[victim], timeout=40
        )
        assert results.pop(victim) == Died(-signal.SIGKILL)
        for (took,) in results:
            assert took < SOON_S + (0.3 if when == "moving" else 0.0), (placement, victim, results)


def test_a_rank_that_died_while_all_were_idle() -> None:
    for placement, victim in ((APART, 2), (UNEVEN, 2), (UNEVEN, 1)):
        results = run_ranks(3, killed, placement, victim, "all_reduce", "idle", may_die=[victim], timeout=40)
        assert results.pop(victim) == Died(-signal.SIGKILL)
        assert all(took < SOON_S for (took,) in results)


def killed_in_transfer(rank: int, size: int, form: str) -> None:
    """Rank 1 dies; rank 0 waits in a recv (first contact, or not; from any source), or in a send."""
    comm = join(rank, [0, 1])
    tell_pid(rank)
    if form != "first":
        comm.barrier()
    pid = pid_of(1)
    meet(rank, size, "begin")
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with raises(pycomm.PeerLostError, "rank 1 (host", f"pid {pid}"):
        if form == "send":
            while True:
                comm.send(torch.ones(1_000_000), 1)
        comm.recv(torch.zeros(5), None if form == "any" else 1)
    assert time.monotonic() - begin < SOON_S + 0.3
    with raises(pycomm.PeerLostError, "rank 1 (host"):
        comm.barrier()


@pytest.mark.parametrize("form", ["first", "recv", "any", "send"])
def test_a_rank_killed_during_send_and_recv(form: str) -> None:
    assert run_ranks(2, killed_in_transfer, form, may_die=[1], timeout=40)[1] == Died(-signal.SIGKILL)


# ---- stopped, slow, late --------------------------------------------------------------------------------


def stopped(rank: int, size: int, placement: list[int], victim: int) -> tuple[float, float]:
    """When this rank made its call, and was told."""
    comm = join(rank, placement)
    tell_pid(rank)
    comm.barrier()
    meet(rank, size, "begin")
    pid = pid_of(victim)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)  # the end of the test kills it
    wait_for(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    comm.timeout = 0.5
    begin = time.monotonic()
    error = ""
    try:
        comm.all_reduce(torch.ones(10))
    except pycomm.CommTimeoutError as e:
        error = str(e)
    told = time.monotonic()
    assert f"rank {victim} (host" in error, error
    assert told - begin < SOON_S + 1.5
    (folder() / f"told-{rank}").touch()
    wait_for(lambda: len(list(folder().glob("told-*"))) == size - 1)
    if rank == (victim + 1) % size:
        os.kill(pid, signal.SIGKILL)
    return begin, told


def test_a_stopped_rank_is_named() -> None:
    for placement, victim in ((APART, 1), (UNEVEN, 2), (PAIRS, 2)):
        results = run_ranks(len(placement), stopped, placement, victim, may_die=[victim], timeout=40)
        assert results.pop(victim) == Died(-signal.SIGKILL)
        begins, tolds = zip(*results, strict=True)
        assert min(tolds) - min(begins) > 0.4, "the first whose time is over tells the others"


def slow(rank: int, size: int, placement: list[int]) -> None:
    """A rank that is late by less than the timeout delays the call, and nothing else."""
    with join(rank, placement, timeout=20) as comm:
        for late in range(size):
            if rank == late:
                time.sleep(0.7)
            t = torch.full((200_000,), float(rank))
            comm.all_reduce(t)
            assert bool((t == sum(range(size))).all())
            comm.broadcast(t, late)
            comm.barrier()


def test_a_slow_rank() -> None:
    run_ranks(3, slow, UNEVEN)


# ---- leaving --------------------------------------------------------------------------------------------


def closes(rank: int, size: int, placement: list[int], leaver: int, form: str) -> None:
    """One rank closes early (or only its communicator, or ends); the others call on."""
    comm = join(rank, placement)
    comm.barrier()
    meet(rank, size, "begin")
    if rank == leaver:
        comm.close()
        comm.close()
        with raises(pycomm.CommError, "closed"):
            comm.barrier()
        if form == "stays":  # the process and its network live on
            wait_for(lambda: len(list(folder().glob("told-*"))) == size - 1)
        return
    if form == "late":
        time.sleep(0.5)
    begin = time.monotonic()
    # Those who had no connection with it find none any more.
    how = "closed its communicator" if form == "stays" else "ed"
    with raises(pycomm.PeerLostError, f"rank {leaver} (host", how):
        if form == "recv":
            comm.recv(torch.zeros(3), leaver)
        else:
            comm.all_reduce(torch.ones(3))
    assert time.monotonic() - begin < SOON_S
    with raises(pycomm.PeerLostError, f"rank {leaver}"):
        comm.barrier()
    (folder() / f"told-{rank}").touch()
    wait_for(lambda: len(list(folder().glob("told-*"))) == size - 1)


@pytest.mark.parametrize("form", ["stays", "late", "recv"])
def test_a_rank_that_closes(form: str) -> None:
    for placement, leaver in ((APART, 2), (UNEVEN, 2), (PAIRS, 3)):
        run_ranks(len(placement), closes, placement, leaver, form, timeout=40)


def closes_one_of_two(rank: int, size: int) -> None:
    """A communicator that never carried anything between two ranks is closed on one of them."""
    comm = join(rank, APART)
    other = comm.split(0)
    assert other is not None
    comm.barrier()
    meet(rank, size, "begin")
    if rank == 1:
        other.close()
    else:
        time.sleep(0.3)
        begin = time.monotonic()
        with raises(pycomm.PeerLostError, "rank 1 (host", "closed its communicator"):
            other.broadcast(torch.ones(3), 1)
        assert time.monotonic() - begin < SOON_S
    comm.barrier()  # the first one lives
    comm.close()


def test_closing_one_of_two_communicators() -> None:
    run_ranks(3, closes_one_of_two)


def last_words(rank: int, size: int, n_sockets: str) -> None:
    """What a rank sent before it closed, or ended, arrives, on however many connections."""
    comm = join(rank, [0, 1], PYCOMM_SOCKETS=n_sockets)
    t = torch.full((2_000_000,), 7.0 - 7.0 * rank)
    comm.broadcast(t, 0)
    assert bool((t == 7).all())
    x = torch.full((1_000_000,), 3.0)
    if rank == 0:
        comm.send(x, 1)
        comm.close()
        del comm
        return
    time.sleep(0.2)
    comm.recv(got := torch.zeros(1_000_000), 0)
    assert bool((got == 3).all())
    comm.close()


@pytest.mark.parametrize("n_sockets", ["1", "3"])
def test_what_a_rank_sent_before_it_left_arrives(n_sockets: str) -> None:
    for _ in range(3):
        run_ranks(2, last_words, n_sockets)


def aborts(rank: int, size: int, placement: list[int]) -> None:
    comm = join(rank, placement)
    comm.barrier()
    meet(rank, size, "begin")
    begin = time.monotonic()
    if rank == 0:
        pending = comm.irecv(torch.zeros(1), 1)
        threading.Timer(0.2, comm.abort, ("enough is enough",)).start()
        with raises(pycomm.CommError, "enough is enough"):
            comm.all_reduce(torch.ones(5))
        with raises(pycomm.CommError):
            pending.wait()
    elif rank == 1:
        with raises(pycomm.CommError, "rank 0 (host", "enough is enough"):
            comm.recv(torch.zeros(1), 0)
    else:
        with raises(pycomm.CommError, "rank 0 (host", "enough is enough"):
            comm.all_reduce(torch.ones(5), async_op=True).wait()
    assert time.monotonic() - begin < SOON_S
    begin = time.monotonic()
    comm.abort("again")
    comm.close()
    assert time.monotonic() - begin < SOON_S
    meet(rank, size, "told")


def test_abort() -> None:
    for placement in (APART, UNEVEN, PAIRS):
        run_ranks(len(placement), aborts, placement)


def abort_and_end(rank: int, size: int) -> None:
    """The reason arrives even when the process ends right behind it."""
    comm = join(rank, [0, 1])
    comm.barrier()
    meet(rank, size, "begin")
    if rank == 0:
        comm.abort("the loss is NaN")
        comm.close()
        return
    time.sleep(0.2)
    with raises(pycomm.CommError, "rank 0 (host", "the loss is NaN"):
        comm.barrier()


def test_abort_and_end() -> None:
    run_ranks(2, abort_and_end)


def ctrl_c(rank: int, size: int, placement: list[int], count: int) -> None:
    comm = join(rank, placement)
    comm.barrier()
    meet(rank, size, "begin")
    if rank > 0:
        with raises(pycomm.CommError, "rank 0 (host", "interrupted"):
            time.sleep(0.8)  # so that rank 0 is blocked in its call
            comm.all_reduce(torch.ones(count))
            comm.barrier()
        meet(rank, size, "end")
        return
    begin = time.monotonic()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with raises(KeyboardInterrupt):
        comm.all_reduce(torch.ones(count))
    assert time.monotonic() - begin < SOON_S
    with raises(pycomm.CommError, "interrupted"):
        comm.barrier()
    meet(rank, size, "end")


def test_ctrl_c() -> None:
    for placement in (APART, PAIRS):
        for count in (4, 500_000):
            run_ranks(len(placement), ctrl_c, placement, count)


def raising(rank: int, size: int, placement: list[int]) -> None:
    """A program that ends by an exception, without close: its peers are told, with the reason."""
    comm = join(rank, placement)
    comm.barrier()
    meet(rank, size, "begin")
    if rank == 1:
        with raises(ZeroDivisionError), comm:
            print(1 // 0)
    else:
        with raises(pycomm.CommError, "rank 1 (host", "left by ZeroDivisionError"):
            comm.all_reduce(torch.ones(3))
            comm.barrier()
    meet(rank, size, "end")


def test_a_block_that_ends_by_an_exception() -> None:
    for placement in (APART, UNEVEN):
        run_ranks(3, raising, placement)
