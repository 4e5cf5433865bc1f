"""Frozen stages: no message that nobody needs is sent or awaited, and gradients pass where one is needed."""

import copy

import pytest
import torch
from torch import nn

from pycomm.pipeline import PipelineStage, get_schedule_class, pop, stash
from pycomm.pipeline.schedule.catalog import CATALOG, build
from ranks import run_ranks

pytestmark = pytest.mark.timeout(120)
ATOL = 1e-12
M = 3  # microbatches


class LoRA(nn.Module):
    """A frozen layer and a trainable one of low rank beside it; may stash or pop a value."""

    def __init__(self, n_rank, name="", gives=False):
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.base.requires_grad_(False)
        self.down = nn.Linear(4, n_rank, bias=False) if n_rank else None
        self.up = nn.Linear(n_rank, 4, bias=False) if n_rank else None
        self.name, self.gives = name, gives

    def forward(self, x):
        if self.name and not self.gives:
            x = x + pop(self.name)
        y = self.base(x)
        if self.down is not None and self.up is not None:
            y = y + self.up(self.down(x))
        if self.name and self.gives:
            stash(self.name, torch.sin(y))
        return torch.tanh(y)


def model_of(trainable):
    """A stage for each letter: t trainable, f frozen. The first stashes, the last pops."""
    torch.manual_seed(5)
    n = len(trainable)
    return nn.ModuleList(
        LoRA(2 * (kind == "t"), "skip" if s in (0, n - 1) else "", s == 0) for s, kind in enumerate(trainable)
    ).double()


def needed(trainable):
    """The gradients that must pass, (to stage, over the skip or not): where something before is trainable."""
    n = len(trainable)
    found = {(s, "") for s in range(n - 1) if "t" in trainable[: s + 1]}
    return found | ({(0, "skip")} if trainable[0] == "t" else set())


def freezing(rank, size, names):
    for name in names:
        v = CATALOG[name].stages_per_rank or 2
        n = size * v
        order = build(name, size, M, v)
        held = order.stages_of(rank)
        patterns = ["f" * (n - 1) + "t", "t" + "f" * (n - 1), "ft" + "f" * (n - 2), "f" * n, "t" * n]
        for i, trainable in enumerate(patterns):
            for checkpoint in ("never", "always")[i % 2 :][:1]:
                whole = model_of(trainable)
                parts = copy.deepcopy(whole)
                mine = [PipelineStage(parts[s], s, n, checkpoint=checkpoint) for s in held]
                schedule = get_schedule_class(name)(
                    mine,
                    M,
                    loss_fn=nn.functional.mse_loss,
                    skips={"skip": (0, n - 1)},
                    loss_on_all_ranks=True,
                )
                post = schedule._runtime.post
                sent, awaited = [], []
                send, expect = post.send, post.expect
                post.send = lambda channel, *rest, log=sent, call=send: (
                    log.append(channel),
                    call(channel, *rest),
                )[1]
                post.expect = lambda channel, *rest, log=awaited, call=expect: (
                    log.append(channel),
                    call(channel, *rest),
                )[1]
                x = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
                for _ in range(2):
                    schedule.step(x, target=x)
                    y = x
                    for module in whole:
                        y = module(y)
                    loss = nn.functional.mse_loss(y, x)
                    if loss.requires_grad:
                        loss.backward()
                    torch.testing.assert_close(schedule.loss, loss.detach(), atol=ATOL, rtol=0)
                for s in held:
                    for (key, p), q in zip(parts[s].named_parameters(), whole[s].parameters(), strict=True):
                        assert (p.grad is None) == (q.grad is None), (name, trainable, s, key)
                        if p.grad is not None:
                            assert torch.allclose(p.grad, q.grad, atol=ATOL, rtol=0), (
                                name,
                                trainable,
                                s,
                                key,
                            )
                place = order.placement
                ways = [(place[n - 1 if skip else s + 1], place[s], s, skip) for s, skip in needed(trainable)]
                for log, end in ((sent, 0), (awaited, 1)):
                    found = sorted((c.stage, c.skip, c.microbatch) for c in log if c.direction == "gradient")
                    mine_of = [w[2:] for w in ways if w[0] != w[1] and w[end] == rank]
                    want = sorted((s, skip, k) for s, skip in mine_of for k in range(M) for _ in range(2))
                    assert found == want, (name, trainable, checkpoint, rank, found, want)


@pytest.mark.parametrize("size", [2, 3])
def test_only_the_gradients_that_are_needed_pass(size):
    names = (
        ["1F1B", "GPipe", "ZeroBubbleH1"] if size == 3 else ["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"]
    )
    run_ranks(size, freezing, names, timeout=100)


def thawing(rank, size):
    """A stage that is frozen, trained and frozen again between steps."""
    whole = model_of("ftt")
    part = copy.deepcopy(whole[rank])
    schedule = get_schedule_class("1F1B")(
        PipelineStage(part, rank, size), M, loss_fn=nn.functional.mse_loss, skips={"skip": (0, 2)}
    )
    x = torch.randn(6, 4, dtype=torch.float64)
    for is_trained in (False, True, False, True):
        if rank == 0:
            part.base.requires_grad_(is_trained)
        whole[0].base.requires_grad_(is_trained)
        n_before = None if part.base.weight.grad is None else part.base.weight.grad.clone()
        schedule.step(x, target=x)
        y = x
        for module in whole:
            y = module(y)
        nn.functional.mse_loss(y, x).backward()
        for p, q in zip(part.parameters(), whole[rank].parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, atol=ATOL, rtol=0)
        if rank == 0 and not is_trained and n_before is not None:
            assert torch.equal(part.base.weight.grad, n_before)


def test_freezing_may_change_between_steps():
    run_ranks(3, thawing)
