"""``shrink()`` among processes that are killed, stopped or cut off: who goes on, and with what.

The agreement itself is tested in tests/cpp/engine/shrink_test.cc, also with random kills. Here is what a
program sees: the error, the new communicator, which serves everything, training that goes on; and the rank
that was left out, which is told so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts_network import enter, ip, network

import pycomm
from cases import raises
from hosts_ranks import folder, join, meet, wait_for
from ranks import Died, run_ranks

pytestmark = pytest.mark.timeout(120)

#: Shrinking takes milliseconds; a dead rank is known after a slice of 100 ms. This machine may be busy.
SOON_S = 8.0
KILLED = Died(-signal.SIGKILL)
Placement = list[int] | None  # None: all on one host


def start(rank: int, placement: Placement, timeout: float = 60.0) -> pycomm.Communicator:
    return pycomm.init(timeout=timeout) if placement is None else join(rank, placement, timeout=timeout)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def until_error(comm: pycomm.Communicator, call: str = "all_reduce") -> pycomm.CommError:
    """Calls until it raises."""
    try:
        while True:
            if call == "broadcast":
                comm.broadcast(torch.ones(50_000), 0)
            else:
                comm.all_reduce(torch.ones(50_000))
    except pycomm.CommError as error:
        return error


def serves(comm: pycomm.Communicator) -> None:
    """Every kind of call gives what it should."""
    n, rank = comm.size, comm.rank
    for count in (1, 1000, 300_000):
        t = torch.full((count,), float(rank + 1))
        comm.all_reduce(t)
        assert bool((t == n * (n + 1) / 2).all())
    inside = comm.empty(5000)
    inside.fill_(rank + 1)
    comm.all_reduce(inside, op="max")
    assert bool((inside == n).all())
    t = torch.full((7,), float(rank))
    comm.broadcast(t, n - 1)
    assert bool((t == n - 1).all())
    comm.all_gather(everything := torch.zeros(2 * n), torch.full((2,), float(rank)))
    assert everything.tolist() == [float(q) for q in range(n) for _ in range(2)]
    comm.all_to_all(got := torch.zeros(n), torch.arange(n) + 10.0 * rank)
    assert got.tolist() == [10.0 * q + rank for q in range(n)]
    work = comm.all_reduce(t := torch.ones(40_000), async_op=True)
    work.wait()
    assert bool((t == n).all())
    sending = comm.isend(torch.tensor([rank]), (rank + 1) % n, tag=3)
    comm.recv(told := torch.tensor([-1]), (rank - 1) % n, tag=3)
    sending.wait()
    assert told.item() == (rank - 1) % n
    half = comm.split(rank % 2)
    assert half is not None and half.size == (n + 1 - rank % 2) // 2
    half.barrier()
    half.close()
    comm.barrier()


def survives(
    rank: int, size: int, placement: Placement, victims: list[int], late: list[int], call: str
) -> list[Any]:
    """``victims`` are killed while all call; ``late`` are killed while they shrink."""
    comm = start(rank, placement)
    comm.barrier()
    meet(rank, size, "begin")  # between hosts, who is still in the barrier would be told there
    if rank in victims:
        kill_self()
    error = until_error(comm, call)
    assert isinstance(error, pycomm.PeerLostError), error
    begin = time.monotonic()
    if rank in late:
        threading.Timer(0.002, kill_self).start()
    ranks = [q for q in range(size) if q not in victims + late]
    old, comm = comm, comm.shrink()
    with contextlib.suppress(pycomm.CommError):
        while rank in late:
            comm.barrier()
    while comm.size > len(ranks):  # one died between the agreement and its first call
        until_error(comm)
        comm = comm.shrink()
    took = time.monotonic() - begin
    assert ranks[comm.rank] == rank and comm.size == len(ranks)
    with pytest.raises(pycomm.CommError):
        old.barrier()
    old.close()
    serves(comm)
    comm.close()
    return [took]


def check_survivors(size: int, placement: Placement, victims: list[int], late: list[int], call: str) -> None:
    results = run_ranks(size, survives, placement, victims, late, call, may_die=victims + late, timeout=60)
    for rank, result in enumerate(results):
        if rank in victims + late:
            assert result == KILLED
        else:
            assert result[0] < SOON_S, results


@pytest.mark.parametrize(
    ("size", "victims", "late"),
    [(2, [1], []), (2, [0], []), (4, [2], []), (5, [1, 3], []), (5, [0], [4]), (4, [1], [0, 2])],
    ids=["1 of 2", "rank 0 of 2", "1 of 4", "2 of 5", "1 of 5 and 1 later", "1 of 4 and 2 later"],
)
def test_killed_ranks(size: int, victims: list[int], late: list[int]) -> None:
    check_survivors(size, None, victims, late, "all_reduce")


def test_the_root_of_a_broadcast_is_killed() -> None:
    check_survivors(4, None, [0], [], "broadcast")


@pytest.mark.parametrize(
    ("placement", "victims", "late"),
    [
        ([0, 0, 1, 1], [3], []),
        ([0, 0, 1, 1], [0], []),
        ([0, 0, 1, 1], [1], [2]),
        ([0, 0, 1, 1], [2, 3], []),  # a whole host
        ([0, 1], [1], []),
        ([0, 1, 2], [0], []),
        ([0, 1, 0, 2, 2], [0, 1], []),
    ],
    ids=str,
)
def test_killed_ranks_on_several_hosts(placement: list[int], victims: list[int], late: list[int]) -> None:
    check_survivors(len(placement), placement, victims, late, "all_reduce")


def cannot_go_on(rank: int, size: int, placement: list[int], victims: list[int]) -> float:
    comm = start(rank, placement)
    comm.barrier()
    meet(rank, size, "begin")
    if rank in victims:
        kill_self()
    until_error(comm)
    begin = time.monotonic()
    with raises(pycomm.PeerLostError, "cannot go on", f"{size - len(victims)} of the {size} ranks"):
        comm.shrink()
    took = time.monotonic() - begin
    meet(rank, size - len(victims), "end")  # one that ends is one more who is gone
    return took


@pytest.mark.parametrize(("placement", "victims"), [([0, 1], [0]), ([0, 0, 1, 1], [0, 1])], ids=str)
def test_half_of_the_ranks_without_rank_0(placement: list[int], victims: list[int]) -> None:
    """The other half might live behind a link that failed."""
    results = run_ranks(len(placement), cannot_go_on, placement, victims, may_die=victims)
    assert all(result == KILLED or result < SOON_S for result in results)


# ---- ranks that stop, are excluded, do not come ---------------------------------------------------------


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stops(rank: int, size: int, placement: Placement, victim: int) -> None:
    """A stopped rank is left out, and told so when it goes on."""
    comm = start(rank, placement)
    comm.barrier()
    (folder() / f"pid-{rank}").write_text(str(os.getpid()))
    meet(rank, size, "begin")
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
        wait_for(lambda: "went on without" in str(until_error(comm)))
        with raises(pycomm.PeerLostError, f"went on without rank {victim} (host"):
            comm.all_reduce(torch.ones(3), async_op=True).wait()
        with raises(pycomm.PeerLostError, "shrink", f"went on without rank {victim} (host"):
            comm.shrink()
        (folder() / "told").touch()
        return
    pid = int((folder() / f"pid-{victim}").read_text())
    wait_for(lambda: state(pid) == "T")
    comm.timeout = 0.5
    until_error(comm)
    begin = time.monotonic()
    old, comm = comm, comm.shrink(timeout=2.0)
    assert 1.0 < time.monotonic() - begin < 2.0 + SOON_S
    assert comm.size == size - 1
    comm.timeout = 60
    serves(comm)
    if comm.rank == 0:
        os.kill(pid, signal.SIGCONT)
    wait_for((folder() / "told").exists)
    serves(comm)
    old.close()
    comm.close()


@pytest.mark.parametrize(
    ("placement", "victim"),
    [(None, 0), (None, 2), ([0, 0, 1, 1], 1), ([0, 0, 1, 1], 0), ([0, 1, 2], 2)],
    ids=str,
)
def test_a_stopped_rank_is_left_out_and_told_so(placement: Placement, victim: int) -> None:
    run_ranks(3 if placement is None else len(placement), stops, placement, victim, timeout=60)


def excludes(rank: int, size: int, placement: Placement) -> None:
    comm = start(rank, placement)
    comm.deterministic = True
    comm.barrier()
    meet(rank, size, "begin")
    if rank == size - 1:
        assert "went on without" in str(until_error(comm))
        meet(rank, size, "end")
        return
    new = comm.shrink(exclude=[size - 1])
    assert (new.rank, new.size, new.deterministic) == (rank, size - 1, True)
    assert new.timeout == comm.timeout
    serves(new)
    with raises(pycomm.CommError, "shrunk"):
        comm.barrier()
    with raises(ValueError, "shrunk already"):
        comm.shrink()
    meet(rank, size, "end")


@pytest.mark.parametrize("placement", [None, [0, 1, 1]], ids=str)
def test_exclude(placement: Placement) -> None:
    run_ranks(3, excludes, placement)


def one_by_one(rank: int, size: int) -> None:
    """Down to one rank, with a kill at each step."""
    comm = pycomm.init(timeout=60)
    while comm.size > 1:
        comm.barrier()
        if comm.rank == comm.size // 2:
            kill_self()
        until_error(comm)
        old, comm = comm, comm.shrink()
        old.close()
        serves(comm)
    assert rank == 0
    assert comm.shrink().size == 1


def test_down_to_one_rank() -> None:
    run_ranks(4, one_by_one, may_die=[1, 2, 3])


def wrong_arguments(rank: int, size: int) -> None:
    comm = pycomm.init(timeout=60)
    for wrong, kind, text in (
        ({"exclude": [size]}, ValueError, "each of exclude"),
        ({"exclude": [rank]}, ValueError, f"exclude has rank {rank}"),
        ({"exclude": "1"}, TypeError, "exclude must be a list of ranks"),
        ({"exclude": 1}, TypeError, "exclude must be a list of ranks"),
        ({"exclude": [1.5]}, TypeError, "each of exclude"),
        ({"timeout": 0}, ValueError, "timeout"),
        ({"timeout": "soon"}, TypeError, "timeout"),
    ):
        with raises(kind, "shrink", text):
            comm.shrink(**wrong)
    comm.barrier()  # nobody was told anything
    comm.close()
    with raises(pycomm.CommError, "closed"):
        comm.shrink()


def test_wrong_arguments() -> None:
    run_ranks(2, wrong_arguments)


def two_threads_and_ctrl_c(rank: int, size: int) -> None:
    """Ctrl-C ends the wait for a rank that does not come; the next call finds it."""
    comm = pycomm.init(timeout=60)
    comm.barrier()
    if rank == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        with raises(KeyboardInterrupt):
            comm.shrink()
        assert time.monotonic() - begin < SOON_S
        (folder() / "interrupted").touch()
    wait_for((folder() / "interrupted").exists)
    serves(comm.shrink())


def test_ctrl_c() -> None:
    run_ranks(2, two_threads_and_ctrl_c)


# ---- what is let go of ----------------------------------------------------------------------------------


def arenas() -> int:
    """How many shared arenas this process has mapped."""
    names = {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line}
    return len(names)


def lets_go(rank: int, size: int) -> None:
    comm = pycomm.init(timeout=60)
    comm.barrier()
    if rank == 1:
        kill_self()
    until_error(comm)
    before, n_descriptors = arenas(), len(os.listdir("/proc/self/fd"))
    assert before == size
    new = comm.shrink()
    comm.close()
    del comm
    assert arenas() == size - 1
    assert len(os.listdir("/proc/self/fd")) < n_descriptors
    serves(new)


def test_the_memory_and_descriptors_of_the_dead_are_let_go() -> None:
    run_ranks(3, lets_go, may_die=[1])


# ---- a link that fails ----------------------------------------------------------------------------------


def cut_off(rank: int, size: int, hosts: list[str], placement: list[int]) -> str:
    """Host 1's link goes down: one side goes on, the other does not."""
    enter(hosts[placement[rank]])
    comm = join(rank, placement, PYCOMM_SOCKET_IFNAME="")
    comm.barrier()
    meet(rank, size, "begin")
    if rank == placement.index(1):
        ip("-n", hosts[1], "link", "set", "eth0", "down")
    until_error(comm)
    try:
        new = comm.shrink()
    except pycomm.PeerLostError as error:
        assert "cannot go on" in str(error), error
        return "raises"
    serves(new)
    return f"goes on with {new.size}"


