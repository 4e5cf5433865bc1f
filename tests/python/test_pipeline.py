"""Pipelines run for real: loss and every gradient as in one process, in float64, under every schedule."""

import copy

import pytest
import torch
from torch import nn

import pycomm
from pycomm.pipeline import PipelineStage, get_schedule_class
from pycomm.pipeline.schedule.catalog import CATALOG
from pycomm.pipeline.schedule.order import Order, parse
from ranks import run_ranks

pytestmark = pytest.mark.timeout(120)
ATOL = 1e-12


class Middle(nn.Module):
    """Takes and gives a dict with an integer mask, a number, None, and a tensor of another shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, state):
        x, mask = state["x"], state["mask"]
        y = torch.tanh(self.a(x)) * mask + self.b(x) * state["factor"]
        return {"x": y, "mask": mask, "factor": state["factor"] + 1, "nothing": None, "side": (y.sum(1),)}


class First(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)

    def forward(self, ids):
        return {"x": self.embed(ids), "mask": ids > 2, "factor": 1, "nothing": None, "side": ()}


class Masked(Middle):
    def forward(self, state):
        mask = state["mask"]
        return super().forward({**state, "mask": mask.unsqueeze(-1) if mask.dim() == 1 else mask})


class Last(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, 3)

    def forward(self, state):
        extra = sum(side.sum() for side in state["side"]) * 0.01
        return self.head(state["x"]) + extra


def model_of(n_stages: int) -> nn.ModuleList:
    torch.manual_seed(7)
    width = 5
    if n_stages == 1:
        return nn.ModuleList([nn.Sequential(First(width), Last(width))]).double()
    middles = [Masked(width) for _ in range(n_stages - 2)]
    return nn.ModuleList([First(width), *middles, Last(width)]).double()


def sequential(model: nn.ModuleList, x):
    for module in model:
        x = module(x)
    return x


def loss_fn(output, target):
    return nn.functional.cross_entropy(output, target, ignore_index=-1)


def n_counted(target):
    return int((target != -1).sum())


def batch_of(n: int, seed: int):
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(7, (n,), generator=made)
    target = torch.randint(3, (n,), generator=made)
    target[torch.rand(n, generator=made) < 0.4] = -1
    target[0] = 1
    return ids, target


def under(rank, size, names):
    for name in names:
        v = CATALOG[name].stages_per_rank or 2
        for n_microbatches, n in ((1, 3), (3, 8), (5, 5), (8, 19)):
            whole = model_of(size * v)
            parts = copy.deepcopy(whole)
            made = get_schedule_class(name)
            order = pycomm.pipeline.schedule.catalog.build(name, size, n_microbatches, v)
            mine = [PipelineStage(parts[s], s, size * v) for s in order.stages_of(rank)]
            schedule = made(mine, n_microbatches, loss_fn=loss_fn, count=n_counted, loss_on_all_ranks=True)
            for step in range(3):  # gradients accumulate, sizes change
                ids, target = batch_of(n + step % 2, seed=step)
                losses: list[torch.Tensor] = []
                output = schedule.step(ids, target=target, losses=losses)
                # The extra term of Last is a sum over the microbatch, so the reference runs in microbatches.
                chunks = ids.tensor_split(n_microbatches)
                want = torch.cat([sequential(whole, chunk) for chunk in chunks])
                loss = loss_fn(want, target)
                loss.backward()
                torch.testing.assert_close(schedule.loss, loss.detach(), atol=ATOL, rtol=0)
                if size * v - 1 in order.stages_of(rank):
                    torch.testing.assert_close(output, want.detach(), atol=ATOL, rtol=0)
                    assert len(losses) == n_microbatches
                else:
                    assert output is None
                with torch.no_grad():
                    found = schedule.eval(ids[: n_microbatches + 2])
                    chunks = ids[: n_microbatches + 2].tensor_split(n_microbatches)
                    want = torch.cat([sequential(whole, chunk) for chunk in chunks])
                if found is not None:
                    torch.testing.assert_close(found, want, atol=ATOL, rtol=0)
            for s in order.stages_of(rank):
                for (key, p), q in zip(parts[s].named_parameters(), whole[s].parameters(), strict=True):
                    assert (p.grad is None) == (q.grad is None), (name, s, key)
                    if p.grad is not None:
                        assert torch.allclose(p.grad, q.grad, atol=ATOL, rtol=0), (name, s, key)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_schedule_has_one_process_gradients(size):
    run_ranks(size, under, list(CATALOG), timeout=100)


def wrong(rank, size):
    stage = PipelineStage(nn.Linear(2, 2), rank, size)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        get_schedule_class("1F1B")(stage, 0)
    with pytest.raises(ValueError, match=r"rank \d of 2 holds stages \[\d\], got \[\d\]"):
        get_schedule_class("1F1B")(PipelineStage(nn.Linear(2, 2), 1 - rank, size), 2)
    with pytest.raises(ValueError, match="3 stages cannot be spread evenly over 2 ranks"):
        get_schedule_class("1F1B")(PipelineStage(nn.Linear(2, 2), rank, 3), 2)
    with pytest.raises(ValueError, match="deadlock"):
        own = Order.from_actions([parse("0B0 0F0"), parse("1F0 1B0")])
        pycomm.pipeline.PipelineSchedule(stage, 1, order=own)
    own = Order.from_actions([parse("0F0 0F1 0B1 0B0"), parse("1F0 1F1 1B1 1B0")])
    schedule = pycomm.pipeline.PipelineSchedule(stage, 2, loss_fn=nn.functional.mse_loss, order=own)
    schedule.step(torch.ones(4, 2), target=torch.ones(4, 2))
    assert stage.submod.weight.grad is not None
    with pytest.raises(ValueError, match="cannot be cut into 2 microbatches"):
        if rank == 0:
            schedule.step(torch.ones(1, 2))
        else:
            schedule.step(target=torch.ones(1, 2))


def test_what_is_wrong_is_said():
    run_ranks(2, wrong)
