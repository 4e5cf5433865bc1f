"""Groups of the backend "pycomm" at their ends: destroyed in use, aborted, interrupted, and made again.

Each case ends within a bounded time, with an error that says what happened; nothing here waits for a long
timeout. What ends a wait is another rank's doing or a signal, told through the store, never a pause.
"""

import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pycomm
from interpreters import run_interpreters
from ranks import Died, run_ranks
from torch_backend_ranks import start, world

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).resolve().parents[2]
SOON_S = 10  # on a busy machine; the timeouts of the groups that must not be waited for are 30 s


@contextmanager
def soon() -> Iterator[None]:
    before = time.monotonic()
    yield
    assert time.monotonic() - before < SOON_S


def store_of(name: str, size: int) -> dist.FileStore:
    return dist.FileStore(f"{os.environ['PYCOMM_RUN_DIR']}/{name}", size)


def in_flight(rank: int, size: int) -> None:
    signs = store_of("signs", -1)
    # calls that all ranks have made are waited for, and their results are there afterwards
    start(rank, size, name="made by all")
    tensors = [torch.full((1 << 18,), float(i + rank)) for i in range(8)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    with soon():
        dist.destroy_process_group()
    for i, (t, work) in enumerate(zip(tensors, works, strict=True)):
        assert work.wait() and work.is_success()
        assert torch.equal(t, torch.full_like(t, 2.0 * i + 1))

    # a call that the peer never makes: it ends when the peer leaves
    start(rank, size, name="left")
    if rank == 0:
        work, recv = dist.all_reduce(torch.zeros(4), async_op=True), dist.irecv(torch.zeros(3), 1)
        future = work.get_future()
        signs.set("in flight", "")
        with soon():
            dist.destroy_process_group()
        with pytest.raises(pycomm.PeerLostError, match=r"rank 1 .* closed"):
            work.wait()
        with pytest.raises(RuntimeError, match=r"rank 1 .* closed"):
            future.wait()
        with pytest.raises(dist.DistBackendError, match="closed"):
            recv.wait()
    else:
        signs.wait(["in flight"])
        dist.destroy_process_group()

    # or when its time is over: the group's timeout bounds destroy
    start(rank, size, name="absent")
    dist.group.WORLD.set_timeout(timedelta(seconds=1))
    if rank == 0:
        work = dist.all_reduce(torch.zeros(4), async_op=True)
        with soon():
            dist.destroy_process_group()
        with pytest.raises(pycomm.CommTimeoutError, match="rank 1"):
            work.wait()
        signs.set("destroyed", "")
    else:
        signs.wait(["destroyed"])
        dist.destroy_process_group()


def test_destroy_with_calls_in_flight():
    run_ranks(2, in_flight)


def other_thread(rank: int, size: int) -> None:
    signs = store_of("signs", -1)
    # rank 1 makes the call while rank 0 destroys the group: the thread that waits has its result
    start(rank, size, name="made")
    t = torch.full((4,), float(rank + 1))
    if rank == 0:
        started, results = threading.Event(), []

        def use() -> None:
            work = dist.all_reduce(t, async_op=True)
            started.set()
            results.append(work.wait())

        thread = threading.Thread(target=use)
        thread.start()
        started.wait()
        signs.set("waits", "")
        with soon():
            dist.destroy_process_group()
            thread.join()
        assert results == [True] and t.tolist() == [3.0] * 4
    else:
        signs.wait(["waits"])
        dist.all_reduce(t)
        assert t.tolist() == [3.0] * 4
        dist.destroy_process_group()

    # a thread that calls on and on meets an error in one of its calls, on both ranks
    start(rank, size, name="on and on")
    group, first, errors = dist.group.WORLD, threading.Event(), []

    def call_on() -> None:
        try:
            while True:
                group.allreduce([torch.ones(4)]).wait()
                first.set()
        except dist.DistBackendError as error:
            errors.append(error)

    thread = threading.Thread(target=call_on)
    thread.start()
    first.wait()
    with soon():
        if rank == 0:
            dist.destroy_process_group()
        thread.join()
    expected = "the communicator (is|was) closed" if rank == 0 else "rank 0 .* closed its communicator"
    assert re.search(expected, str(errors[0])), errors
    if rank == 1:
        dist.destroy_process_group()


def test_destroy_while_another_thread_uses_the_group():
    run_ranks(2, other_thread)


def subgroup(rank: int, size: int) -> None:
    with world(rank, size):
        pair = dist.new_group([0, 1])
        if rank < 2:
            dist.all_reduce(torch.ones(1), group=pair)
            dist.destroy_process_group(pair)
            t = torch.ones(1)
            calls: list[Callable[[], object]] = [
                lambda: dist.all_reduce(t, group=pair),
                lambda: dist.send(t, 1 - rank, group=pair),
                lambda: dist.monitored_barrier(pair, timedelta(seconds=1)),
                lambda: dist.destroy_process_group(pair),
            ]
            for call in calls:
                with soon(), pytest.raises(ValueError, match=r"not initialized|Invalid process group"):
                    call()
            calls = [
                lambda: dist.barrier(pair),  # torch does not look here
                lambda: pair.allreduce([t]).wait(),
                lambda: pair.recv([t], 1 - rank, 0).wait(),
            ]
            for call in calls:
                with soon(), pytest.raises(dist.DistBackendError, match="the communicator is closed"):
                    call()
        # the world does not mind, and the same ranks can have a new group
        t = torch.ones(1)
        dist.all_reduce(t)
        assert t.item() == size
        again = dist.new_group([0, 1])
        if rank < 2:
            dist.all_reduce(t, group=again)
            assert t.item() == 2 * size


def test_a_subgroup_that_was_destroyed():
    run_ranks(3, subgroup)


def aborts(rank: int, size: int) -> None:
    abort = dist.distributed_c10d._abort_process_group
    start(rank, size, name="first")
    if rank == 2:
        works = [dist.irecv(torch.ones(1), 0), dist.irecv(torch.ones(1))]
        with soon():
            abort()
        for pending in works:
            with soon(), pytest.raises(dist.DistBackendError, match="the process group was aborted"):
                pending.wait()
    else:
        with soon(), pytest.raises(dist.DistBackendError, match=r"rank 2 .*the process group was aborted"):
            dist.all_reduce(torch.ones(1))
        with soon():
            abort()
    assert not dist.is_initialized()

    # then with two ranks in another order, and with all of them on the first one's store
    if rank > 0:
        start(2 - rank, 2, name="smaller")
        t = torch.tensor([float(rank)])
        dist.broadcast(t, 0)
        assert t.item() == 2.0
        abort()
    with world(rank, size, name="first"):
        t = torch.ones(1)
        dist.all_reduce(t)
        assert t.item() == size


def test_abort_and_then_other_worlds():
    run_ranks(3, aborts)


@contextmanager
def interrupted_in(*functions: str) -> Iterator[None]:
    """Ctrl-C comes when the main thread is in one of ``functions`` ("file.py:name"), and is raised soon."""
    main, over = threading.main_thread().ident, threading.Event()

    def press() -> None:
        while not over.is_set():
            frame, names = sys._current_frames()[main], set()
            while frame is not None:
                names.add(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
                frame = frame.f_back
            if names & set(functions):
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=press)
    try:
        with soon(), pytest.raises(KeyboardInterrupt):
            thread.start()
            yield
    finally:
        over.set()
        thread.join()


def ctrl_c(rank: int, size: int) -> None:
    signs = store_of("signs", -1)

    def abort_and_tell(sign: str) -> None:
        dist.distributed_c10d._abort_process_group()
        signs.set(sign, "")

    if rank == 1:
        for sign in ("call", "wait", "destroy"):
            start(rank, size, name=sign)
            signs.wait([sign])
            dist.distributed_c10d._abort_process_group()
        return
    start(rank, size, name="call")
    with interrupted_in("group.py:allreduce"):
        dist.all_reduce(torch.ones(4))
    abort_and_tell("call")

    start(rank, size, name="wait")
    work = dist.all_reduce(torch.ones(1 << 18), async_op=True)  # not a small one, which its waiter may run
    with interrupted_in("works.py:wait"):
        work.wait()
    assert not work.is_completed()  # only the wait was interrupted
    abort_and_tell("wait")

    start(rank, size, name="destroy")
    work = dist.all_reduce(torch.ones(4), async_op=True)
    with interrupted_in("group.py:shutdown"):
        dist.destroy_process_group()
    with soon(), pytest.raises(dist.DistBackendError, match=r"all_reduce|closed|aborted|interrupted"):
        work.wait()
    signs.set("destroy", "")


def test_ctrl_c_while_waiting():
    run_ranks(2, ctrl_c)


def ctrl_c_in_init(rank: int, size: int) -> None:
    # Each alone: rank 0 waits in the run folder, rank 1 in the store.
    with interrupted_in("group.py:__init__"):
        start(rank, size, name=f"alone {rank}")
    assert not dist.is_initialized()
    with world(rank, size, name="together"):
        dist.barrier()


def test_ctrl_c_in_init():
    run_ranks(2, ctrl_c_in_init)


def out_of_step(rank: int, size: int) -> None:
    """Ranks give up one after the other, then all come to the same store."""
    store = store_of("met", size)
    for i, first in enumerate((0, 1, 1)):
        turn = f"gave up {i}"
        if rank == first:
            with soon(), pytest.raises(pycomm.CommTimeoutError, match=f"rank {rank} "):
                pycomm.init(store=store, rank=rank, size=size, timeout=0.5)
            store.set(turn, "")
        else:
            store.wait([turn])
    with soon():
        for _ in range(3):
            comm = pycomm.init(store=store, rank=rank, size=size, timeout=30)
            assert comm.all_reduce(torch.ones(1)).item() == size
            comm.close()
    # and through torch, each having tried once
    for turn in range(size):
        if rank == turn:
            with soon(), pytest.raises(pycomm.CommTimeoutError, match=f"rank {rank} "):
                start(rank, size, name="torch", timeout=0.5)
            store.set(f"torch {turn}", "")
        else:
            store.wait([f"torch {turn}"])
    with soon(), world(rank, size, name="torch"):
        dist.barrier()


def test_ranks_that_gave_up_can_meet_in_the_same_store():
    run_ranks(2, out_of_step)


def lives(rank: int, size: int, path: str, life: int) -> int:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(life)
    store = dist.FileStore(path, -1)
    if life == 0 and rank == 0:  # is killed while it waits for the others, and leaves its key behind

        def die() -> None:
            while b"/hosts/0" not in Path(path).read_bytes():  # the last key that it sets before it waits
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die).start()
    elif life == 0:
        return -1
    dist.init_process_group("pycomm", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    t = torch.ones(1)
    dist.all_reduce(t)
    dist.destroy_process_group()
    return int(t.item())


def test_a_restarted_world_meets_no_leftovers():
    with tempfile.TemporaryDirectory() as folder:  # pytest's may be too long for the path of a unix socket
        env = {"TMPDIR": folder, "XDG_RUNTIME_DIR": ""}
        path = f"{folder}/store"
        [killed, _] = run_ranks(2, lives, path, 0, may_die=[0], env=env)
        assert isinstance(killed, Died) and killed.exitcode == -signal.SIGKILL
        assert run_ranks(2, lives, path, 1, env=env) == [2, 2]


SCRIPT = """
import sys
import tempfile
from datetime import timedelta
import torch, torch.distributed as dist
import pycomm
rank = int(sys.argv[2])
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("pycomm", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=50))
store.set(f"joined {rank}", "")
if rank == 0:
    store.wait(["joined 1"])  # in init it would be told other words
    if sys.argv[3] == "in flight":
        work = dist.all_reduce(torch.ones(1), async_op=True)
    raise ValueError("the data are bad")
dist.recv(torch.ones(1), 0)
"""


@pytest.mark.parametrize("calls", ["in flight", "none"])
def test_a_program_that_ends_with_an_exception_does_not_wait_for_its_peers(tmp_path, calls):
    """Rank 1 waits for rank 0, which may have a call in flight that waits for rank 1, when it raises."""
    arguments = [[str(tmp_path / "store"), str(rank), calls] for rank in range(2)]
    ended = run_interpreters(SCRIPT, arguments, timeout=40)  # less than the calls' timeout
    errors = [output for _, output in ended]
    assert "ValueError: the data are bad" in errors[0]
    assert "rank 0 (host" in errors[1]
    assert errors[1].count("the program ended with ValueError: the data are bad") == 1, errors[1]  # once
    assert ("closed its communicator: the program ended" in errors[1]) == (calls == "none")
