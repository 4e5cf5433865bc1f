"""Sparse gradients: averaged, and sparse still; expected are dense float64 gradients of plain modules."""

import pytest
import torch
from torch import nn

import pycomm
from ranks import run_ranks

TINY = 1e-4


class Tables(nn.Module):
    """A sparse table, one tied to a dense layer, one used by some ranks only, and dense parameters."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 4, sparse=sparse)
        self.tied = nn.Embedding(4, 4, sparse=sparse)
        self.bag = nn.EmbeddingBag(6, 4, mode="sum", sparse=sparse)
        self.linear = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor, use_bag: bool) -> torch.Tensor:
        x = self.words(ids).mean(dim=0)
        x = self.linear(x) + self.tied(ids % 4).sum(dim=0)
        if use_bag:
            x = x + self.bag(ids.view(1, -1) % 6)[0]
        return nn.functional.linear(torch.tanh(x), self.tied.weight).square().mean()


def make(sparse=True, dtype=torch.float64):
    torch.manual_seed(4)
    return Tables(sparse).to(dtype)


def ids(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(11, (3 + rank,), generator=generator)


def use_bag(step, rank):
    return step > 0 and rank != 1


def dense(gradient):
    return (
        None if gradient is None else gradient.to_dense().clone() if gradient.is_sparse else gradient.clone()
    )


def train(rank, size, overlap, hooked, dtype):
    net = make(dtype=dtype)
    ddp = pycomm.DistributedDataParallel(
        net,
        communicator=pycomm.init(),
        bucket_cap_mb=TINY,
        find_unused_parameters=True,
        overlap=overlap,
    )
    if hooked:
        ddp.register_comm_hook(ddp.communicator, average)
    found = []
    for step in range(3):
        ddp.zero_grad()
        if step == 2:  # accumulate first
            with ddp.no_sync():
                ddp(ids(9, rank), False).backward()
        ddp(ids(step, rank), use_bag(step, rank)).backward()
        is_sparse = {name for name, p in net.named_parameters() if p.grad is not None and p.grad.is_sparse}
        found.append(({name: dense(p.grad) for name, p in net.named_parameters()}, is_sparse))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.step()
    return found


def average(comm, bucket):
    future = torch.futures.Future()
    future.set_result(comm.all_reduce(bucket.buffer(), op="avg"))
    return future


@pytest.mark.parametrize(
    ("size", "overlap", "hooked", "dtype"),
    [
        (1, None, False, torch.float64),
        (2, "async", False, torch.float64),
        (3, "inline", False, torch.float64),
        (3, "end", True, torch.float64),
        (2, "async", False, torch.bfloat16),
    ],
)
def test_sparse_gradients_are_averaged_and_stay_sparse(size, overlap, hooked, dtype):
    by_rank = run_ranks(size, train, overlap, hooked, dtype)
    for step in range(3):
        net = make(sparse=False)
        losses = [net(ids(step, rank), use_bag(step, rank)) for rank in range(size)]
        if step == 2:
            losses += [net(ids(9, rank), False) for rank in range(size)]
        (sum(losses) / size).backward()
        for found, is_sparse in (result[step] for result in by_rank):
            # the bag's is sparse where any rank used it; the tied table's never (it is a Linear's weight too)
            used = size > 0 and step > 0
            assert is_sparse == ({"words.weight", "bag.weight"} if used else {"words.weight"})
            for name, p in net.named_parameters():
                if p.grad is None:
                    assert found[name] is None, name
                    continue
                rtol, atol = (1e-10, 1e-14) if dtype == torch.float64 else (0.1, 0.02)
                torch.testing.assert_close(found[name].double(), p.grad, rtol=rtol, atol=atol)
                assert torch.equal(found[name], by_rank[0][step][0][name]), name


def missing(rank, size):
    ddp = pycomm.DistributedDataParallel(make(), communicator=pycomm.init())
    with pytest.raises(RuntimeError) as error:
        ddp(ids(0, rank), rank == 0).backward()
    ddp.zero_grad()
    ddp(ids(0, rank), True).backward()  # learns that the bag's gradient is sparse
    ddp.zero_grad()
    with pytest.raises(RuntimeError) as second:
        ddp(ids(0, rank), rank == 0).backward()
    return str(error.value), str(second.value)


def test_a_sparse_gradient_that_does_not_come_is_an_error():
    for messages in run_ranks(2, missing):
        for message in messages:
            assert "rank 1: got no gradient in this backward: bag.weight (1 of 5)" in message
