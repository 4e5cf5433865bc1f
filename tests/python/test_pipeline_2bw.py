"""PipeDream-2BW: the weights of one process under the delayed update, in float64; no flush between steps."""

import copy
import time

import pytest
import torch
from torch import nn

import pycomm
from pycomm.pipeline import PipelineStage, Schedule1F1B, SchedulePipeDream2BW, get_schedule_class, pop, stash
from pycomm.pipeline.gradients import clip_grad_norm_
from pycomm.pipeline.schedule.one_f_one_b import pipedream_2bw, two_bw_steps
from pycomm.pipeline.schedule.order import Order
from pycomm.pipeline.schedule.simulate import Costs, Timeline, simulate
from pycomm.pipeline.schedule.transfers import with_transfers
from pycomm.pipeline.schedule.verify import live_activations, verify
from pycomm.pipeline.schedule.verify_transfers import verify_transfers
from ranks import run_ranks

pytestmark = pytest.mark.timeout(120)
ATOL = 1e-12
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.3),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda ps: torch.optim.AdamW(ps, lr=0.05),
}


def test_the_steps_are_the_whole_order_cut():
    for p in range(1, 7):
        for m in range(max(1, p - 1), 9):
            for n_batches in range(1, 5):
                whole = pipedream_2bw(p, m, n_batches)
                verify(whole, p)
                steps = two_bw_steps(p, m, n_batches)
                assert len(steps) == n_batches + 1
                for rank in range(p):
                    joined = [a for step in steps for a in step.actions[rank]]
                    assert joined == [
                        a._replace(microbatch=a.microbatch % (2 * m)) for a in whole.actions[rank]
                    ]
                    assert max(live_activations(whole, rank)) == min(m * n_batches, p - rank)
                    for b in range(n_batches):
                        done = [
                            a.microbatch for c in steps[: b + 1] for a in c.actions[rank] if a.kind == "B"
                        ]
                        assert len(done) >= b * m  # the batch before is complete
                if n_batches == 2:  # microbatches have their own numbers; step by step every message is right
                    listed = [with_transfers(step) for step in steps]
                    joined = [[a for step in listed for a in step[rank]] for rank in range(p)]
                    verify_transfers(whole, joined)
                idle = simulate(whole, Costs(1, 0.5, 0.5)).bubble
                assert idle == pytest.approx((p - 1) / (m * n_batches + p - 1))
    with pytest.raises(ValueError, match="PipeDream2BW: 4 ranks need at least 3 microbatches, got 2"):
        two_bw_steps(4, 2, 1)


class Block(nn.Module):
    """A stage; the first one takes ids, the last one uses the first one's weight and a skip from it."""

    def __init__(self, index: int, n: int) -> None:
        super().__init__()
        self.index, self.n = index, n
        self.layer = nn.Linear(4, 4)
        if index in (0, n - 1):
            self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        if self.index == 0:
            x = self.weight[x]
            if self.n > 1:
                stash("x", x)
        x = x + torch.tanh(self.layer(x))
        if self.index == self.n - 1:
            x = (x + pop("x") if self.n > 1 else x) @ self.weight.T
        return x


def blocks(n: int) -> nn.ModuleList:
    torch.manual_seed(11)
    made = nn.ModuleList([Block(i, n) for i in range(n)]).double()
    made[n - 1].weight = made[0].weight
    return made


def batch_of(t: int):
    ids = torch.randint(6, (9 + t % 3, 2 + t % 2), generator=torch.Generator().manual_seed(t))
    return ids, ids.flip(0)


def loss_fn(output, target):
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


class OneProcess:
    """w_1 = w_0, then w_{t+1} = optimizer(w_t, g_{t-1}) with g_t = grad f_t(w_t), in its plainest form."""

    def __init__(self, model, optimizer, max_norm=None):
        self.model, self.optimizer, self.max_norm = model, optimizer, max_norm
        self.pending, self.norm = None, 0.0

    def loss_of(self, ids, target):
        x = ids
        for module in self.model:
            x = module(x)
        return loss_fn(x, target)

    def step(self, ids, target):
        loss = self.loss_of(ids, target)
        made = torch.autograd.grad(loss, list(self.model.parameters()))
        self.update()
        self.pending = made
        return loss.detach()

    def update(self):
        if self.pending is not None:
            for p, g in zip(self.model.parameters(), self.pending, strict=True):
                p.grad = g
            if self.max_norm is not None:
                self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
            self.optimizer.step()
        self.pending = None