@pytest.mark.slow
@pytest.mark.parametrize("placement", [[0, 1], [0, 1, 1], [0, 0, 1]], ids=str)
def test_a_link_that_fails_never_lets_both_sides_go_on(placement: list[int]) -> None:
    with network(2) as hosts:
        results = run_ranks(len(placement), cut_off, hosts, placement, timeout=80)
    goes_on = max((0, 1), key=lambda host: (placement.count(host), -host))
    for rank, result in enumerate(results):
        mine = placement[rank] == goes_on
        assert result == (f"goes on with {placement.count(goes_on)}" if mine else "raises"), results


# ---- training -------------------------------------------------------------------------------------------

BATCH, STEPS, RATE, MOMENTUM = 12, 9, 0.05, 0.9


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)
    return x, torch.sin(x.sum(1, keepdim=True))


def new_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def reference() -> list[float]:
    """The losses of one process in float64: what any number of ranks must have, with equal shares."""
    model = new_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def share_state(comm: pycomm.Communicator, model: torch.nn.Module, optimizer: Any, step: int) -> int:
    """Rank 0's step, parameters and momenta: a rank may have ended a step in which others lost a peer."""
    comm.broadcast(number := torch.tensor([step]), 0)
    for p in model.parameters():
        comm.broadcast(p.data, 0)
        momentum = optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        comm.broadcast(momentum, 0)
    return int(number.item())


