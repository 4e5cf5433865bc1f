"""A model as a list of layers, of which each rank makes only its own.

``LayerSpec`` says how to make a layer, ``TiedLayerSpec`` that several places of the list share one weight;
a layer that exists already (an ``nn.Sequential``'s), or a function, stands in the list as it is.
:func:`plan` cuts the list, and its :meth:`Plan.stage` makes the layers of one stage.

Source: DeepSpeed's PipelineModule, whose names these are.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pycomm.pipeline.messages import leaves
from pycomm.pipeline.partition import partition

__all__ = ["LayerSpec", "Plan", "TiedLayerSpec", "measure", "plan"]


class LayerSpec:
    """How to make a layer, later.

    Args:
        typename: a subclass of ``nn.Module``.
        args, kwargs: of it.

    Raises:
        TypeError: it is none.

    Example:
        >>> LayerSpec(nn.Linear, 2, 3).build()
        Linear(in_features=2, out_features=3, bias=True)
    """

    def __init__(self, typename: type[nn.Module], *args: Any, **kwargs: Any) -> None:
        given: Any = typename
        if not isinstance(given, type) or not issubclass(given, nn.Module):
            raise TypeError(f"LayerSpec needs a subclass of nn.Module, got {given!r}")
        self.typename, self.args, self.kwargs = typename, args, kwargs

    def build(self) -> nn.Module:
        """The layer."""
        return self.typename(*self.args, **self.kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares a weight with all others of the same key.

    Args:
        key: of the weight.
        typename: a subclass of ``nn.Module``.
        args, kwargs: of it.
        forward_fn: called as ``forward_fn(module, x)`` instead of the module, or None.
        tied_weight_attr: the name of the shared parameter.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str = "weight",
        **kwargs: Any,
    ) -> None:
        super().__init__(typename, *args, **kwargs)
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, tied_weight_attr


class _Called(nn.Module):
    """A layer under a function of its own."""

    def __init__(self, module: nn.Module, function: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.module, self._function = module, function

    def forward(self, x: Any) -> Any:
        return self._function(self.module, x)


class _Function(nn.Module):
    """A function in a list of layers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any) -> Any:
        return self._function(*args)


Layer = nn.Module | LayerSpec | Callable[..., Any]


def _checked(layers: Sequence[Layer]) -> list[nn.Module | LayerSpec]:
    """The layers, functions as modules.

    Raises:
        TypeError: one that is none.
    """
    given: Any = layers
    if isinstance(given, nn.Module) and not isinstance(given, (nn.Sequential, nn.ModuleList)):
        raise TypeError(
            f"expected a list of layers or an nn.Sequential, got {type(given).__name__}; pipeline() cuts a "
            "model as it is"
        )
    found: list[nn.Module | LayerSpec] = []
    for number, layer in enumerate(given):
        if isinstance(layer, (nn.Module, LayerSpec)):
            found.append(layer)
        elif isinstance(layer, type) or not callable(layer):
            what = f"the class {layer.__name__}" if isinstance(layer, type) else type(layer).__name__
            raise TypeError(
                f"layer {number}: expected a module, a LayerSpec or a function, got {what}; a class is given "
                "as LayerSpec(class, its arguments)"
            )
        else:
            found.append(_Function(layer))
    return found


@dataclass(frozen=True)
class Plan:
    """Which layers each stage has, and what that is expected to cost.

    Attributes:
        parts: the numbers of each stage's layers.
        costs: of each stage, in the unit of ``method``.
        method: how it was cut.
        ties: for ``PipelineSchedule(tied=...)``.
    """

    parts: tuple[range, ...]
    costs: tuple[float, ...]
    method: str
    ties: tuple[tuple[tuple[int, str], ...], ...]

    @property
    def balance(self) -> float:
        """The mean stage's cost divided by the costliest's: 1 is perfect."""
        most = max(self.costs)
        return sum(self.costs) / len(self.costs) / most if most > 0 else 1.0

    def __str__(self) -> str:
        rows = [
            f"stage {i}: layers {part.start}-{part.stop - 1}, {cost:.4g}"
            for i, (part, cost) in enumerate(zip(self.parts, self.costs, strict=True))
        ]
        return "\n".join([*rows, f"balance {self.balance:.0%} by {self.method}"])

    def stage(self, layers: Sequence[Layer], index: int) -> nn.Sequential:
        """Makes the layers of one stage. Their initial values are those that torch's generator gives now.

        Parameters are named as in ``nn.Sequential`` of all layers, ``7.weight`` that of layer 7: independent
        of the cut.

        Args:
            layers: that the plan was made of.
            index: of the stage.

        Raises:
            TypeError: a layer that is none.
            ValueError: a stage that is none, or other layers than the plan's.
        """
        n = self.parts[-1].stop
        if not 0 <= index < len(self.parts):
            raise ValueError(f"stage {index} is none of the {len(self.parts)} stages of this plan")
        if len(layers) != n:
            raise ValueError(f"the plan is of {n} layers, got {len(layers)}: give those that it was made of")
        layers = _checked(layers)
        made: list[tuple[str, nn.Module]] = []
        shared: dict[str, nn.Module] = {}
        for number in self.parts[index]:
            layer = layers[number]
            if not isinstance(layer, LayerSpec):
                made.append((str(number), layer))
                continue
            module = layer.build()
            if isinstance(layer, TiedLayerSpec):
                first = shared.setdefault(layer.key, module)
                setattr(module, layer.tied_weight_attr, getattr(first, layer.tied_weight_attr))
                if layer.forward_fn is not None:
                    module = _Called(module, layer.forward_fn)
            made.append((str(number), module))
        return nn.Sequential(OrderedDict(made))


