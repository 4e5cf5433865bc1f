"""pycomm.optim: scale_lr (rules, warm-up, checkpoints, composition, refusals), and clip_grad_norm_."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import SequentialLR, StepLR

from pycomm import _C
from pycomm.optim import clip_grad_norm_, scale_lr, scaling_of


def sgd(*rates: float) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in rates], lr=1.0)


def rates_over(
    optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, n: int
) -> list[float]:
    """The first group's rate at each of n steps."""
    seen = []
    for _ in range(n):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize(("rule", "factor"), [("linear", 6.0), ("sqrt", math.sqrt(6.0))])
def test_every_group_is_scaled(rule, factor):
    optimizer = sgd(0.1, 0.02)
    scale_lr(optimizer, world_size=6, rule=rule)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.1 * factor, 0.02 * factor])
    scaling = scaling_of(optimizer)
    assert scaling is not None and (scaling.world_size, scaling.rule) == (6, rule)
    assert scaling.factor == pytest.approx(factor)


def test_the_warm_up_is_a_straight_line_from_the_rate_of_one_replica():
    optimizer = sgd(0.1)
    warmup = scale_lr(optimizer, world_size=4, warmup_steps=3)
    assert rates_over(optimizer, warmup, 6) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_one_replica_changes_nothing():
    optimizer = sgd(0.1)
    assert rates_over(optimizer, scale_lr(optimizer, world_size=1, warmup_steps=5), 7) == pytest.approx(
        [0.1] * 7
    )


def test_a_checkpoint_goes_on_where_the_warm_up_was():
    first = sgd(0.1)
    warmup = scale_lr(first, world_size=4, warmup_steps=6)
    rates_over(first, warmup, 3)
    second = sgd(0.1)
    resumed = scale_lr(second, world_size=4, warmup_steps=6)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(warmup.state_dict())
    assert rates_over(second, resumed, 4) == pytest.approx([0.25, 0.3, 0.35, 0.4])


def test_a_scheduler_behind_it_sees_the_scaled_rate():
    optimizer = sgd(0.1)
    warmup = scale_lr(optimizer, world_size=2, warmup_steps=2)
    both = SequentialLR(optimizer, [warmup, StepLR(optimizer, step_size=1, gamma=0.5)], milestones=[2])
    assert rates_over(optimizer, both, 5) == pytest.approx([0.1, 0.15, 0.2, 0.1, 0.05])


def test_a_rate_that_is_a_tensor():
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.1))
    scale_lr(optimizer, world_size=4, rule="sqrt")
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"world_size": 0}, "world_size"),
        ({"world_size": 2.0}, "world_size"),
        ({"world_size": 2, "rule": "cubic"}, "rule"),
        ({"world_size": 2, "warmup_steps": -1}, "warmup_steps"),
    ],
)
def test_bad_arguments_change_nothing(arguments, word):
    optimizer = sgd(0.1)
    with pytest.raises(ValueError, match=word):
        scale_lr(optimizer, **arguments)
    assert optimizer.param_groups[0]["lr"] == 0.1 and scaling_of(optimizer) is None


def test_twice_is_refused():
    optimizer = sgd(0.1)
    scale_lr(optimizer, world_size=2)
    with pytest.raises(ValueError, match="scaled before"):
        scale_lr(optimizer, world_size=2)


def test_something_else_is_refused():
    with pytest.raises(TypeError, match="Optimizer"):
        scale_lr(nn.Linear(2, 2), world_size=2)


def test_a_rate_that_was_loaded_is_not_scaled_twice():
    first = sgd(0.1, 0.3)
    scale_lr(first, world_size=4, rule="sqrt", warmup_steps=2)
    saved = first.state_dict()
    second = sgd(0.1, 0.3)
    second.load_state_dict(saved)
    assert scaling_of(second) == scaling_of(first)
    with pytest.raises(
        ValueError, match=r"scaled before.*to resume, call scale_lr first and load_state_dict"
    ):
        scale_lr(second, world_size=4, rule="sqrt")
    assert [g["lr"] for g in second.param_groups] == [g["lr"] for g in first.param_groups]
    resumed = sgd(0.1, 0.3)
    scale_lr(resumed, world_size=4, rule="sqrt", warmup_steps=2)
    resumed.load_state_dict(saved)
    assert [g["lr"] for g in resumed.param_groups] == [g["lr"] for g in first.param_groups]


def make_gradients(dtypes: list[torch.dtype], seed: int = 5) -> list[torch.nn.Parameter]:
    """Parameters of several shapes, each with a gradient; one is transposed, one has none."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for dtype in dtypes:
        for shape in ((), (0,), (7, 5), (2, 3, 4), (1000,)):
            parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
            parameter.grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            if len(shape) == 2:
                parameter.grad = parameter.grad.t().contiguous().t()
            made.append(parameter)
    return [*made, torch.nn.Parameter(torch.ones(3))]


def check_clipping(rank: int = 0, size: int = 1) -> int:
    """Against torch's in float64; returns the emulated device that the gradients were on."""
    for dtypes in ([torch.float32], [torch.float64, torch.bfloat16], [torch.float16, torch.complex64]):
        parameters = make_gradients(dtypes)
        wide = [torch.nn.Parameter(p.detach().to(torch.complex128)) for p in parameters]
        for copy, parameter in zip(wide, parameters, strict=True):
            copy.grad = None if parameter.grad is None else parameter.grad.to(torch.complex128)
        wanted = nn.utils.clip_grad_norm_(wide, 2.5).real
        norm = clip_grad_norm_(parameters, 2.5)
        assert (norm.dtype, norm.shape) == (torch.float64, ())
        assert float(norm) == pytest.approx(float(wanted), rel=1e-13)
        for copy, parameter in zip(wide, parameters, strict=True):
            if parameter.grad is None:
                assert copy.grad is None
                continue
            found, exact = parameter.grad.to(torch.complex128), copy.grad
            assert parameter.grad.dtype is parameter.dtype
            assert ((found - exact).abs() <= 2 * torch.finfo(parameter.dtype).eps * exact.abs() + 1e-7).all()
    parameters = make_gradients([torch.float32])
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    assert float(clip_grad_norm_(parameters, 1e9, error_if_nonfinite=True)) > 1
    after = [p.grad for p in parameters if p.grad is not None]
    assert all(map(torch.equal, before, after))  # a factor of 1
    after[-1][3], after[-2][1, 1, 1] = float("nan"), float("inf")
    before = [g.clone() for g in after]
    with pytest.raises(RuntimeError, match="2 elements of the gradients are infinite or NaN"):
        clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))
    assert not torch.isfinite(clip_grad_norm_(parameters, 1.0))
    return _C.cuda.emulated_device()


def test_clipping_is_torchs_in_float64():
    check_clipping()
    assert float(clip_grad_norm_([], 1.0)) == 0.0
    lone = torch.nn.Parameter(torch.zeros(2))
    lone.grad = torch.tensor([3.0, 4.0])
    assert float(clip_grad_norm_(lone, 1.0)) == 5.0
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"parameter 0 is torch.sparse_coo, expected a dense one"):
        clip_grad_norm_(table.parameters(), 1.0)
