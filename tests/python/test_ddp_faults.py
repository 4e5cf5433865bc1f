"""DistributedDataParallel: odd and missing gradients, exceptions in backward, dead ranks reach every rank."""

import os
import signal

import pytest
import torch
from torch import nn

import pycomm
from ddp_cases import (
    OVERLAPS,
    TINY,
    Branches,
    Net,
    assert_close,
    assert_same_bits,
    batch,
    gradients,
    one_process,
    seeded,
)
from ranks import Died, run_ranks


def leave_one_out(rank, size, overlap, compression):
    comm = pycomm.init()
    net = seeded(Branches, dtype=torch.float32 if compression else torch.float64)
    ddp = pycomm.DistributedDataParallel(
        net, communicator=comm, bucket_cap_mb=TINY, overlap=overlap, compression=compression
    )
    messages = []
    for use in ("abc", "ab" if rank == 1 else "abc", "abc"):
        net.zero_grad()
        try:
            ddp(batch(0, rank).to(net.a.weight.dtype), use).backward()
            messages.append(None)
        except RuntimeError as error:
            messages.append(str(error))
    return messages, gradients(net)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("compression", [None, "fp16"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_missing_gradient_is_an_error_on_every_rank_at_once(overlap, compression, size):
    net = seeded(Branches)
    (sum(net(batch(0, rank), "abc") for rank in range(size)) / size).backward()
    by_rank = run_ranks(size, leave_one_out, overlap, compression)
    for messages, found in by_rank:
        first, second, third = messages
        assert first is None
        assert second == by_rank[0][0][1]
        assert "rank 1: got no gradient in this backward: c.weight, c.bias (2 of 6)" in second
        assert "rank 0" not in second
        assert "find_unused_parameters=True" in second
        assert third is None  # all is well again
        if compression is None:
            assert_close(found, gradients(net))


def use_some(rank, size):
    comm = pycomm.init()
    return [use_some_with(comm, rank, options) for options in MAY_BE_UNUSED]


# With one bucket for all, gradients that came and stand-ins meet in it.
MAY_BE_UNUSED = [{"bucket_cap_mb": TINY, "overlap": overlap} for overlap in OVERLAPS] + [
    {},
    {"gradient_as_bucket_view": True},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": TINY, "overlap": "inline"},
    {"gradient_as_bucket_view": True, "static_graph": True},
]


def use_some_with(comm, rank, options):
    net = seeded(Branches)
    ddp = pycomm.DistributedDataParallel(net, communicator=comm, find_unused_parameters=True, **options)
    found = []
    for use in ("a" if rank == 1 else "ab", "abc", "c" if rank == 0 else "b"):
        net.zero_grad()
        ddp(batch(0, rank), use).backward()
        found.append(gradients(net))
    # Without zero_grad: b has gradients from before and is used by nobody now, a by one rank.
    before = {name: p.grad for name, p in net.named_parameters()}
    values = gradients(net)
    ddp(batch(1, rank), "a" if rank == 0 else "c").backward()
    assert net.b.weight.grad is before["b.weight"]
    if values["b.weight"] is not None:
        assert torch.equal(net.b.weight.grad, values["b.weight"])
    found.append(gradients(net))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_unused_parameters_count_as_zeros_or_stay_none(size):
    def wanted(net, step, use):
        (sum(net(batch(step, rank), use(rank)) for rank in range(size)) / size).backward()
        return gradients(net)

    cases = [
        lambda rank: "a" if rank == 1 else "ab",
        lambda rank: "abc",
        lambda rank: "c" if rank == 0 else "b",
    ]
    for by_rank in zip(*run_ranks(size, use_some), strict=True):
        for step in range(4):
            assert_same_bits([result[step] for result in by_rank])
        for step, use in enumerate(cases):
            assert_close(by_rank[0][step], wanted(seeded(Branches), 0, use))
        net = seeded(Branches)
        wanted(net, 0, cases[2])
        assert_close(by_rank[0][3], wanted(net, 1, lambda rank: "a" if rank == 0 else "c"))
        assert by_rank[0][0]["c.weight"] is None


def no_sync_covers_a_gap(rank, size):
    """A parameter used only under no_sync still has a gradient to average."""
    net = seeded(Branches)
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init(), bucket_cap_mb=TINY)
    with ddp.no_sync():
        ddp(batch(0, rank), "c").backward()
    ddp(batch(1, rank), "ab").backward()
    return gradients(net)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_gradient_from_no_sync_is_not_missing(size):
    net = seeded(Branches)
    (sum(net(batch(0, rank), "c") + net(batch(1, rank), "ab") for rank in range(size)) / size).backward()
    for found in run_ranks(size, no_sync_covers_a_gap):
        assert_close(found, gradients(net))


class Picky(nn.Module):
    """Gradients that cannot be averaged, on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)
        self.plain = nn.Parameter(torch.ones(3))

    def forward(self, sparse: bool) -> torch.Tensor:
        rows = self.table(torch.tensor([1, 2])) if sparse else self.table.weight[1:3]
        return (rows * self.plain).square().sum()


def provoke(rank, size, how):
    net = seeded(Picky, dtype=torch.float32)
    # "end": the hook that loses a gradient comes after the wrapper's and must run before the reduction
    ddp = pycomm.DistributedDataParallel(
        net, communicator=pycomm.init(), find_unused_parameters=True, overlap="end" if how == "lost" else None
    )
    culprit = rank == size - 1
    handle = None
    if how == "lost" and culprit:
        handle = net.plain.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with pytest.raises(RuntimeError) as error:
        ddp(how == "sparse" and culprit).backward(create_graph=how == "graph" and culprit)
    if handle is not None:
        handle.remove()
    net.zero_grad()
    ddp(False).backward()
    return str(error.value), gradients(net)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_gradient_lost_to_a_hook(size):
    net = seeded(Picky, dtype=torch.float32)
    net(False).backward()
    for message, found in run_ranks(size, provoke, "lost"):
        assert f"rank {size - 1}: lost its gradient to a hook before it was reduced" in message
        assert "(an optimizer that steps in backward?): plain (1 of 2)" in message
        assert "rank 0" not in message
        assert_close(found, gradients(net), rtol=1e-6)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise ZeroDivisionError("of the user's")
        return gradient, None


class Fragile(Net):
    """Backward fails before the first layer's gradients, after those of the others."""

    def forward(self, x: torch.Tensor, fails: bool) -> torch.Tensor:
        x = Fails.apply(torch.tanh(self.layers[0](x)), fails)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x.square().mean()


def break_backward(rank, size, overlap):
    net = seeded(Fragile)
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init(), bucket_cap_mb=TINY, overlap=overlap)
    message = ""
    if rank == 1:
        with pytest.raises(ZeroDivisionError):
            ddp(batch(0, rank), True).backward()
        with pytest.raises(RuntimeError, match="rank 1: backward ended in an exception") as error:
            ddp(batch(1, rank), False)
    else:
        with pytest.raises(RuntimeError, match="rank 1: backward ended in an exception") as error:
            ddp(batch(0, rank), False).backward()
    message = str(error.value)
    net.zero_grad()
    ddp(batch(2, rank), False).backward()
    return message, gradients(net)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_exception_in_backward_reaches_all_ranks(overlap, size):
    net = seeded(Net)
    wanted = one_process(net, size, 2)
    for message, found in run_ranks(size, break_backward, overlap):
        assert "got no gradient" not in message
        assert_close(found, wanted)


