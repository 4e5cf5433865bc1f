"""pp x dp x tp on a DeviceMesh and on pycomm's own communicators: loss, every gradient, the clipped norm and
overflow are those of one process, in float64."""

from __future__ import annotations

import copy
from typing import Any

import hybrid_model as gpt
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pycomm
import pycomm.tensor_parallel as tp
from pycomm.pipeline import (
    PipelineSchedule,
    PipelineStage,
    clip_grad_norm_,
    get_schedule_class,
    has_overflow,
    plan,
)
from pycomm.pipeline.names import plain_parameters
from pycomm.pipeline.schedule.catalog import build
from pycomm.tensor_parallel.parameters import shard_index
from ranks import run_ranks
from torch_backend_ranks import world

pytestmark = pytest.mark.timeout(300)


def pipelined(
    name: str, pipe: Any, n_pipe: int, rank_in_pipe: int, replicas: Any, tensor: Any, m: int = 3, **more: Any
) -> PipelineSchedule:
    """The GPT under a schedule; ``replicas`` are DDP's arguments, None for none."""
    v = 1 if name in ("1F1B", "ZeroBubbleH1", "GPipe") else 2
    order = build(name, n_pipe, m, v)
    layers = gpt.layers(tensor)
    cut = plan(layers, n_pipe * v, "uniform")
    stages = []
    for s in order.stages_of(rank_in_pipe):
        module: nn.Module = cut.stage(layers, s)
        if replicas is not None:
            module = pycomm.DistributedDataParallel(module, **replicas)
        stages.append(PipelineStage(module, s, n_pipe * v, group=pipe))
    return get_schedule_class(name)(
        stages,
        m,
        loss_fn=gpt.loss_over(tensor),
        loss_on_all_ranks=True,
        tied=[[(0, "0.embedding.weight"), (n_pipe * v - 1, "5.embedding.weight")]],
        **more,
    )


def check_gradients(schedule: PipelineSchedule, want: dict[str, Tensor], scale: float = 1.0) -> None:
    index = shard_index()
    for stage in schedule.stages:
        for name, parameter in plain_parameters(stage.submod).items():
            gradient = want[name.replace("5.embedding", "0.embedding")].grad
            assert gradient is not None and parameter.grad is not None, name
            shard = index.get(id(parameter))
            mine = gradient if shard is None else shard.take(gradient)
            torch.testing.assert_close(parameter.grad, mine * scale, atol=1e-12, rtol=1e-10, msg=name)


def trains(schedule: PipelineSchedule, replica: int, n_replicas: int, mesh: Any = None) -> None:
    """Two steps, accumulated, then a clip, against one process."""
    want = gpt.weights()
    for step in range(2):
        ids, target = gpt.batch(step)
        mine = [t.chunk(n_replicas)[replica] for t in (ids, target)]
        schedule.step(mine[0], target=mine[1])
        loss = gpt.reference_loss(want, ids, target)
        loss.backward()
    everyone = schedule.loss.clone()
    pycomm.init().all_reduce(everyone, op="avg")  # of the replicas; within one all have the same
    torch.testing.assert_close(everyone, loss.detach(), atol=1e-12, rtol=0)
    check_gradients(schedule, want)
    leaves = list(want.values())
    norm = torch.nn.utils.get_total_norm([p.grad for p in leaves])
    found = clip_grad_norm_(schedule, float(norm) / 2, mesh=mesh)
    torch.testing.assert_close(found, norm.to(torch.float64), atol=0, rtol=1e-10)
    check_gradients(schedule, want, 0.5 / (1 + 1e-6 / float(norm)))
    assert not has_overflow(schedule, mesh=mesh)
    if schedule.communicator.rank == 0 and replica == 0:
        next(schedule.stages[0].submod.parameters()).grad[0, 0] = torch.nan
    assert has_overflow(schedule, mesh=mesh) == (replica == 0)


