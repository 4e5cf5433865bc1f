"""What a step takes and gives: a batch's arguments, its gradient, outputs of any form, the loss."""

import collections
import math
import os
import signal
import threading
import time

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from pycomm.errors import CommError
from pycomm.pipeline import PipelineSchedule, PipelineStage, Schedule1F1B, ScheduleZeroBubbleH1
from pycomm.pipeline.microbatches import are_alike, merge
from pycomm.pipeline.schedule.order import Order, parse
from pycomm.pipeline.schedule.verify import verify
from ranks import run_ranks

pytestmark = pytest.mark.timeout(180)
LOSS = nn.functional.mse_loss
Pair = collections.namedtuple("Pair", "x scale")


class Called(nn.Module):
    """A layer in a function."""

    def __init__(self, function=None):
        super().__init__()
        self.layer = nn.Linear(2, 2).double()
        self.function = function or (lambda layer, x: layer(x))

    def forward(self, *args, **kwargs):
        return self.function(self.layer, *args, **kwargs)


def batch(n=6, seed=0):
    return torch.randn(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def made(rank, size, function=None, n=3, loss=LOSS, kind=Schedule1F1B, **options):
    torch.manual_seed(rank)
    return kind(PipelineStage(Called(function), rank, size), n, loss_fn=loss, **options)


def whole(size):
    """All ranks' layers in one process."""
    layers = []
    for rank in range(size):
        torch.manual_seed(rank)
        layers.append(nn.Linear(2, 2).double())
    return nn.Sequential(*layers)


def test_which_sizes_are_cut_alike():
    for a in range(1, 25):
        for b in range(1, 25):
            for n in range(1, min(a, b) + 1):
                pieces = [[len(p) for p in torch.arange(size).tensor_split(n)] for size in (a, b)]
                shares = {x / y for x, y in zip(*pieces, strict=True)}
                assert are_alike(a, b, n) == (len(shares) == 1), (a, b, n)


def test_outputs_that_do_not_join_come_as_a_list():
    ones = [torch.ones(2, 3), torch.ones(1, 4)]
    assert merge(ones) is ones
    assert merge([Pair(torch.ones(2), None), Pair(torch.ones(1), None)]).x.shape == (3,)
    assert merge([{"a": 1}, {"b": 1}]) == [{"a": 1}, {"b": 1}]
    assert merge([(1,), (1, 2)]) == [(1,), (1, 2)]
    assert merge([None, torch.ones(1)])[0] is None


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (Order("mine", (0,), 0, ((),)), "at least 1, got 0"),
        (Order("mine", (0,), 1, (parse("0F0 0SEND_F0 0B0"),)), "rank 0 has 0SEND_F0: an order holds comp"),
    ],
)
def test_orders_that_are_none(order, text):
    with pytest.raises(ValueError, match=text):
        verify(order)


def refused(rank, size):
    x = batch()
    cut = (TensorChunkSpec(0), TensorChunkSpec(0))
    forwards = Order.from_actions([parse("0F0 0F1"), parse("1F0 1F1")])
    own = lambda: PipelineSchedule(PipelineStage(Called(), rank, size), 2, loss_fn=LOSS, order=forwards)  # noqa: E731
    cases = (
        (
            lambda: made(rank, size).step(x, target=x[:4]),
            "rank 0's part of the batch has 6 rows and rank 1's ",
        ),
        (lambda: made(rank, size).step(x, x[:4], target=x), r"args\[0\] has 6 rows and args\[1\] has 4"),
        (lambda: made(rank, size, args_chunk_spec=cut).step(x, target=x), "1 values, and a chunk spec of 2"),
        (own, "has forwards only and would train nothing"),
        (
            lambda: made(rank, size, count=lambda t: -1.0).step(x, target=x),
            "counts must be numbers of at least 0",
        ),
    )
    for call, text in cases:
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(TypeError, match=r"n_microbatches must be an int, got 2\.0"):
        made(rank, size, n=2.0)
    # What goes after all of this: a spec on every rank, and targets of another size that are cut alike.
    schedule = made(rank, size, args_chunk_spec=cut[:1], loss=lambda y, t: y.mean() + 0 * t.sum())
    schedule.step(x, target=batch(12))


def test_what_does_not_belong_together_is_refused_on_every_rank():
    run_ranks(2, refused, timeout=100)


def scaled(layer, given):
    return Pair(layer(given.x) * given.scale.unsqueeze(1), None)


def named_and_shared(rank, size):
    """Named tuples in and out; the loss on every rank, of step and eval, in the model's dtype."""
    x, target = batch(), batch(seed=1)
    function = scaled if rank == 0 else lambda layer, x, _: Pair(layer(x), "y")
    loss_fn = lambda y, t: LOSS(y.x, t)  # noqa: E731
    schedule = made(rank, size, function, loss=loss_fn, loss_on_all_ranks=True)
    scale = torch.arange(6.0, dtype=torch.float64)
    output = schedule.step(Pair(x, scale), target=target)
    model = whole(size)
    wanted = model[1](model[0](x) * scale.unsqueeze(1))
    assert schedule.loss.dtype == torch.float64 and schedule.loss.shape == ()
    torch.testing.assert_close(schedule.loss, LOSS(wanted, target).detach(), rtol=1e-12, atol=0)
    assert output is None if rank == 0 else isinstance(output, Pair) and output.scale == "y"
    before = schedule.loss
    schedule.eval(Pair(x, scale))  # without a target: as it was
    assert schedule.loss is before
    schedule.eval(Pair(x[:3], scale[:3]), target=target[:3])
    torch.testing.assert_close(schedule.loss, LOSS(wanted[:3], target[:3]).detach(), rtol=1e-12, atol=0)
    half = made(rank, size, loss=lambda y, t: LOSS(y, t).bfloat16(), loss_on_all_ranks=True)
    half.step(x, target=target)
    assert half.loss.dtype == torch.bfloat16
    return float(half.loss)


