"""Gradients that travel as codes with a scale for each block: the bound, error feedback, its state.

A rank's gradient is made to be exactly a given tensor (the loss is its product with the parameter), so that
the exact average is known in float64.
"""

import copy
import gc
import io
import math
import pickle
import weakref

import pytest
import torch
from test_ddp_compression import Dots, assert_same_bits, random_steps
from torch import nn

import pycomm
from ddp_cases import ON_DEVICE
from ranks import run_ranks

U = {"int8": 0.0, "fp8": 2.0**-4, "fp16": 2.0**-11, "bf16": 2.0**-8}
F = {"int8": 1 / 254, "fp8": 2.0**-17, "fp16": 2.0**-38, "bf16": 2.0**-132}
BLOCK = 256


def wrap(net, compression, feedback, **more):
    return pycomm.DistributedDataParallel(
        net, communicator=pycomm.init(), compression=compression, error_feedback=feedback, **more
    )


def take_steps(rank, size, steps, compression, feedback, overlap="async", weights=None):
    """steps[s][r] are rank r's gradients in step s; returns what each step made of them, flat."""
    net = Dots([t.numel() for t in steps[0][0]], steps[0][0][0].dtype)
    ddp = wrap(net, compression, feedback, overlap=overlap, bucket_cap_mb=25)
    found = []
    for tensors in steps:
        net.zero_grad()
        if weights is None:
            ddp(tensors[rank]).backward()
        else:
            with ddp.weighted(weights[rank]):
                ddp(tensors[rank]).backward()
        found.append(torch.cat([w.grad for w in reversed(net.weights)]))  # as the bucket has them
    return found


def flat(tensors):
    return torch.cat(list(reversed(tensors))).double()


def bound(by_rank, compression):
    """Of pycomm/ddp/block_wire.py, for the ranks' vectors (float64), times their weights."""
    n = by_rank.shape[1]
    padded = torch.nn.functional.pad(by_rank.abs(), (0, -n % BLOCK))
    largest = padded.amax(dim=0).view(-1, BLOCK).amax(dim=1).repeat_interleave(BLOCK)[:n]
    mean = by_rank.abs().mean(dim=0)
    return 2.1 * U[compression] * mean + (2.1 * F[compression] + 2.0**-21) * largest + 2.0**-99


