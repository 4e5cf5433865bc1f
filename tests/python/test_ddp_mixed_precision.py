"""mixed_precision with a param_dtype: expected is one process whose parameters and inputs are cast by hand.

The reference calls a plain copy of the module with ``torch.func.functional_call`` on ``p.to(param_dtype)``,
rank by rank, and averages the full-precision gradients in float64. Ranks do the same operations, so with
``reduce_dtype=torch.float32`` gradients agree to float32's rounding of an average.
"""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import pycomm
from ranks import run_ranks

HALF = torch.bfloat16
FULL = partial(_MixedPrecision, reduce_dtype=torch.float32)
UNIT_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


class Net(nn.Module):
    """A weight read from outside its layer, the root's own parameters (one frozen), an LSTM, buffers.

    Args:
        keep: None, or ``use_reentrant`` of the checkpoints that run the blocks and a function of the root.
    """

    def __init__(self, keep: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(9, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(2)
        )
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.gain = nn.Parameter(torch.randn(6))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.spare = nn.Linear(6, 6)
        self.register_buffer("shift", torch.randn(6))
        self.register_buffer("count", torch.tensor(3))
        self.keep = keep
        self.seen: set[torch.dtype] = set()

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * self.gain + self.frozen

    def run(self, part, x: torch.Tensor) -> torch.Tensor:
        return part(x) if self.keep is None else checkpoint(part, x, use_reentrant=self.keep)

    def forward(self, ids: torch.Tensor, x: torch.Tensor, use_spare: bool = False) -> torch.Tensor:
        self.seen |= {p.dtype for p in self.parameters()} | {x.dtype, self.words.weight.dtype}
        x = self.words(ids) + x
        for block in self.blocks:
            x = x + self.run(block, x)
        x = self.run(self.scale, x)
        x = self.lstm(x)[0] + self.shift.to(x.dtype)
        if use_spare:
            x = self.spare(x)
        return nn.functional.linear(x, self.words.weight)


def data(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(9, (2, 3), generator=generator)
    return ids, torch.randn(2, 3, 6, generator=generator)


def loss_of(output):
    return output.float().square().mean()


def reference(net, calls, dtype=HALF):
    """Gradients of the mean over ranks of the sum of a rank's calls: calls[rank] is a list of arguments."""
    total = {}
    for of_rank in calls:
        net.zero_grad()
        for ids, x, *more in of_rank:
            casts = {name: p.to(dtype) for name, p in net.named_parameters()}
            loss_of(torch.func.functional_call(net, casts, (ids, x.to(dtype), *more))).backward()
        for name, p in net.named_parameters():
            if p.grad is not None:
                total[name] = total.get(name, 0) + p.grad.double() / len(calls)
    net.zero_grad()
    return total


def gradients(net):
    for p in net.parameters():
        assert p.dtype == torch.float32
        assert p.grad is None or p.grad.dtype == torch.float32
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def assert_equal_gradients(found, wanted, rtol=1e-5, atol=1e-6):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(
            found[name].double(), gradient, rtol=rtol, atol=atol, msg=lambda m, n=name: n + m
        )


def train(rank, size, keep, options, n_spare=0):
    net = Net(keep)
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init(), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        before = copy.deepcopy(net.state_dict())
        loss_of(ddp(*data(step, rank), rank < n_spare)).backward()
        found.append((before, gradients(net)))
        optimizer.step()
    assert net.seen == {options["mixed_precision"].param_dtype}
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("size", "keep", "n_spare", "options"),
    [
        (1, None, 0, {"find_unused_parameters": True}),
        (1, True, 1, {}),
        (2, None, 2, {}),
        (2, None, 2, {"gradient_as_bucket_view": True, "overlap": "inline"}),
        (2, None, 1, {"gradient_as_bucket_view": True, "find_unused_parameters": True}),
        (2, False, 0, {"static_graph": True}),
        (2, True, 2, {"overlap": "end"}),
        (3, False, 3, {"overlap": "async", "bucket_cap_mb": 1e-3}),
        (3, None, 1, {"find_unused_parameters": True}),
        (4, None, 4, {"bucket_cap_mb": 1e-3}),
    ],
)
def test_steps_are_those_of_a_module_cast_by_hand(size, keep, n_spare, options):
    """Checkpoints of both kinds run modules, and a function that reads a parameter itself."""
    options = options | {"mixed_precision": FULL(param_dtype=HALF)}
    by_rank = run_ranks(size, train, keep, options, n_spare)
    net = Net()
    for step in range(3):
        net.load_state_dict(by_rank[0][step][0])  # the step's parameters: each step is checked alone
        wanted = reference(net, [[(*data(step, r), r < n_spare)] for r in range(size)])
        assert ("spare.weight" in wanted) == (n_spare > 0)
        for result in by_rank:
            before, found = result[step]
            assert_equal_gradients(found, wanted)
            for name, value in before.items():
                assert torch.equal(value, by_rank[0][step][0][name]), name


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        (torch.bfloat16, _MixedPrecision(param_dtype=torch.bfloat16)),
        (torch.float16, _MixedPrecision(param_dtype=torch.float16)),
        (torch.float16, _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)),
    ],
)
def test_gradients_travel_in_reduce_dtype_or_else_in_param_dtype(dtype, config):
    options = {"mixed_precision": config, "find_unused_parameters": True}
    by_rank = run_ranks(3, train, None, options)
    net = Net()
    calls = [[data(0, r)] for r in range(3)]
    wanted = reference(net, calls, config.param_dtype)
    alone = [reference(net, [call], config.param_dtype) for call in calls]
    largest = max(float(g.abs().max()) for by_name in alone for g in by_name.values())
    travelled = False
    for result in by_rank:
        _, found = result[0]
        assert found.keys() == wanted.keys()
        for name, exact in wanted.items():
            mean = sum(by_name[name].abs() for by_name in alone) / 3
            bound = 2.01 * UNIT_ROUNDOFF[dtype] * mean + largest * 2.0**-33
            assert ((found[name].double() - exact).abs() <= bound).all(), name
            # that it did travel so: every average is a number of that dtype, but for a power of two
            few_bits = found[name].view(torch.int32) & ((1 << (13 if dtype == torch.float16 else 16)) - 1)
            travelled = travelled or bool(found[name].any())
            assert not bool((few_bits[found[name].abs() > largest * 2.0**-20]).any()), name
    assert travelled


