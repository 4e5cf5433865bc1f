"""Mistakes of a new user: each is told by what it is and what to do. A sum as loss is one process's sum."""

import functools

import pytest
import torch
from torch import nn

import pycomm
from pycomm.errors import CommError
from pycomm.pipeline import Order, PipelineStage, Schedule1F1B, ScheduleZeroBubbleH1, pop, stash
from ranks import run_ranks

pytestmark = pytest.mark.timeout(120)
mse = nn.functional.mse_loss
X = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4)  # 5 samples, 2 microbatches: 3 and 2


def made(rank, size, loss_fn, cls=Schedule1F1B, module=None, **more):
    torch.manual_seed(0)
    stages = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(size)]
    stage = PipelineStage(stages[rank] if module is None else module, rank, size)
    return cls(stage, 2, loss_fn=loss_fn, **more), stages


# Refused when the schedule is made, on every rank.
FITS_NOT = {
    "a sum": (
        nn.MSELoss(reduction="sum"),
        "1F1B: loss_fn is MSELoss with reduction='sum'.*scale_grads=False",
    ),
    "a partial sum": (functools.partial(mse, reduction="sum"), "mse_loss with reduction='sum'"),
    "no number": (nn.CrossEntropyLoss(reduction="none"), "CrossEntropyLoss with reduction='none'"),
}


def refusing(rank, size):
    comm = pycomm.init()
    for loss_fn, said in FITS_NOT.values():
        for given in (
            loss_fn,
            loss_fn if rank == size - 1 else None,
        ):  # also where the last rank alone has it
            with pytest.raises(ValueError, match=said):
                made(rank, size, given)
    for wrong, said in (("2", "must be an int, got '2'"), (2.0, "must be an int, got 2.0")):
        with pytest.raises(TypeError, match=said):
            Schedule1F1B(PipelineStage(nn.Identity(), rank, size), wrong, loss_fn=mse)
    for module in (nn.Linear(1, 1), [nn.Linear(1, 1)]):
        with pytest.raises(TypeError, match="expected a PipelineStage or a list of them, got Linear"):
            Schedule1F1B(module, 2, loss_fn=mse)
    with pytest.raises(TypeError, match=f"stage {rank}: submodule must be a torch.nn.Module, got function"):
        PipelineStage(lambda x: x, rank, size)
    schedule, _ = made(rank, size, mse)
    with pytest.raises(ValueError, match=r"target: dimension 0 of a tensor of shape \(1, 4\)"):
        schedule.step(X, target=X[:1])
    comm.barrier()


def test_what_no_schedule_can_train_with_is_refused():
    run_ranks(2, refusing, timeout=60)


def summing(rank, size):
    """scale_grads=False: the losses' sum, which for a sum is one process's."""
    for cls in (Schedule1F1B, ScheduleZeroBubbleH1):
        schedule, stages = made(rank, size, nn.MSELoss(reduction="sum"), cls, scale_grads=False)
        schedule.step(X, target=X * X)
        found = stages[rank].weight.grad.clone()
        whole = nn.Sequential(*stages)
        whole.zero_grad()
        loss = mse(whole(X), X * X, reduction="sum")
        loss.backward()
        torch.testing.assert_close(found, stages[rank].weight.grad)
        if rank == size - 1:
            torch.testing.assert_close(schedule.loss, loss.detach())


def test_a_sum_is_one_process_s():
    run_ranks(2, summing, timeout=60)


class Stashes(nn.Module):
    def forward(self, x):
        stash("s", x)
        return x * 1


class Pops(nn.Module):
    def forward(self, x):
        return x + pop("s")


SKIPS = {
    "not in skips": (Stashes(), nn.Identity(), {}, r"stage 0, microbatch 0: it stashed 's', which no skip "),
    "not stashed": (
        nn.Identity(),
        Pops(),
        {"s": (0, 1)},
        "it did not stash 's', though the schedule's skips",
    ),
    "not popped": (Stashes(), nn.Identity(), {"s": (0, 1)}, "stage 1, microbatch 0: it did not pop 's', th"),
    "nobody stashes": (
        nn.Identity(),
        Pops(),
        {},
        r"pop\('s'\) in stage 1, microbatch 0: nothing of .* skips=",
    ),
}


def skipping(rank, size, name):
    *modules, skips, said = SKIPS[name]
    module = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), modules[rank])
    schedule, _ = made(rank, size, mse, module=module, skips=skips)
    with pytest.raises((RuntimeError, CommError), match=said):
        schedule.step(X, target=X)


@pytest.mark.parametrize("name", SKIPS)
def test_a_skip_that_is_not_as_told_says_what_to_do(name):
    run_ranks(2, skipping, name, timeout=60)


def staying_away(rank, size, first):
    comm = pycomm.init(timeout=2)
    schedule, _ = made(rank, size, mse)
    if not first:
        schedule.step(X, target=X)
    what = "the first step of 1F1B" if first else "1F1B.step"
    said = f"^{what}: rank 0 waits for every rank of the pipeline to come to it: .*rank 1"
    with pytest.raises(CommError, match=said if rank == 0 else ""):
        if rank == 0:
            schedule.step(X, target=X)
        else:
            comm.barrier()


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_that_does_not_come_to_step(first):
    run_ranks(2, staying_away, first, timeout=60)


def differing(rank, size):
    schedule = Schedule1F1B(PipelineStage(nn.Linear(4, 4), rank, size), 2 + rank, loss_fn=mse)
    with pytest.raises(ValueError, match=r"must make the same schedule class with the same arguments$"):
        schedule.step(X, target=X)


def test_schedules_that_differ_are_not_said_to_be_modules():
    run_ranks(2, differing, timeout=60)


def test_an_order_is_named_by_the_package():
    assert Order.from_csv("0F0,0B0\n1F0,1B0\n").placement == (0, 1)
