"""What is built on torch.distributed, on pycomm: values against one process or a closed form.

DDP, FSDP1, FSDP2, HSDP, DTensor, tensor and pipeline parallelism, ZeroRedundancyOptimizer, PostLocalSGD,
checkpoints, functional and differentiable collectives, torch.compile, the profiler.
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import pycomm
from ranks import run_ranks
from torch_backend_ranks import world

pytestmark = pytest.mark.timeout(110)


def network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def trained(size: int, steps: int = 3, lr: float = 0.1, momentum: float = 0.0) -> list[torch.Tensor]:
    """Parameters after training in one process on all ranks' batches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    for step in range(steps):
        optimizer.zero_grad()
        sum(model(batch(r, step)).square().mean() for r in range(size)).div(size).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(model: nn.Module, rank: int, steps: int = 3, optimizer=None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()


def same(got, want, what: str) -> None:
    got, want = list(got), list(want)
    assert len(got) == len(want), what
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.detach(), w, rtol=1e-10, atol=1e-12, msg=lambda m: f"{what}: {m}")


def full(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [full(p.grad) for p in model.parameters()]


def data_parallel(rank: int, size: int) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    with world(rank, size):
        want = trained(size)
        for options in (
            {},
            {"gradient_as_bucket_view": True},
            {"static_graph": True},
            {"bucket_cap_mb": 0.0001},
        ):
            model = TorchDDP(network(), **options)
            train(model, rank)
            same(model.parameters(), want, f"torch's DDP {options}")
        model = TorchDDP(network())
        model.register_comm_hook(None, default_hooks.allreduce_hook)
        train(model, rank)
        same(model.parameters(), want, "a hook")
        model = TorchDDP(network().float())
        model.register_comm_hook(
            powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
        )
        for _ in range(4):
            model(batch(rank, 0).float()).sum().backward()
        model = pycomm.DistributedDataParallel(network(), process_group=dist.group.WORLD)
        train(model, rank)
        same(model.parameters(), want, "pycomm's DDP on the group")
        model = TorchDDP(network())
        train(model, rank, optimizer=ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))
        same(model.parameters(), want, "ZeroRedundancyOptimizer")
        model = TorchDDP(network())
        with model.join():  # rank r has 2 + r batches
            for step in range(2 + rank):
                model(batch(rank, step)).square().mean().backward()
        post_local_sgd(rank, size)


def post_local_sgd(rank: int, size: int) -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = network()
    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    train(model, rank, steps=3, optimizer=optimizer)
    # in one process: each rank's model alone; averaged after steps 0 and 2
    models = [network() for _ in range(size)]
    for step in range(3):
        for r, each in enumerate(models):
            each.zero_grad()
            each(batch(r, step)).square().mean().backward()
            with torch.no_grad():
                for p in each.parameters():
                    p -= 0.1 * p.grad
        if step % 2 == 0:
            with torch.no_grad():
                for together in zip(*(m.parameters() for m in models), strict=True):
                    mean = sum(together) / size
                    for p in together:
                        p.copy_(mean)
    same(model.parameters(), [p.detach() for p in models[0].parameters()], "PostLocalSGD")


@pytest.mark.parametrize("n", [2, 3])
def test_data_parallel(n):
    run_ranks(n, data_parallel, timeout=100)


