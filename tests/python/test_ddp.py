"""DistributedDataParallel: its average is that of one process, over every kind of parameter; accumulation.

Missing gradients and failures are in test_ddp_faults.py, the start and buffers in test_ddp_start.py.
"""

import gc
import weakref

import pytest
import torch
from torch import nn

import pycomm
from ddp_cases import (
    OVERLAPS,
    TINY,
    Net,
    assert_close,
    assert_same_bits,
    batch,
    gradients,
    one_process,
    seeded,
)
from ranks import run_ranks

# ---- the average


def train_some_steps(rank, size):
    """Every overlap and two caps, three SGD steps each; returns the gradients of every step."""
    comm = pycomm.init()
    found = {}
    for overlap in OVERLAPS:
        for cap in (TINY, 25):
            net = seeded(Net, seed=1 if rank == 0 else 99)  # rank 0's weights must win
            ddp = pycomm.DistributedDataParallel(net, communicator=comm, bucket_cap_mb=cap, overlap=overlap)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
            steps = []
            for step in range(3):
                optimizer.zero_grad()
                ddp(batch(step, rank)).backward()
                steps.append(gradients(net))
                optimizer.step()
            found[overlap, cap] = steps
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_are_those_of_one_process(size):
    net = seeded(Net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    wanted = []
    for step in range(3):
        optimizer.zero_grad()
        wanted.append(one_process(net, size, step))
        optimizer.step()
    results = run_ranks(size, train_some_steps)
    for case, steps in results[0].items():
        for step in range(3):
            assert_close(steps[step], wanted[step])
            assert_same_bits([result[case][step] for result in results])


class Zoo(nn.Module):
    """Parameters of every kind, each used so that its gradient depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
        self.scalar = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.shared = nn.Linear(4, 4, dtype=torch.float64)
        self.shared.weight = self.first.weight
        self.transposed = nn.Parameter(torch.randn(4, 7, dtype=torch.float64).t())
        self.single = nn.Parameter(torch.randn(9, dtype=torch.float32))
        self.brain = nn.Parameter(torch.tensor([1.0, 2.0, -0.5], dtype=torch.bfloat16))
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).mean(dim=(2, 3)) * self.scalar * self.frozen
        y = self.shared(torch.tanh(self.first(y)))
        y = (y @ self.transposed.t()).square().sum() + self.empty.sum()
        # x is a multiple of 1/4 for the bfloat16 parameter, so that its average is exact
        quarter = (x.flatten()[0] * 4).round() / 4
        y = y + (self.single.double() * quarter).sum() + (self.brain.double() * quarter).sum()
        return y + (self.phase * (x.flatten()[0] + 2j * x.flatten()[1])).abs().sum()


def picture(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(2, 3, 5, 5, generator=generator, dtype=torch.float64)
    return x.to(memory_format=torch.channels_last)


def train_zoo(rank, size, overlap):
    comm = pycomm.init()
    torch.manual_seed(rank)
    zoo = Zoo()
    ddp = pycomm.DistributedDataParallel(zoo, communicator=comm, bucket_cap_mb=TINY, overlap=overlap)
    made_by_autograd = {}
    for name, p in zoo.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(
                lambda q, name=name: made_by_autograd.update({name: (q.grad.data_ptr(), q.grad.stride())})
            )
    results = []
    for _ in range(2):
        zoo.zero_grad()
        ddp(picture(rank)).backward()
        results.append(gradients(zoo))
        for name, p in zoo.named_parameters():
            if p.requires_grad:
                assert (p.grad.data_ptr(), p.grad.stride()) == made_by_autograd[name], name
                assert p.grad.stride() == p.stride(), name
    return results


@pytest.mark.parametrize(
    ("size", "overlap"), [(1, None), *((size, overlap) for size in (2, 3, 4) for overlap in OVERLAPS)]
)
def test_every_kind_of_parameter(size, overlap):
    torch.manual_seed(0)
    zoo = Zoo()
    (sum(zoo(picture(rank)) for rank in range(size)) / size).backward()
    wanted = gradients(zoo)
    by_rank = run_ranks(size, train_zoo, overlap)
    for step in range(2):
        assert_same_bits([result[step] for result in by_rank])
        found = by_rank[0][step]
        for name in wanted:
            exact = name not in ("single", "brain")
            rtol = 1e-12 if exact else 2**-22 if name == "single" else 2**-8
            assert_close({name: found[name]}, {name: wanted[name]}, rtol=rtol)
    assert wanted["frozen"] is None
    assert "shared.weight" not in wanted


class Either(Net):
    """The same sum over the layers, from either end."""

    def __init__(self, is_reversed: bool) -> None:
        super().__init__()
        self.is_reversed = is_reversed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = reversed(self.layers) if self.is_reversed else self.layers
        return sum(torch.tanh(layer(x)).square().mean() for layer in layers)


def orders_of_arrival(rank, size):
    """Ranks use the layers in opposite orders: gradients come in another order on each rank."""
    comm = pycomm.init()
    found = []
    for overlap in OVERLAPS:
        net = seeded(Either, rank % 2 == 0)
        ddp = pycomm.DistributedDataParallel(net, communicator=comm, bucket_cap_mb=TINY, overlap=overlap)
        for step in range(3):
            net.zero_grad()
            ddp(batch(step, rank)).backward()
        found.append((ddp.buckets, gradients(net)))
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_may_get_their_gradients_in_different_orders(size):
    net = seeded(Net)
    losses = [
        sum(torch.tanh(layer(batch(2, r))).square().mean() for layer in net.layers) for r in range(size)
    ]
    (sum(losses) / size).backward()
    by_rank = run_ranks(size, orders_of_arrival)
    for case in range(len(OVERLAPS)):
        assert all(result[case][0] == by_rank[0][case][0] for result in by_rank)
        assert_same_bits([result[case][1] for result in by_rank])
        assert_close(by_rank[0][case][1], gradients(net))


class Backwards(nn.Module):
    """Uses its layers in the opposite of the order in which they are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x.square().mean()


def watch_buckets(rank, size):
    ddp = pycomm.DistributedDataParallel(
        seeded(Backwards), communicator=pycomm.init(), bucket_cap_mb=2 * 6 * 6 * 8 / (1 << 20)
    )
    before = ddp.buckets
    found = []
    for step in range(2):
        ddp.zero_grad()
        ddp(batch(step, rank)).backward()
        found.append(gradients(ddp.module))
    return before, ddp.buckets, found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_buckets_follow_the_order_of_the_first_backward(size):
    by_rank = run_ranks(size, watch_buckets)
    layer = "layers.{}.weight".format
    for before, after, _ in by_rank:
        assert before == [[layer(3), layer(2)], [layer(1), layer(0)]]  # the reverse of the registration
        assert after == [[layer(0), layer(1)], [layer(2), layer(3)]]  # as gradients come
    for step in range(2):
        net = seeded(Backwards)
        assert_close(by_rank[0][2][step], one_process(net, size, step))
        assert_same_bits([result[2][step] for result in by_rank])


# ---- accumulation


def accumulate(rank, size):
    comm = pycomm.init()
    found = []
    for overlap in OVERLAPS:
        net = seeded(Net)
        ddp = pycomm.DistributedDataParallel(net, communicator=comm, bucket_cap_mb=TINY, overlap=overlap)
        with ddp.no_sync():
            ddp(batch(0, rank)).backward()
            local = gradients(net)
            ddp(batch(1, rank)).backward()
        ddp(batch(2, rank)).backward()
        first = gradients(net)
        ddp(batch(3, rank)).backward()  # without zero_grad: on top of the average
        second = gradients(net)
        net.zero_grad(set_to_none=False)
        losses = [ddp(batch(step, rank)) for step in (4, 5)]  # two forwards, then two backwards
        for loss in losses:
            loss.backward()
        found.append((local, first, second, gradients(net)))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_accumulate_over_backwards(size):
    def wanted(*steps):
        net = seeded(Net)
        for step in steps:
            one_process(net, size, step)
        return gradients(net)

    by_rank = run_ranks(size, accumulate)
    for rank, result in enumerate(by_rank):
        for local, first, second, third in result:
            net = seeded(Net)
            net(batch(0, rank)).backward()
            assert_close(local, gradients(net))
            assert_close(first, wanted(0, 1, 2))
            assert_close(second, wanted(0, 1, 2, 3))
            assert_close(third, wanted(4, 5))


# ---- the wrapper


def test_one_rank_costs_nothing():
    net = seeded(Net)
    comm = pycomm.init()
    for compression in (None, "fp16"):
        ddp = pycomm.DistributedDataParallel(net, communicator=comm, compression=compression)
        assert all(not p._post_accumulate_grad_hooks for p in net.parameters())
        with ddp.no_sync():
            ddp(batch(0, 0)).backward()
        assert_close(gradients(net), one_process(seeded(Net), 1))
        assert ddp.buckets == []
        assert ddp.exposed_s == 0.0
        net.zero_grad()


def test_the_wrapper_is_like_torchs():
    ddp = pycomm.DistributedDataParallel(Net(depth=1))
    assert list(ddp.state_dict()) == ["module.layers.0.weight", "module.layers.0.bias"]
    assert [name for name, _ in ddp.named_parameters()] == ["module.layers.0.weight", "module.layers.0.bias"]
    assert not hasattr(ddp, "layers")  # not forwarded
    assert ddp.require_backward_grad_sync
    with ddp.no_sync():
        assert not ddp.require_backward_grad_sync
        with ddp.no_sync():
            pass
        assert not ddp.require_backward_grad_sync
    assert ddp.require_backward_grad_sync
    assert ddp.eval().module.training is False


def drop_wrapper(rank, size):
    net = seeded(Net)
    comm = pycomm.init()
    ddp = pycomm.DistributedDataParallel(net, communicator=comm)
    ddp(batch(0, rank)).backward()
    gone = weakref.ref(ddp), weakref.ref(ddp._reducer)
    del ddp
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    net.zero_grad()
    net(batch(1, rank)).backward()
    return gradients(net)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_dropped_wrapper_leaves_a_plain_module(size):
    for rank, found in enumerate(run_ranks(size, drop_wrapper)):
        net = seeded(Net)
        net(batch(1, rank)).backward()
        assert_close(found, gradients(net), rtol=0, atol=0)


def evaluate_alone(rank, size):
    """A forward without gradients makes no call when buffers are not broadcast: one rank may do it alone."""
    ddp = pycomm.DistributedDataParallel(seeded(Net), communicator=pycomm.init())
    loss = ddp(batch(0, rank))
    if rank == 0:
        with torch.no_grad():
            ddp(batch(1, rank))
    loss.backward()
    return gradients(ddp.module)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_forward_without_gradients_changes_nothing(size):
    wanted = one_process(seeded(Net), size)
    for found in run_ranks(size, evaluate_alone):
        assert_close(found, wanted)


def two_models(rank, size):
    """Two wrappers on one communicator, in one backward."""
    comm = pycomm.init()
    first, second = (pycomm.DistributedDataParallel(seeded(Net, seed=s), communicator=comm, bucket_cap_mb=TINY, overlap="async") for s in (1, 2))  # fmt: skip  # noqa: E501
    for _ in range(2):
        first.zero_grad(), second.zero_grad()
        (first(batch(0, rank)) + second(batch(0, rank))).backward()
    return gradients(first.module), gradients(second.module)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_two_wrappers_share_a_communicator(size):
    wanted = [one_process(seeded(Net, seed=s), size) for s in (1, 2)]
    for found in run_ranks(size, two_models):
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
