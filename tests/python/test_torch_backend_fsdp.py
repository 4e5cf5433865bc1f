"""FSDP on the backend, all of FSDP2's options, against one process; FSDP1 with torch's own comparison.

torch's wheel ships no tests of FSDP, only what they are made of (common_fsdp.py): models, and ``FSDPTest``,
whose ``_test_fsdp_parity`` trains with FSDP1 and with DDP and compares.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks
from torch_backend_ranks import world

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="for torch 2.13 and its helpers"),
]
fsdp = pytest.importorskip("torch.distributed.fsdp")
has_fsdp2 = hasattr(fsdp, "fully_shard")
MICROBATCHES = 3


class Block(nn.Module):
    """A layer with a branch and sizes that no number of ranks divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(width), nn.Linear(width, 13), nn.Linear(13, width)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(torch.tanh(self.one(self.norm(x)))) * self.scale.sum() / 3


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(5, 7), Block(7), Block(7), nn.Linear(7, 2)).to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64).to(dtype)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return model(x).double().square().mean()


def shard(model: nn.Module, **options: Any) -> Any:
    for layer in model:
        if isinstance(layer, Block):
            fsdp.fully_shard(layer, **options)
    return fsdp.fully_shard(model, **options)


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def same(model: nn.Module, right: nn.Module, what: Any, **tolerance: float) -> None:
    """Parameters and gradients."""
    tolerance = tolerance or {"rtol": 1e-11, "atol": 1e-13}
    for (name, p), q in zip(model.named_parameters(), right.named_parameters(), strict=True):
        for got, want in ((p, q[1]), (p.grad, q[1].grad)):
            says = partial("{} {}: {}".format, what, name)
            torch.testing.assert_close(whole(got).detach(), want.detach(), **tolerance, msg=says)


def compare(rank: int, size: int, model: Any, what: Any) -> None:
    """Three steps of Adam with clipped gradients on the model and on one in this process alone."""
    right = network()
    pairs = [(m, torch.optim.Adam(m.parameters(), lr=0.02)) for m in (model, right)]
    for step in range(3):
        for _, optimizer in pairs:
            optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        torch.stack([loss_of(right, batch(r, step)) for r in range(size)]).mean().backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m, _ in pairs]
        torch.testing.assert_close(whole(norms[0]), norms[1])
        for _, optimizer in pairs:
            optimizer.step()
    same(model, right, what)


def options(rank: int, size: int) -> None:
    flat = dist.init_device_mesh("cpu", (size,))
    two = dist.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    for reshard in (True, False, 2):
        model = shard(network(), mesh=flat, reshard_after_forward=reshard)
        compare(rank, size, model, f"reshard_after_forward={reshard}")
    compare(rank, size, shard(network(), mesh=two), "HSDP")
    offload = fsdp.CPUOffloadPolicy(pin_memory=False)
    compare(rank, size, shard(network(), mesh=flat, offload_policy=offload), "offload")

    model = shard(network(), mesh=flat)
    blocks = [layer for layer in model if isinstance(layer, Block)]
    blocks[0].set_modules_to_forward_prefetch(blocks[1:])
    blocks[1].set_modules_to_backward_prefetch(blocks[:1])
    compare(rank, size, model, "prefetch")

    model = shard(network(), mesh=flat)
    if hasattr(model, "set_allocate_memory_from_process_group_for_comm"):
        model.set_allocate_memory_from_process_group_for_comm(True)
        compare(rank, size, model, "buffers of the group's own memory")


def accumulated(rank: int, size: int) -> None:
    flat = dist.init_device_mesh("cpu", (size,))
    two = dist.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    right = network()
    losses = [loss_of(right, batch(r, s)) for r in range(size) for s in range(MICROBATCHES)]
    (torch.stack(losses).sum() / size).backward()
    for mesh in (flat, two):
        for setting in ("requires_gradient_sync", "requires_all_reduce", "reshard_after_backward"):
            if setting == "requires_all_reduce" and mesh is flat:
                continue
            model = shard(network(), mesh=mesh)
            for micro in range(MICROBATCHES):
                getattr(model, f"set_{setting}")(micro == MICROBATCHES - 1)
                loss_of(model, batch(rank, micro)).backward()
            same(model, right, f"accumulation with {setting} on {mesh}")


