"""DistributedDataParallel at the start: ranks that differ, bad arguments, buffers, ignored parameters."""

import os

import pytest
import torch
from torch import nn

import pycomm
from ddp_cases import Branches, Net, assert_close, batch, gradients, seeded
from ranks import run_ranks

THEIRS_AND_OURS = {
    "shape": (
        "'layers.1.weight' of torch.float32 (7, 6)",
        "'layers.1.weight' of torch.float32 (6, 6)",
    ),
    "dtype": (
        "'layers.2.weight' of torch.float64 (6, 6)",
        "'layers.2.weight' of torch.float32 (6, 6)",
    ),
    "order": ("parameter 'layers.2.weight'", "parameter 'layers.1.weight'"),
    "frozen": ("frozen parameter 'layers.0.bias'", "parameter 'layers.0.bias'"),
    "more": ("parameter 'last' of torch.float32 (1,)", "parameter 'layers.0.weight'"),
    "layout": ("'layers.3.weight' of torch.float32 (6, 6), memory order (1, 0)", "(6, 6)"),
    "buffer": ("buffer 'seen' of torch.float64 (2,)", "buffer 'seen' of torch.float32 (2,)"),
    "cap": ("bucket_cap_mb=5", "bucket_cap_mb=None"),
    "asleep": ("skip_all_reduce_unused_params=True", "skip_all_reduce_unused_params=False"),
    "checks": ("check_consistency_every=3", "check_consistency_every=0"),
    "bad argument": ("the error that compression must be one of", "compression=None"),
}


def start_with_differences(rank, size):
    """The last rank differs; all are told, and the communicator stays usable for the next case."""
    comm = pycomm.init()
    messages = {}
    for how in THEIRS_AND_OURS:
        net = Net()
        net.register_buffer("seen", torch.zeros(2))
        arguments = {}
        if rank == size - 1:
            if how == "shape":
                net.layers[1] = nn.Linear(6, 7)
            elif how == "dtype":
                net.layers[2].double()
            elif how == "order":
                net.layers = nn.ModuleDict(
                    {"0": net.layers[0], "2": net.layers[2], "1": net.layers[1], "3": net.layers[3]}
                )
            elif how == "frozen":
                net.layers[0].bias.requires_grad_(False)
            elif how == "more":
                net.last = nn.Parameter(torch.ones(1))
            elif how == "layout":
                net.layers[3].weight = nn.Parameter(net.layers[3].weight.detach().t())
            elif how == "buffer":
                net.seen = net.seen.double()
            elif how == "cap":
                arguments["bucket_cap_mb"] = 5
            elif how == "asleep":
                arguments["skip_all_reduce_unused_params"] = True
            elif how == "checks":
                arguments["check_consistency_every"] = 3
            elif how == "bad argument":
                arguments["compression"] = "int4"
        with pytest.raises(ValueError) as error:
            pycomm.DistributedDataParallel(net, communicator=comm, **arguments)
        messages[how] = str(error.value)
    comm.barrier()
    return messages


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_that_differ_are_told_at_the_start(size):
    by_rank = run_ranks(size, start_with_differences)
    for how, (theirs, ours) in THEIRS_AND_OURS.items():
        message = by_rank[0][how]
        assert {messages[how] for messages in by_rank} == {message}
        before, _, after = message.partition(f"rank {size - 1} has")
        assert theirs in after, how
        assert ours in before, how
        assert not [rank for rank in range(1, size - 1) if f"rank {rank} " in message]


def bad_arguments(rank, size):
    comm = pycomm.init()
    frozen = Net().requires_grad_(False)
    cases = [
        (frozen, {}, "no parameter of the module requires a gradient"),
        (Net(), {"bucket_cap_mb": 0}, "bucket_cap_mb must be above 0"),
        (Net(), {"bucket_cap_mb": float("nan")}, "bucket_cap_mb must be above 0"),
        (Net(), {"compression": "int4"}, "compression must be one of"),
        (
            Net(),
            {"overlap": "never"},
            "overlap (or PYCOMM_DDP_OVERLAP) must be one of 'async', 'inline', 'end'",
        ),
        (nn.LazyLinear(3), {}, "parameter 'weight' has no shape yet"),
        (nn.Linear(2, 2, device="meta"), {}, "parameter 'weight' is torch.strided on meta"),
    ]
    for module, arguments, words in cases:
        with pytest.raises((ValueError, RuntimeError)) as error:  # RuntimeError where torch raises it
            pycomm.DistributedDataParallel(module, communicator=comm, **arguments)
        assert words in str(error.value)
    for arguments in ({"module": 3}, {"module": Net(), "communicator": 3}):
        with pytest.raises(TypeError):
            pycomm.DistributedDataParallel(**arguments)
    with pytest.raises(ValueError, match="device_ids and output_device must be None"):
        pycomm.DistributedDataParallel(Net(), communicator=comm, device_ids=[0])
    os.environ["PYCOMM_DDP_OVERLAP"] = "sometimes"
    with pytest.raises(ValueError, match="got 'sometimes'"):
        pycomm.DistributedDataParallel(Net(), communicator=comm)
    os.environ["PYCOMM_DDP_OVERLAP"] = "inline"
    pycomm.DistributedDataParallel(Net(), communicator=comm)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_arguments_out_of_range(size):
    run_ranks(size, bad_arguments)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.norm(x).square().mean() + self.norm.weight.sum()


