"""What torch.distributed.pipelining accepts is accepted, or said to be missing; and means the same."""

import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed.pipelining as theirs
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec, sum_reducer

import pycomm.pipeline as ours
from pycomm.pipeline import PipelineStage, Schedule1F1B

pytestmark = pytest.mark.timeout(60)
DOCS = Path(__file__).parents[2] / "docs" / "pipeline.md"
# Of torch's public names: the arguments that are not here. Each is named in docs/pipeline.md with its reason.
MISSING = {
    "PipelineStage": {"output_grads", "input_grads", "dw_builder", "get_mesh"},
    "Schedule": {"use_full_backward", "backward_requires_autograd", "defer_pp_recv"},
    "names": {"build_stage"},
}
SCHEDULES = [name for name in theirs.__all__ if name.startswith("Schedule")]


def arguments(function):
    return [name for name in inspect.signature(function).parameters if name not in ("self", "kwargs", "args")]


def test_every_public_name_is_here_or_listed():
    assert {name for name in theirs.__all__ if not hasattr(ours, name)} == MISSING["names"]
    said = DOCS.read_text().partition("## Differences from torch.distributed.pipelining")[2]
    for names in MISSING.values():
        for name in names:
            assert name in said.partition("| not accepted |")[2], name


def test_every_argument_of_a_stage_is_here_or_listed():
    mine, torchs = arguments(PipelineStage), arguments(theirs.PipelineStage)
    assert [name for name in torchs if name not in mine] == [
        name for name in torchs if name in MISSING["PipelineStage"]
    ]
    assert mine[:5] == torchs[:5]  # also by position


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_argument_of_a_schedule_is_here_or_listed(name):
    torch_class, my_class = getattr(theirs, name), getattr(ours, name)
    for method in ("__init__", "step", "eval"):
        mine = arguments(getattr(my_class, method))
        torchs = [a for a in arguments(getattr(torch_class, method)) if a not in ("stage", "stages")]
        assert {a for a in torchs if a not in mine} <= MISSING["Schedule"], (name, method)
    inner = arguments(theirs.schedules._PipelineSchedule.__init__)
    assert arguments(my_class.__init__)[1 : len(inner)] == inner[:-1]  # all but scale_grads by position


def test_schedules_classes_are_found_by_torchs_names():
    for name in SCHEDULES:
        short = name.removeprefix("Schedule")
        assert ours.get_schedule_class(short).__name__ == name
        assert theirs.schedules.get_schedule_class(short).__name__ == name


def test_arguments_of_a_step():
    """loss_kwargs reach loss_fn, outputs are merged as asked, or not at all."""
    stage = PipelineStage(nn.Identity(), 0, 1)
    seen = []

    def loss_fn(output, target, *, factor):
        seen.append(factor)
        return ((output - target) * factor).mean()

    schedule = Schedule1F1B(stage, 2, loss_fn, None, None, TensorChunkSpec(1))
    x = torch.arange(8.0).view(4, 2).requires_grad_()
    output = schedule.step(x, target=torch.zeros(4, 2), loss_kwargs={"factor": 3.0})
    assert torch.equal(output, torch.cat([x[:2], x[2:]], 1).detach())
    assert seen == [3.0, 3.0]
    torch.testing.assert_close(schedule.loss, (x.detach() * 3).mean())
    assert schedule.step(x, target=x.detach(), loss_kwargs={"factor": 1.0}, return_outputs=False) is None
    summed = Schedule1F1B(PipelineStage(Sum(), 0, 1), 2, output_merge_spec=sum_reducer)
    assert summed.eval(x.detach()) == 28


class Sum(nn.Module):
    def forward(self, x):
        return x.sum()


def test_a_chunk_spec_cuts_another_dimension():
    stage = PipelineStage(nn.Linear(3, 3), 0, 1)
    schedule = Schedule1F1B(stage, 2, args_chunk_spec=(TensorChunkSpec(1),))
    x = torch.randn(3, 4, 3)
    torch.testing.assert_close(
        schedule.eval(x), torch.cat([stage.submod(x[:, :2]), stage.submod(x[:, 2:])]).detach()
    )
