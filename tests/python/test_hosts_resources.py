"""What a process holds, leaves and runs out of: inherited sockets, folders, descriptors, memory.

Each is made by what really does it: fork, os._exit, setrlimit, a DataLoader's worker. On one host, and on
several ones played by loopback (hosts_ranks.py).
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
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

pytestmark = pytest.mark.timeout(120)

SOON_S = 3.0  # the promise is a second; this machine may be busy

ONE_HOST: list[int] = [0, 0, 0]
APART = [0, 1, 2]
PAIRS = [0, 0, 1, 1]


def joined(rank: int, placement: list[int], **settings: str) -> pycomm.Communicator:
    """As `join`; all ranks on one host meet as usual there."""
    return join(rank, placement, timeout=30.0, **settings)


def left_behind() -> list[str]:
    """Files of ours in the test's own folder for temporary files."""
    return [path.name for path in (folder() / "tmp").iterdir()]


# ---- ends ------------------------------------------------------------------------------------------------


class _Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor(float(i))

    def __len__(self) -> int:
        return 1000


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def with_a_worker(rank: int, size: int, placement: list[int], how: str) -> float:
    """The last rank dies while a process that it forked holds whatever it inherited."""
    victim = size - 1
    comm = joined(rank, placement)
    comm.all_reduce(torch.ones(100_000))  # the connections are there when it forks
    if rank == victim:
        if how == "fork":
            if (child := os.fork()) == 0:
                time.sleep(30)  # (longer than anybody waits for it)
                os._exit(0)
        else:
            batches = iter(torch.utils.data.DataLoader(_Numbers(), num_workers=1, batch_size=2))
            assert next(batches).tolist() == [0.0, 1.0]
            child = batches._workers[0].pid  # type: ignore[attr-defined]
        (folder() / "child.part").write_text(f"{os.getpid()} {child}")
        (folder() / "child.part").rename(folder() / "child")
    else:
        wait_for((folder() / "child").exists)
    meet(rank, size, "begin")
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    pid, child = map(int, (folder() / "child").read_text().split())
    begin = time.monotonic()
    with raises(pycomm.PeerLostError, f"rank {victim} (host", f"pid {pid}"):
        while True:
            comm.all_reduce(torch.ones(100_000))
    took = time.monotonic() - begin
    assert state(child) not in "ZX", "the child still holds what it inherited"
    meet(rank, size - 1, "told")
    if rank == 0:
        os.kill(child, signal.SIGKILL)
    return took


@pytest.mark.parametrize("how", ["fork", "DataLoader"])
@pytest.mark.parametrize("placement", [ONE_HOST, APART, PAIRS], ids=["one host", "apart", "pairs"])
def test_a_child_that_holds_a_dead_ranks_sockets(placement: list[int], how: str) -> None:
    victim = len(placement) - 1
    results = run_ranks(len(placement), with_a_worker, placement, how, may_die=[victim], timeout=60)
    assert results.pop(victim) == Died(-signal.SIGKILL)
    assert max(results) < SOON_S


def without_close(rank: int, size: int, placement: list[int]) -> None:
    os.environ["XDG_RUNTIME_DIR"] = str(folder() / "tmp")
    comm = joined(rank, placement)
    comm.barrier()
    meet(rank, size, "begin")
    if rank == size - 1:
        os._exit(7)
    begin = time.monotonic()
    with raises(pycomm.PeerLostError, f"rank {size - 1} (host"):
        while True:
            comm.all_reduce(torch.ones(100))
    assert time.monotonic() - begin < SOON_S
    meet(rank, size - 1, "told")
    assert left_behind() == []


@pytest.mark.parametrize("placement", [ONE_HOST, APART, PAIRS], ids=["one host", "apart", "pairs"])
def test_a_process_that_ends_without_close(placement: list[int]) -> None:
    victim = len(placement) - 1
    results = run_ranks(len(placement), in_its_tmp, without_close, placement, may_die=[victim], timeout=60)
    assert results[victim] == Died(7)