def lose_a_rank(rank, size, overlap):
    comm = pycomm.init()
    ddp = pycomm.DistributedDataParallel(seeded(Net), communicator=comm, bucket_cap_mb=TINY, overlap=overlap)
    ddp(batch(0, rank)).backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycomm.PeerLostError, match="rank 1"):
        ddp(batch(1, rank)).backward()
    with pytest.raises(pycomm.CommError):
        ddp(batch(1, rank)).backward()
    return True


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_rank_that_dies_is_named(overlap, size):
    first, second, *others = run_ranks(size, lose_a_rank, overlap, may_die=[1])
    assert [first, *others] == [True] * (size - 1)
    assert isinstance(second, Died)


def break_the_first_of_two(rank, size, overlap, around, culprits):
    """Two forwards, then their backwards, of which the first ends in an exception on some ranks."""
    net = seeded(Fragile)
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init(), bucket_cap_mb=TINY, overlap=overlap)
    ddp(batch(9, rank), False).backward()  # from now on buckets are launched early
    net.zero_grad()
    call = net if around else ddp
    first, second = call(batch(0, rank), rank in culprits), call(batch(1, rank), False)
    if rank in culprits:
        with pytest.raises(ZeroDivisionError):
            first.backward()
        with pytest.raises(RuntimeError, match="rank 1: backward ended in an exception"):
            second.backward()
    else:
        with pytest.raises(RuntimeError, match="rank 1: backward ended in an exception"):
            first.backward()
    net.zero_grad()
    call(batch(2, rank), False).backward()
    return gradients(net)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("culprits", [(1,), (0, 1)])
def test_the_backward_after_a_broken_one_does_not_take_its_place(overlap, around, culprits):
    wanted = one_process(seeded(Net), 2, 2)
    for found in run_ranks(2, break_the_first_of_two, overlap, around, culprits):
        assert_close(found, wanted)


def break_a_local_backward(rank, size):
    net = seeded(Fragile)
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init(), bucket_cap_mb=TINY)
    ddp(batch(9, rank), False).backward()
    with ddp.no_sync():
        first = ddp(batch(0, rank), rank == 1)
    second = ddp(batch(2, rank), False)
    if rank == 1:
        with pytest.raises(ZeroDivisionError):
            first.backward()
    net.zero_grad()
    second.backward()
    return gradients(net)


def test_a_broken_backward_within_no_sync_is_no_business_of_other_ranks():
    wanted = one_process(seeded(Net), 2, 2)
    for found in run_ranks(2, break_a_local_backward):
        assert_close(found, wanted)
