"""Uneven inputs: join(), torch's Join with ZeroRedundancyOptimizer, and averages by tokens."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

import pycomm
from ddp_cases import start_gloo
from ranks import run_ranks

TINY = 1e-4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.unused = nn.Linear(5, 5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        self.seen += 1
        x = self.second(torch.tanh(self.first(x)))
        return (self.unused(x) if use else x).square().mean()


def make():
    torch.manual_seed(6)
    return Net().double()


def data(step, rank, rows=4):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 5, generator=generator, dtype=torch.float64)


def n_inputs(rank):
    return 3 + 2 * rank


def train(rank, size, by_torch, by_initial, options):
    if by_torch:
        start_gloo(rank, size)
    net = make()
    ddp = pycomm.DistributedDataParallel(net, bucket_cap_mb=TINY, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ddp.join(divide_by_initial_world_size=by_initial):
        for step in range(n_inputs(rank)):
            optimizer.zero_grad()
            ddp(data(step, rank), not options or step % 2 == 0).backward()
            optimizer.step()
    if by_torch:
        dist.barrier()
        dist.destroy_process_group()
    return {name: t.clone() for name, t in net.state_dict().items()}


def wanted(size, by_initial, uses_all):
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(n_inputs(size - 1)):
        active = [rank for rank in range(size) if step < n_inputs(rank)]
        optimizer.zero_grad()
        losses = [net(data(step, rank), uses_all or step % 2 == 0) for rank in active]
        (sum(losses) / (size if by_initial else len(active))).backward()
        optimizer.step()
    return net


@pytest.mark.parametrize(
    ("size", "by_torch", "by_initial", "options"),
    [
        (1, False, True, {}),
        (2, False, True, {}),
        (3, False, False, {}),
        (2, True, True, {}),
        (3, True, False, {"find_unused_parameters": True}),
        (3, False, True, {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
        (4, False, False, {}),
        (4, True, True, {"find_unused_parameters": True}),
    ],
)
def test_join_with_uneven_inputs(size, by_torch, by_initial, options):
    net = wanted(size, by_initial, not options)
    for state in run_ranks(size, train, by_torch, by_initial, options):
        for name, p in net.named_parameters():
            torch.testing.assert_close(state[name], p.detach(), rtol=1e-9, atol=1e-12)
        assert state["seen"] == n_inputs(size - 1)  # the last rank's: it saw the most


def stop_early(rank, size):
    ddp = pycomm.DistributedDataParallel(make())
    with pytest.raises(RuntimeError) as error, ddp.join(throw_on_early_termination=True):
        for step in range(n_inputs(rank)):
            ddp(data(step, rank)).backward()
    return str(error.value)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_join_may_stop_all(size):
    first, *others = run_ranks(size, stop_early)
    assert first == "Rank 0 exhausted all inputs."
    assert all("at least one rank that exhausted inputs" in message for message in others)


def with_zero(rank, size):
    start_gloo(rank, size)
    net = make()
    ddp = pycomm.DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    with Join([ddp, optimizer]):
        for step in range(n_inputs(rank)):
            optimizer.zero_grad()
            ddp(data(step, rank)).backward()
            optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    return {name: t.clone() for name, t in net.state_dict().items()}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_join_composes_with_zero_redundancy_optimizer(size):
    net = wanted(size, True, True)
    for state in run_ranks(size, with_zero):
        for name, p in net.named_parameters():
            torch.testing.assert_close(state[name], p.detach(), rtol=1e-9, atol=1e-12)


# ---- averages by tokens


def rows(step, rank):
    return 1 + 3 * rank + step


def weigh(rank, size, options):
    net = make()
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init(), bucket_cap_mb=TINY, **options)
    found = []
    for step in range(3):
        ddp.zero_grad()
        with ddp.weighted(rows(step, rank)):
            loss = ddp(data(step, rank, rows(step, rank)))
            if step == 0:
                loss.backward()
        if step > 0:  # outside: the forward decides
            loss.backward()
        found.append({name: p.grad.clone() for name, p in net.named_parameters()})
    with pytest.raises(ValueError, match="the number of rank 0 must be finite") as error:
        ddp.weighted(-1 if rank == 0 else 1).__enter__()
    assert ("got -1" in str(error.value)) == (rank == 0)
    with pytest.raises(ValueError, match="all ranks are 0"):
        ddp.weighted(0).__enter__()
    ddp.zero_grad()
    with ddp.weighted(4):
        first = ddp(data(0, rank))
    try:
        (first + ddp(data(0, rank))).backward()
        found.append(None)
    except RuntimeError as clash:
        found.append(str(clash))
    return found


def average(comm, bucket):
    future = torch.futures.Future()
    future.set_result(comm.all_reduce(bucket.buffer(), op="avg"))
    return future


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {}),
        (2, {}),
        (3, {"overlap": "async"}),
        (3, {"gradient_as_bucket_view": True, "overlap": "inline"}),
        (4, {}),
    ],
)
def test_weights_are_those_of_the_concatenated_batch(size, options):
    by_rank = run_ranks(size, weigh, options)
    for step in range(3):
        net = make()
        everything = torch.cat([data(step, rank, rows(step, rank)) for rank in range(size)])
        net(everything).backward()
        for found in by_rank:
            for name, p in net.named_parameters():
                torch.testing.assert_close(found[step][name], p.grad, rtol=1e-10, atol=1e-14)
    if size > 1:
        assert len({found[3] for found in by_rank}) == 1
        assert "forwards with different weights share this backward" in by_rank[0][3]


def weigh_compressed(rank, size, how):
    net = make().float()
    options = {"compression": "fp16"} if how == "fp16" else {}
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init(), **options)
    if how == "hook":
        ddp.register_comm_hook(ddp.communicator, average)
    for step in range(2):
        ddp.zero_grad()
        with ddp.weighted(rows(step, rank)):
            ddp(data(step, rank, rows(step, rank)).float()).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("how", ["fp16", "hook"])
def test_weights_with_compression_and_hooks(how, size):
    net = make()
    net(torch.cat([data(1, rank, rows(1, rank)) for rank in range(size)])).backward()
    for found in run_ranks(size, weigh_compressed, how):
        for name, p in net.named_parameters():
            atol = 3e-3 * p.grad.abs().max().item()
            torch.testing.assert_close(found[name].double(), p.grad, rtol=3e-3, atol=atol)


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4, sparse=sparse)
        self.linear = nn.Linear(4, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(self.embedding(words))).sum()


def words_of(step, rank):
    return torch.arange(1 + rank + step) if rank != 1 else torch.arange(0)


def weigh_nothing(rank, size, sparse, options):
    """Rank 1 has no input, and divides by their number: its loss and gradients are NaN."""
    torch.manual_seed(1)
    net = Words(sparse)
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init(), **options)
    found = []
    for step in range(3):
        ddp.zero_grad()
        words = words_of(step, rank)
        with ddp.weighted(len(words)):
            loss = ddp(words) / torch.tensor(float(len(words)))
        assert bool(loss.isnan()) is (rank == 1)
        if step == 2:
            asked = [net.linear.weight, net.linear.bias]
            found.append([g.clone() for g in torch.autograd.grad(loss, asked)])
        else:
            loss.backward()
            found.append([p.grad.to_dense().clone() for p in net.parameters()])
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("sparse", "options"),
    [
        (False, {}),
        (True, {"overlap": "async"}),
        (False, {"gradient_as_bucket_view": True, "overlap": "inline"}),
        (True, {"compression": "fp16"}),
    ],
)
def test_a_rank_with_nothing_counts_as_zeros_even_where_it_has_nan(sparse, options):
    torch.manual_seed(1)
    net = Words(False).double()
    tolerance = 2e-3 if "compression" in options else 1e-5
    for found in run_ranks(3, weigh_nothing, sparse, options):
        for step, gradients in enumerate(found):
            net.zero_grad()
            words = torch.cat([words_of(step, rank) for rank in range(3)])
            (net(words) / len(words)).backward()
            wanted = [p.grad for p in net.parameters()][-len(gradients) :]
            for gradient, exact in zip(gradients, wanted, strict=True):
                torch.testing.assert_close(gradient.double(), exact, rtol=tolerance, atol=tolerance)
