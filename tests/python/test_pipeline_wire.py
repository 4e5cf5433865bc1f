"""Activations on a wire of fewer bits: each element within the stated bound of float64, bytes counted."""

import math

import pytest
import torch
from torch import nn

from pycomm.pipeline import PipelineStage, ScheduleGPipe
from pycomm.pipeline.messages import Spec
from pycomm.pipeline.wire import WIRES, Wire, empty, unpack
from ranks import run_ranks

pytestmark = pytest.mark.timeout(120)
BOUND = {"fp16": (2**-11, 2**-38), "bf16": (2**-8, 2**-132), "int8": (0.0, 1 / 254 + 2**-23)}
ITEM = {"fp16": 2, "bf16": 2, "int8": 1}


def across(wire, x, place="here"):
    spec = Spec.of(x, wire.of(x))
    sent = wire.pack(x, spec, place)
    assert (sent.dtype, sent.shape) == (empty(spec).dtype, empty(spec).shape)
    return unpack(spec, sent)


def allowed(code, x):
    """The bound of each element, from the largest magnitude in its block of 256."""
    u, f = BOUND[code]
    flat = x.double().reshape(-1).abs()
    padded = nn.functional.pad(flat, (0, -flat.numel() % 256)).view(-1, 256)
    largest = padded.amax(1, keepdim=True).expand_as(padded).reshape(-1)[: flat.numel()]
    return (u * flat + f * largest).view(x.shape)


@pytest.mark.parametrize("code", WIRES)
def test_each_element_is_within_the_bound(code):
    made = torch.Generator().manual_seed(1)
    for shape, scale in (((1024,), 1.0), ((37, 61), 1e30), ((4, 19, 31), 1e-20), ((5, 300), 70000.0)):
        x = torch.randn(shape, generator=made) * scale
        got = across(Wire(code), x)
        assert got.shape == x.shape and got.dtype == torch.float32
        assert ((got.double() - x.double()).abs() <= allowed(code, x)).all()
        turned = x.transpose(0, -1)  # not contiguous
        assert torch.equal(across(Wire(code), turned), across(Wire(code), turned.contiguous()))


@pytest.mark.parametrize("code", WIRES)
def test_what_is_not_finite_makes_its_block_nan_and_no_other(code):
    for bad in (math.inf, -math.inf, math.nan, 2.0**127):
        x = torch.ones(1100)
        x[300] = bad
        got = across(Wire(code), x)
        assert got[256:512].isnan().all()
        assert torch.equal(got[:256], x[:256]) and torch.equal(got[512:], x[512:])
    assert torch.equal(across(Wire(code), torch.full((1024,), 2.0**-101)), torch.zeros(1024))


def test_error_feedback_keeps_sums_exact_to_one_encoding():
    made = torch.Generator().manual_seed(2)
    wire, n = Wire("int8", error_feedback=True), 64
    total, arrived = torch.zeros(2048, dtype=torch.float64), torch.zeros(2048, dtype=torch.float64)
    plain = torch.zeros(2048, dtype=torch.float64)
    for _ in range(n):
        x = torch.rand(2048, generator=made) * 0.001 + 0.0013
        x[::256] = 1.0  # the block's largest, so that the others are a third of a code
        total += x.double()
        arrived += across(wire, x).double()
        plain += across(Wire("int8"), x).double()
    # The residual is at most half a code, so what is sent is at most 1 + 1/254 in magnitude.
    assert (arrived - total).abs().max() <= (1 + 1 / 254) / 254 + n * 2**-23
    assert (plain - total).abs().max() > 10 / 254


def test_only_large_float32_tensors_are_coded():
    wire = Wire("int8")
    assert wire.of(torch.ones(1024)) == "int8"
    for x in (torch.ones(1023), torch.ones(2048).double(), torch.ones(2048).half(), torch.ones(2048).long()):
        assert wire.of(x) == ""
        assert across(wire, x) is not None
    for wrong in (("fp8", False), ("fp16", True), (None, True)):
        with pytest.raises(ValueError, match="wire"):
            Wire(*wrong)


class Noting(nn.Module):
    """Gives its input on, and notes it and the gradient that comes back."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.seen, self.back = [], []

    def forward(self, x):
        self.seen.append(x.detach().clone())
        y = x * self.scale
        if y.requires_grad:
            y.register_hook(lambda g: self.back.append(g.clone()))
        return y


def piped(rank, size, code):
    """Rank 0's outputs arrive at rank 1, whose gradients arrive at rank 0, within the bound."""
    module = Noting()
    schedule = ScheduleGPipe(
        PipelineStage(module, rank, size),
        2,
        loss_fn=lambda out, target: (out * target).sum(),
        wire=code,
        scale_grads=False,
    )
    made = torch.Generator().manual_seed(3)
    n_bytes = 0
    for n in (8, 6):  # another shape in the second step
        x, target = (torch.randn(n, 300, generator=made) for _ in range(2))
        module.seen.clear()
        module.back.clear()
        schedule.step(x, target=target)
        if rank == 1:
            for got, sent in zip(module.seen, x.chunk(2), strict=True):
                limit = allowed(code, sent) if sent.numel() >= 1024 else torch.zeros_like(sent)
                assert ((got - sent).abs() <= limit).all()
        else:
            wanted = target.chunk(2)
            for got in module.back:
                off = [(got - w).abs() - (allowed(code, w) if w.numel() >= 1024 else 0) for w in wanted]
                assert any((o <= 1e-7).all() for o in off)
        n_elems = n // 2 * 300
        each = n_elems * ITEM[code] + -(-n_elems // 256) * 4 if n_elems >= 1024 else n_elems * 4
        n_bytes += 2 * each
    return schedule._runtime.post.wire.n_bytes, n_bytes


@pytest.mark.parametrize("code", WIRES)
def test_a_pipeline_on_a_wire(code):
    for counted, expected in run_ranks(2, piped, code):
        assert counted == expected
