"""Every way in which gradients come about averages them: the oracle is the mean of what plain modules get.

A scenario is a function of a model and a rank that runs forwards and backwards. It runs in every rank on
the wrapper, and here on plain float64 copies with each rank's data; gradients being sums, their mean over
the ranks is what one process on the concatenated batch would have.
"""

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pycomm
from ranks import run_ranks

TINY = 1e-4  # MiB: toy modules have several buckets


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Checkpointed(Net):
    """Every layer runs a backward of its own; the middle one is checkpointed twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[1]):
            x = torch.tanh(checkpoint(layer, x, use_reentrant=self.reentrant))
        return x


class Plain(nn.Module):
    """What a scenario sees in place of the wrapper."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)

    def no_sync(self):
        return contextlib.nullcontext()

    def finalize_backward(self):
        pass


def data(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64)


def loss(model, step, rank):
    return model(data(step, rank)).square().mean()


# ---- scenarios: what torch's wrapper was seen to get wrong, and what it gets right


def one(model, rank):
    loss(model, 0, rank).backward()


def two_forwards_each_with_its_backward(model, rank):
    loss(model, 0, rank).backward()
    loss(model, 1, rank).backward()


def two_forwards_then_their_backwards(model, rank):
    losses = [loss(model, step, rank) for step in range(2)]
    for each in losses:
        each.backward()


def interleaved_as_in_1f1b(model, rank):
    waiting = [loss(model, 0, rank), loss(model, 1, rank)]
    for step in range(2, 4):
        waiting.pop(0).backward()
        waiting.append(loss(model, step, rank))
    for each in waiting:
        each.backward()


def two_forwards_one_backward(model, rank):
    (loss(model, 0, rank) + loss(model, 1, rank)).backward()


def around_the_wrapper(model, rank):
    loss(model.module, 0, rank).backward()


def around_the_wrapper_after_no_sync(model, rank):
    with model.no_sync():
        loss(model, 0, rank).backward()
    loss(model.module, 1, rank).backward()


def retained_graph(model, rank):
    value = loss(model, 0, rank)
    value.backward(retain_graph=True)
    value.backward()


def no_sync_then_sync(model, rank):
    with model.no_sync():
        loss(model, 0, rank).backward()
        loss(model, 1, rank).backward()
    loss(model, 2, rank).backward()


def backward_outside_of_no_sync(model, rank):
    with model.no_sync():
        value = loss(model, 0, rank)
    value.backward()  # local: its forward was within
    loss(model, 1, rank).backward()


def no_sync_and_sync_in_one_backward(model, rank):
    with model.no_sync():
        value = loss(model, 0, rank)
    (value + loss(model, 1, rank)).backward()


def flag_set_directly(model, rank):
    model.require_backward_grad_sync = False
    loss(model, 0, rank).backward()
    model.require_backward_grad_sync = True
    loss(model, 1, rank).backward()


def finalized(model, rank):
    with model.no_sync():
        for step in range(3):
            loss(model, step, rank).backward()
    model.finalize_backward()
    model.finalize_backward()  # changes nothing


def finalized_by_hand(model, rank):
    parameters = list(model.module.parameters())
    for p, g in zip(parameters, torch.autograd.grad(loss(model.module, 0, rank), parameters), strict=True):
        p.grad = g
    model.finalize_backward()


def asked_for(model, rank):
    parameters = list(model.module.parameters())
    for p, g in zip(parameters, torch.autograd.grad(loss(model, 0, rank), parameters), strict=True):
        p.grad = g.clone()


def asked_for_in_part(model, rank):
    last = list(model.module.parameters())[-2:]
    value = loss(model, 0, rank)
    for p, g in zip(last, torch.autograd.grad(value, last, retain_graph=True), strict=True):
        p.grad = g.clone()
    value.backward()


def penalty_on_inputs(model, rank):
    x = data(0, rank).requires_grad_()
    value = model(x).square().mean()
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    (value + gradient.square().sum()).backward()


def regularised_outside(model, rank):
    (loss(model, 0, rank) + (1 + rank) * model.module.layers[0].weight.square().sum()).backward()


def second_step_without_zero_grad(model, rank):
    loss(model, 0, rank).backward()
    for p in model.module.parameters():
        p.grad.mul_(0.5)
    loss(model, 1, rank).backward()