def sharded(rank: int, size: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

    with world(rank, size):
        want = trained(size)
        for strategy in (
            ShardingStrategy.FULL_SHARD,
            ShardingStrategy.SHARD_GRAD_OP,
            ShardingStrategy.NO_SHARD,
        ):
            model = FullyShardedDataParallel(
                network(), sharding_strategy=strategy, device_id=torch.device("cpu"), use_orig_params=True
            )
            train(model, rank)
            with FullyShardedDataParallel.summon_full_params(model):
                same(model.parameters(), want, f"FSDP1 {strategy}")
        flat = dist.init_device_mesh("cpu", (size,))
        two = dist.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        for mesh in (flat, two):
            model = network()
            for layer in model:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            train(model, rank)
            same([full(p) for p in model.parameters()], want, f"FSDP2 {mesh}")
        model = fully_shard(network(), mesh=flat)
        for _ in range(2):  # a factor of its own: premul_sum
            model.set_gradient_divide_factor(3.0)
            model.zero_grad()
            model(batch(rank, 0)).square().mean().backward()
        alone = network()
        sum(alone(batch(r, 0)).square().mean() for r in range(size)).div(3.0).backward()
        same(
            [full(p.grad) for p in model.parameters()], [p.grad for p in alone.parameters()], "divide factor"
        )
        checkpoints(rank, size, flat)


def checkpoints(rank: int, size: int, mesh) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def make(sharded: bool):
        model = network()
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        if sharded:
            fully_shard(model, mesh=mesh)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model = fully_shard(network(), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, rank, optimizer=optimizer)
    want = trained(size, momentum=0.9)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    folder = os.environ["PYCOMM_RUN_DIR"]
    dcp.save(state, checkpoint_id=f"{folder}/saved")
    dcp.async_save(state, checkpoint_id=f"{folder}/saved-async").result()
    for name in ("saved", "saved-async"):
        for as_shards in (True, False):  # resharding: what was saved in shards comes back whole
            again, its = make(as_shards)
            for p in again.parameters():
                p.grad = torch.zeros_like(p)
            state = dict(zip(("model", "optimizer"), get_state_dict(again, its), strict=True))
            dcp.load(state, checkpoint_id=f"{folder}/{name}")
            set_state_dict(again, its, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            same([full(p) for p in again.parameters()], want, f"{name}, as shards: {as_shards}")


def test_sharded_data_parallel_and_checkpoints():
    run_ranks(4, sharded, timeout=100)


def tensors(rank: int, size: int) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with world(rank, size):
        mesh = dist.init_device_mesh("cpu", (size,))
        whole = torch.arange(5 * 8, dtype=torch.float64).view(5, 8)  # 5 rows: uneven shards
        for dim in (0, 1):
            t = distribute_tensor(whole, mesh, [Shard(dim)])
            assert torch.equal(t.full_tensor(), whole)
            assert torch.equal(t.redistribute(mesh, [Shard(1 - dim)]).full_tensor(), whole)
            assert torch.equal(t.redistribute(mesh, [Replicate()]).to_local(), whole)
            assert torch.equal((t @ t.t()).full_tensor(), whole @ whole.t())
            assert t.sum().full_tensor().item() == whole.sum().item()
        assert isinstance(t, DTensor)
        model, alone = network(), network()
        plan = {
            "0": ColwiseParallel(),
            "2": RowwiseParallel(),
            "4": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, plan)
        x = batch(0, 0)
        torch.testing.assert_close(model(x), alone(x))
        model(x).square().mean().backward()
        alone(x).square().mean().backward()
        same(
            [full(p.grad) for p in model.parameters()],
            [p.grad for p in alone.parameters()],
            "tensor parallel",
        )
        functional_collectives(rank, size)
        differentiable(rank, size)


def functional_collectives(rank: int, size: int) -> None:
    group = dist.group.WORLD
    total = size * (size - 1) / 2

    def calls(x: torch.Tensor) -> list[torch.Tensor]:
        a = functional.all_reduce(x, "sum", group)
        b = functional.all_gather_tensor(x, 0, group)
        c = functional.reduce_scatter_tensor(b, "sum", 0, group)
        d = functional.all_to_all_single(b, None, None, group)
        e = functional.broadcast(x, 1, group)
        both = functional.all_reduce_coalesced([x, x + 1], "avg", group)
        return [(t + 0) for t in (a, b, c, d, e, *both)]

    x = torch.full((4,), float(rank))
    ranks = torch.arange(size).repeat_interleave(4).float()
    want = [
        torch.full((4,), total),
        ranks,
        torch.full((4,), float(rank * size)),
        ranks * 0 + 0,
        torch.ones(4),
    ]
    want[3] = torch.cat([ranks[4 * rank : 4 * rank + 4]] * size)
    want += [torch.full((4,), total / size), torch.full((4,), total / size + 1)]
    for how, function in (
        ("eager", calls),
        ("compiled", torch.compile(calls, fullgraph=True, backend="aot_eager")),
    ):
        for index, (got, right) in enumerate(zip(function(x), want, strict=True)):
            assert torch.equal(got, right), (how, index, got, right)


def differentiable(rank: int, size: int) -> None:
    import torch.distributed.nn.functional as autograd

    x = torch.full((3,), float(rank + 1), dtype=torch.float64, requires_grad=True)
    y = autograd.all_reduce(x.clone())
    (y * (rank + 1)).sum().backward()  # d/dx_r of sum over q of (q + 1) * sum(x): the same on all ranks
    assert x.grad.tolist() == [size * (size + 1) / 2] * 3
    x.grad = None
    parts = autograd.all_gather(x.clone())
    (parts[0] * (rank + 1)).sum().backward()
    assert x.grad.tolist() == [size * (size + 1) / 2 if rank == 0 else 0.0] * 3
    x.grad = None
    autograd.broadcast(x.clone(), 1).sum().backward()
    assert x.grad.tolist() == [float(size) if rank == 1 else 0.0] * 3


def test_dtensor_tensor_parallel_functional_and_autograd():
    run_ranks(2, tensors, timeout=100)


def pipelines(rank: int, size: int) -> None:
    from torch.distributed.pipelining import PipelineStage, schedules

    with world(rank, size):
        whole = network()
        x, target = batch(0, 0).repeat(2, 1)[:8], torch.zeros(8, 4, dtype=torch.float64)
        loss_of = nn.MSELoss(reduction="sum")
        alone = copy.deepcopy(whole)
        loss_of(alone(x), target).backward()
        want = [p.grad for p in alone.parameters()]
        pieces = [nn.Sequential(*whole[:2]), *(nn.Sequential(layer) for layer in whole[2:])]
        names = [
            "GPipe",
            "1F1B",
            "Interleaved1F1B",
            "LoopedBFS",
            "InterleavedZeroBubble",
            "ZBVZeroBubble",
            "DualPipeV",
        ]
        names = [
            name for name in names if hasattr(schedules, f"Schedule{name}")
        ]  # torch before 2.9 has fewer
        for name in names:
            kind = schedules.get_schedule_class(name)
            parts = copy.deepcopy(pieces)
            if issubclass(kind, schedules.PipelineScheduleSingle):
                parts = [nn.Sequential(*parts[0], *parts[1]), nn.Sequential(*parts[2], *parts[3])]
                mine = [rank]
            elif name in ("ZBVZeroBubble", "DualPipeV"):
                mine = [rank, 3 - rank]
            else:
                mine = [rank, rank + 2]
            stages = [PipelineStage(parts[i], i, len(parts), torch.device("cpu")) for i in mine]
            one = issubclass(kind, schedules.PipelineScheduleSingle)
            options = {"loss_fn": loss_of, "scale_grads": False}
            schedule = kind(stages[0] if one else stages, 4, **options)
            first, last = 0 in mine, len(parts) - 1 in mine
            schedule.step(*([x] if first else []), **({"target": target} if last else {}))
            grads = [p.grad for i in mine for p in parts[i].parameters()]
            bounds = {4: [[0, 1], [2, 3], [], [4, 5]], 2: [[0, 1, 2, 3], [4, 5]]}[len(parts)]
            same(grads, [want[j] for i in mine for j in bounds[i]], name)


def test_every_pipeline_schedule():
    run_ranks(2, pipelines, timeout=100)


def compiled_and_profiled(rank: int, size: int) -> None:
    with world(rank, size):
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as seen:
            dist.all_reduce(torch.ones(3, 2))
            dist.all_reduce(torch.ones(5), async_op=True).wait()
            dist.barrier()
        events = {e.name: e.input_shapes for e in seen.events() if e.name.startswith("pycomm:")}
        shapes = [e.input_shapes for e in seen.events() if e.name == "pycomm:all_reduce"]
        assert shapes == [[[3, 2]], [[5]]] and "pycomm:barrier" in events, events
        model = nn.parallel.DistributedDataParallel(network())
        compiled = torch.compile(model, backend="aot_eager")
        train(compiled, rank)
        same(model.parameters(), trained(size), "torch.compile of DDP")


def test_compiled_ddp_and_the_profiler():
    run_ranks(2, compiled_and_profiled, timeout=100)