def test_named_tuples_and_the_loss_on_every_rank():
    first, second = run_ranks(2, named_and_shared, timeout=100)
    assert first == second


def nothing_counts(rank, size):
    """A microbatch of which nothing counts adds nothing, also where its output is not finite."""
    huge = lambda layer, x: layer(x) + torch.where(x[:, :1] > 100, math.inf, 0.0)  # noqa: E731
    schedule = made(
        rank, size, huge if rank == 1 else None, loss=lambda y, t: y.mean(), count=lambda t: float(t.sum())
    )
    target = torch.tensor([1.0, 1, 0, 0, 0, 0])
    weight = schedule.stages[0].submod.layer
    schedule.step(batch(), target=target)
    model = whole(size)
    model(batch()[:2]).mean().backward()
    torch.testing.assert_close(weight.weight.grad, model[rank].weight.grad, rtol=1e-12, atol=1e-15)
    integers = made(
        rank, size, (lambda layer, x: layer(x) > 0) if rank == 1 else None,
        loss=lambda y, t: torch.zeros(()), count=lambda t: float(t.sum()), loss_on_all_ranks=True,
    )  # fmt: skip
    integers.step(batch(), target=target)
    assert float(integers.loss) == 0
    infinite = made(
        rank, size, (lambda layer, x: layer(x) / (x[:, :1] * 0 + (x.shape[0] == 3))) if rank == 1 else None,
        n=2, loss=lambda y, t: y.mean(), count=lambda t: float(len(t) == 3), loss_on_all_ranks=True,
    )  # fmt: skip
    infinite.step(
        batch(5), target=batch(5)
    )  # microbatches of 3 and 2 samples; the second's output is infinite
    assert math.isfinite(float(infinite.loss))


def test_what_does_not_count():
    run_ranks(2, nothing_counts, timeout=100)


def batch_gradient(rank, size):
    """The user's tensors get their gradients under whole and halved backwards alike."""
    target, found = batch(seed=1), []
    for kind in (Schedule1F1B, ScheduleZeroBubbleH1):
        for checkpoint in (None, "always"):
            torch.manual_seed(rank)
            stage = PipelineStage(
                Called(lambda layer, x, more: layer(x) * more["by"]), rank, size, checkpoint=checkpoint
            )
            schedule = kind(stage, 3, loss_fn=LOSS)
            weight = torch.full((2,), 0.5, dtype=torch.float64, requires_grad=True)
            by = batch(seed=2 + rank).requires_grad_()
            schedule.step((batch() * weight).exp(), target=target, more={"by": by, "other": object()})
            found.append((weight.grad, by.grad, stage.submod.layer.weight.grad))
    return found


def test_the_batch_gets_its_gradient():
    model, weight = whole(2), torch.full((2,), 0.5, dtype=torch.float64, requires_grad=True)
    first, second = (batch(seed=2 + rank).requires_grad_() for rank in range(2))
    y = model[1](model[0]((batch() * weight).exp()) * first) * second
    LOSS(y, batch(seed=1)).backward()
    wanted = [
        (weight.grad, first.grad, model[0].weight.grad),
        (None, second.grad, model[1].weight.grad),
    ]
    for rank, cases in enumerate(run_ranks(2, batch_gradient, timeout=100)):
        for case in cases:
            for got, want in zip(case, wanted[rank], strict=True):
                assert (got is None) == (want is None)
                if want is not None:
                    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-14)


WRONG = {
    "float": (lambda y, t: 3.0, TypeError, "microbatch 0: expected a floating-point tensor, got float"),
    "vector": (lambda y, t: y - t, ValueError, r"microbatch 0: expected one number, got shape \(2, 2\)"),
    "detached": (lambda y, t: LOSS(y, t).detach(), RuntimeError, "the loss needs no gradient although"),
}


def wrong_loss(rank, size, name):
    loss, error, text = WRONG[name]
    with pytest.raises(error if rank == 1 else CommError, match=text):
        made(rank, size, loss=loss).step(batch(), target=batch())


@pytest.mark.parametrize("name", WRONG)
def test_losses_that_are_none(name):
    run_ranks(2, wrong_loss, name, timeout=60)


def sparse(rank, size):
    function = (lambda layer, x: layer(x).to_sparse()) if rank == 0 else None
    text = "stage 0, microbatch 0: a sparse_coo tensor cannot pass"
    with pytest.raises(TypeError if rank == 0 else CommError, match=text):
        made(rank, size, function).step(batch(), target=batch())


def test_a_sparse_tensor_is_refused():
    run_ranks(2, sparse, timeout=60)


def interrupted(rank, size):
    """Ctrl-C on rank 0: the others' step ends as well, and a next one cannot take what this one left."""

    def wait(layer, x):
        if rank == 0:
            time.sleep(60)
        return layer(x)

    schedule = made(rank, size, wait)
    began = time.monotonic()
    if rank == 0:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt if rank == 0 else CommError) as error:
        schedule.step(batch(), target=batch())
    assert rank == 0 or "rank 0 with KeyboardInterrupt in 0F0" in str(error.value)
    with pytest.raises(CommError, match="KeyboardInterrupt in 0F0"):
        schedule.step(batch(), target=batch())
    assert time.monotonic() - began < 30


def test_ctrl_c_ends_the_step_everywhere():
    run_ranks(2, interrupted, timeout=60)
