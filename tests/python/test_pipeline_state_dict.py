"""Checkpoints of pipelines: saved at one cut, loaded at another, training goes on as if nothing had been."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import hybrid_model as gpt
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from test_pipeline_hybrid import pipelined
from torch import nn

from pycomm.pipeline import (
    PipelineStage,
    ScheduleGPipe,
    get_schedule_class,
    load_sharded_optimizer_state_dict,
    sharded_optimizer_state_dict,
    sharded_state_dict,
)
from pycomm.pipeline.names import whole_name
from ranks import run_ranks
from torch_backend_ranks import world

pytestmark = pytest.mark.timeout(300)


def made(shape: tuple[int, int, int], name: str) -> tuple[Any, torch.optim.Optimizer, Any]:
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
    replicas = {"process_group": mesh.get_group("dp")} if shape[1] > 1 else None
    schedule = pipelined(name, mesh, shape[0], mesh.get_local_rank("pp"), replicas, mesh["tp"], m=2)
    # Two groups: norms and biases are not decayed.
    parameters = {id(p): p for stage in schedule.stages for p in stage.submod.parameters()}.values()
    groups = [
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        {"params": [p for p in parameters if p.dim() > 1], "lr": 0.02},
    ]
    adam = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.05)
    return schedule, adam, mesh


def train(schedule: Any, adam: torch.optim.Optimizer, steps: range, mesh: Any) -> list[float]:
    losses = []
    for step in steps:
        ids, target = gpt.batch(step)
        n, r = mesh["dp"].size(), mesh.get_local_rank("dp")
        schedule.step(ids.chunk(n)[r], target=target.chunk(n)[r])
        adam.step()
        adam.zero_grad()
        loss = schedule.loss.clone()
        dist.all_reduce(loss, op=dist.ReduceOp.AVG, group=mesh.get_group("dp"))
        losses.append(float(loss))
    return losses


def states(schedule: Any, adam: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": sharded_state_dict(schedule), "optim": sharded_optimizer_state_dict(schedule, adam)}


def saves(rank: int, size: int, shape: tuple[int, int, int], name: str, folder: str) -> list[float]:
    with world(rank, size):
        schedule, adam, mesh = made(shape, name)
        train(schedule, adam, range(2), mesh)
        state = states(schedule, adam)
        if rank == 0:
            assert state["model"]["0.embedding.weight"].shape == (7, 6)
        assert "5.embedding.weight" not in state["optim"]["state"]  # under its first place's name
        dcp.save(state, checkpoint_id=folder)
        for group in adam.param_groups:  # later changes are not in it
            group["lr"] = group["lr"] / 2
        return train(schedule, adam, range(2, 4), mesh)


def loads(rank: int, size: int, shape: tuple[int, int, int], name: str, folder: str) -> list[float]:
    with world(rank, size):
        schedule, adam, mesh = made(shape, name)
        with torch.no_grad():
            for stage in schedule.stages:
                for parameter in stage.submod.parameters():
                    parameter.zero_()
        for group in adam.param_groups:
            group["lr"] = 1e9
        state = states(schedule, adam)
        dcp.load(state, checkpoint_id=folder)
        load_sharded_optimizer_state_dict(schedule, adam, state["optim"])
        assert sorted(group["lr"] for group in adam.param_groups) in ([0.02], [0.02, 0.05])
        for group in adam.param_groups:
            assert group["weight_decay"] == (0.0 if group["params"][0].dim() == 1 else 0.01)
            group["lr"] = group["lr"] / 2
        return train(schedule, adam, range(2, 4), mesh)


def test_saved_at_one_cut_and_loaded_at_others(tmp_path: Path) -> None:
    [*saved] = run_ranks(4, saves, (2, 1, 2), "1F1B", str(tmp_path / "a"), timeout=120)
    want = saved[0]
    assert all(found == want for found in saved)
    for shape, name in (
        ((2, 1, 2), "1F1B"),
        ((4, 1, 1), "ZeroBubbleH1"),
        ((1, 1, 1), "1F1B"),
        ((2, 2, 1), "ZBVZeroBubble"),
    ):
        n = shape[0] * shape[1] * shape[2]
        for found in run_ranks(n, loads, shape, name, str(tmp_path / "a"), timeout=120):
            assert found == (want if (shape, name) == ((2, 1, 2), "1F1B") else pytest.approx(want, rel=1e-9))


def test_saved_by_one_process_and_loaded_by_several(tmp_path: Path) -> None:
    [want] = run_ranks(1, saves, (1, 1, 1), "GPipe", str(tmp_path))
    for found in run_ranks(2, loads, (1, 1, 2), "Interleaved1F1B", str(tmp_path), timeout=120):
        assert found == pytest.approx(want, rel=1e-9)


def test_torch_reads_it_without_pycomm(tmp_path: Path) -> None:
    run_ranks(2, saves, (2, 1, 1), "1F1B", str(tmp_path / "a"))
    weights = gpt.weights()
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in weights.values() if p.dim() == 1], "weight_decay": 0.0},
            {"params": [p for p in weights.values() if p.dim() > 1], "lr": 0.02},
        ],
        lr=0.05,
    )
    for step in range(2):
        gpt.reference_loss(weights, *gpt.batch(step)).backward()
        adam.step()
        adam.zero_grad()
    read = {
        "model": {name: torch.zeros_like(p, requires_grad=False) for name, p in weights.items()},
        "optim": {
            "state": {
                name: {"exp_avg": torch.zeros_like(p, requires_grad=False)} for name, p in weights.items()
            }
        },
    }
    dcp.load(read, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    for name, p in weights.items():
        torch.testing.assert_close(read["model"][name], p.detach(), atol=1e-12, rtol=0)
        torch.testing.assert_close(
            read["optim"]["state"][name]["exp_avg"], adam.state[p]["exp_avg"], atol=1e-12, rtol=0
        )


def names(rank: int, size: int) -> None:
    part = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    schedule = ScheduleGPipe(PipelineStage(copy.deepcopy(part), rank, size), 1)
    with pytest.raises(
        ValueError, match=r"stage 0 and stage 1 both have '0\.weight', so one would overwrite"
    ):
        sharded_state_dict(schedule)
    named = PipelineStage(part, rank, size, names={"0": f"layers.{rank}", "": f"rest.{rank}"})
    found = sharded_state_dict(ScheduleGPipe(named, 1))
    assert list(found)[:3] == [f"layers.{rank}.weight", f"layers.{rank}.bias", f"rest.{rank}.1.weight"]
    assert f"rest.{rank}.1.running_mean" in found
    assert whole_name(PipelineStage(part, 0, 1, names="a"), "0.bias") == "a.0.bias"
    assert whole_name(PipelineStage(part, 0, 1, names={"0": "x"}), "1.bias") == "1.bias"


def test_names_are_the_whole_models() -> None:
    run_ranks(2, names)


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]

    def run(n: int, *options: str) -> list[float]:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
        example = str(root / "examples" / "pipeline_hybrid.py")
        ended = subprocess.run(
            [sys.executable, *launch, example, *options],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stderr
        return [float(found) for found in re.findall(r"loss (\d+\.\d+)", ended.stdout)]

    first = run(4, "--pp", "2", "--tp", "2", "--steps", "3", "--save", str(tmp_path))
    assert len(first) == 3 and first[2] < first[0]
    [after] = run(2, "--dp", "2", "--steps", "1", "--load", str(tmp_path))
    assert after < first[2]


def one_a_stage(rank: int, size: int, folder: str) -> None:
    """An optimizer for each of a rank's stages: saved, and loaded into a single one."""
    torch.manual_seed(0)
    stages = [PipelineStage(nn.Linear(3, 3), i, 2, names=f"layers.{i}") for i in range(2)]
    schedule = get_schedule_class("Interleaved1F1B")(stages, 2, loss_fn=nn.functional.mse_loss)
    several = [torch.optim.Adam(stage.submod.parameters(), lr=0.1 + i) for i, stage in enumerate(stages)]
    schedule.step(torch.ones(4, 3), target=torch.zeros(4, 3))
    for optimizer in several:
        optimizer.step()
    state = sharded_optimizer_state_dict(schedule, several)
    assert state["param_groups"]["layers.1.bias"]["lr"] == 1.1
    assert stages[0].submod.weight.grad is not None  # is there all the time, and changes nothing
    dcp.save(state, checkpoint_id=folder)
    groups = [{"params": list(stage.submod.parameters())} for stage in stages]
    one = torch.optim.Adam(groups)
    read = sharded_optimizer_state_dict(schedule, one)
    dcp.load(read, checkpoint_id=folder)
    load_sharded_optimizer_state_dict(schedule, one, read)
    again = [torch.optim.Adam(stage.submod.parameters()) for stage in stages]
    load_sharded_optimizer_state_dict(schedule, again, state)
    for i, stage in enumerate(stages):
        assert one.param_groups[i]["lr"] == again[i].param_groups[0]["lr"] == 0.1 + i
        for p in stage.submod.parameters():
            for found in (one.state[p], again[i].state[p]):
                assert torch.equal(found["exp_avg"], several[i].state[p]["exp_avg"])


def test_several_optimizers(tmp_path: Path) -> None:
    run_ranks(1, one_a_stage, str(tmp_path), timeout=60)
