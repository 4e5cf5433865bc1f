"""skip_all_reduce_unused_params: what no rank uses does not travel; it is averaged when one uses it.

Expected are the gradients of one process on the ranks' losses, in float64.
"""

import contextlib

import pytest
import torch
from torch import nn

import pycomm
from ranks import run_ranks

TINY = 1e-4


class Parts(nn.Module):
    """A trunk that every call uses, and parts of which a call uses those it is told."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.trunk = nn.Linear(4, 4)
        self.parts = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})
        self.table = nn.Embedding(4, 4, sparse=sparse)

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        x = torch.tanh(self.trunk(x))
        for name in used:
            x = x + (self.table(torch.arange(3)) if name == "t" else torch.tanh(self.parts[name](x)))
        return x.square().mean()


def make(sparse=True):
    return Parts(sparse).double()


def data(step, rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(9 * step + rank), dtype=torch.float64)


#: What rank r uses in each step: USES[step][r % 4].
USES = [
    ("a", "a", "a", "a"),  # b, c and the table fall asleep
    ("a", "a", "a", "a"),
    ("ab", "a", "a", "ab"),  # b wakes on some ranks
    ("a", "ab", "a", "a"),
    ("at", "a", "at", "a"),  # the sparse table wakes
    ("a", "a", "a", "a"),  # b is used by none again, but not asleep
    ("", "", "", ""),  # nothing but the trunk: a falls asleep
    ("abct", "ac", "bt", ""),  # all wake
    ("abct", "abct", "abct", "abct"),
]
AT_STEP = {"no_sync": 3}
"""Step 3 accumulates c within no_sync first, on rank 0 only."""


def average(comm, bucket):
    future = torch.futures.Future()
    buffer = bucket.buffer()
    averaged = comm.all_reduce(buffer.to_dense() if buffer.is_sparse else buffer, op="avg")
    future.set_result(averaged.to_sparse(1) if buffer.is_sparse else averaged)
    return future


def train(rank, size, options, hooked, set_to_none):
    net = make()
    ddp = pycomm.DistributedDataParallel(
        net, communicator=pycomm.init(), skip_all_reduce_unused_params=True, bucket_cap_mb=TINY, **options
    )
    if hooked:
        ddp.register_comm_hook(ddp.communicator, average)
    found = []
    for step, uses in enumerate(USES):
        ddp.zero_grad(set_to_none=set_to_none)
        if step == AT_STEP["no_sync"]:
            with ddp.no_sync():
                ddp(data(50, rank), "c" if rank == 0 else "").backward()
        ddp(data(step, rank), uses[rank % 4]).backward()
        grads = {
            name: None if p.grad is None else p.grad.to_dense().clone() for name, p in net.named_parameters()
        }
        in_buckets = {name for bucket in ddp._reducer.buckets for name in bucket} if ddp._reducer else set()
        found.append((grads, in_buckets, ddp.reducer._get_local_used_map().tolist()))
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("size", "options", "hooked", "set_to_none"),
    [
        (1, {}, False, True),
        (1, {}, True, True),
        (2, {"overlap": "async"}, False, True),
        (2, {"overlap": "inline", "gradient_as_bucket_view": True}, False, False),
        (3, {"overlap": "inline"}, False, True),
        (3, {"overlap": "end", "find_unused_parameters": True}, True, True),
        (4, {"compression": "bf16"}, False, False),  # float64 gradients travel as they are
    ],
)
def test_gradients_are_those_of_all_ranks_losses(size, options, hooked, set_to_none):
    by_rank = run_ranks(size, train, options, hooked, set_to_none)
    for step, uses in enumerate(USES):
        net = make(sparse=False)
        losses = [net(data(step, r), uses[r % 4]) for r in range(size)]
        if step == AT_STEP["no_sync"]:
            losses += [net(data(50, r), "c" if r == 0 else "") for r in range(size)]
        (sum(losses) / size).backward()
        for result in by_rank:
            for name, p in net.named_parameters():
                found = result[step][0][name]
                if p.grad is None:
                    assert found is None or (not set_to_none and not found.any()), (step, name)
                else:
                    torch.testing.assert_close(
                        found, p.grad, rtol=1e-10, atol=1e-14, msg=lambda m, n=name, s=step: f"{s} {n}: {m}"
                    )
    if size == 1 and not hooked:
        return
    in_buckets = [{name.split(".")[-2] for name in by_rank[0][s][1]} for s in range(len(USES))]
    assert in_buckets[0] == in_buckets[1] == {"trunk", "a"}
    assert "b" in in_buckets[2]
    assert in_buckets[4] >= {"trunk", "a", "b", "c"}
    assert "b" in in_buckets[5]
    assert "c" in in_buckets[7]
    names = [name for name, _ in make().named_parameters()]
    unused = names.index("parts.b.weight")
    assert [by_rank[0][s][2][unused] for s in (0, 1)] == [0, 0]
    assert by_rank[0][2][2][unused] == sum("b" in USES[2][r % 4] for r in range(size))


def join(rank, size):
    net = make()
    ddp = pycomm.DistributedDataParallel(
        net, communicator=pycomm.init(), skip_all_reduce_unused_params=True, bucket_cap_mb=TINY
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    n_steps = 2 if rank == 0 else 5
    with ddp.join() if size > 1 else contextlib.nullcontext():
        for step in range(n_steps):
            optimizer.zero_grad()
            ddp(data(step, rank), "ab" if step == 3 else "a").backward()  # wakes when rank 0 has joined
            optimizer.step()
    return {name: p.detach().clone() for name, p in net.named_parameters()}


@pytest.mark.timeout(60)
def test_a_parameter_wakes_while_a_rank_has_joined():
    by_rank = run_ranks(3, join)
    net = make(sparse=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        active = [r for r in range(3) if step < (2 if r == 0 else 5)]
        (sum(net(data(step, r), "ab" if step == 3 else "a") for r in active) / 3).backward()
        optimizer.step()
    for result in by_rank[1:]:
        for name, p in net.named_parameters():
            torch.testing.assert_close(result[name], p.detach(), rtol=1e-10, atol=1e-12)
            assert torch.equal(result[name], by_rank[1][name])
