"""Running statistics of BatchNorm under a pipeline are one process's on the whole batch, in float64."""

import copy

import pytest
import torch
from torch import nn

from pycomm.pipeline import PipelineStage, convert_deferred_batch_norm, get_schedule_class
from pycomm.pipeline.batch_norm import DeferredBatchNorm, deferring
from pycomm.pipeline.schedule.catalog import build
from ranks import run_ranks

pytestmark = pytest.mark.timeout(120)
ATOL = 1e-12
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def cnn(momentum=0.1):
    """Three parts; the normalisation of the first sees the batch as it is."""
    torch.manual_seed(11)
    return nn.ModuleList(
        [
            nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.Tanh()),
            nn.Sequential(nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3, momentum=momentum), nn.Tanh()),
            nn.Sequential(
                nn.Flatten(), nn.Linear(48, 5), nn.BatchNorm1d(5, momentum=momentum), nn.Linear(5, 2)
            ),
        ]
    ).double()


def part(model, rank, size):
    """Of two ranks the second has two parts."""
    return nn.Sequential(*(model[i] for i in range(rank, 3 if rank == size - 1 else rank + 1)))


def norms(module):
    return {name: m for name, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


def close(a, b, what):
    for name in STATISTICS:
        x, y = getattr(a, name), getattr(b, name)
        assert torch.allclose(x.double(), y.double(), atol=ATOL, rtol=0), (what, name, x, y)


def in_one_process(whole, x, n_microbatches):
    """Every part in microbatches; each normalisation updated once, by all values that it got."""
    chunks = list(x.tensor_split(n_microbatches))
    for norm in norms(whole).values():
        norm.momentum, norm.kept = 0.0, []
        norm.num_batches_tracked.sub_(n_microbatches)
        norm.register_forward_pre_hook(lambda m, args: m.kept.append(args[0].detach()))
    for module in whole:
        chunks = [module(chunk) for chunk in chunks]
    return torch.cat(chunks)


def training(rank, size):
    for name, options, momentum in (
        ("GPipe", {}, 0.1),
        ("1F1B", {}, None),
        ("1F1B", {"checkpoint": "always"}, 0.3),
        ("GPipe", {"checkpoint": "except_last"}, 0.1),
        ("ZeroBubbleH1", {"checkpoint_modules": lambda _, m: isinstance(m, nn.Sequential)}, None),
    ):
        model = cnn(momentum)
        mine = part(convert_deferred_batch_norm(copy.deepcopy(model)), rank, size)
        reference = part(model, rank, size)  # updated below, by what its normalisations would have got
        first = copy.deepcopy(model)
        schedule = get_schedule_class(name)(
            PipelineStage(mine, rank, size, **options), 3, loss_fn=nn.functional.mse_loss
        )
        for n in (10, 7):  # in microbatches of 4, 3, 3 and 3, 2, 2
            x = torch.randn(n, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) + 2
            split = copy.deepcopy(model).train()
            output = in_one_process(split, x, 3)
            target = torch.zeros(n, 2, dtype=torch.float64)
            loss = nn.functional.mse_loss(output, target)
            got = schedule.step(x, target=target)
            if got is not None:
                torch.testing.assert_close(got, output.detach(), atol=ATOL, rtol=0)
                torch.testing.assert_close(schedule.loss, loss.detach(), atol=ATOL, rtol=0)
            for norm, into in zip(norms(split).values(), norms(model).values(), strict=True):
                into(torch.cat(norm.kept))  # torch's own update, of the whole batch
            first[0](x)
            if rank == 0:
                close(mine[0][1], first[0][1], "the whole batch through the whole model")
            for (key, norm), want in zip(norms(mine).items(), norms(reference).values(), strict=True):
                close(norm, want, (name, options, key))
        for mode in (True, False):  # in evaluation as torch; a forward in training is a batch, too
            mine.train(mode)
            schedule.eval(x)
        for key, norm in norms(mine).items():
            assert norm.num_batches_tracked == 3, key


def repeated(rank, size):
    """Microbatches with equal statistics: then normalisation is the whole batch's as well, in all depths."""
    whole = cnn()
    mine = part(convert_deferred_batch_norm(copy.deepcopy(whole)), rank, size)
    schedule = get_schedule_class("1F1B")(PipelineStage(mine, rank, size), 4, loss_fn=nn.functional.mse_loss)
    for seed in range(2):
        x = torch.randn(3, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        x = x.repeat(4, 1, 1, 1)
        target = torch.zeros(12, 2, dtype=torch.float64)
        schedule.step(x, target=target)
        output = x
        for module in whole:
            output = module(output)
        nn.functional.mse_loss(output, target).backward()
    want = part(whole, rank, size)
    for p, q in zip(mine.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=ATOL, rtol=0)
    for norm, other in zip(norms(mine).values(), norms(want).values(), strict=True):
        close(norm, other, "repeated")


def plain(rank, size):
    """What it is for: plain BatchNorm is updated once a microbatch."""
    net = cnn()[0].append(nn.Flatten()).append(nn.Linear(144, 1).double())
    order = build("1F1B", 1, 3, 1)
    schedule = get_schedule_class("1F1B")(PipelineStage(net, 0, 1), 3, loss_fn=lambda y, t: y.sum())
    assert schedule.order.to_csv() == order.to_csv()
    schedule.step(torch.randn(6, 2, 8, 8, dtype=torch.float64), target=torch.zeros(6))
    assert net[1].num_batches_tracked == 3
    failing = convert_deferred_batch_norm(net)
    assert failing is net and isinstance(net[1], DeferredBatchNorm)
    before = copy.deepcopy(net.state_dict())

    def fails(output, target):
        raise ZeroDivisionError

    schedule = get_schedule_class("1F1B")(PipelineStage(net, 0, 1), 3, loss_fn=fails)
    with pytest.raises(ZeroDivisionError):
        schedule.step(torch.randn(6, 2, 8, 8, dtype=torch.float64), target=torch.zeros(6))
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key])  # of a step that failed nothing is kept
    net(torch.randn(2, 2, 8, 8, dtype=torch.float64))  # outside of a pipeline as ever
    assert net[1].num_batches_tracked == 4