def follow_buffers(rank, size, options):
    net = Buffered()
    with torch.no_grad():
        net.count.fill_(10 * (rank + 1))
        net.mask.fill_(rank == 0)
        net.norm.running_mean.fill_(rank)
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init(), **options)
    at_start = (net.count.item(), net.mask.tolist(), net.norm.running_mean.tolist())
    for step in range(2):
        ddp(batch(step, rank).float()).backward()
    with ddp.no_sync():
        ddp(batch(2, rank).float()).backward()  # follows a synchronised one: buffers are given to all
        ddp(batch(3, rank).float()).backward()  # follows no_sync: they are not
    return at_start, net.count.item(), net.norm.running_mean.clone()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_buffers_are_those_of_rank_0(size):
    results = run_ranks(size, follow_buffers, {})
    assert all(result[:2] == ((10, [True] * 3, [0.0] * 6), 14) for result in results)
    # BatchNorm, momentum 0.1: what rank 0 saw in steps 0 and 1, then own batches.
    for rank, (_, _, mean) in enumerate(results):
        wanted = torch.zeros(6)
        for step, who in ((0, 0), (1, 0), (2, rank), (3, rank)):
            wanted = 0.9 * wanted + 0.1 * batch(step, who).float().mean(dim=0)
        torch.testing.assert_close(mean, wanted)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["forward_sync_buffers", "broadcast_buffers"])
def test_buffers_are_left_alone_when_told_so(name, size):
    for rank, (at_start, _, mean) in enumerate(run_ranks(size, follow_buffers, {name: False})):
        # broadcast_buffers=False means the start, too; as torch has it
        source = rank if name == "broadcast_buffers" else 0
        assert at_start == (10 * (source + 1), [source == 0] * 3, [float(source)] * 6)
        wanted = torch.full((6,), float(source))
        for step in range(4):
            wanted = 0.9 * wanted + 0.1 * batch(step, rank).float().mean(dim=0)
        torch.testing.assert_close(mean, wanted)


class Scaled(Net):
    """Backward needs the buffer's value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((6,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.layers[0].bias * self.scale)


def overwrite_saved_buffer(rank, size):
    ddp = pycomm.DistributedDataParallel(seeded(Scaled), communicator=pycomm.init())
    ddp(batch(0, rank)).backward()
    losses = [ddp(batch(step, rank)) for step in range(2)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(losses).backward()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_broadcast_over_a_saved_buffer_is_no_silent_mistake(size):
    run_ranks(size, overwrite_saved_buffer)


def ignore_some(rank, size):
    net = seeded(Branches, seed=rank)
    net._ddp_params_and_buffers_to_ignore = ["c.weight", "c.bias"]
    before = net.c.weight.detach().clone()
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init())
    assert torch.equal(net.c.weight, before)
    ddp(batch(0, rank), "abc").backward()
    return gradients(net)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ignored_parameters_are_left_alone(size):
    net = seeded(Branches, seed=0)
    (sum(net(batch(0, rank), "ab") for rank in range(size)) / size).backward()
    for rank, found in enumerate(run_ranks(size, ignore_some)):
        alone = seeded(Branches, seed=rank)
        alone(batch(0, rank), "c").backward()
        assert_close(
            {n: g for n, g in found.items() if n[0] != "c"},
            {n: g for n, g in gradients(net).items() if n[0] != "c"},
        )
        assert torch.equal(found["c.weight"], alone.c.weight.grad)


def overlap_apart(rank, size):
    """As ranks do that may use different numbers of cores."""
    eager = ("async", "end", "inline")[rank]
    net = seeded(Net, 300)
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init(), overlap=eager)
    for _ in range(2):
        net.zero_grad()
        ddp(batch(0, rank, width=300)).backward()
    return ddp.buckets, gradients(net)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_agree_on_when_buckets_are_reduced(size):
    """Other answers would mean other buckets: the first is small where it is reduced during backward."""
    net = seeded(Net, 300)
    torch.autograd.backward(sum(net(batch(0, rank, width=300)) for rank in range(size)) / size)
    by_rank = run_ranks(size, overlap_apart)
    for buckets, found in by_rank:
        assert buckets == by_rank[0][0]
        assert_close(found, gradients(net))