def some_inputs_only(model, rank):
    """backward(inputs=…): the others keep what they have; both of two come."""
    chosen = list(model.module.parameters())
    loss(model, 0, rank).backward(inputs=chosen)


SCENARIOS = [
    one,
    two_forwards_each_with_its_backward,
    two_forwards_then_their_backwards,
    interleaved_as_in_1f1b,
    two_forwards_one_backward,
    around_the_wrapper,
    around_the_wrapper_after_no_sync,
    retained_graph,
    no_sync_then_sync,
    backward_outside_of_no_sync,
    no_sync_and_sync_in_one_backward,
    flag_set_directly,
    finalized,
    finalized_by_hand,
    asked_for,
    asked_for_in_part,
    penalty_on_inputs,
    regularised_outside,
    second_step_without_zero_grad,
    some_inputs_only,
]
MODULES = {
    "plain": Net,
    "checkpointed": functools.partial(Checkpointed, False),
    "reentrant": functools.partial(Checkpointed, True),
}


def make(kind):
    torch.manual_seed(3)
    return MODULES[kind]().double()


def gradients(module):
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def oracle(kind, scenario, size):
    by_rank = []
    for rank in range(size):
        plain = Plain(make(kind))
        scenario(plain, rank)
        by_rank.append(gradients(plain.module))
    return {name: sum(found[name] for found in by_rank) / size for name in by_rank[0]}


def run_scenarios(rank, size, kind, scenarios, overlap, as_view):
    comm = pycomm.init()
    found = []
    for scenario in scenarios:
        module = make(kind)
        ddp = pycomm.DistributedDataParallel(
            module, communicator=comm, bucket_cap_mb=TINY, overlap=overlap, gradient_as_bucket_view=as_view
        )
        by_step = []
        for _ in range(2):  # the second time with buckets that are launched early
            scenario(ddp, rank)
            by_step.append(gradients(module))
            ddp.zero_grad(set_to_none=not as_view)
        found.append(by_step)
    return found


def check(kind, scenarios, size, overlap=None, as_view=False):
    by_rank = run_ranks(size, run_scenarios, kind, scenarios, overlap, as_view)
    for at, scenario in enumerate(scenarios):
        wanted = oracle(kind, scenario, size)
        for rank in range(size):
            for step in range(2):
                for name, gradient in wanted.items():
                    torch.testing.assert_close(
                        by_rank[rank][at][step][name],
                        gradient,
                        rtol=1e-10,
                        atol=1e-13,
                        msg=lambda m, c=(scenario.__name__, rank, step, name): f"{c}: {m}",
                    )
                    assert torch.equal(by_rank[rank][at][step][name], by_rank[0][at][step][name])


@pytest.mark.parametrize(
    ("size", "overlap", "as_view"),
    [
        (1, None, False),
        (2, "async", False),
        (2, "inline", True),
        (3, "end", False),
        (3, "async", True),
        (4, "async", False),
        (4, "inline", True),
    ],
)
def test_every_backward_averages(size, overlap, as_view):
    check("plain", SCENARIOS, size, overlap, as_view)


@pytest.mark.parametrize("kind", ["checkpointed", "reentrant"])
@pytest.mark.parametrize(
    ("size", "overlap"), [(1, None), (2, "async"), (3, "inline"), (2, "end"), (4, "async")]
)
def test_checkpoints(kind, size, overlap):
    scenarios = [one, two_forwards_each_with_its_backward, two_forwards_one_backward, no_sync_then_sync]
    if kind == "reentrant":
        scenarios = [functools.wraps(s)(functools.partial(with_grad_inputs, s)) for s in scenarios]
    else:
        scenarios += [interleaved_as_in_1f1b, around_the_wrapper, retained_graph]
    check(kind, scenarios, size, overlap)


def with_grad_inputs(scenario, model, rank):
    """Reentrant checkpoints need an input that requires a gradient."""
    handle = model.module.register_forward_pre_hook(lambda _, args: (args[0].requires_grad_(),))
    scenario(model, rank)
    handle.remove()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_reentrant_checkpoints_around_the_wrapper(size):
    """No output of the wrapper tells of this backward; its first gradient comes within a checkpoint's own."""
    scenario = functools.wraps(around_the_wrapper)(functools.partial(with_grad_inputs, around_the_wrapper))
    check("reentrant", [scenario], size, "inline")