def ignored(rank: int, size: int) -> None:
    if "ignored_params" not in inspect.signature(fsdp.fully_shard).parameters:
        return  # torch before 2.8
    model = network()
    left_out = {layer.scale for layer in model if isinstance(layer, Block)}
    shard(model, ignored_params=left_out)
    loss_of(model, batch(rank, 0)).backward()
    right, alone = network(), network()
    torch.stack([loss_of(right, batch(r, 0)) for r in range(size)]).mean().backward()
    loss_of(alone, batch(rank, 0)).backward()  # what is ignored has this rank's gradient
    for (name, p), q, own in zip(
        model.named_parameters(), right.parameters(), alone.parameters(), strict=True
    ):
        want = own.grad if name.endswith("scale") else q.grad
        assert hasattr(p, "full_tensor") != name.endswith("scale"), name
        torch.testing.assert_close(whole(p.grad), want, rtol=1e-11, atol=1e-13)


def mixed(rank: int, size: int) -> None:
    """bfloat16 in the layers, gradients summed in fp32 (exactly here) or in bfloat16 (rounded once)."""
    for reduce_dtype in (torch.float32, torch.bfloat16):
        policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        model = shard(network(torch.float32), mp_policy=policy)
        loss_of(model, batch(rank, 0, torch.float32)).backward()
        right = network(torch.float32)
        gradients = []
        for r in range(size):
            low = copy.deepcopy(right).to(torch.bfloat16)
            loss_of(low, batch(r, 0, torch.bfloat16)).backward()
            gradients.append([p.grad.double() for p in low.parameters()])
        for q, parts in zip(right.parameters(), zip(*gradients, strict=True), strict=True):
            q.grad = (sum(parts) / size).float()
        bound = 1e-6 if reduce_dtype == torch.float32 else 2.0**-7  # one rounding to bfloat16, and the mean's
        same(model, right, f"mixed precision, reduced in {reduce_dtype}", rtol=bound, atol=bound / 50)


def helpers() -> Any:
    """torch's helpers for tests of FSDP."""
    pytest.importorskip("expecttest", reason="torch's helpers need it: pip install expecttest")
    with contextlib.redirect_stderr(io.StringIO()):
        from torch.testing._internal import common_fsdp
    return common_fsdp


def torchs_comparison(rank: int, size: int) -> None:
    suite = helpers()

    class Test(suite.FSDPTest):
        world_size = size

        def runTest(self) -> None: ...

    test = Test("runTest")
    test.rank = rank
    for kind in (suite.NestedWrappedModule, suite.TransformerWithSharedParams):
        for strategy in (
            fsdp.ShardingStrategy.FULL_SHARD,
            fsdp.ShardingStrategy.SHARD_GRAD_OP,
            fsdp.ShardingStrategy.NO_SHARD,
        ):
            for use_orig_params in (False, True):
                test._test_fsdp_parity(
                    kind,
                    suite.FSDPInitMode.RECURSIVE,
                    suite.DEVICEInitMode.DEVICE_BEFORE,
                    sharding_strategy=strategy,
                    use_orig_params=use_orig_params,
                    device_id=torch.device("cpu"),
                )


def torchs_models(rank: int, size: int) -> None:
    """FSDP2 of torch's tensor-parallel MLP, on a mesh of two dimensions."""
    suite = helpers()
    mesh = dist.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    for sequence_parallel in (False, True):
        torch.manual_seed(4)
        right = suite.MLPStack(8, with_seq_parallel=sequence_parallel).double()
        model = copy.deepcopy(right)
        model.parallelize(mesh["tp"], mesh["dp"], sequence_parallel)
        dp = mesh.get_local_rank("dp")
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, right)]
        for step in range(2):
            inputs = [batch(d, step).repeat(1, 2)[:, :8] for d in range(2)]
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(inputs[dp]).sum().backward()
            torch.stack([right(x).sum() for x in inputs]).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        same(model, right, f"FSDP2 and tensor parallel, sequence parallel: {sequence_parallel}")


def four(rank: int, size: int) -> None:
    with world(rank, size):
        if has_fsdp2:
            options(rank, size)
            accumulated(rank, size)
            torchs_models(rank, size)


def two(rank: int, size: int) -> None:
    with world(rank, size):
        torchs_comparison(rank, size)
        if has_fsdp2:
            mixed(rank, size)
            ignored(rank, size)


@pytest.mark.parametrize(("n", "scenarios"), [(4, four), (2, two)], ids=["4", "2"])
def test_fsdp(n, scenarios):
    helpers()
    run_ranks(n, scenarios, timeout=170)
