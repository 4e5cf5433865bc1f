"""Pipelines run for real: loss and every gradient as in one process, in float64, under every schedule."""

import copy

import pytest
import torch
from torch import nn

import pycomm
from pycomm.pipeline import PipelineStage, get_schedule_class, pop, stash
from pycomm.pipeline.schedule.catalog import CATALOG, build
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
            order = build(name, size, n_microbatches, v)
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
    differing = get_schedule_class("1F1B")(stage, 2 + rank, loss_fn=nn.functional.mse_loss)
    with pytest.raises(ValueError, match="rank 0 has n_microbatches 2; rank 1 has n_microbatches 3"):
        differing.step(torch.ones(6, 2), target=torch.ones(6, 2))
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


class Down(nn.Module):
    def __init__(self, name, n_in, n_out):
        super().__init__()
        self.name, self.layer = name, nn.Linear(n_in, n_out)

    def forward(self, x):
        x = torch.tanh(self.layer(x))
        stash(self.name, (x, 2))
        return x


class Up(nn.Module):
    def __init__(self, name, n_in, n_skip, n_out):
        super().__init__()
        self.name, self.layer = name, nn.Linear(n_in + n_skip, n_out)

    def forward(self, x):
        skip, factor = pop(self.name)
        return torch.sin(self.layer(torch.cat([x, skip * factor], 1)))


def u_net():
    """Six stages; the skips span 5 and 3 of them."""
    torch.manual_seed(3)
    parts = [Down("a", 4, 5), Down("b", 5, 3), nn.Linear(3, 3), nn.Tanh(), Up("b", 3, 3, 4), Up("a", 4, 5, 2)]
    return nn.ModuleList(parts).double()


def skipping(rank, size, names):
    for name in names:
        v = 6 // size
        whole = u_net()
        parts = copy.deepcopy(whole)
        order = build(name, size, 4, v)
        mine = [PipelineStage(parts[s], s, 6) for s in order.stages_of(rank)]
        schedule = get_schedule_class(name)(
            mine, 4, loss_fn=nn.functional.mse_loss, skips={"a": (0, 5), "b": (1, 4)}, loss_on_all_ranks=True
        )
        for n in (9, 6):
            x = torch.randn(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
            schedule.step(x, target=x[:, :2])
            loss = nn.functional.mse_loss(sequential(whole, x), x[:, :2])
            loss.backward()
            torch.testing.assert_close(schedule.loss, loss.detach(), atol=ATOL, rtol=0)
        for s in order.stages_of(rank):
            for p, q in zip(parts[s].parameters(), whole[s].parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, atol=ATOL, rtol=0)


def test_skips_under_every_schedule():
    run_ranks(
        3, skipping, ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
    )
    run_ranks(1, skipping, ["Interleaved1F1B"])


class Embed(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, ids):
        return self.weight[ids]


class Head(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x @ self.weight.T


def tying(rank, size, names):
    for name in names:
        v = CATALOG[name].stages_per_rank or 2
        n_stages = size * v
        torch.manual_seed(5)
        weight = nn.Parameter(torch.randn(7, 4, dtype=torch.float64))
        middles = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(n_stages - 2)]
        whole = nn.ModuleList([Embed(weight), *middles, Head(weight)])
        order = build(name, size, 3, v)
        held = order.stages_of(rank)
        is_one_object = {0, n_stages - 1} <= set(held) and rank % 2 == 0
        parts = {s: copy.deepcopy(whole[s]) for s in held}
        if is_one_object:
            parts[n_stages - 1].weight = parts[0].weight
        elif n_stages - 1 in held:
            parts[n_stages - 1].weight.data.zero_()  # takes the first one's values
        mine = [PipelineStage(parts[s], s, n_stages) for s in held]
        schedule = get_schedule_class(name)(
            mine,
            3,
            loss_fn=nn.functional.cross_entropy,
            tied=[[(0, "weight"), (n_stages - 1, "weight")]],
        )
        for step in range(3):  # the sums accumulate
            ids = torch.randint(7, (8,), generator=torch.Generator().manual_seed(step))
            schedule.step(ids, target=ids)
            nn.functional.cross_entropy(sequential(whole, ids), ids).backward()
        for s in held:
            for p, q in zip(parts[s].parameters(), whole[s].parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, atol=ATOL, rtol=0)
                torch.testing.assert_close(p, q, atol=0, rtol=0)
    with pytest.raises(ValueError, match="stage 0 has no parameter 'nothing'"):
        get_schedule_class("1F1B")(
            PipelineStage(nn.Linear(2, 2), rank, size), 1, tied=[[(0, "nothing"), (1, "weight")]]
        )


def test_tied_weights_have_the_sum_of_their_gradients():
    run_ranks(2, tying, ["GPipe", "1F1B", "Interleaved1F1B", "ZeroBubbleH1", "ZBVZeroBubble", "DualPipeV"])
    run_ranks(3, tying, ["1F1B", "ZBVZeroBubble"])


def freezing(rank, size):
    whole = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)]).double()
    torch.manual_seed(1)
    for p in whole.parameters():
        p.data.normal_()
    for p in [*whole[0].parameters(), whole[1].bias]:
        p.requires_grad_(False)
    part = copy.deepcopy(whole[rank])
    schedule = get_schedule_class("1F1B")(PipelineStage(part, rank, size), 2, loss_fn=nn.functional.mse_loss)
    x = torch.randn(4, 3, dtype=torch.float64)
    for _ in range(2):
        schedule.step(x, target=x)
        nn.functional.mse_loss(sequential(whole, x), x).backward()
    sent = set(schedule._runtime.post.n_messages)
    assert sent == {0: {"activation"}, 1: {"activation"}, 2: {"gradient"}}[rank]  # nothing back to stage 0
    for p, q in zip(part.parameters(), whole[rank].parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, atol=ATOL, rtol=0)


def test_nothing_is_sent_back_to_a_frozen_stage():
    run_ranks(3, freezing)