@pytest.mark.parametrize("overlap", ["async", "inline", "end"])
@pytest.mark.parametrize("compression", ["int8", "fp8"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_error_bound(size, compression, overlap):
    steps = random_steps(size, size, [1.0, 0.5, 1e-9, 1e9, 1e-25], sizes=(1000, 1, 37, 700))
    by_rank = run_ranks(size, take_steps, steps, compression, False, overlap)
    assert_same_bits([[[step] for step in found] for found in by_rank])
    for got, given in zip(by_rank[0], steps, strict=True):
        vectors = torch.stack([flat(tensors) for tensors in given])
        assert ((got.double() - vectors.mean(dim=0)).abs() <= bound(vectors, compression)).all()


@pytest.mark.parametrize("compression", ["int8", "fp8", "fp16", "bf16"])
def test_a_weighted_average_and_error_feedback_keep_the_bound(compression):
    steps = random_steps(9, 3, [1.0], sizes=(600, 300))
    for got in run_ranks(3, take_steps, steps, compression, True, "async", [1, 0, 3]):
        scaled = torch.stack([flat(t) * w * 3 / 4 for t, w in zip(steps[0], [1, 0, 3], strict=True)])
        assert ((got[0].double() - scaled.mean(dim=0)).abs() <= bound(scaled, compression)).all()


@pytest.mark.parametrize("compression", ["int8", "fp8", "fp16", "bf16"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_with_feedback_the_sum_of_steps_is_as_exact_as_one(size, compression):
    n_steps = 40
    steps = random_steps(size, size, [1.0], sizes=(1000, 37)) * n_steps  # the same gradients every time
    exact = torch.stack([flat(tensors) for tensors in steps[0]])
    # What is sent is the gradient and the residual: its magnitudes are at most one step's error larger.
    one_step = 2 * bound(exact, compression)
    with_feedback = run_ranks(size, take_steps, steps, compression, True)[0]
    total = torch.stack(with_feedback).double().sum(dim=0)
    assert (
        (total - n_steps * exact.mean(dim=0)).abs() <= one_step + n_steps * 2.0**-22 * exact.abs().amax()
    ).all()
    without = torch.stack(run_ranks(size, take_steps, steps, compression, False)[0]).double().sum(dim=0)
    worst = (without - n_steps * exact.mean(dim=0)).abs().amax()
    assert worst > 5 * (total - n_steps * exact.mean(dim=0)).abs().amax()


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("compression", ["int8", "fp8"])
def test_what_is_not_finite_is_nan_in_its_block_on_all_ranks_and_only_then(compression, feedback):
    plain = [[torch.full((3 * BLOCK,), 2.0)]] * 2
    odd = [[torch.full((3 * BLOCK,), 2.0)], [torch.full((3 * BLOCK,), 2.0)]]
    odd[1][0][300] = math.inf
    odd[0][0][3 * BLOCK - 1] = math.nan
    for first, second, third in run_ranks(2, take_steps, [plain, odd, plain], compression, feedback):
        assert first.tolist() == third.tolist() == [2.0] * (3 * BLOCK)
        # Blocks begin with the vector; on a device, with the part that a rank owns: here its half.
        hit = [(BLOCK, 3 * BLOCK)] if not ON_DEVICE else [(BLOCK, 384), (384 + BLOCK, 3 * BLOCK)]
        is_nan = torch.zeros(3 * BLOCK, dtype=torch.bool)
        for begin, end in hit:
            is_nan[begin:end] = True
        assert torch.equal(second.isnan(), is_nan)
        assert bool((second[~is_nan] == 2.0).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    """16-bit gradients travel with 8 bits; float64 ones as they are."""
    steps = random_steps(4, 2, [1.0], sizes=(600,))
    steps = [[[t.to(dtype) for t in tensors] for tensors in step] for step in steps]
    for (got,) in run_ranks(2, take_steps, steps, "int8", False):
        vectors = torch.stack([flat(tensors) for tensors in steps[0]])
        allowed = bound(vectors, "int8") + torch.finfo(dtype).eps * vectors.abs().mean(dim=0)
        if dtype is torch.float64:
            allowed = 2.0**-50 * vectors.abs().mean(dim=0)
        assert got.dtype is dtype
        assert ((got.double() - vectors.mean(dim=0)).abs() <= allowed + torch.finfo(dtype).tiny).all()


class Layouts(torch.nn.Module):
    """channels_last, empty and unused parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.empty = torch.nn.Parameter(torch.empty(0))
        self.extra = torch.nn.Linear(2, 2)

    def forward(self, x, extra):
        out = self.conv(x).square().mean() + self.empty.sum()
        return out + self.extra(x[0, 0, :2, :2]).sum() if extra else out


def step_layouts(net, ddp, rank):
    net.zero_grad()
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(rank))
    with ddp.no_sync():
        ddp(x, False).backward()
    ddp(2 * x, rank == 0).backward()
    assert net.conv.weight.grad.is_contiguous(memory_format=torch.channels_last)
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def compress_layouts(rank, size, feedback, as_view):
    net = Layouts()
    ddp = wrap(net, "int8", feedback, find_unused_parameters=True, gradient_as_bucket_view=as_view)
    return step_layouts(net, ddp, rank)


@pytest.mark.parametrize(("feedback", "as_view"), [(False, False), (True, False), (True, True)])
def test_layouts_accumulation_and_unused_parameters(feedback, as_view):
    net = Layouts()
    inputs = [torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    losses = [net(x, False) + net(2 * x, rank == 0) for rank, x in enumerate(inputs)]
    (sum(losses) / 3).backward()
    wanted = {name: p.grad for name, p in net.named_parameters()}
    largest = max(float(g.abs().max()) for g in wanted.values() if g.numel() > 0)
    for found in run_ranks(3, compress_layouts, feedback, as_view):
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=4 * largest / 127)


def keep_state(rank, size):
    """Steps, then the same steps again from a copy, a pickle and a checkpoint of each rank: equal bits."""
    net = Layouts()
    ddp = wrap(net, "fp8", True, find_unused_parameters=True)
    for _ in range(3):
        step_layouts(net, ddp, rank)
    saved = io.BytesIO()
    torch.save(ddp.error_feedback_state_dict(), saved)
    saved.seek(0)
    assert {name: r.shape for name, r in ddp.error_feedback_state_dict().items()} == {
        name: p.shape for name, p in net.named_parameters()
    }
    copied = copy.deepcopy(ddp)
    wanted = step_layouts(net, ddp, rank)
    fresh = Layouts()
    loaded = wrap(fresh, "fp8", True, find_unused_parameters=True)
    loaded.load_error_feedback_state_dict(torch.load(saved))
    for other in (copied, loaded):
        if ON_DEVICE:
            # Ranks' parts are cut by elements there, not by blocks: bits depend on the order of parameters in
            # the bucket, which a new wrapper learns in its first backward.
            kept = other.error_feedback_state_dict()
            step_layouts(other.module, other, rank)
            other.load_error_feedback_state_dict(kept)
        for name, gradient in step_layouts(other.module, other, rank).items():
            assert torch.equal(gradient, wanted[name]), name
    assert any(bool(r.any()) for r in ddp.error_feedback_state_dict().values())
    before = ddp.error_feedback_state_dict()
    with pytest.raises(ValueError, match="no parameter is named 'nobody'"):
        ddp.load_error_feedback_state_dict({"conv.weight": torch.ones(4, 3, 3, 3), "nobody": torch.ones(1)})
    with pytest.raises(ValueError, match=r"'conv.bias' has the shape \(5,\), the parameter \(4,\)"):
        ddp.load_error_feedback_state_dict({"conv.bias": torch.ones(5)})
    after = ddp.error_feedback_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("size", [2, 3])
def test_residuals_survive_new_buckets_copies_and_checkpoints(size):
    run_ranks(size, keep_state)


def refuse(rank, size):
    with pytest.raises(ValueError, match="error_feedback is of what a compression loses"):
        wrap(Dots([1]), None, True)
    with pytest.raises(ValueError, match=r"compression must be one of 'fp16', 'bf16', 'fp8', 'int8' or None"):
        wrap(Dots([1]), "int4", False)
    with pytest.raises(RuntimeError, match=r"no hook would be asked; wrap without them to register one"):
        wrap(Dots([1]), "int8", False).register_comm_hook(None, print)
    with pytest.raises(RuntimeError, match="keeps no residuals; give it error_feedback=True"):
        wrap(Dots([1]), "int8", False).load_error_feedback_state_dict({})
    facts = wrap(Dots([1000]), "int8", False)
    facts([torch.ones(1000)]).backward()
    if size > 1:
        [bucket] = facts.stats()["buckets"]
        assert (bucket["bytes"], bucket["wire_bytes"]) == (4000, 1000)
    else:
        assert wrap(Dots([1]), "int8", True).error_feedback_state_dict() == {"weights.0": torch.zeros(1)}


@pytest.mark.parametrize("size", [1, 2])
def test_arguments_and_facts(size):
    run_ranks(size, refuse)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(700), requires_grad=False)
        self.trained = nn.Parameter(torch.ones(700))

    def forward(self, x):
        return (x * self.trained * self.frozen).sum()


def move_state(rank, size):
    """A wrapper that came out of a pickle has its residuals before it has its ranks, and keeps them."""
    ddp = pycomm.DistributedDataParallel(Pair(), compression="int8", error_feedback=True)
    ddp(torch.linspace(0, rank + 1, 700)).backward()
    wanted = ddp.error_feedback_state_dict()
    assert wanted.keys() == {"trained"}
    assert bool(wanted["trained"].any()) is (size > 1)
    once = pickle.loads(pickle.dumps(ddp))
    for moved in (once, pickle.loads(pickle.dumps(once)), copy.deepcopy(once)):
        assert torch.equal(moved.error_feedback_state_dict()["trained"], wanted["trained"])
        moved.load_error_feedback_state_dict({"trained": torch.full((700,), 2.0)})
        moved.load_error_feedback_state_dict(wanted)
        moved(torch.linspace(0, rank + 1, 700)).backward()
    ddp.zero_grad()
    ddp(torch.linspace(0, rank + 1, 700)).backward()
    return [moved.error_feedback_state_dict()["trained"], ddp.error_feedback_state_dict()["trained"]]


@pytest.mark.parametrize("size", [1, 2])
def test_residuals_move_with_pickles(size):
    for after_move, after_step in run_ranks(size, move_state):
        assert torch.equal(after_move, after_step)


def replace_again_and_again(rank, size):
    net = Pair()
    ddp = wrap(net, "int8", True)
    vectors = []
    for step in range(4):
        net.trained = nn.Parameter(torch.full((700,), float(step)))
        net.zero_grad()
        ddp(torch.ones(700)).backward()
        vectors.append(weakref.ref(ddp._feedback._of[id(net.trained)][1]))
    gc.collect()
    return [vector() is not None for vector in vectors]


def test_residuals_of_parameters_that_are_gone_are_let_go():
    assert run_ranks(2, replace_again_and_again)[0][:2] == [False, False]
