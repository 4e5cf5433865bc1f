"""A rank that waits says for what, from whom, and in which action that rank is: late, lost, in an error."""

import contextlib
import os
import re
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import pycomm
from pycomm.errors import CommError, CommTimeoutError, PeerLostError
from pycomm.pipeline import PipelineStage, ScheduleGPipe
from pycomm.pipeline.schedule.action import Action
from pycomm.pipeline.watch import LateWarning, Watch
from ranks import Died, run_ranks

pytestmark = pytest.mark.timeout(120)
WAITS = r"rank 0 waits for the gradient of microbatch \d from stage 1 \(rank 1, which is in 1F2\)"


class Troubled(nn.Module):
    """Does something in its third forward."""

    def __init__(self, then):
        super().__init__()
        self.layer, self.then, self.n = nn.Linear(2, 2), then, 0

    def forward(self, x):
        self.n += 1
        if self.n == 3:
            self.then()
        return self.layer(x)


def step(rank, size, then, timeout=60.0):
    comm = pycomm.init(timeout=timeout)
    stage = PipelineStage(Troubled(then) if rank == 1 else nn.Linear(2, 2), rank, size, group=comm)
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    x = torch.ones(4, 2)
    return comm, lambda: schedule.step(x, target=x)


def stopping(rank, size):
    comm, run = step(rank, size, lambda: os.kill(os.getpid(), signal.SIGSTOP), timeout=3.0)
    if rank == 1:  # when it goes on, it may end its step before it learns that rank 0 has given up
        with contextlib.suppress(CommError):
            run()
        return ""
    try:
        with pytest.raises(CommTimeoutError) as found:
            run()
    finally:
        os.kill(comm._c.pid(1), signal.SIGCONT)
    return str(found.value)


def test_a_stopped_rank_is_named_with_its_action():
    text = run_ranks(2, stopping, timeout=60)[0]
    assert re.search(WAITS, text), text
    assert "stopped" in text


def dying(rank, size):
    _, run = step(rank, size, lambda: os._exit(7))
    with pytest.raises(PeerLostError) as found:
        run()
    return str(found.value)


def test_a_dead_rank_is_named_with_its_action():
    text, died = run_ranks(2, dying, timeout=60, may_die=[1])
    assert died == Died(7)
    assert re.search(WAITS, text), text
    assert "died" in text


def slow(rank, size):
    """Rank 1 goes on when rank 0 has warned."""
    warned = Path(os.environ["PYCOMM_RUN_DIR"], "warned")
    pycomm.pipeline.post.LATE_S = 1.0

    def wait():
        end = time.monotonic() + 30
        while not warned.exists() and time.monotonic() < end:
            time.sleep(0.01)

    texts = []

    def note(message, category, *_):
        if category is LateWarning:
            texts.append(str(message))
            warned.touch()

    _, run = step(rank, size, wait)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        run()
    return texts


def test_a_slow_rank_is_named_in_a_warning_and_the_step_goes_on():
    texts = run_ranks(2, slow, timeout=60)
    assert len(texts[0]) == 1 and not texts[1], texts
    assert re.match(WAITS + ".* goes on waiting; it is rank 1 .*pid", texts[0][0]), texts[0]


def broken(rank, size):
    def fail():
        watch, end = Watch(comm), time.monotonic() + 30
        while (
            "itself waits" not in watch.doing(0) and time.monotonic() < end
        ):  # else it is told before it waits
            time.sleep(0.01)
        raise ArithmeticError("no number")

    comm, run = step(rank, size, fail)
    began = time.monotonic()
    with pytest.raises(ArithmeticError if rank == 1 else CommError) as found:
        run()
    assert time.monotonic() - began < 20
    return str(found.value)


def test_an_error_of_one_stage_ends_the_step_on_all_ranks():
    text = run_ranks(2, broken, timeout=60)[0]
    assert re.search(WAITS, text), text
    assert "ended on rank 1 with ArithmeticError in 1F2: no number" in text


def noting(rank, size):
    comm = pycomm.init()
    watch = Watch(comm)
    actions = [Action(1048575, "B", 4294967295), Action(0, "F", 0), Action.parse("3REDUCE_GRAD")]
    seen = []
    for action in actions:
        if rank == 0:
            watch.begin(action)
        comm.barrier()
        seen.append(watch.doing(0))
        comm.barrier()
    if rank == 0:
        watch.begin(actions[1])
        watch.wait()
    comm.barrier()
    seen.append(watch.doing(0))
    comm.barrier()
    watch.end()
    comm.barrier()
    return [*seen, watch.doing(0)]


def test_every_action_fits_into_the_word():
    for seen in run_ranks(2, noting):
        assert seen == [
            "is in 1048575B4294967295",
            "is in 0F0",
            "is in 3REDUCE_GRAD",
            "itself waits for what 0F0 needs",
            "is between two steps",
        ]
