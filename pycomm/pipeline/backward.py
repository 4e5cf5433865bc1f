"""A stage's backward in two halves: first the gradients of its inputs, later those of its weights.

A node of the autograd graph is *on the way* when a stage input lies behind it. Weights hang off such nodes.
The first half runs the nodes on the way, for the inputs only, and notes the gradient that reaches every
node which has weights beside the way; autograd computes of a node only what is asked for, so nothing of the
weights. The second half begins at these nodes, each for its own weights. What lies behind two such nodes of
which one is behind the other (a weight used twice) would be counted twice, and is computed in the first
half.

Source: the split that Qi et al. (2023) need; torch's pipelining makes it over groups of parameters instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

__all__ = ["HalfDone", "accumulate", "backward_input", "backward_weight"]

Node = Any


@dataclass
class HalfDone:
    """What the second half needs of the first: where to begin, with what, for which weights."""

    starts: list[tuple[list[GradientEdge], list[Tensor], list[Tensor]]] = field(default_factory=list)
    outside: tuple[list[Tensor], list[Tensor | None]] = field(default_factory=lambda: ([], []))
    weights: list[Tensor] = field(default_factory=list)


def accumulate(weights: Sequence[Tensor], gradients: Iterable[Tensor | None]) -> None:
    """Adds to ``.grad``, as a whole backward does."""
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is None:
                continue
            if weight.grad is None:
                weight.grad = gradient.detach().clone() if gradient._base is not None else gradient.detach()
            else:
                weight.grad += gradient


class _Graph:
    """The nodes behind some outputs, and which of them are on the way to the inputs."""

    def __init__(self, roots: Iterable[Node], ends: set[Node]) -> None:
        self.order: list[Node] = []  # children before parents
        self.on_the_way: set[Node] = set()
        seen: set[Node] = set()
        stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                self.order.append(node)
                if node in ends or any(n in self.on_the_way for n, _ in node.next_functions if n):
                    self.on_the_way.add(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack += [(n, False) for n, _ in node.next_functions if n is not None and n not in seen]


def _node(tensor: Tensor) -> Node:
    """Where the gradient of a tensor goes: the function that made it, or the one that accumulates."""
    return torch.autograd.graph.get_gradient_edge(tensor).node


def backward_input(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> tuple[list[Tensor | None], HalfDone]:
    """The first half.

    Args:
        outputs: of the stage, all require a gradient.
        gradients: of them.
        inputs: leaves whose gradients are wanted.
        weights: leaves; only those behind the outputs matter.

    Returns:
        The gradients of the inputs, and what :func:`backward_weight` takes.
    """
    half = HalfDone(weights=list(weights))
    ends = {_node(tensor): i for i, tensor in enumerate(inputs)}
    at_weight = {_node(tensor): tensor for tensor in weights}
    graph = _Graph([_node(output) for output in outputs], set(ends))
    half.outside = (
        [o for o in outputs if _node(o) not in graph.on_the_way],
        [g for o, g in zip(outputs, gradients, strict=True) if _node(o) not in graph.on_the_way],
    )
    inside = [(o, g) for o, g in zip(outputs, gradients, strict=True) if _node(o) in graph.on_the_way]
    if not inside:
        return [None] * len(inputs), half
    beside = _weights_beside(graph, at_weight)
    early, late = _apart(graph, beside, half.outside[0], at_weight)
    captured: dict[Node, tuple[Any, ...]] = {}
    handles = [node.register_prehook(_capture(captured, node)) for node in late]
    try:
        found = torch.autograd.grad(
            [o for o, _ in inside],
            [*inputs, *early],
            [g for _, g in inside],
            retain_graph=True,
            allow_unused=True,
        )
    finally:
        for handle in handles:
            handle.remove()
    accumulate(early, found[len(inputs) :])
    for node, its_weights in late.items():
        reached = [(i, g) for i, g in enumerate(captured.get(node, ())) if g is not None]
        if reached:
            edges = [GradientEdge(node, i) for i, _ in reached]
            half.starts.append((edges, [g for _, g in reached], its_weights))
    return list(found[: len(inputs)]), half


def _capture(captured: dict[Node, tuple[Any, ...]], node: Node) -> Callable[[tuple[Any, ...]], None]:
    def note(gradients: tuple[Any, ...]) -> None:
        captured[node] = gradients

    return note


def _weights_beside(graph: _Graph, at_weight: dict[Node, Tensor]) -> dict[Node, list[Node]]:
    """For each node on the way: the accumulators of weights that lie behind it beside the way."""
    behind: dict[Node, frozenset[Node]] = {}  # for nodes that are not on the way
    found: dict[Node, list[Node]] = {}
    for node in graph.order:
        mine: set[Node] = set()
        for child, _ in node.next_functions:
            if child is not None and child not in graph.on_the_way:
                mine |= behind[child]
        if node in graph.on_the_way:
            if mine:
                found[node] = sorted(mine, key=id)
        else:
            behind[node] = frozenset(mine | ({node} if node in at_weight else set()))
    return found


def _apart(
    graph: _Graph, beside: dict[Node, list[Node]], outside: Sequence[Tensor], at_weight: dict[Node, Tensor]
) -> tuple[list[Tensor], dict[Node, list[Tensor]]]:
    """(weights for the first half, for each node its weights for the second)."""
    holders: dict[Node, list[Node]] = {}
    for node, accumulators in beside.items():
        for accumulator in accumulators:
            holders.setdefault(accumulator, []).append(node)
    for accumulator in _Graph([_node(o) for o in outside], set()).order if outside else ():
        if accumulator in holders:  # also behind an output beside the way
            holders[accumulator].append(accumulator)
    shared = {accumulator for accumulator, nodes in holders.items() if len(nodes) > 1}
    early = [at_weight[accumulator] for accumulator in shared]
    late = {
        node: [at_weight[a] for a in accumulators if a not in shared] for node, accumulators in beside.items()
    }
    return early, {node: weights for node, weights in late.items() if weights}


def backward_weight(half: HalfDone) -> None:
    """The second half: adds to the weights' ``.grad``."""
    for edges, gradients, weights in half.starts:
        found = torch.autograd.grad(edges, weights, gradients, allow_unused=True)
        accumulate(weights, found)
    outputs, given = half.outside
    if outputs and half.weights:
        found = torch.autograd.grad(outputs, half.weights, given, allow_unused=True)
        accumulate(half.weights, found)
    half.starts, half.outside = [], ([], [])
