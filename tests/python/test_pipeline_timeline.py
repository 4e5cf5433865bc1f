"""The measured timeline: exactly what ran, on one clock; its file; the picture; the command line."""

import json
import time

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import pycomm
from pycomm.cli.pipeline import app
from pycomm.pipeline import PipelineStage, get_schedule_class
from pycomm.pipeline.schedule import picture
from pycomm.pipeline.schedule.catalog import CATALOG, build
from pycomm.pipeline.schedule.measured import Measured, costs_of
from pycomm.pipeline.schedule.simulate import Costs, simulate
from pycomm.pipeline.schedule.verify import needs
from pycomm.pipeline.timeline import clock_offset
from ranks import run_ranks

pytestmark = pytest.mark.timeout(120)


def running(rank, size, names, folder):
    for name in names:
        v = CATALOG[name].stages_per_rank or 2
        order = build(name, size, 4, v)
        mine = [PipelineStage(nn.Linear(2, 2), s, size * v) for s in order.stages_of(rank)]
        schedule = get_schedule_class(name)(mine, 4, loss_fn=nn.functional.mse_loss)
        with pytest.raises(RuntimeError, match="call step or eval before"):
            schedule.timeline()
        x = torch.ones(4, 2)
        schedule.step(x, target=x)
        measured = schedule.save_measured(f"{folder}/{name}.json")
        timeline = schedule.timeline()
        assert timeline == measured.timeline
        assert tuple(tuple(s.action for s in row) for row in timeline.spans) == order.actions
        ends = {s.action: s.end for row in timeline.spans for s in row}
        for row in timeline.spans:
            for span in row:  # a clock for all: nothing begins before what it needs has ended
                assert 0 <= span.start <= span.end
                for choice in needs(order, span.action):
                    assert any(a in ends and ends[a] <= span.start for a in choice), (name, span)
        schedule.eval(x)
        kinds = {s.action.kind for row in schedule.timeline().spans for s in row}
        assert kinds == {"F"}
    with pytest.raises(OSError, match="rank 0 cannot write"):
        schedule.save_measured(f"{folder}/none/x.json")
    offset = clock_offset(pycomm.init(), lambda: time.monotonic() + 100 * rank)
    assert abs(offset - 100 * rank) < 5
    assert clock_offset(pycomm.init()) == 0.0


def test_a_timeline_has_exactly_the_actions_that_ran(tmp_path):
    names = ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
    run_ranks(2, running, names, str(tmp_path))
    for name in names:
        measured = Measured.from_json((tmp_path / f"{name}.json").read_text())
        assert Measured.from_json(measured.to_json()) == measured
        _picture(measured, tmp_path, name)
    _commands(tmp_path)


def _picture(measured, folder, name):
    """Every action that ran is written once in the picture, as in the simulated one."""
    path = folder / f"{name}.svg"
    order = measured.timeline.order
    drawn = {"simulated": simulate(order, measured.costs), "measured": measured.timeline}
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        picture.draw(drawn, path, "s")
    text = path.read_text()
    for actions in order.actions:
        for action in actions:
            assert text.count(f">{action}<") == 2, action
    picture.draw(drawn, path.with_suffix(".png"))
    assert path.with_suffix(".png").read_bytes()[1:4] == b"PNG"


def _commands(folder):
    runner, run = CliRunner(), str(folder / "Interleaved1F1B.json")
    picture_of = folder / "both.svg"
    told = runner.invoke(app, ["simulate", "Interleaved1F1B", "--measured", run, "--draw", str(picture_of)])
    assert told.exit_code == 0, told.output
    assert "measured, Interleaved1F1B: step" in told.output and picture_of.exists()
    found = json.loads(runner.invoke(app, ["choose", "--measured", run, "--json"]).output)
    assert {line["microbatches"] for line in found} == {4} and {line["ranks"] for line in found} == {2}
    whole = Measured.from_json((folder / "Interleaved1F1B.json").read_text()).costs
    line = next(line for line in found if line["schedule"] == "GPipe")
    mean = [sum(part) / 2 for part in (whole.forward, whole.backward_input, whole.backward_weight)]
    expected = simulate(
        build("GPipe", 2, 4, 1), Costs(*mean, whole.latency, dispatch=whole.dispatch)
    ).makespan
    assert line["makespan"] == pytest.approx(expected)
    (folder / "bad.json").write_text("{}")
    told = runner.invoke(app, ["choose", "--measured", str(folder / "bad.json")])
    assert told.exit_code == 2 and "not the file of a measured run" in told.output
    for option, said in (("--ranks", "which has 2: leave it out"), ("--forward", "not both")):
        told = runner.invoke(app, ["choose", "--measured", run, option, "3"])
        assert told.exit_code == 2 and said in told.output


@pytest.mark.parametrize("name", list(CATALOG))
def test_costs_are_found_again(name):
    """What a simulation took is what it was given; a whole backward is two halves."""
    v = CATALOG[name].stages_per_rank or 2
    order = build(name, 4, 8, v)
    costs = Costs(2.0, 1.5, 1.5, 0.25, dispatch=0.125)
    found = costs_of(simulate(order, costs))
    for got, given in ((found.forward, 2.0), (found.backward_input, 1.5), (found.backward_weight, 1.5)):
        assert got == pytest.approx([given] * 4 * v)
    assert found.latency == pytest.approx(0.25)
    assert found.dispatch == pytest.approx(0.125)


def replicated(rank, size):
    """Two replicas of one stage: the reduction is in the timeline, behind the last backward."""
    module = pycomm.DistributedDataParallel(nn.Linear(2, 2))
    alone = pycomm.init().split(rank)
    schedule = get_schedule_class("1F1B")(
        PipelineStage(module, 0, 1, group=alone), 2, loss_fn=nn.functional.mse_loss
    )
    for _ in range(2):
        schedule.step(torch.ones(4, 2), target=torch.zeros(4, 2))
        timeline = schedule.timeline()
        ((span,),) = timeline.reductions
        assert str(span.action) == "0REDUCE_GRAD"
        assert timeline.spans[0][-1].end <= span.start <= span.end
    measured = Measured.of(timeline)
    assert Measured.from_json(measured.to_json()) == measured
    schedule.eval(torch.ones(4, 2))
    assert schedule.timeline().reductions == ()


def test_reductions_are_in_the_timeline():
    run_ranks(2, replicated, timeout=60)