def in_its_tmp(rank: int, size: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Calls it with a folder for temporary files that is the test's own."""
    (folder() / "tmp").mkdir(mode=0o700, exist_ok=True)
    os.environ["XDG_RUNTIME_DIR"] = str(folder() / "tmp")
    return fn(rank, size, *args)


# ---- descriptors -----------------------------------------------------------------------------------------

PORTS = range(47050, 47058)


def few_descriptors(rank: int, size: int) -> None:
    """Strangers take what rank 0 has left; the job goes on, and hears who comes when they have gone."""
    ports = f"{PORTS[0]}-{PORTS[-1]}"
    with joined(rank, [0, 1, 2], PYCOMM_PORT_RANGE=ports) as comm:
        pair = comm.new_group([0, 1])
        t = torch.ones(10)
        if pair is not None:
            pair.all_reduce(t)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        if rank == 0:
            highest = max(int(name) for name in os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 3, limits[1]))
        meet(rank, size, "few")
        if rank == 2:
            strangers = crowd(60)
            (folder() / "crowded").touch()
            wait_for((folder() / "gone on").exists)
            for stranger in strangers:
                stranger.close()
            (folder() / "gone").touch()
        if pair is not None:
            wait_for((folder() / "crowded").exists)
            for i in range(50):
                t.fill_(i + rank)
                pair.all_reduce(t)
                assert bool((t == 2 * i + 1).all())
            pair.barrier()
            if rank == 1:  # rank 0 may have no descriptor for it
                (folder() / "gone on").touch()
            wait_for((folder() / "gone").exists)
            pair.close()
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        meet(rank, size, "many")
        t.fill_(rank + 1)
        comm.all_reduce(t)
        assert bool((t == 6).all())
        comm.barrier()


def crowd(n: int) -> list[socket.socket]:
    """So many silent connections to whatever listens at the ports."""
    found: list[socket.socket] = []
    while len(found) < n:
        for port in PORTS:
            with contextlib.suppress(OSError):
                found.append(socket.create_connection(("127.0.0.1", port), 1))
    return found


def test_the_limit_of_descriptors_while_strangers_connect() -> None:
    run_ranks(3, few_descriptors, timeout=60)


# ---- memory ----------------------------------------------------------------------------------------------


def no_more_files() -> None:
    """The shared arena, which is a file of memory, cannot grow; nor can other files beyond 4 KiB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def full_at_init(rank: int, size: int, placement: list[int]) -> None:
    if rank == size - 1:
        no_more_files()
    begin = time.monotonic()
    named = [] if rank == size - 1 else [f"rank {size - 1} ", "cannot join"]
    with raises(pycomm.CommError, "shared arena: no memory", *named):
        joined(rank, placement)
    assert time.monotonic() - begin < SOON_S + 2
    meet(rank, size, "told")
    assert left_behind() == []


@pytest.mark.parametrize("placement", [ONE_HOST, APART, PAIRS], ids=["one host", "apart", "pairs"])
def test_no_memory_for_the_arena_at_init(placement: list[int]) -> None:
    run_ranks(len(placement), in_its_tmp, full_at_init, placement)


def full_at_split(rank: int, size: int, placement: list[int]) -> None:
    """Every rank is told, and what was there goes on."""
    with joined(rank, placement) as comm:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        groups = []
        if rank == size - 1:
            no_more_files()
        with raises(pycomm.CommError, "no memory"):
            for _ in range(200):  # until what the arena has is used up
                groups.append(comm.split(0))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert comm.all_reduce(torch.ones(1)).item() == size
        for group in groups:
            assert group is not None
            assert group.all_reduce(torch.ones(1)).item() == size
            group.close()
        again = comm.split(0)
        assert again is not None and again.all_reduce(torch.ones(1)).item() == size
        again.close()
        comm.barrier()


@pytest.mark.parametrize("placement", [ONE_HOST, PAIRS], ids=["one host", "pairs"])
def test_no_memory_for_the_arena_at_split(placement: list[int]) -> None:
    run_ranks(len(placement), full_at_split, placement)


def full_at_empty(rank: int, size: int) -> None:
    """A tensor that finds no room is an error of this rank alone."""
    with joined(rank, ONE_HOST) as comm:
        if rank == 1:
            no_more_files()
            with raises(pycomm.CommError, "shared arena: no memory"):
                comm.empty(10_000_000)
        assert comm.all_reduce(torch.ones(300_000)).sum().item() == size * 300_000
        comm.barrier()


def test_no_memory_for_a_tensor() -> None:
    run_ranks(3, full_at_empty)
