"""A traced model in stages: one graph cut at its marks into a module for each stage.

Every node belongs to the stage in which it stands; a parameter or buffer to each stage that uses it. Values
that the next stage needs go to it as its arguments; values for a later one are stashed and popped, as
:mod:`pycomm.pipeline.skips` has it. A parameter that several stages use is tied. Submodules, parameters and
buffers keep their names, so a stage's ``state_dict`` is a part of the model's.

Source: the interface is torch.distributed.pipelining's ``pipeline``; there the whole model is exported to
operators, values for later stages pass through all stages between, and shared weights are copied and left
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from pycomm.pipeline.skips import Skips, pop, serving, stash
from pycomm.pipeline.stage import PipelineStage
from pycomm.pipeline.traced_plan import changes_in_place, computes, cut_by_cost, modules_around_lists
from pycomm.pipeline.tracing import SplitPoint, modules_that_split, pipe_split, trace, undisturbed

__all__ = ["Pipe", "pipeline"]


class Pipe:
    """A model in stages.

    Attributes:
        num_stages: how many.
        skips: for ``PipelineSchedule``; the stages of :meth:`build_stage` bring them.
        ties: likewise, for ``tied``.
        costs: of each stage, when it was cut by cost.
    """

    def __init__(
        self,
        stages: Sequence[fx.GraphModule],
        skips: dict[str, tuple[int, int]],
        costs: tuple[float, ...] = (),
    ) -> None:
        self._stages = list(stages)
        self.skips = skips
        self.ties = _ties(self._stages)
        self.costs = costs

    @property
    def num_stages(self) -> int:
        """How many."""
        return len(self._stages)

    def get_stage_module(self, stage_idx: int) -> fx.GraphModule:
        """The module of one stage; it shares its parameters with the model.

        Raises:
            ValueError: there is no such stage.
        """
        if not 0 <= stage_idx < self.num_stages:
            raise ValueError(f"stage {stage_idx} is none of the {self.num_stages} stages")
        return self._stages[stage_idx]

    def build_stage(
        self, stage_index: int, device: torch.device | str = "cpu", group: Any = None, **options: Any
    ) -> PipelineStage:
        """The stage for a schedule, which takes skips and ties from it.

        Args:
            stage_index: of it.
            device, group, options: of :class:`PipelineStage`.

        Raises:
            ValueError: as PipelineStage does.
        """
        module = self.get_stage_module(stage_index)
        stage = PipelineStage(module, stage_index, self.num_stages, device, group=group, **options)
        stage.skips, stage.tied = dict(self.skips), self.ties
        return stage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """All stages in a row, in this process."""
        values = Skips("in a Pipe", {})
        values.outgoing = values.incoming
        with serving(values):
            output = self._stages[0](*args, **kwargs)
            for stage in self._stages[1:]:
                output = stage(*output)
        return output

    def __str__(self) -> str:
        rows = []
        for i, stage in enumerate(self._stages):
            called = [str(n.target) for n in stage.graph.nodes if n.op == "call_module"]
            what = f"{called[0]} - {called[-1]}" if len(called) > 1 else "".join(called) or "functions"
            n = sum(p.numel() for p in stage.parameters())
            cost = f", cost {self.costs[i]:.4g}" if self.costs else ""
            rows.append(f"stage {i}: {what}, {n} parameters{cost}")
        rows += [f"skip {name}: stage {a} to {b}" for name, (a, b) in self.skips.items()]
        rows += ["tied: " + " = ".join(f"{name} of stage {s}" for s, name in tie) for tie in self.ties]
        return "\n".join(rows)


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: Callable[[fx.Graph], Sequence[fx.Node]] | None = None,
    *,
    num_stages: int | None = None,
    partition_method: str = "parameters",
    speeds: Sequence[float] | None = None,
) -> Pipe:
    """Splits a model into stages by tracing it.

    Where it is cut: at ``split_spec``; or where its forward calls :func:`pipe_split`; or, given
    ``num_stages``, where ``partition_method`` finds the best cut; or before the nodes that ``split_policy``
    picks.

    Args:
        module: the model; it is not changed, and the stages share its parameters.
        mb_args, mb_kwargs: a microbatch. Other microbatches may have other shapes; arguments without tensors
            must keep their values.
        split_spec: for submodules by name, whether the next stage begins before or after their call.
        split_policy: of the graph, the nodes with which stages begin.
        num_stages: how many, cut by cost; elements of lists and of sequences stay whole.
        partition_method: "uniform", "parameters", "type:REGEX" (of classes), "time" or "memory", as
            :func:`pycomm.pipeline.plan`'s.
        speeds: of each stage's rank, where ranks differ.

    Raises:
        ValueError: more than one way to cut or none, a submodule that is not there, is not called or is
            called several times, a stage with nothing in it, a value that is changed in place after it was
            sent.
        TypeError: ``mb_args`` do not fit the forward.
        RuntimeError: the model cannot be traced; the text says where.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> pipe = pipeline(net, (torch.ones(4, 2),), split_spec={"1": SplitPoint.END})
        >>> print(pipe)
        stage 0: 0 - 1, 9 parameters
        stage 1: 2, 4 parameters
        >>> pipe(torch.ones(5, 2)).shape
        torch.Size([5, 1])
    """
    kwargs = dict(mb_kwargs or {})
    given = [
        n
        for n, v in (("split_spec", split_spec), ("split_policy", split_policy), ("num_stages", num_stages))
        if v
    ]
    if len(given) > 1:
        raise ValueError(f"pipeline() takes one of split_spec, split_policy and num_stages, got {given}")
    marks = _marked(module, split_spec or {})
    if split_spec:
        opened = [m for m in module.modules() if any(mark in set(m.modules()) - {m} for mark in marks)]
    elif given:
        opened = modules_around_lists(module)
    else:
        opened = modules_that_split(module, tuple(mb_args), kwargs)
    graph, tracer = trace(module, tuple(mb_args), kwargs, opened, marks)
    for name, mark in (split_spec or {}).items():
        n_calls = tracer.n_calls.get(module.get_submodule(name), 0)
        if n_calls != 1:
            raise ValueError(
                f"split_spec: {name!r} is called {n_calls} times, so {mark} there is no one place"
            )
    costs: tuple[float, ...] = ()
    held = [name for name in tracer.constants if not hasattr(module, name)]
    for name in held:
        module.__dict__[name] = tracer.constants[name]
    try:
        if split_policy is not None:
            begins = set(split_policy(graph))
        elif num_stages is not None:
            with undisturbed(module):
                begins, costs = cut_by_cost(
                    module, graph, tuple(mb_args), kwargs, num_stages, partition_method, speeds
                )
        else:
            begins = set()
        stage_of = _stages_of(graph, begins)
        _check_in_place(module, graph, stage_of)
        made, skips = _cut(module, graph, stage_of)
    finally:
        for name in held:
            del module.__dict__[name]
    for stage in made:
        stage._non_persistent_buffers_set |= {n for n in held if n in stage._buffers}
    return Pipe(made, skips, costs)


def _marked(module: nn.Module, split_spec: Mapping[str, SplitPoint]) -> dict[nn.Module, SplitPoint]:
    marks: dict[nn.Module, SplitPoint] = {}
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    for name, point in split_spec.items():
        if name not in names:
            raise ValueError(
                f"split_spec: {type(module).__name__} has no submodule {name!r}; there are "
                f"{', '.join(names[:20])}{' …' if len(names) > 20 else ''}"
            )
        if not isinstance(point, SplitPoint):
            raise ValueError(
                f"split_spec[{name!r}] must be SplitPoint.BEGINNING or SplitPoint.END, got {point!r}"
            )
        marks[module.get_submodule(name)] = point
    return marks


def _stages_of(graph: fx.Graph, begins: set[fx.Node]) -> dict[fx.Node, int]:
    """The stage of every node but those that only fetch an attribute."""
    stage, n_here = 0, 0
    found: dict[fx.Node, int] = {}
    is_cut = False
    for node in graph.nodes:
        if node.target is pipe_split or node in begins:
            if n_here == 0 and not is_cut:
                raise ValueError(
                    f"pipeline(): nothing is computed before the cut at {node}; stage 0 would be empty"
                )
            is_cut = True
        if computes(node):
            if is_cut:
                stage, n_here, is_cut = stage + 1, 0, False
            n_here += 1
        if node.op != "get_attr":
            found[node] = stage
    if is_cut:
        raise ValueError("pipeline(): nothing is computed after the last cut; the last stage would be empty")
    if stage == 0:
        raise ValueError(
            "pipeline(): the model is not cut: give split_spec, num_stages or split_policy, or call "
            "pipe_split() in its forward"
        )
    return found


def _check_in_place(module: nn.Module, graph: fx.Graph, stage_of: dict[fx.Node, int]) -> None:
    """A value that came from another stage must not be changed: it is a copy there, and autograd's leaf."""
    for node in graph.nodes:
        value = node.args[0] if node.args and changes_in_place(module, node) else None
        if isinstance(value, fx.Node) and stage_of.get(value, stage_of[node]) != stage_of[node]:
            raise ValueError(
                f"pipeline(): {node.name} ({node.target}) changes in place what stage {stage_of[value]} "
                f"made, in stage {stage_of[node]}, which has a copy; use an operation that is not in place, "
                "or cut elsewhere"
            )