def _n_parameters(layer: nn.Module | LayerSpec) -> float:
    if isinstance(layer, LayerSpec):
        with torch.device("meta"):
            layer = layer.build()
    return float(sum(p.numel() for p in layer.parameters() if p.requires_grad))


def _name(layer: nn.Module | LayerSpec) -> str:
    if isinstance(layer, _Function):
        return getattr(layer._function, "__name__", type(layer._function).__name__)
    return (layer.typename if isinstance(layer, LayerSpec) else type(layer)).__name__


def measure(layers: Sequence[Layer], sample: Any, what: str, repeats: int = 3) -> list[float]:
    """What each layer costs on a sample: of all of them in a row, made one at a time.

    Args:
        layers: of the model.
        sample: the first layer's input: a microbatch.
        what: "time": seconds of forward and backward, the least of ``repeats``; "memory": bytes of
            parameters, their gradients and what the forward keeps for the backward.
        repeats: of the time.

    Raises:
        ValueError: a layer cannot compute what the one before gives; which, and on what.
    """
    costs: list[float] = []
    value = sample
    for number, layer in enumerate(_checked(layers)):
        module = layer.build() if isinstance(layer, LayerSpec) else layer
        call: Callable[[Any], Any] = module
        if isinstance(layer, TiedLayerSpec) and layer.forward_fn is not None:
            call = _Called(module, layer.forward_fn)
        args = value if isinstance(value, tuple) else (value,)
        try:
            cost, output = _time(call, args, repeats) if what == "time" else _memory(module, call, args)
        except Exception as error:
            given = ", ".join(str(tuple(t.shape)) for t in leaves(value)) or "no tensor"
            come = "the sample" if number == 0 else f"what layer {number - 1} made of the sample"
            raise ValueError(
                f"layer {number} ({_name(layer)}) cannot compute {come}, {given}: {type(error).__name__}: "
                f"{error}"
            ) from error
        costs.append(cost)
        value = output
    return costs


def _fresh(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        a.detach().requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a for a in args
    )


def _time(call: Callable[..., Any], args: tuple[Any, ...], repeats: int) -> tuple[float, Any]:
    best, output = float("inf"), None
    for _ in range(repeats + 1):  # the first one warms up
        began = time.perf_counter()
        output = call(*_fresh(args))
        ends = [t for t in leaves(output) if t.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
        best = min(best, time.perf_counter() - began)
    if isinstance(call, nn.Module):
        call.zero_grad(set_to_none=True)
    return best, output


def _memory(module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...]) -> tuple[float, Any]:
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = call(*_fresh(args))
    parameters = {p.untyped_storage().data_ptr(): p for p in module.parameters()}
    n_bytes = sum(p.untyped_storage().nbytes() * (2 if p.requires_grad else 1) for p in parameters.values())
    return float(n_bytes + sum(n for place, n in kept.items() if place not in parameters)), output


def plan(
    layers: Sequence[Layer],
    n_stages: int,
    partition_method: str = "parameters",
    *,
    sample: Any = None,
    speeds: Sequence[float] | None = None,
) -> Plan:
    """Cuts a list of layers into stages.

    Args:
        layers: modules, LayerSpecs and functions, in order; each takes what the one before returns.
        n_stages: of the pipeline.
        partition_method: what each stage should have as little of as can be: "uniform" (layers),
            "parameters", "type:REGEX" (layers whose class matches), "time" or "memory", measured on
            ``sample``.
        sample: a microbatch, for "time" and "memory".
        speeds: of each stage's rank, where ranks differ.

    Raises:
        TypeError: a layer that is none.
        ValueError: an unknown method, no sample where one is needed, or one that a layer cannot compute,
            fewer layers than stages, or no layer whose class (or function's name) matches.

    Example:
        >>> layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()]
        >>> plan(layers, 2).parts
        (range(0, 1), range(1, 4))
    """
    layers = _checked(layers)
    if partition_method == "uniform":
        costs = [1.0] * len(layers)
    elif partition_method == "parameters":
        costs = [_n_parameters(layer) for layer in layers]
    elif partition_method.startswith("type:"):
        pattern = partition_method.removeprefix("type:")
        try:
            costs = [float(bool(re.search(pattern, _name(layer), re.IGNORECASE))) for layer in layers]
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        if not any(costs):
            names = sorted({_name(layer) for layer in layers})
            raise ValueError(f"no layer's class matches {pattern!r}; there are {', '.join(names)}")
    elif partition_method in ("time", "memory"):
        if sample is None:
            raise ValueError(f"partition_method={partition_method!r} is measured: give a sample microbatch")
        costs = measure(layers, sample, partition_method)
    else:
        raise ValueError(
            "partition_method must be uniform, parameters, type:REGEX, time or memory, got "
            f"{partition_method!r}"
        )
    parts = partition(costs, n_stages, speeds)
    rates = [1.0] * n_stages if speeds is None else speeds
    totals = tuple(sum(costs[i] for i in part) / rate for part, rate in zip(parts, rates, strict=True))
    return Plan(tuple(parts), totals, partition_method, _ties(layers, parts))


def _ties(layers: Sequence[Layer], parts: Sequence[range]) -> tuple[tuple[tuple[int, str], ...], ...]:
    places: dict[str, list[tuple[int, str]]] = {}
    for stage, part in enumerate(parts):
        for number in part:
            layer = layers[number]
            if isinstance(layer, TiedLayerSpec):
                inner = "module." if layer.forward_fn is not None else ""
                mine = places.setdefault(layer.key, [])
                if all(stage != other for other, _ in mine):  # within a stage it is one object
                    mine.append((stage, f"{number}.{inner}{layer.tied_weight_attr}"))
    return tuple(tuple(found) for found in places.values() if len(found) > 1)
