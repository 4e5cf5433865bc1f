"""DistributedDataParallel against one process on the concatenated batch, in float64 where that is defined.

Ranks build the same toy module from the same seed (or on purpose not); ``one_process`` computes what the
average must be without pycomm: the mean over the ranks of the losses, differentiated by torch.
"""

import copy
import gc
import os
import pickle
import signal
import weakref

import pytest
import torch
from torch import nn

import pycomm
from ranks import Died, run_ranks

OVERLAPS = ("async", "inline", "end")
TINY = 1e-4  # MiB: about a hundred bytes, so that toy modules have several buckets


class Net(nn.Module):
    """Linear layers in a row; more than one bucket with a cap of TINY."""

    def __init__(self, width: int = 6, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def seeded(make, *args, seed: int = 1, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return make(*args).to(dtype)


def batch(step: int, rank: int, rows: int = 5, width: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64)


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def one_process(module: nn.Module, size: int, step: int = 0) -> dict[str, torch.Tensor | None]:
    """Gradients of the mean loss of all ranks' batches."""
    (sum(module(batch(step, rank)) for rank in range(size)) / size).backward()
    return gradients(module)


def assert_close(found, wanted, rtol=1e-12, atol=1e-15):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(
                found[name], gradient, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )


def assert_same_bits(by_rank):
    for other in by_rank[1:]:
        for name, gradient in by_rank[0].items():
            assert (gradient is None) == (other[name] is None), name
            if gradient is not None:
                assert gradient.stride() == other[name].stride(), name
                assert torch.equal(gradient, other[name]), name


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


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("size", [2, 3, 4])
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


@pytest.mark.parametrize("size", [2, 3])
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


def test_buckets_follow_the_order_of_the_first_backward():
    by_rank = run_ranks(2, watch_buckets)
    layer = "layers.{}.weight".format
    for before, after, _ in by_rank:
        assert before == [[layer(3), layer(2)], [layer(1), layer(0)]]  # the reverse of the registration
        assert after == [[layer(0), layer(1)], [layer(2), layer(3)]]  # as gradients come
    for step in range(2):
        net = seeded(Backwards)
        assert_close(by_rank[0][2][step], one_process(net, 2, step))
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


@pytest.mark.parametrize("size", [2, 3])
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


# ---- parameters without a gradient


class Branches(nn.Module):
    """Three branches; forward uses those named."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        return sum(torch.tanh(getattr(self, name)(x)).square().mean() for name in use)


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


@pytest.mark.parametrize("compression", [None, "fp16"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_missing_gradient_is_an_error_on_every_rank_at_once(overlap, compression):
    size = 3
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


def use_some(rank, size, overlap):
    comm = pycomm.init()
    net = seeded(Branches)
    ddp = pycomm.DistributedDataParallel(
        net, communicator=comm, bucket_cap_mb=TINY, find_unused_parameters=True, overlap=overlap
    )
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
    assert torch.equal(net.b.weight.grad, values["b.weight"])
    found.append(gradients(net))
    return found


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("size", [2, 3])
def test_unused_parameters_count_as_zeros_or_stay_none(size, overlap):
    def wanted(net, step, use):
        (sum(net(batch(step, rank), use(rank)) for rank in range(size)) / size).backward()
        return gradients(net)

    cases = [
        lambda rank: "a" if rank == 1 else "ab",
        lambda rank: "abc",
        lambda rank: "c" if rank == 0 else "b",
    ]
    by_rank = run_ranks(size, use_some, overlap)
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


def test_a_gradient_from_no_sync_is_not_missing():
    net = seeded(Branches)
    (sum(net(batch(0, rank), "c") + net(batch(1, rank), "ab") for rank in range(2)) / 2).backward()
    for found in run_ranks(2, no_sync_covers_a_gap):
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


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "sparse",
            "has a gradient that is not a strided tensor (an Embedding with sparse=True?): table.weight",
        ),
        (
            "graph",
            "has a gradient that is part of a graph (create_graph=True), which would be lost: plain, table",
        ),
        (
            "lost",
            "lost its gradient to a hook before it was reduced (an optimizer that steps in backward?): plain",
        ),
    ],
)
def test_gradients_that_cannot_be_averaged(how, words):
    net = seeded(Picky, dtype=torch.float32)
    net(False).backward()
    for message, found in run_ranks(2, provoke, how):
        assert f"rank 1: {words}" in message
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


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_exception_in_backward_reaches_all_ranks(overlap):
    net = seeded(Net)
    wanted = one_process(net, 3, 2)
    for message, found in run_ranks(3, break_backward, overlap):
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


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_rank_that_dies_is_named(overlap):
    first, second = run_ranks(2, lose_a_rank, overlap, may_die=[1])
    assert first is True
    assert isinstance(second, Died)


# ---- the start


def start_with_differences(rank, size, how):
    net = Net()
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
        elif how == "cap":
            arguments["bucket_cap_mb"] = 5
        elif how == "bad argument":
            arguments["compression"] = "int8"
    comm = pycomm.init()
    with pytest.raises(ValueError) as error:
        pycomm.DistributedDataParallel(net, communicator=comm, **arguments)
    comm.barrier()  # still usable
    return str(error.value)


@pytest.mark.parametrize(
    ("how", "theirs", "ours"),
    [
        ("shape", "'layers.1.weight' of torch.float32 (7, 6)", "'layers.1.weight' of torch.float32 (6, 6)"),
        ("dtype", "'layers.2.weight' of torch.float64 (6, 6)", "'layers.2.weight' of torch.float32 (6, 6)"),
        ("order", "parameter 'layers.2.weight'", "parameter 'layers.1.weight'"),
        ("frozen", "frozen parameter 'layers.0.bias'", "parameter 'layers.0.bias'"),
        ("more", "parameter 'last' of torch.float32 (1,)", "parameter 'layers.0.weight'"),
        ("layout", "'layers.3.weight' of torch.float32 (6, 6), memory order (1, 0)", "(6, 6)"),
        ("cap", "bucket_cap_mb=5", "bucket_cap_mb=25"),
        ("bad argument", "compression must be one of 'fp16', 'bf16' or None, got 'int8'", "compression=None"),
    ],
)
def test_ranks_that_differ_are_told_at_the_start(how, theirs, ours):
    messages = run_ranks(3, start_with_differences, how)
    assert len(set(messages)) == 1
    assert f"rank 2 has {'the error that ' if how == 'bad argument' else ''}" in messages[0]
    assert theirs in messages[0].partition("rank 2 has")[2]
    assert ours in messages[0].partition("rank 2 has")[0]
    assert "rank 1" not in messages[0]


def bad_arguments(rank, size):
    comm = pycomm.init()
    frozen = Net().requires_grad_(False)
    cases = [
        (frozen, {}, "no parameter of the module requires a gradient"),
        (Net(), {"bucket_cap_mb": 0}, "bucket_cap_mb must be above 0"),
        (Net(), {"bucket_cap_mb": float("nan")}, "bucket_cap_mb must be above 0"),
        (Net(), {"compression": "fp8"}, "compression must be one of"),
        (
            Net(),
            {"overlap": "never"},
            "overlap (or PYCOMM_DDP_OVERLAP) must be one of 'async', 'inline', 'end'",
        ),
        (nn.LazyLinear(3), {}, "parameter 'weight' has no shape yet"),
        (nn.Linear(2, 2, device="meta"), {}, "parameter 'weight' is torch.strided on meta"),
    ]
    for module, arguments, words in cases:
        with pytest.raises(ValueError) as error:
            pycomm.DistributedDataParallel(module, communicator=comm, **arguments)
        assert words in str(error.value)
    for arguments in ({"module": 3}, {"module": Net(), "communicator": 3}):
        with pytest.raises(TypeError):
            pycomm.DistributedDataParallel(**arguments)
    with pytest.raises(TypeError):
        pycomm.DistributedDataParallel(Net(), communicator=comm, device_ids=[0])
    os.environ["PYCOMM_DDP_OVERLAP"] = "sometimes"
    with pytest.raises(ValueError, match="got 'sometimes'"):
        pycomm.DistributedDataParallel(Net(), communicator=comm)
    os.environ["PYCOMM_DDP_OVERLAP"] = "inline"
    pycomm.DistributedDataParallel(Net(), communicator=comm)


@pytest.mark.parametrize("size", [1, 2])
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


def follow_buffers(rank, size, broadcast_buffers):
    net = Buffered()
    with torch.no_grad():
        net.count.fill_(10 * (rank + 1))
        net.mask.fill_(rank == 0)
        net.norm.running_mean.fill_(rank)
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init(), broadcast_buffers=broadcast_buffers)
    at_start = (net.count.item(), net.mask.tolist(), net.norm.running_mean.tolist())
    for step in range(2):
        ddp(batch(step, rank).float()).backward()
    with ddp.no_sync():
        ddp(batch(2, rank).float()).backward()  # follows a synchronised one: buffers are given to all
        ddp(batch(3, rank).float()).backward()  # follows no_sync: they are not
    return at_start, net.count.item(), net.norm.running_mean.clone()


def test_buffers_are_those_of_rank_0():
    results = run_ranks(3, follow_buffers, True)
    assert all(result[:2] == ((10, [True] * 3, [0.0] * 6), 14) for result in results)
    # BatchNorm, momentum 0.1: what rank 0 saw in steps 0 and 1, then own batches.
    for rank, (_, _, mean) in enumerate(results):
        wanted = torch.zeros(6)
        for step, who in ((0, 0), (1, 0), (2, rank), (3, rank)):
            wanted = 0.9 * wanted + 0.1 * batch(step, who).float().mean(dim=0)
        torch.testing.assert_close(mean, wanted)


def test_buffers_are_left_alone_when_told_so():
    for rank, (at_start, _, mean) in enumerate(run_ranks(2, follow_buffers, False)):
        assert at_start == (10, [True] * 3, [0.0] * 6)
        wanted = torch.zeros(6)
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


def test_a_broadcast_over_a_saved_buffer_is_no_silent_mistake():
    run_ranks(2, overwrite_saved_buffer)


def ignore_some(rank, size):
    net = seeded(Branches, seed=rank)
    net._ddp_params_and_buffers_to_ignore = ["c.weight", "c.bias"]
    before = net.c.weight.detach().clone()
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init())
    assert torch.equal(net.c.weight, before)
    ddp(batch(0, rank), "abc").backward()
    return gradients(net)


def test_ignored_parameters_are_left_alone():
    net = seeded(Branches, seed=0)
    (sum(net(batch(0, rank), "ab") for rank in range(2)) / 2).backward()
    for rank, found in enumerate(run_ranks(2, ignore_some)):
        alone = seeded(Branches, seed=rank)
        alone(batch(0, rank), "c").backward()
        assert_close(
            {n: g for n, g in found.items() if n[0] != "c"},
            {n: g for n, g in gradients(net).items() if n[0] != "c"},
        )
        assert torch.equal(found["c.weight"], alone.c.weight.grad)


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
    for copier in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"Copy \.module"):
            copier(ddp)


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


def test_a_dropped_wrapper_leaves_a_plain_module():
    for rank, found in enumerate(run_ranks(2, drop_wrapper)):
        net = seeded(Net)
        net(batch(1, rank)).backward()
        assert_close(found, gradients(net), rtol=0, atol=0)


def unfreeze(rank, size):
    net = Net()
    net.layers[0].bias.requires_grad_(False)
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init())
    net.layers[0].bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"'layers\.0\.bias' was frozen when the module was wrapped"):
        ddp(batch(0, rank).float())


def test_a_parameter_that_thaws_is_not_silently_left_out():
    run_ranks(2, unfreeze)


def evaluate_alone(rank, size):
    """A forward without gradients makes no call when buffers are not broadcast: one rank may do it alone."""
    ddp = pycomm.DistributedDataParallel(seeded(Net), communicator=pycomm.init())
    loss = ddp(batch(0, rank))
    if rank == 0:
        with torch.no_grad():
            ddp(batch(1, rank))
    loss.backward()
    return gradients(ddp.module)


def test_a_forward_without_gradients_changes_nothing():
    wanted = one_process(seeded(Net), 2)
    for found in run_ranks(2, evaluate_alone):
        assert_close(found, wanted)


def two_models(rank, size):
    """Two wrappers on one communicator, in one backward."""
    comm = pycomm.init()
    first, second = (pycomm.DistributedDataParallel(seeded(Net, seed=s), communicator=comm, bucket_cap_mb=TINY, overlap="async") for s in (1, 2))  # fmt: skip  # noqa: E501
    for _ in range(2):
        first.zero_grad(), second.zero_grad()
        (first(batch(0, rank)) + second(batch(0, rank))).backward()
    return gradients(first.module), gradients(second.module)


def test_two_wrappers_share_a_communicator():
    wanted = [one_process(seeded(Net, seed=s), 2) for s in (1, 2)]
    for found in run_ranks(2, two_models):
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other)
