"""Works of the backend: what they keep alive, in a forked child, and when who waits is interrupted."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
import weakref

import pytest
import torch
import torch.distributed as dist

import pycomm
from interpreters import run_interpreters
from ranks import run_ranks
from torch_backend_ranks import start, world

pytestmark = pytest.mark.timeout(60)


def kept(rank: int, size: int) -> None:
    """A work that was waited for keeps no tensor, also when no other call follows."""
    with world(rank, size):
        tensors = [torch.ones(10) for _ in range(200)]
        alive = [weakref.ref(t) for t in tensors]
        works = [dist.all_reduce(t, async_op=True) for t in tensors]
        for work in works:
            work.wait()
        del tensors, works, work
        gc.collect()
        assert [ref() for ref in alive] == [None] * len(alive)


def test_a_work_that_was_waited_for_keeps_no_tensor():
    run_ranks(2, kept)


def child_of(rank: int, size: int) -> None:
    signs = dist.FileStore(f"{os.environ['PYCOMM_RUN_DIR']}/signs", -1)
    with world(rank, size):
        if rank == 0:
            works = [dist.all_reduce(torch.ones(4), async_op=True), dist.irecv(torch.ones(3), 1)]
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # instead of waiting for ever
                code = 1
                try:
                    for wait in (*(w.wait for w in works), works[0].get_future().wait):
                        with pytest.raises(RuntimeError, match="parent of this forked process"):
                            wait()
                    assert not any(work.is_completed() for work in works)
                    code = 0
                finally:
                    if code:
                        traceback.print_exc()
                    os._exit(code)
            _, status = os.waitpid(child, 0)
            assert status == 0
            signs.set("child ended", "")
            for work in works:
                work.wait()
        else:
            signs.wait(["child ended"])
            dist.all_reduce(torch.ones(4))
            dist.send(torch.ones(3), 0)


def test_a_forked_child_cannot_wait_for_its_parents_works():
    run_ranks(2, child_of)


def interrupted(rank: int, size: int) -> None:
    """Ctrl-C while the waiting thread itself runs a small call: it raises there, and the work has failed."""
    signs = dist.FileStore(f"{os.environ['PYCOMM_RUN_DIR']}/signs", -1)
    start(rank, size)
    if rank == 0:
        main = threading.main_thread().ident

        def press() -> None:  # when it waits
            waits = False
            while not waits:
                time.sleep(0.01)
                frames = traceback.extract_stack(sys._current_frames()[main])
                waits = any(frame.filename.endswith("torch_backend/works.py") for frame in frames)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=press)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            work = dist.all_reduce(torch.ones(4), async_op=True)
            work.wait()
        thread.join()
        if dist.group.WORLD.communicator._c.failed:  # else the engine's thread had begun it
            for ask in (work.wait, dist.barrier):
                with pytest.raises(dist.DistBackendError, match=r"interrupted \(Ctrl-C\)"):
                    ask()
            assert work.is_completed() and isinstance(work.exception(), pycomm.CommError)
        signs.set("interrupted", "")
    signs.wait(["interrupted"])
    dist.distributed_c10d._abort_process_group()


def test_ctrl_c_in_a_call_that_its_waiter_runs():
    run_ranks(2, interrupted)


EXITS = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
import pycomm
rank = int(sys.argv[2])
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("pycomm", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=55))
if rank == 0:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    sys.exit(3)
dist.recv(torch.ones(1), 0)
"""


def test_a_program_that_exits_does_not_wait_long_for_calls_that_nobody_waited_for(tmp_path):
    """Rank 1 waits for rank 0, which has a call in flight that waits for rank 1, when it calls sys.exit."""
    arguments = [[str(tmp_path / "store"), str(rank)] for rank in range(2)]
    ended = run_interpreters(EXITS, arguments, timeout=45)  # less than the calls' timeout
    (status, output), (_, error) = ended
    assert status == 3, output
    assert "rank 0 (host" in error and "the program ended, and waited 10 s" in error