@pytest.mark.parametrize("size", [2, 3])
def test_statistics_of_the_whole_batch(size):
    run_ranks(size, training)
    run_ranks(size, repeated)


def test_plain_and_failing_steps():
    run_ranks(1, plain)


def test_parts_of_any_size_count_by_their_values():
    norm, plain = convert_deferred_batch_norm(nn.BatchNorm2d(3)).double(), nn.BatchNorm2d(3).double()
    assert isinstance(norm, DeferredBatchNorm)
    x = torch.randn(9, 3, 2, 2, dtype=torch.float64) * 5 + 100
    with deferring([norm]):
        for part in x.split([1, 0, 6, 2]):
            assert norm(part).shape == part.shape
    plain(x)
    close(norm, plain, "parts")


def test_conversion_keeps_everything():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False))
    net.append(net[1])
    weight, mean = net[1].weight, net[1].running_mean
    converted = convert_deferred_batch_norm(net)
    assert converted is net and net[1] is net[3]
    assert net[1].weight is weight and net[1].running_mean is mean
    assert isinstance(net[1], nn.BatchNorm1d) and type(net[2]) is nn.BatchNorm1d
    assert isinstance(convert_deferred_batch_norm(nn.BatchNorm3d(2)), DeferredBatchNorm)
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        net[1](torch.ones(2, 3, 4, 5))
    with pytest.raises(TypeError, match="'1' is a SyncBatchNorm, only BatchNorm1d"):
        convert_deferred_batch_norm(nn.Sequential(nn.Tanh(), nn.SyncBatchNorm(2)))