def accumulate(rank, size):
    net = Net()
    ddp = pycomm.DistributedDataParallel(
        net,
        communicator=pycomm.init(),
        mixed_precision=FULL(param_dtype=HALF),
        find_unused_parameters=True,
    )
    found = []
    # within no_sync, then outside
    with ddp.no_sync():
        loss_of(ddp(*data(0, rank))).backward()
    loss_of(ddp(*data(1, rank))).backward()
    found.append(gradients(net))
    # two forwards, one backward
    net.zero_grad()
    (loss_of(ddp(*data(0, rank))) + loss_of(ddp(*data(1, rank)))).backward()
    found.append(gradients(net))
    # two forwards, each with its backward, in reverse; an evaluation between
    net.zero_grad(set_to_none=False)
    first, second = loss_of(ddp(*data(0, rank))), loss_of(ddp(*data(1, rank)))
    with torch.no_grad():
        ddp(*data(7, rank))
    second.backward()
    first.backward()
    found.append(gradients(net))
    # a graph that is kept: the second backward adds the same once more
    net.zero_grad()
    loss = loss_of(ddp(*data(0, rank))) + loss_of(ddp(*data(1, rank)))
    loss.backward(retain_graph=True)
    net.zero_grad()
    loss.backward()
    found.append(gradients(net))
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [1, 2])
def test_accumulation_in_every_order(size):
    wanted = reference(Net(), [[data(0, r), data(1, r)] for r in range(size)])
    for result in run_ranks(size, accumulate):
        for found in result:
            # bfloat16 sums of two uses differ in nothing: each forward has casts of its own
            assert_equal_gradients(found, wanted)