def delayed(rank, size):
    assert get_schedule_class("pipedream2bw") is SchedulePipeDream2BW
    for kind, make in OPTIMIZERS.items():
        for m in (max(1, size - 1), 4):
            whole = blocks(size)
            part = copy.deepcopy(whole)[rank]  # its own copy of the tied weight
            reference = OneProcess(whole, make(whole.parameters()))
            stage = PipelineStage(part, rank, size)
            optimizer = make(part.parameters())
            schedule = SchedulePipeDream2BW(
                stage,
                m,
                loss_fn=loss_fn,
                count=lambda t: t.numel(),
                loss_on_all_ranks=True,
                skips={"x": (0, size - 1)} if size > 1 else {},
                tied=[[(0, "weight"), (size - 1, "weight")]] if size > 1 else (),
            )

            def equal(part=part, whole=whole, what=(kind, m)):
                for p, q in zip(part.parameters(), whole[rank].parameters(), strict=True):
                    torch.testing.assert_close(p, q, atol=ATOL, rtol=0, msg=lambda text: f"{what}: {text}")

            for t in range(8):
                ids, target = batch_of(t)
                want = reference.step(ids, target)
                schedule.step(ids, target=target)
                torch.testing.assert_close(schedule.loss, want, atol=ATOL, rtol=0)
                assert all((p.grad is None) == (t in (0, 5)) for p in part.parameters()), t
                optimizer.step()
                optimizer.zero_grad()
                equal()
                found = schedule.eval(ids[: m + 1], target=target[: m + 1])  # with the newest weights
                if rank == size - 1:
                    with torch.no_grad():
                        want = reference.loss_of(ids[: m + 1], target[: m + 1])
                    torch.testing.assert_close(schedule.loss, want, atol=ATOL, rtol=0)
                    assert found.shape[0] == m + 1
                if t == 4:  # a flush in between: the next step is a first one again
                    schedule.flush()
                    optimizer.step()
                    optimizer.zero_grad()
                    reference.update()
                    equal()
            schedule.flush()
            optimizer.step()
            reference.update()
            equal()
            before = [p.grad.clone() for p in part.parameters()]
            schedule.flush()  # nothing is left
            assert all(torch.equal(p.grad, b) for p, b in zip(part.parameters(), before, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_weights_are_those_of_the_delayed_update(size):
    run_ranks(size, delayed)


def accumulating(rank, size):
    """Gradients of two steps in one update, and none is scaled again."""
    whole = blocks(size)
    part = copy.deepcopy(whole)[rank]
    schedule = SchedulePipeDream2BW(
        PipelineStage(part, rank, size),
        3,
        loss_fn=loss_fn,
        count=lambda t: t.numel(),
        skips={"x": (0, size - 1)},
        tied=[[(0, "weight"), (size - 1, "weight")]],
    )
    reference = OneProcess(whole, None)
    for t in range(3):
        ids, target = batch_of(t)
        schedule.step(ids, target=target)
        reference.loss_of(ids, target).backward()
    schedule.flush()
    for p, q in zip(part.parameters(), whole[rank].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=ATOL, rtol=0)


def test_gradients_accumulate_over_steps():
    run_ranks(2, accumulating)


def resuming(rank, size):
    """Six steps with a flush after three, and three steps from what was saved at the flush."""

    def make(state=None):
        part = blocks(size)[rank]
        optimizer = OPTIMIZERS["adam"](part.parameters())
        if state is not None:
            part.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        schedule = SchedulePipeDream2BW(
            PipelineStage(part, rank, size),
            4,
            loss_fn=loss_fn,
            skips={"x": (0, size - 1)},
            tied=[[(0, "weight"), (size - 1, "weight")]],
        )
        return part, optimizer, schedule

    def train(made, steps):
        _, optimizer, schedule = made
        for t in steps:
            ids, target = batch_of(t)
            schedule.step(ids, target=target)
            optimizer.step()
            optimizer.zero_grad()
        schedule.flush()
        optimizer.step()
        optimizer.zero_grad()

    straight = make()
    train(straight, range(3))
    saved = copy.deepcopy((straight[0].state_dict(), straight[1].state_dict()))
    train(straight, range(3, 6))
    resumed = make(saved)
    train(resumed, range(3, 6))
    for p, q in zip(straight[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(p, q)


def test_resuming_from_a_flush_is_continuing():
    run_ranks(3, resuming)


def clipped(rank, size):
    """The norm is the whole model's, of the batch before; there is none in the first step."""
    whole = blocks(size)
    part = copy.deepcopy(whole)[rank]
    reference = OneProcess(whole, OPTIMIZERS["adam"](whole.parameters()), max_norm=0.1)
    optimizer = OPTIMIZERS["adam"](part.parameters())
    schedule = SchedulePipeDream2BW(
        PipelineStage(part, rank, size),
        3,
        loss_fn=loss_fn,
        count=lambda t: t.numel(),
        skips={"x": (0, size - 1)},
        tied=[[(0, "weight"), (size - 1, "weight")]],
    )
    for t in range(4):
        ids, target = batch_of(t)
        schedule.step(ids, target=target)
        reference.step(ids, target)
        found = clip_grad_norm_(schedule, 0.1)
        assert found == pytest.approx(float(reference.norm), abs=ATOL) and (found > 0.1) == (t > 0)
        optimizer.step()
        optimizer.zero_grad()
        for p, q in zip(part.parameters(), whole[rank].parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=ATOL, rtol=0)
    schedule.flush()


def test_clipping_is_of_the_whole_model():
    run_ranks(3, clipped)


def replicated(rank, size):
    """Two pipelines of two ranks: the delayed update of the whole batch."""
    comm = pycomm.init()
    pipe, replicas = comm.split(rank % 2), comm.split(rank // 2)
    whole = blocks(2)
    part = copy.deepcopy(whole)[pipe.rank]
    reference = OneProcess(whole, OPTIMIZERS["momentum"](whole.parameters()))
    optimizer = OPTIMIZERS["momentum"](part.parameters())
    wrapped = pycomm.DistributedDataParallel(part, communicator=replicas)
    schedule = SchedulePipeDream2BW(
        PipelineStage(wrapped, pipe.rank, 2, group=pipe),
        3,
        loss_fn=loss_fn,
        count=lambda t: t.numel(),
        count_group=replicas,
        skips={"x": (0, 1)},
        tied=[[(0, "module.weight"), (1, "module.weight")]],
    )
    for t in range(5):
        ids, target = batch_of(t)
        schedule.step(ids.chunk(2)[replicas.rank], target=target.chunk(2)[replicas.rank])
        reference.step(ids, target)
        optimizer.step()
        optimizer.zero_grad()
        for p, q in zip(part.parameters(), whole[pipe.rank].parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=ATOL, rtol=0)
    schedule.flush()
    optimizer.step()
    reference.update()
    for p, q in zip(part.parameters(), whole[pipe.rank].parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=ATOL, rtol=0)


def test_replicas_are_averaged():
    run_ranks(4, replicated)


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        time.sleep(0.05)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(0.05)
        return gradient


class Sleeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return Sleeps.apply(self.layer(x))


def timed(rank, size, n_steps):
    x = torch.ones(8, 2)
    found = {}
    for made in (Schedule1F1B, SchedulePipeDream2BW):
        part = Sleeper()
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
        schedule = made(PipelineStage(part, rank, size), 2, loss_fn=nn.functional.mse_loss)
        spans = []
        for _ in range(n_steps):
            schedule.step(x, target=x)
            spans += schedule._runtime.spans
            optimizer.step()
            optimizer.zero_grad()
        last = schedule.timeline()  # of the last step, and every rank's
        assert [[s.action for s in row] for row in last.spans] == [list(row) for row in last.order.actions]
        if made is SchedulePipeDream2BW:
            schedule.flush()
            spans += schedule._runtime.spans
        found[made.schedule_name] = spans
    return found


def test_no_flush_between_steps():
    n_steps, m, p = 6, 2, 3
    results = run_ranks(p, timed, n_steps)
    idle = {}
    for name in ("1F1B", "PipeDream2BW"):
        rows = tuple(tuple(result[name]) for result in results)
        order = Order(name, tuple(range(p)), 2 * m, tuple(tuple(s.action for s in row) for row in rows))
        idle[name] = Timeline(order, rows).bubble
        if name == "PipeDream2BW":  # what ran is what was drawn and verified
            whole = pipedream_2bw(p, m, n_steps)
            for rank in range(p):
                want = [a._replace(microbatch=a.microbatch % (2 * m)) for a in whole.actions[rank]]
                assert list(order.actions[rank]) == want
    # In theory 2/4 and 2/14; what a busy machine adds comes to both.
    assert idle["PipeDream2BW"] < idle["1F1B"] - 0.12, idle


def hooked(rank, size):
    def make(part, m=4, **kwargs):
        return SchedulePipeDream2BW(PipelineStage(part, rank, size), m, loss_fn=loss_fn, **kwargs)

    with pytest.raises(ValueError, match="3 ranks need at least 2 microbatches, got 1"):
        make(nn.Linear(2, 2), m=1)
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        make(nn.Linear(2, 2), m=0)
    with pytest.raises(ValueError, match="takes no order"):
        make(nn.Linear(2, 2), order=pipedream_2bw(3, 4, 1))
    with pytest.raises(ValueError, match="PipeDream2BW has 1 stage on a rank: 3 ranks, 6 stages"):
        SchedulePipeDream2BW([PipelineStage(nn.Linear(2, 2), rank + i, 6) for i in (0, 3)], 4)
    part = nn.Linear(2, 2)
    part.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match=r"parameter 'weight' of stage \d has hooks"):
        make(part)


def test_what_is_wrong_is_said():
    run_ranks(3, hooked)
