"""Ranks that are stopped or late, hosts that do not answer: what whoever waits is told, and no harm done.

A wait of 5 s is told to a person in one line on standard error (docs/multi-host.md has the texts); the job
goes on. A process that is stopped or slow is no reason to end it, however short the heartbeat limit is.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hosts_network import enter, ip, network
from test_hosts_faults import SOON_S, dead, pid_of, tell_pid

import pycomm
from cases import raises
from hosts_ranks import folder, join, meet, store, wait_for
from ranks import HOST, Died, run_ranks

HERE, APART, PAIR, SPREAD = [0, 0], [0, 1], [0, 1, 1], [0, 1, 2]
CALLS: dict[str, Callable[[pycomm.Communicator, int], Any]] = {
    "all_reduce": lambda comm, victim: comm.all_reduce(torch.ones(200_000)),
    "barrier": lambda comm, victim: comm.barrier(),
    "recv": lambda comm, victim: comm.recv(torch.zeros(3), victim),
}


def warnings_of(text: str, rank: int) -> list[str]:
    return re.findall(rf"^pycomm: rank {rank} has waited .*$", text, re.MULTILINE)


def waits(
    rank: int, size: int, placement: list[int], victim: int, form: str, call: str, away_s: float
) -> int:
    """The victim is stopped, or sleeps, before the call; the others wait for it."""
    comm = join(rank, placement)
    tell_pid(rank)
    comm.barrier()
    pid = pid_of(victim)
    meet(rank, size, "begin")
    if form == "stopped":
        if rank == 0:
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(away_s, os.kill, (pid, signal.SIGCONT)).start()
            (folder() / "stopped").touch()
        wait_for((folder() / "stopped").exists)  # the victim sees it when it goes on
    else:
        time.sleep(away_s if rank == victim else 0.15)
    if call != "recv":
        CALLS[call](comm, victim)
    elif rank == victim:
        comm.send(torch.ones(3), 0)
    elif rank == 0:
        comm.recv(torch.zeros(3), victim)
    comm.barrier()
    comm.close()
    return pid


def warned(capsys: pytest.CaptureFixture[str], *case: Any) -> tuple[str, int]:
    capsys.readouterr()
    pid = run_ranks(len(case[0]), waits, *case, timeout=50)[0]
    return capsys.readouterr().out, pid


@pytest.mark.timeout(90)
@pytest.mark.parametrize("call", ["all_reduce", "barrier"])
def test_a_stopped_rank_of_this_host(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, pid = warned(capsys, HERE, 1, "stopped", call, 6.5)
    who = f"rank 1 (host {HOST}, pid {pid})"
    assert warnings_of(text, 0) == [
        f"pycomm: rank 0 has waited 5 s in {call} #2 for {who}, which is stopped (SIGSTOP) and has not "
        "entered this call (its last: barrier #1)"
    ]


@pytest.mark.timeout(90)
def test_a_late_rank_of_this_host_twice(capsys: pytest.CaptureFixture[str]) -> None:
    text, pid = warned(capsys, HERE, 1, "late", "all_reduce", 11.5)
    five, ten = warnings_of(text, 0)
    end = (
        f"in all_reduce #2 for rank 1 (host {HOST}, pid {pid}), which is sleeping and has not entered this "
        "call (its last: barrier #1)"
    )
    assert five == f"pycomm: rank 0 has waited 5 s {end}"
    assert ten == f"pycomm: rank 0 has waited 10 s {end}"


@pytest.mark.timeout(90)
@pytest.mark.parametrize("form", ["stopped", "late"])
def test_a_rank_alone_on_another_host(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, pid = warned(capsys, APART, 1, form, "all_reduce", 7.0)
    who = f"in all_reduce #2 for rank 1 (host host1, pid {pid}), which"
    what = {
        "stopped": "is stopped or hung (the kernel of its host answers, no process of the job there does)",
        "late": "is sleeping and has not entered this call (its last: barrier #1)",
    }
    assert warnings_of(text, 0) == [f"pycomm: rank 0 has waited 5 s {who} {what[form]}"]


@pytest.mark.timeout(90)
def test_a_stopped_rank_that_another_one_of_its_host_sees(capsys: pytest.CaptureFixture[str]) -> None:
    text, pid = warned(capsys, PAIR, 2, "stopped", "recv", 7.0)
    assert warnings_of(text, 0) == [
        f"pycomm: rank 0 has waited 5 s in recv(tag 0) for rank 2 (host host1, pid {pid}), which is stopped "
        "(SIGSTOP) and is in no collective (its last: barrier #1)"
    ]


@pytest.mark.timeout(90)
def test_who_waits_for_one_that_waits_is_told_for_whom(capsys: pytest.CaptureFixture[str]) -> None:
    text, pid = warned(capsys, PAIR, 2, "stopped", "all_reduce", 7.0)
    (far,) = warnings_of(text, 0)
    assert "for rank 1 (host host1, pid " in far
    assert far.endswith("which is sleeping and is in this call, where it waits for rank 2"), far
    (near,) = warnings_of(text, 1)
    assert f"in all_reduce #2 for rank 2 (host {HOST}, pid {pid}), which is stopped (SIGSTOP)" in near


def off(rank: int, size: int) -> None:
    os.environ["PYCOMM_LOG_LEVEL"] = "off"
    waits(rank, size, HERE, 1, "late", "barrier", 5.6)


@pytest.mark.timeout(60)
def test_the_log_can_be_silent(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, off)
    assert "pycomm:" not in capsys.readouterr().out


def timed_out(rank: int, size: int, placement: list[int], victim: int) -> str:
    comm = join(rank, placement)
    tell_pid(rank)
    comm.barrier()
    meet(rank, size, "begin")
    if rank == victim:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)
    comm.timeout = 2
    try:
        comm.all_reduce(torch.ones(3))
    except pycomm.CommTimeoutError as error:
        text = str(error)
    meet(rank, size - 1, "told")
    if rank == 0:
        os.kill(pid_of(victim), signal.SIGKILL)
    return text


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("placement", "says"),
    [
        (HERE, ", stopped), which has not entered this call; its last collective was barrier"),
        (APART, "which is stopped or hung (the kernel of its host answers"),
    ],
)
def test_the_error_says_the_same(placement: list[int], says: str) -> None:
    results = run_ranks(len(placement), timed_out, placement, 1, may_die=[1], timeout=40)
    assert results[1] == Died(-signal.SIGKILL)
    assert "rank 1 (host" in results[0] and says in results[0], results[0]


# ---- the heartbeat limit --------------------------------------------------------------------------------


def stopped_in_transfer(rank: int, size: int, form: str) -> None:
    """A stopped process takes nothing, and its windows close: its host answers, and so nobody gives it up."""
    comm = join(rank, APART, PYCOMM_HEARTBEAT_TIMEOUT="2")
    tell_pid(rank)
    comm.barrier()
    pid = pid_of(1)
    meet(rank, size, "begin")
    if rank == 0:
        threading.Timer(0.05, os.kill, (pid, signal.SIGSTOP)).start()
        threading.Timer(8.0, os.kill, (pid, signal.SIGCONT)).start()
    end = time.monotonic() + 8.5
    while True:  # rank 0 says when it is over
        if form == "send":
            t = torch.full((8_000_000,), 5.0 * (1 - rank))
            comm.send(t, 1) if rank == 0 else comm.recv(t, 0)
            assert bool((t == 5).all())
        else:
            t = torch.full((8_000_000,), rank + 1.0)
            comm.all_reduce(t)
            assert bool((t == 3).all())
        go_on = torch.tensor([float(time.monotonic() < end)])
        comm.broadcast(go_on, 0)
        if not go_on.item():
            break
    comm.close()


@pytest.mark.timeout(90)
@pytest.mark.parametrize("form", ["send", "all_reduce"])
def test_a_stop_in_mid_transfer_longer_than_the_heartbeat_limit(form: str) -> None:
    run_ranks(2, stopped_in_transfer, form, timeout=50)


def stopped_first(rank: int, size: int) -> None:
    """Stopped before anybody has connected to it: the connection waits as well."""
    comm = join(rank, APART, PYCOMM_HEARTBEAT_TIMEOUT="2")
    tell_pid(rank)
    pid = pid_of(1)
    meet(rank, size, "begin")
    if rank == 0:
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(11.5, os.kill, (pid, signal.SIGCONT)).start()  # longer than a connect may take
    else:
        time.sleep(0.2)
    t = torch.ones(3)
    comm.all_reduce(t)
    assert t.tolist() == [2.0] * 3
    comm.barrier()
    comm.close()


@pytest.mark.timeout(60)
def test_a_rank_that_is_stopped_before_anybody_has_connected() -> None:
    run_ranks(2, stopped_first)


def silent(rank: int, size: int, hosts: list[str]) -> tuple[float, str]:
    enter(hosts[rank])
    os.environ.update({"PYCOMM_HOSTID": f"host{rank}", "PYCOMM_HEARTBEAT_TIMEOUT": "7"})
    comm = pycomm.init(store=store(size), rank=rank, size=size, timeout=60)
    comm.barrier()
    meet(rank, size, "begin")
    begin, text = time.monotonic(), ""
    if rank == 1:
        ip("-n", hosts[1], "link", "set", "eth0", "down")
    meet(rank, size, "down")
    try:
        comm.all_reduce(torch.ones(3)) if rank == 0 else comm.recv(torch.ones(3), 0)
        comm.barrier()
    except pycomm.PeerLostError as error:
        text = str(error)
    took = time.monotonic() - begin
    meet(rank, size, "told")
    return took, text


@pytest.mark.timeout(90)
def test_a_host_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with network(2) as hosts:
        results = run_ranks(2, silent, hosts, timeout=50)
    text = capsys.readouterr().out
    for rank, (took, error) in enumerate(results):
        assert 6.0 < took < 11.0, results
        assert f"rank {1 - rank} (host host{1 - rank}, pid" in error, results
        assert "its host has answered nothing for longer than PYCOMM_HEARTBEAT_TIMEOUT" in error, results
        (line,) = warnings_of(text, rank)
        assert re.search(
            rf"for rank {1 - rank} \(host host{1 - rank}, pid \d+\), whose host has not answered for "
            r"[56]\.\d s \(error at 7 s\)$",
            line,
        ), text


# ---- sockets that a child has inherited -----------------------------------------------------------------


def parent_dies(rank: int, size: int, placement: list[int], victim: int) -> float:
    """The victim has a child, as with a DataLoader's workers, which lives on."""
    comm = join(rank, placement)
    tell_pid(rank)
    comm.all_reduce(torch.ones(5))
    pid = pid_of(victim)
    if rank == victim:
        child = os.fork()
        if child == 0:
            (folder() / "child").write_text(str(os.getpid()))
            time.sleep(60)
            os._exit(0)
        wait_for((folder() / "child").exists)
    meet(rank, size, "begin")
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for(lambda: dead(pid))
    begin = time.monotonic()
    with raises(pycomm.PeerLostError, f"rank {victim} (host", f"pid {pid}"):
        comm.all_reduce(torch.ones(5))
        comm.barrier()
    took = time.monotonic() - begin
    meet(rank, size - 1, "told")
    child_pid = int((folder() / "child").read_text())
    assert not dead(child_pid)
    if rank == 0:
        os.kill(child_pid, signal.SIGKILL)
    return took


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("placement", "victim"), [(HERE, 1), (SPREAD, 1), (PAIR, 2)])
def test_a_death_is_seen_while_a_child_lives(placement: list[int], victim: int) -> None:
    results = run_ranks(len(placement), parent_dies, placement, victim, may_die=[victim], timeout=40)
    assert results.pop(victim) == Died(-signal.SIGKILL)
    assert max(results) < SOON_S


# ---- settings -------------------------------------------------------------------------------------------


def test_defaults_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with pycomm.init() as comm:
        assert comm.timeout == 600.0
    with pycomm.init(timeout=5) as comm:
        assert comm.timeout == 5.0
    monkeypatch.setenv("PYCOMM_LOG_LEVEL", "loud")
    with raises(ValueError, "PYCOMM_LOG_LEVEL must be off, warning or info", "loud"):
        pycomm.init()


def bad_heartbeat(rank: int, size: int, text: str) -> None:
    with raises(ValueError, "PYCOMM_HEARTBEAT_TIMEOUT must be seconds from 1 to 86400", text):
        join(rank, APART, PYCOMM_HEARTBEAT_TIMEOUT=text)


@pytest.mark.parametrize("text", ["0", "soon", "nan"])
def test_a_heartbeat_limit_that_is_none(text: str) -> None:
    run_ranks(2, bad_heartbeat, text)