def _cut(
    module: nn.Module, graph: fx.Graph, stage_of: dict[fx.Node, int]
) -> tuple[list[fx.GraphModule], dict[str, tuple[int, int]]]:
    """A module for each stage, and the skips."""
    n_stages = max(stage_of.values()) + 1
    nodes = [n for n in graph.nodes if n.op != "get_attr"]
    needed = [_needed(nodes, stage_of, s) for s in range(n_stages)]
    skips = {_skip(v, s): (stage_of[v], s) for s in range(n_stages) for v in needed[s] if stage_of[v] < s - 1}
    made: list[fx.GraphModule] = []
    for s in range(n_stages):
        new = fx.Graph()
        here: dict[fx.Node, fx.Node] = {}
        for value in needed[s]:
            if stage_of[value] == s - 1:
                here[value] = new.placeholder(value.name)
        if s > 0:
            new.placeholder("**unused")  # the model's keywords: the first stage has them
        for value in needed[s]:
            if stage_of[value] < s - 1:
                here[value] = new.call_function(pop, (_skip(value, s),))
        for node in nodes:
            if stage_of[node] == s and node.op != "output" and node.target is not pipe_split:
                _copy(new, node, here)
        for to in range(s + 2, n_stages):
            for value in needed[to]:
                if stage_of[value] == s:
                    new.call_function(stash, (_skip(value, to), here[value]))
        if s < n_stages - 1:
            new.output(tuple(here[v] for v in needed[s + 1] if stage_of[v] == s))
        else:
            _copy(new, nodes[-1], here)
        new.lint()
        made.append(fx.GraphModule(module, new, f"{type(module).__name__}Stage{s}"))
    return made, skips


