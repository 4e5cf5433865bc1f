"""Options of the wrapper, and what a forward may do: evaluation, buffers, delayed parameters, caps, views."""

import pytest
import torch
from test_ddp_torch_names import assert_wanted, data, loss_of, make
from torch import nn

import pycomm
from ddp_cases import ON_DEVICE
from ranks import run_ranks


def evaluate_alone(rank, size):
    ddp = pycomm.DistributedDataParallel(make(), communicator=pycomm.init())
    loss_of(ddp, rank).backward()
    if rank == 0:  # buffers would be synchronised by a forward in training mode
        ddp.eval()
        with torch.no_grad():
            ddp(data(0))
        ddp(data(0))  # with gradients, too
        ddp.train()
        with torch.no_grad():
            ddp(data(0))
    ddp.zero_grad()
    loss_of(ddp, rank).backward()
    assert_wanted(ddp.module, size)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_one_rank_may_evaluate_alone(size):
    run_ranks(size, evaluate_alone)


def odd_buffers(rank, size):
    net = make()
    for number, dtype in enumerate(
        (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.bool, torch.complex32)
    ):
        value = torch.full((3,), rank + 1.0).to(dtype)
        net.register_buffer(f"odd{number}", value)
    net.register_buffer("scalar8", torch.tensor(rank + 1.0).to(torch.float8_e4m3fnuz))
    net.register_buffer("strided8", torch.full((2, 3), rank + 1.0).to(torch.float8_e4m3fnuz).t())
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init())
    at_start = [b.clone() for n, b in net.named_buffers() if "odd" in n or "8" in n]
    loss_of(ddp, rank).backward()
    return [b.to(torch.complex64) for b in at_start]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_buffers_of_every_dtype_are_synchronised(size):
    for found in run_ranks(size, odd_buffers):
        for buffer in found:
            assert bool((buffer == 1).all())


def forwards_with_batch_norm(rank, size):
    """Two forwards before one backward: the second gives other ranks rank 0's running statistics."""
    ddp = pycomm.DistributedDataParallel(make(), communicator=pycomm.init())
    loss_of(ddp, rank).backward()
    ddp.zero_grad()
    ((loss_of(ddp, rank) + loss_of(ddp, rank)) / 2).backward()
    assert_wanted(ddp.module, size)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_several_forwards_with_batch_norm(size):
    run_ranks(size, forwards_with_batch_norm)


def delay_some(rank, size):
    net = make()
    extra = nn.Parameter(torch.ones(4))
    delayed = [("outside", extra), ("linear.bias", net.linear.bias)]
    ddp = pycomm.DistributedDataParallel(
        net,
        communicator=pycomm.init(),
        delay_all_reduce_named_params=delayed,
        param_to_hook_all_reduce=net.linear.weight,
    )
    with torch.no_grad():
        assert bool((extra == 1).all())
    for _ in range(2):
        ddp.zero_grad()
        extra.grad = None
        (loss_of(ddp, rank) + (extra * (rank + 1)).sum()).backward()
    assert set(ddp.buckets[-1]) == {"linear.bias", "outside"}
    assert_wanted(net, size)
    assert extra.grad.tolist() == [sum(range(1, size + 1)) / size] * 4


@pytest.mark.parametrize("size", [2, 3, 4])
def test_delayed_parameters(size):
    run_ranks(size, delay_some)


def cap_list(rank, size):
    net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(5)))
    mib = 64 / (1 << 20)
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init(), bucket_cap_mb_list=[mib, 2 * mib])
    ddp(torch.ones(2, 4)).sum().backward()
    return [len(bucket) for bucket in ddp.buckets]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_caps_of_single_buckets(size):
    assert run_ranks(size, cap_list) == [[1, 2, 2]] * size


def view_gradients(rank, size):
    net = make()
    comm = pycomm.init()
    ddp = pycomm.DistributedDataParallel(net, communicator=comm, gradient_as_bucket_view=True)
    addresses: list[int] = []
    for step in range(4):
        ddp.zero_grad(set_to_none=step == 0)
        loss_of(ddp, rank).backward()
        grads = [p.grad for p in net.parameters() if p.requires_grad]
        # In shared memory, where they stay; on a device in memory that its peers reach.
        assert all(comm._c.owns(g.data_ptr()) is not ON_DEVICE for g in grads)
        if step > 1:  # they move once, when buckets are built in the order of the first backward
            assert [g.data_ptr() for g in grads] == addresses
        addresses = [g.data_ptr() for g in grads]
        assert_wanted(net, size)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gradients_as_bucket_views(size):
    run_ranks(size, view_gradients)
