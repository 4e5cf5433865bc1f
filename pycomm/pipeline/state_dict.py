"""Checkpoints of a model cut into stages, which load at any number of stages, ranks, shards and replicas.

    sharded_state_dict                   for torch.distributed.checkpoint: each rank writes and reads what it
    sharded_optimizer_state_dict         has, in place, under the whole model's names
    load_sharded_optimizer_state_dict    gives an optimizer what was read

    state = {"model": sharded_state_dict(schedule), "optim": sharded_optimizer_state_dict(schedule, adam)}
    dcp.save(state, checkpoint_id=folder)

    dcp.load(state, checkpoint_id=folder)      # of a schedule and optimizer made for now's ranks
    load_sharded_optimizer_state_dict(schedule, adam, state["optim"])

Nothing in a checkpoint knows of the cut: names are *whole* (pycomm/pipeline/names.py), shards are parts of
whole tensors (pycomm/tensor_parallel/whole.py), replicas are written once. An optimizer's state and options
are kept for each parameter, not for each group, since groups are a rank's. What is tied between stages has
its value under all its names, as one process's ``state_dict`` has it, and its optimizer's state under the
name of its first place, as one process's optimizer has it.

Call :meth:`SchedulePipeDream2BW.flush` first where a schedule has that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pycomm.pipeline.names import plain_names, whole_name
from pycomm.pipeline.ties import gather
from pycomm.tensor_parallel.parameters import ParameterShard, check_notes, shard_index
from pycomm.tensor_parallel.state_dict import _is_shard, _optimizer_state
from pycomm.tensor_parallel.whole import WholeTensor

if TYPE_CHECKING:
    from pycomm.pipeline.schedules import PipelineSchedule
    from pycomm.pipeline.stage import PipelineStage

__all__ = ["load_sharded_optimizer_state_dict", "sharded_optimizer_state_dict", "sharded_state_dict"]

State = dict[str, Any]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]  # one, or several of disjoint parameters
Place = tuple[int, str]  # a stage, and a plain name in it


def _by_place(schedule: PipelineSchedule) -> dict[Place, Any]:
    """What ``state_dict`` has of this rank's stages, not detached."""
    found: dict[Place, Any] = {}
    for stage in schedule.stages:
        check_notes("a pipeline's checkpoint", stage.submod)
        state = stage.submod.state_dict(keep_vars=True)
        tensors = [name for name, value in state.items() if isinstance(value, Tensor)]
        plain = plain_names(stage.submod, tensors)
        found |= {(stage.stage_index, plain.get(name, name)): value for name, value in state.items()}
    return found


class _Names:
    """The whole model's name of every place, on all ranks. Making it is collective over the pipeline.

    Raises:
        ValueError: two stages have the same name for what is not tied; on every rank.
    """

    def __init__(self, schedule: PipelineSchedule, places: list[Place]) -> None:
        stages: dict[int, PipelineStage] = {stage.stage_index: stage for stage in schedule.stages}
        mine = [[stage, name, whole_name(stages[stage], name)] for stage, name in places]
        everyones = [row for rows in gather(schedule.communicator, mine) for row in rows]
        self._whole: dict[Place, str] = {(stage, name): whole for stage, name, whole in everyones}
        self._first: dict[Place, Place] = {
            (stage, name): (tie.places[0][0], tie.places[0][1])
            for tie in schedule.ties
            for stage, name in tie.places
        }
        holders: dict[str, Place] = {}
        for place, whole in self._whole.items():
            other = holders.setdefault(whole, place)
            if self._first.get(other, other) != self._first.get(place, place):
                raise ValueError(
                    f"a pipeline's checkpoint: stage {other[0]} and stage {place[0]} both have {whole!r}, so "
                    "one would overwrite the other; give each PipelineStage(names=...) what it is called in "
                    "the whole model, or cut it with pycomm.pipeline.plan or pipeline, which keep the names"
                )

    def of(self, place: Place) -> str:
        return self._whole[place]

    def first_of(self, place: Place) -> str:
        """The name of the first of the places that are tied to this one."""
        return self._whole[self._first.get(place, place)]


def sharded_state_dict(schedule: PipelineSchedule) -> State:
    """For ``torch.distributed.checkpoint``: the model, saved and loaded in place, at any cut.

    Collective over the pipeline's ranks.

    Args:
        schedule: whose stages.

    Returns:
        By the whole model's names, what this rank has: tensors, and for shards ones that have the whole's
        shape and this rank's part.

    Raises:
        ValueError: two stages have the same name for what is not tied; on every rank.

    Example:
        >>> from pycomm.pipeline import PipelineStage, ScheduleGPipe
        >>> schedule = ScheduleGPipe(PipelineStage(nn.Linear(3, 5), 0, 1, names="head"), 1)
        >>> list(sharded_state_dict(schedule))
        ['head.weight', 'head.bias']
    """
    by_place = _by_place(schedule)
    names, index = _Names(schedule, list(by_place)), shard_index()
    found: State = {}
    for place, value in by_place.items():
        shard = index.get(id(value))
        value = value.detach() if isinstance(value, Tensor) else value
        found[names.of(place)] = value if shard is None else WholeTensor(value, shard)
    return found


