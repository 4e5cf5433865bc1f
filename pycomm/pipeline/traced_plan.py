"""The best contiguous cut of a traced model.

A *unit* is a call of a module with the functions, and modules that work in place, up to the next; units are
cut as :mod:`pycomm.pipeline.partition` does.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from pycomm.pipeline.layers import _memory, _time
from pycomm.pipeline.partition import partition
from pycomm.pipeline.tracing import pipe_split, same_as_traced

__all__ = ["changes_in_place", "computes", "cut_by_cost", "modules_around_lists"]


def modules_around_lists(module: nn.Module) -> list[nn.Module]:
    """The modules to open: those that have lists or sequences of modules in them, down to these."""
    found: list[nn.Module] = []

    def has_list(m: nn.Module) -> bool:
        return any(isinstance(inner, (nn.ModuleList, nn.Sequential)) for inner in m.modules())

    def walk(m: nn.Module) -> None:
        found.append(m)
        is_list = isinstance(m, (nn.ModuleList, nn.Sequential))
        for child in m.children():
            if isinstance(child, (nn.ModuleList, nn.Sequential)) or (not is_list and has_list(child)):
                walk(child)

    walk(module)
    return found


_IN_PLACE = {
    getattr(operator, name) for name in dir(operator) if name.startswith("i") and hasattr(operator, name[1:])
}


def changes_in_place(module: nn.Module, node: fx.Node) -> bool:
    """Whether a node changes its first argument; what happens inside of other modules is not looked at."""
    if node.op == "call_module":
        return getattr(module.get_submodule(str(node.target)), "inplace", False) is True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op == "call_function" and (node.target in _IN_PLACE or node.kwargs.get("inplace") is True):
        return True
    return node.op in ("call_method", "call_function") and name.endswith("_") and not name.endswith("__")


def computes(node: fx.Node) -> bool:
    """Whether a node is the model's own, and neither an input, an attribute, a mark nor a check."""
    return node.op in ("call_module", "call_function", "call_method") and node.target not in (
        pipe_split,
        same_as_traced,
    )


class _Measured(fx.Interpreter):
    """Runs a graph and notes what each node costs."""

    def __init__(self, module: nn.Module, graph: fx.Graph, what: str) -> None:
        super().__init__(module, graph=graph)
        self.what = what
        self.costs: dict[fx.Node, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        """As fx's, several times."""
        if not computes(n):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        run = getattr(self, n.op)

        def call(*given: Any) -> Any:
            if changes_in_place(self.module, n):
                given = (given[0].clone(), *given[1:])
            return run(n.target, given, kwargs)

        if self.what == "time":
            self.costs[n], output = _time(call, args, 3)
        else:
            own = self.module.get_submodule(str(n.target)) if n.op == "call_module" else nn.Module()
            self.costs[n], output = _memory(own, call, args)
        return output


def _arguments(graph: fx.Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """In the order of the placeholders."""
    rest, given = list(args), dict(kwargs)
    found: list[Any] = []
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        name = str(node.target)
        if name.startswith("**"):
            found.append(given)
        elif name.startswith("*"):
            found += rest
        elif rest:
            found.append(rest.pop(0))
        else:
            found.append(given.pop(name) if name in given else node.args[0])
    return found


def cut_by_cost(
    module: nn.Module,
    graph: fx.Graph,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    n_stages: int,
    method: str,
    speeds: Sequence[float] | None,
) -> tuple[set[fx.Node], tuple[float, ...]]:
    """The nodes with which the stages after the first begin, and the stages' costs.

    Raises:
        ValueError: an unknown method, a type that none has, or fewer units than stages.
    """
    units: list[list[fx.Node]] = []
    for node in graph.nodes:
        if computes(node):
            begins = node.op == "call_module" and not changes_in_place(module, node)
            if not units or (begins and any(n.op == "call_module" for n in units[-1])):
                units.append([])
            units[-1].append(node)
    if method == "uniform":
        costs = [1.0] * len(units)
    elif method == "parameters":
        costs = [_n_parameters(module, unit) for unit in units]
    elif method.startswith("type:"):
        costs = _n_of_type(module, units, method.removeprefix("type:"))
    elif method in ("time", "memory"):
        measured = _Measured(module, graph, method)
        measured.run(*_arguments(graph, args, kwargs))
        costs = [sum(measured.costs[n] for n in unit) for unit in units]
    else:
        raise ValueError(
            f"partition_method must be uniform, parameters, type:REGEX, time or memory, got {method!r}"
        )
    parts = partition(costs, n_stages, speeds)
    rates = [1.0] * n_stages if speeds is None else list(speeds)
    totals = tuple(sum(costs[i] for i in part) / rate for part, rate in zip(parts, rates, strict=True))
    return {units[part.start][0] for part in parts[1:]}, totals


def _n_of_type(module: nn.Module, units: Sequence[Sequence[fx.Node]], pattern: str) -> list[float]:
    """How many calls in each unit are of a module whose class matches, as layers.py has it."""
    called = [
        [type(module.get_submodule(str(n.target))).__name__ for n in unit if n.op == "call_module"]
        for unit in units
    ]
    costs = [float(sum(bool(re.search(pattern, name, re.IGNORECASE)) for name in unit)) for unit in called]
    if not any(costs):
        names = sorted({name for unit in called for name in unit})
        raise ValueError(f"no module's class matches {pattern!r}; called are {', '.join(names)}")
    return costs


def _n_parameters(module: nn.Module, unit: Sequence[fx.Node]) -> float:
    found: set[nn.Parameter] = set()
    for node in unit:
        if node.op == "call_module":
            found.update(module.get_submodule(str(node.target)).parameters())
        for value in node.all_input_nodes:
            if value.op == "get_attr":
                holder, _, name = str(value.target).rpartition(".")
                fetched = getattr(module.get_submodule(holder), name)
                found.update([fetched] if isinstance(fetched, nn.Parameter) else [])
    return float(sum(p.numel() for p in found if p.requires_grad))