def _needed(nodes: Sequence[fx.Node], stage_of: dict[fx.Node, int], stage: int) -> list[fx.Node]:
    """The values of earlier stages that one uses, in order."""
    users = [n for n in nodes if stage_of[n] == stage]
    used = {v for n in users for v in n.all_input_nodes if v.op != "get_attr" and stage_of[v] < stage}
    return [n for n in nodes if n in used]


def _skip(value: fx.Node, to: int) -> str:
    return f"{value.name} to stage {to}"


def _copy(graph: fx.Graph, node: fx.Node, here: dict[fx.Node, fx.Node]) -> None:
    for value in node.all_input_nodes:
        if value.op == "get_attr" and value not in here:
            here[value] = graph.node_copy(value)
    here[node] = graph.node_copy(node, lambda n: here[n])


def _ties(stages: Sequence[nn.Module]) -> tuple[tuple[tuple[int, str], ...], ...]:
    """The parameters that are in several stages.

    Raises:
        ValueError: a normalisation that several stages call: its statistics would differ.
    """
    places: dict[nn.Parameter, list[tuple[int, str]]] = {}
    norms: dict[nn.Module, tuple[int, str]] = {}
    for s, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            places.setdefault(parameter, []).append((s, name))
        for name, m in stage.named_modules():
            if isinstance(m, nn.modules.batchnorm._NormBase) and m.track_running_stats:
                first = norms.setdefault(m, (s, name))
                if first[0] != s:
                    raise ValueError(
                        f"pipeline(): {name!r} is called in stages {first[0]} and {s}; each would have "
                        "running statistics of its own. Cut elsewhere"
                    )
    return tuple(tuple(found) for found in places.values() if len(found) > 1)