class _OfOptimizer:
    """The names that torch gives to this rank's parameters in an optimizer's state, and what is behind them.

    torch's functions take one module: ``all``, which holds the stages.
    """

    def __init__(self, schedule: PipelineSchedule) -> None:
        self.all = nn.ModuleDict({str(stage.stage_index): stage.submod for stage in schedule.stages})
        by_place = _by_place(schedule)
        self._names, index = _Names(schedule, list(by_place)), shard_index()
        self._parameters = {f"{stage}.{name}": value for (stage, name), value in by_place.items()}
        self._shards = {name: index.get(id(value)) for name, value in self._parameters.items()}

    def whole(self, name: str) -> str:
        stage, plain = name.split(".", 1)
        return self._names.first_of((int(stage), plain))

    def shard(self, name: str, key: str, value: Any) -> ParameterShard | None:
        """Of what a value of the optimizer's state is the shard, if it is one."""
        shard = self._shards[name]
        shape = self._parameters[name].shape
        return shard if _is_shard(f"{self.whole(name)}.{key}", value, shard, shape) else None


def sharded_optimizer_state_dict(schedule: PipelineSchedule, optimizer: Optimizers) -> State:
    """As :func:`sharded_state_dict`, of the optimizer of this rank's stages, or of several: one a stage, say.

    After ``dcp.load`` give it to the function below. Makes the optimizer's state where there is none yet.
    Collective over the pipeline's ranks.

    Returns:
        ``state`` and ``param_groups``, both by parameter.

    Example:
        >>> from pycomm.pipeline import PipelineStage, ScheduleGPipe
        >>> schedule = ScheduleGPipe(PipelineStage(nn.Linear(3, 5), 0, 1, names="head"), 1)
        >>> adam = torch.optim.Adam(schedule.stages[0].submod.parameters(), lr=0.5)
        >>> state = sharded_optimizer_state_dict(schedule, adam)
        >>> state["param_groups"]["head.bias"]["lr"], state["state"]["head.weight"]["exp_avg"].shape
        (0.5, torch.Size([5, 3]))
    """
    of = _OfOptimizer(schedule)
    state: State = {}
    groups: State = {}
    for one in _each(optimizer):
        found = _optimizer_state(of.all, one)
        for name, values in found["state"].items():
            mine = state.setdefault(of.whole(name), {})
            for key, value in values.items():
                shard = of.shard(name, key, value)
                mine[key] = value if shard is None else WholeTensor(value, shard)
        groups |= {
            of.whole(name): {key: value for key, value in group.items() if key != "params"}
            for group in found["param_groups"]
            for name in group["params"]
        }
    return {"state": state, "param_groups": groups}


def load_sharded_optimizer_state_dict(
    schedule: PipelineSchedule, optimizer: Optimizers, state: State
) -> None:
    """Gives one or several optimizers what ``dcp.load`` has put into their state of the function above.

    Collective over the pipeline's ranks.

    Raises:
        ValueError: parameters of one group were saved with different options.
    """
    of = _OfOptimizer(schedule)
    for one in _each(optimizer):
        _load(of, one, state)


def _each(optimizer: Optimizers) -> Sequence[torch.optim.Optimizer]:
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer


def _load(of: _OfOptimizer, optimizer: torch.optim.Optimizer, state: State) -> None:
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    frame = _optimizer_state(of.all, optimizer)
    values = {
        name: {
            key: value.local if isinstance(value, WholeTensor) else value
            for key, value in state["state"].get(of.whole(name), {}).items()
        }
        for name in frame["state"]
    }
    groups = []
    for group in frame["param_groups"]:
        saved = [state["param_groups"][of.whole(name)] for name in group["params"]]
        for name, options in zip(group["params"], saved, strict=True):
            differing = [key for key in options if options[key] != saved[0].get(key)]
            if differing:
                first, other = of.whole(group["params"][0]), of.whole(name)
                raise ValueError(
                    f"a pipeline's checkpoint: {first!r} and {other!r} are in one group of this optimizer "
                    f"and were saved with different {', '.join(differing)}; give it the groups it had"
                )
        groups.append({**(saved[0] if saved else group), "params": group["params"]})
    made: State = {"state": values, "param_groups": groups}
    set_optimizer_state_dict(of.all, optimizer, made)
