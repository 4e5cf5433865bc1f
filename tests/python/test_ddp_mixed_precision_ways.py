"""mixed_precision with a param_dtype: other ways to a parameter, and other backwards, than a plain step has.

Expected is, as in test_ddp_mixed_precision.py, one process whose parameters and inputs are cast by hand.
"""

import pytest
import torch
from test_ddp_mixed_precision import FULL, HALF, assert_equal_gradients, gradients, loss_of
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import pycomm
from ranks import run_ranks


class Odd(nn.Module):
    """Parameters that reach the forward by other ways; inputs and outputs that are no plain tensors."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.list = nn.ParameterList([nn.Parameter(torch.randn(3, 3)) for _ in range(2)])
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.inner, self.late = nn.Linear(3, 3), nn.Linear(3, 3)
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)
        self.table = nn.Embedding(5, 3, sparse=sparse)

    def forward(self, batch):
        x = batch["x"][0]
        for weight in self.list:
            x = torch.tanh(x @ weight)
        x = self.normed(x)
        # a functional call of a part must put back the parameters, not their casts
        x = torch.func.functional_call(self.inner, {"bias": torch.ones(3, dtype=x.dtype)}, (x,))
        with torch.no_grad():
            sign = self.inner(x).sign()  # a cast without a graph must not serve the call below
        x = self.inner(x) + sign
        x = x + torch.vmap(self.list[0].matmul)(x)  # a cast made within a transform ends with it
        x = x + torch.vmap(lambda row: self.late(row))(x)
        x = self.late(x)
        x = self.attention(x[None], x[None], x[None])[0][0] + self.table(batch["ids"])
        return {"out": [x, None]}


def odd_batch(rank):
    generator = torch.Generator().manual_seed(rank)
    return {
        "x": (torch.randn(4, 3, generator=generator),),
        "ids": torch.randperm(5, generator=generator)[:4],  # each once: no sum in bfloat16
    }


def reach(rank, size):
    net = Odd()
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init(), mixed_precision=FULL(HALF))
    for _ in range(2):
        net.zero_grad()
        output = ddp(odd_batch(rank))["out"][0]
        assert output.dtype == HALF
        loss_of(output).backward()
    assert all(type(p) is nn.Parameter for p in net.parameters())
    net.new = nn.Linear(3, 3)  # a layer that comes later is cast as well, and averaged
    net.zero_grad()
    for parameter in net.new.parameters():
        parameter.data.fill_(0.5)
    ddp.module.table.register_forward_hook(lambda _, __, out: net.new(out))
    loss_of(ddp(odd_batch(rank))["out"][0]).backward()
    assert net.table.weight.grad.is_sparse
    return {name: p.grad.to_dense().clone() for name, p in net.named_parameters()}


def test_parameters_reached_by_other_ways():
    net = Odd(sparse=False)
    net.new = nn.Linear(3, 3)
    for parameter in net.new.parameters():
        parameter.data.fill_(0.5)
    net.table.register_forward_hook(lambda _, __, out: net.new(out))
    total = {}
    for rank in range(2):
        net.zero_grad()
        batch = odd_batch(rank)
        casts = {name: p.to(HALF) for name, p in net.named_parameters()}
        given = {"x": (batch["x"][0].to(HALF),), "ids": batch["ids"]}
        loss_of(torch.func.functional_call(net, casts, (given,))["out"][0]).backward()
        for name, p in net.named_parameters():
            total[name] = total.get(name, 0) + p.grad.to_dense().double() / 2
    for found in run_ranks(2, reach):
        assert_equal_gradients(found, total)


def penalise(rank, size):
    """Double backward: the gradient of a gradient's norm."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(torch.linspace(-1, 1 + i, p.numel()).view(p.shape))
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init(), mixed_precision=FULL(HALF))
    x = torch.full((2, 3), 0.5 + rank, requires_grad=True)
    (slope,) = torch.autograd.grad(ddp(x).float().sum(), x, create_graph=True)
    slope.square().sum().backward()
    return gradients(net), slope.detach()


