"""SyncBatchNorm on the CPU: as BatchNorm of one process on the concatenated batch, also an uneven one."""

import copy

import pytest
import torch
from torch import nn

import pycomm
from ranks import run_ranks


class Net(nn.Module):
    def __init__(self, affine: bool = True, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4, affine=affine, momentum=momentum)
        self.flat = nn.BatchNorm1d(4, affine=affine, momentum=momentum)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.conv(x)))
        return self.head(self.flat(x.mean(dim=(2, 3))))


def make(options):
    torch.manual_seed(3)
    return Net(**options).double()


def data(step, rank, even):
    generator = torch.Generator().manual_seed(10 * step + rank)
    rows = 3 if even else 1 + 2 * rank
    x = torch.randn(rows, 3, 6, 6, generator=generator, dtype=torch.float64)
    return x.to(memory_format=torch.channels_last) if step == 1 else x


def weigh(loss, rank, size, even):
    counts = [len(data(0, r, even)) for r in range(size)]
    return loss * (counts[rank] * size / sum(counts))


def train(rank, size, options, even):
    net = nn.SyncBatchNorm.convert_sync_batchnorm(make(options))
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init())
    assert isinstance(net.norm, nn.SyncBatchNorm)
    found = []
    for step in range(3):
        ddp.zero_grad()
        x = data(step, rank, even)
        weigh(ddp(x).square().mean(), rank, size, even).backward()
        found.append({name: p.grad.clone() for name, p in net.named_parameters()})
    copied = copy.deepcopy(ddp)
    copied.zero_grad()
    weigh(copied(x).square().mean(), rank, size, even).backward()
    if size > 1:
        with pytest.raises(RuntimeError, match="scale the loss itself"):
            ddp.weighted(len(x)).__enter__()
    ddp.eval()
    ddp(data(7, 0, True))  # one rank could do it alone
    return found, net.state_dict(), {name: p.grad for name, p in copied.module.named_parameters()}


@pytest.mark.parametrize(
    ("size", "options", "even"),
    [
        (1, {}, True),
        (2, {}, True),
        (3, {}, False),
        (4, {}, False),
        (2, {"affine": False}, False),
        (2, {"momentum": None}, True),
    ],
)
def test_statistics_and_gradients_are_those_of_the_concatenated_batch(size, options, even):
    net = make(options)
    by_rank = run_ranks(size, train, options, even)
    for step in range(3):
        net.zero_grad()
        net(torch.cat([data(step, rank, even) for rank in range(size)])).square().mean().backward()
        for found, _, _ in by_rank:
            for name, p in net.named_parameters():
                torch.testing.assert_close(found[step][name], p.grad, rtol=1e-8, atol=1e-11)
    for _, state, copied in by_rank:
        for name, value in net.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12)
        for name, p in net.named_parameters():
            torch.testing.assert_close(copied[name], p.grad, rtol=1e-8, atol=1e-11)


class Branched(nn.Module):
    """``extra`` is of rank 0's graph alone, and its gradients are the first that come there."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.SyncBatchNorm(4)
        self.head = nn.Linear(4, 2)
        self.extra = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, has_extra: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.conv(x))).mean(dim=(2, 3))
        out = self.head(hidden)
        return out + has_extra[:, None] * self.extra(hidden) if bool(has_extra.any()) else out


def branched(rank, size):
    torch.manual_seed(3)
    net = Branched().double()
    comm = pycomm.init(timeout=30)
    ddp = pycomm.DistributedDataParallel(
        net, communicator=comm, find_unused_parameters=True, bucket_cap_mb=1e-5
    )
    x = data(0, rank, True)
    for _ in range(3):
        ddp.zero_grad()
        ddp(x, torch.full((len(x),), float(rank == 0), dtype=x.dtype)).square().sum().backward()
    assert len(ddp.buckets) > 2
    return {name: p.grad.clone() for name, p in net.named_parameters()}


@pytest.mark.timeout(120)
def test_graphs_that_differ():
    """The layer's calls in backward and the buckets' come in another order on each rank."""
    size = 2
    found = run_ranks(size, branched)
    torch.manual_seed(3)
    net = Branched().double()
    net.norm = nn.BatchNorm2d(4).double()
    x = torch.cat([data(0, rank, True) for rank in range(size)])
    first = (torch.arange(len(x)) < len(data(0, 0, True))).double()
    (net(x, first).square().sum() / size).backward()
    for gradients in found:
        for name, p in net.named_parameters():
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-8, atol=1e-11)


def penalty(net, x, weight):
    """A gradient penalty with a loss: second derivatives of every parameter and of x."""
    out = net(x)
    (slope,) = torch.autograd.grad((out.tanh() * weight).sum(), x, create_graph=True)
    return slope


def penalise(rank, size, options, counts):
    net = nn.SyncBatchNorm.convert_sync_batchnorm(make(options))
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init(), find_unused_parameters=True)
    found = []
    for _ in range(2):
        ddp.zero_grad()
        x = penalty_data(rank, counts[rank]).requires_grad_()
        slope = penalty(ddp, x, 1.0 + rank)
        (slope.square().sum() * size).backward()
        found.append((slope.detach(), x.grad, {n: p.grad.clone() for n, p in net.named_parameters()}))
    return found


def penalty_data(rank, n):
    generator = torch.Generator().manual_seed(40 + rank)
    return torch.randn(n, 3, 6, 6, generator=generator, dtype=torch.float64)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("counts", "options"),
    [((3,), {}), ((3, 2), {}), ((1, 3, 2), {"affine": False}), ((2, 1, 1, 3), {"momentum": None})],
)
def test_it_is_differentiable_twice(counts, options):
    """Expected: a plain BatchNorm in float64 on the concatenated batch, also for the gradients of x."""
    size = len(counts)
    net = make(options)
    x = torch.cat([penalty_data(rank, n) for rank, n in enumerate(counts)]).requires_grad_()
    weight = torch.cat([torch.full((n, 1), 1.0 + rank, dtype=torch.float64) for rank, n in enumerate(counts)])
    slope = penalty(net, x, weight)
    slope.square().sum().backward()
    assert bool(net.conv.weight.grad.any())
    results = run_ranks(size, penalise, options, counts)
    close = {"rtol": 1e-8, "atol": 1e-10}
    for step in range(2):
        slopes = torch.cat([result[step][0] for result in results])
        torch.testing.assert_close(slopes, slope.detach(), **close)
        # each rank's loss was multiplied by the number of ranks, against the average over them
        grads = torch.cat([result[step][1] for result in results]) / size
        torch.testing.assert_close(grads, x.grad, **close)
        for result in results:
            for name, p in net.named_parameters():
                wanted = torch.zeros_like(p) if p.grad is None else p.grad
                torch.testing.assert_close(result[step][2].get(name, wanted), wanted, **close)
