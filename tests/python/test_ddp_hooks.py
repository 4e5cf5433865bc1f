"""Communication hooks: torch's own, unchanged, over gloo groups as state; and hooks of a user's."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook

import pycomm
from ddp_cases import start_gloo
from ranks import run_ranks

TINY = 1e-4


class Net(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def make(dtype=torch.float32):
    torch.manual_seed(2)
    return Net().to(dtype)


def data(step, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 12, generator=generator).to(dtype)


def gradients(net):
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def wanted(size, step):
    net = make(torch.float64)
    (sum(net(data(step, rank, torch.float64)) for rank in range(size)) / size).backward()
    return gradients(net)


def powersgd_state():
    # (torch's batched_powerSGD_hook fails in its own orthogonalisation, whatever the wrapper: not tested.)
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=12, start_powerSGD_iter=2)


def use_torchs(rank, size, overlap, as_view):
    start_gloo(rank, size)
    compressing = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    compressing_bf16 = default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)
    subgroup = dist.new_group(list(range(size)))
    hooks = {
        "allreduce": (None, default_hooks.allreduce_hook),
        "allreduce with a group": (dist.group.WORLD, default_hooks.allreduce_hook),
        "fp16": (None, default_hooks.fp16_compress_hook),
        "bf16": (None, default_hooks.bf16_compress_hook),
        "fp16 wrapper": (None, compressing),
        "bf16 wrapper": (None, compressing_bf16),
        "powerSGD": (powersgd_state(), powerSGD_hook.powerSGD_hook),
        "post-local SGD": (
            post_localSGD_hook.PostLocalSGDState(None, subgroup, start_localSGD_iter=100),
            post_localSGD_hook.post_localSGD_hook,
        ),
    }
    found = {}
    for name, (state, hook) in hooks.items():
        net = make()
        ddp = pycomm.DistributedDataParallel(
            net, bucket_cap_mb=TINY * 6, overlap=overlap, gradient_as_bucket_view=as_view
        )
        ddp.register_comm_hook(state, hook)
        found[name] = []
        for step in range(4):
            ddp.zero_grad()
            ddp(data(step, rank)).backward()
            found[name].append(gradients(net))
        assert len(ddp.buckets) > 2
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("size", "overlap", "as_view"),
    [(2, "async", False), (3, "end", True), (1, None, False), (4, "inline", False)],
)
def test_torchs_hooks_run_unchanged(size, overlap, as_view):
    by_rank = run_ranks(size, use_torchs, overlap, as_view)
    for step in range(4):
        exact = wanted(size, step)
        for name in by_rank[0]:
            # PowerSGD at full rank is exact but for orthogonalisation in float32
            rtol = 1e-5 if "allreduce" in name or "local" in name else 2e-2 if "bf16" in name else 5e-3
            for result in by_rank:
                for parameter, gradient in exact.items():
                    assert torch.equal(result[name][step][parameter], by_rank[0][name][step][parameter])
                    scale = gradient.abs().max().item()
                    torch.testing.assert_close(
                        result[name][step][parameter].double(),
                        gradient,
                        rtol=rtol,
                        atol=rtol * scale,
                        msg=lambda m, c=(name, step, parameter): f"{c}: {m}",
                    )


def use_own(rank, size):
    comm = pycomm.init()
    seen = []

    def hook(state, bucket):
        state.append((bucket.index(), bucket.is_last(), [p.shape for p in bucket.parameters()]))
        assert sum(g.numel() for g in bucket.gradients()) == bucket.buffer().numel()
        local = {id(p): g.clone() for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)}
        expected.update(local)
        doubled = torch.full_like(bucket.buffer(), float(bucket.index()))
        bucket.set_buffer(doubled)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    expected = {}
    net = make()
    ddp = pycomm.DistributedDataParallel(net, communicator=comm, bucket_cap_mb=TINY * 6)
    ddp.register_comm_hook(seen, hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(None, hook)
    plain = make()
    for step in range(2):
        seen.clear()
        ddp.zero_grad(), plain.zero_grad()
        ddp(data(step, rank)).backward()
        plain(data(step, rank)).backward()
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            assert torch.equal(expected[id(p)], q.grad)  # undivided, this rank's own
        names = dict(net.named_parameters())
        for at, bucket in enumerate(ddp.buckets):
            assert all(bool((names[name].grad == at).all()) for name in bucket)
        assert [index for index, _, _ in seen] == list(range(len(ddp.buckets)))
        assert [last for _, last, _ in seen] == [False] * (len(ddp.buckets) - 1) + [True]
    return True


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_hook_sees_undivided_buckets_and_its_result_counts(size):
    assert run_ranks(size, use_own) == [True] * size


def refuse(rank, size):
    ddp = pycomm.DistributedDataParallel(make(), communicator=pycomm.init())
    with pytest.raises(TypeError, match="must be callable"):
        ddp.register_comm_hook(None, 3)

    def annotated(state: object, bucket: int):
        return None

    with pytest.raises(ValueError, match="bucket annotation"):
        ddp.register_comm_hook(None, annotated)
    ddp.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    with pytest.raises(TypeError, match=r"must return a torch\.futures\.Future, got Tensor"):
        ddp(data(0, rank)).backward()


def test_hooks_that_are_none():
    run_ranks(1, refuse)


def builtin(rank, size, name):
    net = make()
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init())
    ddp._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
    ddp(data(0, rank)).backward()
    return gradients(net)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "rtol"), [("ALLREDUCE", 1e-5), ("FP16_COMPRESS", 4e-3)])
def test_builtin_hooks(name, rtol, size):
    exact = wanted(size, 0)
    for found in run_ranks(size, builtin, name):
        for parameter, gradient in exact.items():
            atol = rtol * gradient.abs().max().item()
            torch.testing.assert_close(found[parameter].double(), gradient, rtol=rtol, atol=atol)


def raise_once(rank, size, overlap, where):
    """A hook without any communication: nothing but the wrapper can tell the other ranks."""
    calls = 0

    def hook(state, bucket):
        nonlocal calls
        calls += 1
        fails = rank == 1 and calls == 2 * len(ddp.buckets) - 1
        if fails and where == "hook":
            raise ZeroDivisionError("of the hook")
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future.then(fail) if fails else future

    def fail(future):
        raise ZeroDivisionError("of the hook")

    net = make()
    ddp = pycomm.DistributedDataParallel(
        net, communicator=pycomm.init(), overlap=overlap, bucket_cap_mb=0.0001
    )
    ddp.register_comm_hook(None, hook)
    messages = []
    for step in range(3):
        net.zero_grad()
        try:
            ddp(data(step, rank)).backward()
        except (RuntimeError, ZeroDivisionError) as error:  # torch's Futures make RuntimeErrors
            messages.append((step, f"{error}; {error.__cause__}"))
    return messages, len(ddp.buckets)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("overlap", ["async", "inline", "end"])
@pytest.mark.parametrize("where", ["hook", "future"])
def test_what_a_hook_raises_reaches_all_ranks_in_that_backward(overlap, where):
    for rank, (messages, n_buckets) in enumerate(run_ranks(2, raise_once, overlap, where)):
        assert n_buckets > 2
        ((step, message),) = messages
        assert step == 1
        assert "rank 1: its communication hook raised an exception" in message
        assert ("of the hook" in message) is (rank == 1)