def on_mesh(rank: int, size: int, shape: tuple[int, int, int], names: list[str]) -> None:
    with world(rank, size):
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
        replicas = {"process_group": mesh.get_group("dp")} if shape[1] > 1 else None
        for name in names:
            group = mesh["pp"] if name == "1F1B" else mesh  # of several dimensions, that called pp
            schedule = pipelined(
                name, group, shape[0], mesh.get_local_rank("pp"), replicas, mesh["tp"], m=2 if size > 4 else 3
            )
            assert schedule.communicator.size == shape[0]
            trains(schedule, mesh.get_local_rank("dp"), shape[1], mesh)
        named = dist.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c"))
        with pytest.raises(ValueError, match="none is called 'pp'; give the one of the pipeline's ranks"):
            get_schedule_class("1F1B")(PipelineStage(nn.Linear(1, 1), 0, 1, group=named), 1)


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((2, 1, 2), ["1F1B", "ZBVZeroBubble", "Interleaved1F1B"]),
        ((2, 2, 1), ["1F1B", "ZeroBubbleH1", "ZBVZeroBubble", "DualPipeV"]),
        ((2, 2, 2), ["1F1B", "ZBVZeroBubble"]),
    ],
)
def test_a_mesh_of_pipelines_replicas_and_shards(shape: tuple[int, int, int], names: list[str]) -> None:
    run_ranks(shape[0] * shape[1] * shape[2], on_mesh, shape, names, timeout=200)


def by_megatrons_names(rank: int, size: int) -> None:
    tp.initialize_model_parallel(1, 2)
    assert tp.get_pipeline_model_parallel_rank() == rank // 2 and tp.get_data_parallel_rank() == rank % 2
    schedule = pipelined(
        "1F1B",
        None,
        tp.get_pipeline_model_parallel_world_size(),
        tp.get_pipeline_model_parallel_rank(),
        {"communicator": tp.get_data_parallel_group()},
        tp.get_tensor_model_parallel_group(),
    )
    trains(schedule, tp.get_data_parallel_rank(), tp.get_data_parallel_world_size())
    tp.destroy_model_parallel()
    tp.initialize_model_parallel(2, 2)
    assert [tp.get_tensor_model_parallel_rank(), tp.get_pipeline_model_parallel_rank()] == [
        rank % 2,
        rank // 2,
    ]
    assert tp.get_data_parallel_world_size() == 1
    tp.destroy_model_parallel()


def test_communicators_under_megatrons_names() -> None:
    run_ranks(4, by_megatrons_names)


def clipped(rank: int, size: int) -> None:
    """Stages whose gradients differ a thousandfold; a loss scale that is too large on one stage only."""
    torch.manual_seed(3)
    whole = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).double()
    with torch.no_grad():
        whole[1].weight.mul_(1e-3)  # so that the first stage's gradients are small
    part = copy.deepcopy(whole[rank])
    scaler = tp.GradScaler([None, pycomm.init()], init_scale=4.0, growth_interval=1)
    schedule = get_schedule_class("1F1B")(
        PipelineStage(part, rank, size), 2, loss_fn=lambda y, t: scaler.scale(nn.functional.mse_loss(y, t))
    )
    sgd = torch.optim.SGD(part.parameters(), lr=0.1)
    x = torch.randn(6, 4, dtype=torch.float64)
    schedule.step(x, target=x)
    scaler.unscale_(sgd)
    nn.functional.mse_loss(whole[1](whole[0](x)), x).backward()
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    alone = copy.deepcopy(part)
    for p, q in zip(alone.parameters(), part.parameters(), strict=True):
        p.grad = q.grad.clone()
    torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    assert float(clip_grad_norm_(schedule, 0.1)) == pytest.approx(float(norm), rel=1e-12)
    for p, q, other in zip(part.parameters(), whole[rank].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-14, rtol=1e-9)
        # A stage by itself: the first one's gradients are below the bound, and would not be clipped at all.
        if rank == 0:
            assert float(other.grad.norm()) > 2 * float(q.grad.norm())
    scaler.step(sgd)
    scaler.update()
    assert scaler.get_scale() == 8.0
    before = part.weight.detach().clone()
    schedule.step(x, target=x)
    if rank == 1:
        part.bias.grad[0] = torch.inf
    assert has_overflow(schedule)
    scaler.step(sgd)
    scaler.update()
    assert torch.equal(part.weight, before) and scaler.get_scale() == 4.0  # on both stages
    frozen = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # without a gradient on either
    scaler.step(frozen)


def test_clipping_by_stage_is_wrong_and_an_overflow_skips_every_stages_step() -> None:
    run_ranks(2, clipped)