def trains(rank: int, size: int, placement: Placement, dies: dict[int, int]) -> list[float]:
    """Rank q is killed in the backward of step ``dies[q]``; the others go on, with more of the batch each."""
    comm = start(rank, placement)
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    ddp = pycomm.DistributedDataParallel(model, communicator=comm)
    losses: dict[int, float] = {}
    step = 0
    while step < STEPS:
        x, y = (t.float().tensor_split(comm.size)[comm.rank] for t in batch(step))
        try:
            loss = torch.nn.functional.mse_loss(ddp(x), y)
            if dies.get(rank) == step:
                next(iter(model.parameters())).register_hook(lambda _: kill_self())
            optimizer.zero_grad()
            loss.backward()
            comm.all_reduce(mean := loss.detach().clone(), op="avg")
        except pycomm.CommError:
            old, comm = comm, comm.shrink()
            old.close()
            step = share_state(comm, model, optimizer, step)
            ddp = pycomm.DistributedDataParallel(model, communicator=comm)
            continue
        losses[step] = mean.item()
        optimizer.step()
        step += 1
    comm.close()
    return [losses[s] for s in range(STEPS)]


@pytest.mark.parametrize(
    ("placement", "dies"),
    [(None, {1: 3}), (None, {0: 2, 3: 5}), ([0, 0, 1, 1], {2: 4})],
    ids=["one dies", "two die", "on two hosts"],
)
def test_training_goes_on(placement: Placement, dies: dict[int, int]) -> None:
    want = torch.tensor(reference())
    results = run_ranks(4, trains, placement, dies, may_die=list(dies), timeout=80)
    for rank, losses in enumerate(results):
        if rank in dies:
            assert losses == KILLED
        else:
            torch.testing.assert_close(torch.tensor(losses), want, rtol=1e-5, atol=1e-6)