def outside(rank, size):
    """What is seen outside of forward and backward, and in copies."""
    net = Net(keep=True)
    plain = copy.deepcopy(net.state_dict())
    options = {"communicator": pycomm.init(), "find_unused_parameters": True}
    ddp = pycomm.DistributedDataParallel(
        net, mixed_precision=_MixedPrecision(HALF, torch.float32, HALF), **options
    )

    def assert_full():
        assert all(p.dtype == torch.float32 for p in ddp.parameters())
        assert all(type(p) is nn.Parameter for p in ddp.parameters())
        for name, value in net.state_dict().items():
            assert torch.equal(value, plain[name].to(HALF) if name == "shift" else plain[name])

    assert_full()
    assert net.shift.dtype == HALF
    assert net.count.dtype == torch.int64
    output = ddp(*data(0, rank))
    assert output.dtype == HALF
    assert_full()  # between forward and backward: torch's would be low
    loss_of(output).backward()
    assert_full()
    wanted = gradients(net)
    ddp.eval()
    with torch.no_grad():
        assert ddp(*data(0, rank)).dtype == HALF
    with torch.inference_mode():
        assert ddp(*data(0, rank)).dtype == HALF
    ddp.train()
    assert_full()
    # the module itself is a plain one: full precision, also where its backward recomputes
    loss_of(net(data(0, rank)[0], data(0, rank)[1].requires_grad_())).backward()
    assert net.seen == {HALF, torch.float32}
    # exceptions leave nothing behind
    for bad in ((data(0, rank)[0], torch.zeros(5, 5, 5)),):
        with pytest.raises(RuntimeError):
            ddp(*bad)
    assert_full()
    # copies
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded.__dict__["_parameters"]) is dict
    assert type(pickle.loads(pickle.dumps(net)).lstm.__dict__["_parameters"]) is dict
    assert loaded(data(0, rank)[0], data(0, rank)[1]).dtype == torch.float32
    copied = copy.deepcopy(ddp)
    copied.zero_grad()
    loss_of(copied(*data(0, rank))).backward()
    assert copied.module.seen >= {HALF}
    for name, gradient in gradients(copied.module).items():
        assert torch.equal(gradient, wanted[name]), name
    return wanted


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [1, 2])
def test_outside_of_forward_and_backward_all_is_in_full_precision(size):
    net = Net()
    net.shift.data = net.shift.to(HALF)
    wanted = reference(net, [[data(0, r)] for r in range(size)])
    for found in run_ranks(size, outside):
        assert_equal_gradients(found, wanted)


class Ignoring(nn.Module):
    """Two layers, tied in half: first.weight is second.weight; first.bias and one buffer are ignored."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("cast", torch.zeros(2))

    def forward(self, x):
        assert self.first.weight is self.second.weight
        assert self.first.weight.dtype == self.second.bias.dtype == HALF
        assert self.first.bias.dtype == torch.float32
        return self.second(torch.tanh(x @ self.first.weight.t() + self.first.bias.to(HALF)))


def ignore(rank, size):
    net = Ignoring()
    names = ["first.bias", "kept"]
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
    ddp = pycomm.DistributedDataParallel(
        net, communicator=pycomm.init(), mixed_precision=_MixedPrecision(HALF, torch.float32, torch.float16)
    )
    assert (net.kept.dtype, net.cast.dtype) == (torch.float32, torch.float16)
    loss_of(ddp(torch.full((2, 4), float(rank + 1)))).backward()
    assert net.first.weight is net.second.weight
    return gradients(net)


def test_ignored_parameters_are_not_cast_and_tied_ones_stay_tied():
    by_rank = run_ranks(2, ignore)
    alone = []
    for rank in range(2):
        net = Ignoring()
        weight, bias = net.first.weight.to(HALF), net.second.bias.to(HALF)
        x = torch.full((2, 4), float(rank + 1), dtype=HALF)
        hidden = torch.tanh(x @ weight.t() + net.first.bias.to(HALF))
        loss_of(nn.functional.linear(hidden, weight, bias)).backward()
        alone.append(gradients(net))
    for rank, found in enumerate(by_rank):
        for name in ("first.weight", "second.bias"):
            mean = (alone[0][name].double() + alone[1][name].double()) / 2
            torch.testing.assert_close(found[name].double(), mean, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(found["first.bias"], alone[rank]["first.bias"], rtol=1e-6, atol=0)


def refuse(rank, size, config, compression, words):
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=words):
        pycomm.DistributedDataParallel(
            net, communicator=pycomm.init(), mixed_precision=config, compression=compression
        )


@pytest.mark.parametrize(
    ("config", "compression", "words"),
    [
        (_MixedPrecision(param_dtype=torch.int32), None, "param_dtype must be one of .*, got torch.int32"),
        (_MixedPrecision(param_dtype=torch.float8_e5m2), None, "param_dtype must be one of"),
        (_MixedPrecision(reduce_dtype=torch.int8), None, "reduce_dtype must be one of"),
        (_MixedPrecision(buffer_dtype=torch.int8), None, "buffer_dtype must be a floating dtype"),
        (_MixedPrecision(reduce_dtype=HALF), "fp16", "give either compression or mixed_precision"),
        (_MixedPrecision(param_dtype=HALF), "fp16", "give either compression or mixed_precision"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_what_is_refused(size, config, compression, words):
    run_ranks(size, refuse, config, compression, words)


def differ(rank, size):
    config = _MixedPrecision(param_dtype=HALF if rank == 0 else torch.float16)
    with pytest.raises(ValueError, match="ranks differ at line 0"):
        pycomm.DistributedDataParallel(nn.Linear(2, 2), communicator=pycomm.init(), mixed_precision=config)


def test_ranks_that_differ_are_told():
    run_ranks(2, differ)
