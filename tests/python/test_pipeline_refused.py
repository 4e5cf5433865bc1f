"""Bad input to a pipeline: an error on every rank, before anything is sent, and the next call is right."""

import re
import time

import pytest
import torch
from torch import nn

import pycomm
from pycomm.errors import CommError
from pycomm.pipeline import PipelineSchedule, PipelineStage, Schedule1F1B, get_schedule_class
from pycomm.pipeline.schedule.order import Order, parse
from ranks import run_ranks

pytestmark = pytest.mark.timeout(120)
X = torch.ones(4, 2)
LOSS = nn.functional.mse_loss


def stage(rank, size, **more):
    return PipelineStage(nn.Linear(2, 2), rank, size, **more)


def made(rank, size, n=2, loss=LOSS, **more):
    return Schedule1F1B(stage(rank, size, **more), n, loss_fn=loss)


def deadlock(rank, size):
    own = Order.from_actions([parse("0B0 0F0"), parse("1F0 1B0")])
    return PipelineSchedule(stage(rank, size), 1, loss_fn=LOSS, order=own)


def once(rank, size):
    own = Order.from_actions([parse("0F0 0F1 0B0"), parse("1F0 1F1 1B1 1B0")])
    return PipelineSchedule(stage(rank, size), 2, loss_fn=LOSS, order=own)


def sized(shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype)


# What is done, of which rank it is the fault (None: of all), and what that rank, or all, say.
REFUSED = {
    "no microbatch": (lambda r, n: made(r, n, 0), None, "at least 1, got 0"),
    "no microbatch on one rank": (lambda r, n: made(r, n, 2 * r), 0, "at least 1, got 0"),
    "stages that ranks cannot share": (
        lambda r, n: Schedule1F1B(stage(r, 3), 2, loss_fn=LOSS),
        None,
        "3 stages cannot be spread evenly over 2 ranks",
    ),
    "one rank's stage is another's": (
        lambda r, n: made(0, n),
        1,
        r"1F1B: rank 1 of 2 holds stages \[1\], got \[0\]",
    ),
    "an order that deadlocks": (deadlock, None, "deadlock: rank 0 at 0B0"),
    "an order that leaves one out": (once, None, "stage 0, microbatch 1: expected one F and one B"),
    "microbatches that differ": (lambda r, n: made(r, n, 2 + r).step(X, target=X), None, "ranks differ"),
    "no batch": (
        lambda r, n: made(r, n).step(target=X),
        0,
        "1F1B: rank 0 has the first stage and got no batch",
    ),
    "fewer samples than microbatches": (
        lambda r, n: made(r, n, 4).step(X[:3] if r == 0 else X, target=X),
        0,
        r"a tensor of shape \(3, 2\) cannot be cut into 4",
    ),
    "fewer targets than microbatches": (
        lambda r, n: made(r, n, 4).step(X, target=X[:3]),
        1,
        r"a tensor of shape \(3, 2\) cannot be cut into 4",
    ),
    "no loss": (
        lambda r, n: made(r, n, loss=None).step(X, target=X),
        1,
        "1F1B: rank 1 has the last stage and needs a loss_fn",
    ),
    "no target": (
        lambda r, n: made(r, n).step(X),
        1,
        "1F1B: rank 1 has the last stage and got no target",
    ),
    "stages that do not fit": (
        lambda r, n: made(r, n, input_args=sized((2, 2 + r)), output_args=(sized((2, 2)),)).step(X, target=X),
        None,
        r"stage 1 \(rank 1\), by its input_args, does not take what stage 0 \(rank 0\) gives by its "
        r"output_args: expected float32 \(2, 3\) \(dimension 0 may differ\), got float32 \(2, 2\)",
    ),
    "dtypes that do not fit": (
        lambda r, n: made(
            r, n, input_args=sized((2, 2), torch.float64 if r else torch.float32), output_args=sized((2, 2))
        ).step(X, target=X),
        None,
        r"expected float64 \(2, 2\) \(dimension 0 may differ\), got float32 \(2, 2\)",
    ),
}


def refusing(rank, size):
    comm = pycomm.init()
    found = {}
    for name, (call, whose, _) in REFUSED.items():
        began = time.monotonic()
        with pytest.raises(ValueError) as error:
            call(rank, size)
        found[name] = str(error.value), rank == whose or whose is None, time.monotonic() - began
        comm.barrier()
    # None of this has harmed anything.
    whole = made(rank, size, input_args=X, output_args=X)
    for n in (4, 3):
        whole.step(X[:n], target=X[:n])
    assert whole.eval(X) is None if rank == 0 else whole.eval(X).shape == (4, 2)
    return found


def test_every_rank_refuses_and_goes_on():
    for rank, found in enumerate(run_ranks(2, refusing, timeout=100)):
        for name, (_, whose, expected) in REFUSED.items():
            text, is_own, seconds = found[name]
            assert re.search(expected, text), (name, rank, text)
            assert is_own or f"rank {whose} refused this call: ValueError" in text, (name, rank, text)
            assert seconds < 30, (name, seconds)


# In the step: which stage's submodule, of what it is told, and what is wrong.
WRONG = {
    "an input": (
        {"input_args": sized((2, 3))},
        r"stage 1, microbatch 0: what came from stage 0 \(rank 0\) is not as input_args says: expected "
        r"float32 \(2, 3\) \(dimension 0 may differ\), got float32 \(2, 2\)",
    ),
    "a dtype": ({"input_args": sized((2, 2), torch.int64)}, r"expected int64 \(2, 2\).*got float32 \(2, 2\)"),
    "a number of tensors": ({"input_args": (X, X)}, r"expected float32 \(4, 2\), float32 \(4, 2\) .*got fl"),
    "an output": (
        {"output_args": sized((2, 5))},
        r"stage 1, microbatch 0: its output is not as output_args says: expected float32 \(2, 5\)",
    ),
}


def wrong(rank, size, name):
    schedule = made(rank, size, **(WRONG[name][0] if rank == 1 else {}))
    with pytest.raises(ValueError if rank == 1 else CommError) as error:
        schedule.step(X, target=X)
    return str(error.value)


@pytest.mark.parametrize("name", WRONG)
def test_what_comes_is_compared_with_what_a_stage_was_told(name):
    for text in run_ranks(2, wrong, name, timeout=60):
        assert re.search(WRONG[name][1], text), text


def first(rank, size):
    schedule = made(rank, size, **({"input_args": sized((2, 7))} if rank == 0 else {}))
    with pytest.raises(ValueError if rank == 0 else CommError, match="the batch's part is not as input_args"):
        schedule.step(X, target=X)


def without_flush(rank, size):
    schedule = get_schedule_class("PipeDream2BW")(stage(rank, size), 2, loss_fn=LOSS)
    with pytest.raises(ValueError if rank == 1 else CommError, match="rank 1 has the last stage and got no"):
        schedule.step(X)
        schedule.flush()


def test_the_batch_is_compared_too_and_steps_without_flush_end():
    run_ranks(2, first, timeout=60)
    run_ranks(2, without_flush, timeout=60)