def test_double_backward():
    for rank, (found, slope) in enumerate(run_ranks(2, penalise)):
        total = {}
        for r in range(2):
            net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1, bias=False))
            with torch.no_grad():
                for i, p in enumerate(net.parameters()):
                    p.copy_(torch.linspace(-1, 1 + i, p.numel()).view(p.shape))
            x = torch.full((2, 3), 0.5 + r, requires_grad=True)
            casts = {name: p.to(HALF) for name, p in net.named_parameters()}
            out = torch.func.functional_call(net, casts, (x.to(HALF),))
            (wanted,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
            wanted.square().sum().backward()
            for name, p in net.named_parameters():
                if p.grad is not None:
                    total[name] = total.get(name, 0) + p.grad.double() / 2
            if r == rank:
                torch.testing.assert_close(slope, wanted.detach(), rtol=1e-6, atol=0)
        assert_equal_gradients(found, total)


def compiled(rank, size):
    import torch._dynamo.testing

    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
    options = {"communicator": pycomm.init(), "mixed_precision": FULL(param_dtype=HALF)}
    counter = torch._dynamo.testing.CompileCounter()
    within = pycomm.DistributedDataParallel(torch.compile(net, backend=counter), **options)
    ddp = pycomm.DistributedDataParallel(net, **options)
    found = []
    for call in (ddp, within, torch.compile(ddp, backend="eager"), ddp):
        for _ in range(2):
            net.zero_grad()
            output = call(torch.full((2, 4), float(rank + 1)))
            assert output.dtype == HALF
            loss_of(output).backward()
            found.append(gradients(net))
    assert counter.frame_count == 1  # the look-ups break no graph
    return found


@pytest.mark.timeout(120)
def test_torch_compile():
    for found in run_ranks(2, compiled, timeout=100):
        for other in found[1:]:
            for name, gradient in other.items():
                assert torch.equal(gradient, found[0][name]), name


def keep_matrix_products():
    def policy(_, op, *args, **kwargs):
        is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Nest(nn.Module):
    """Checkpoints within checkpoints, down to a function that reads the root's own parameter."""

    def __init__(self, keep: bool | str | None = None) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.outer, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.randn(4))
        self.keep = keep

    def kept(self, part, x):
        if self.keep is None or (self.keep == "selective" and part == self.deep):
            return part(x)
        if self.keep == "selective":
            return checkpoint(part, x, use_reentrant=False, context_fn=keep_matrix_products)
        return checkpoint(part, x, use_reentrant=self.keep)

    def middle(self, x):
        return self.kept(self.deep, torch.tanh(self.inner(x) * self.gain))

    def deep(self, x):
        return torch.sin(x * self.gain) @ self.inner.weight

    def forward(self, x):
        return self.kept(self.middle, torch.tanh(self.outer(x))) * self.gain


def nested_data(rank):
    return torch.linspace(-1, 1 + rank, 12).view(3, 4)


def nest(rank, size, keep, around, fails):
    net = Nest(keep)
    ddp = pycomm.DistributedDataParallel(
        net, communicator=pycomm.init(), mixed_precision=FULL(HALF), overlap="end"
    )
    x = nested_data(rank).requires_grad_()
    found = []
    for step in range(3):
        net.zero_grad()
        output = checkpoint(ddp, x, use_reentrant=False) if around else ddp(x)
        if fails and step == 1:
            output.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss_of(output).backward()
            # nothing is left of the backward that broke
            assert all(p.dtype == torch.float32 for p in net.state_dict().values())
            assert net(x).dtype == torch.float32
            if size > 1:
                with pytest.raises(RuntimeError, match="ended in an exception"):
                    ddp(x)
        else:
            loss_of(output).backward()
            found.append(gradients(net))
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("size", "keep", "around", "fails"),
    [
        (1, False, False, True),
        (2, None, True, False),
        (2, False, False, True),
        (2, True, False, False),
        (1, True, False, True),
        (2, False, True, False),
        (2, "selective", False, False),
    ],
)
def test_nested_checkpoints_and_backwards_that_break(size, keep, around, fails):
    total = {}
    for rank in range(size):
        net = Nest()
        casts = {name: p.to(HALF) for name, p in net.named_parameters()}
        loss_of(torch.func.functional_call(net, casts, (nested_data(rank).to(HALF),))).backward()
        for name, p in net.named_parameters():
            total[name] = total.get(name, 0) + p.grad.double() / size
    for result in run_ranks(size, nest, keep, around, fails):
        for found in result:
            # uses within a reentrant checkpoint are summed in float32, those by hand in bfloat16
            assert_equal_gradients(found, total, *((2e-2, 2e-2) if keep is True else (1e-5, 1e-6)))


def hooked(rank, size):
    net = Nest()
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init(), mixed_precision=FULL(HALF))
    seen = []

    def average(comm, bucket):
        seen.append((bucket.buffer().dtype, {p.dtype for p in bucket.parameters()}))
        future = torch.futures.Future()
        future.set_result(comm.all_reduce(bucket.buffer(), op="avg"))
        return future

    ddp.register_comm_hook(ddp.communicator, average)
    loss_of(ddp(nested_data(rank))).backward()
    return set(map(repr, seen)), gradients(net)


def test_a_hook_is_given_full_precision():
    plain = [found for (found,) in run_ranks(2, nest_once)]
    for rank, (seen, found) in enumerate(run_ranks(2, hooked)):
        assert seen == {repr((torch.float32, {torch.float32}))}
        assert_equal_gradients(found, {name: g.double() for name, g in plain[rank].items()})


def nest_once(rank, size):
    return nest(rank, size, None, False, False)[:1]
