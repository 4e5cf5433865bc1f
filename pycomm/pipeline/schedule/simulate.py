"""What an order costs: every rank computes as soon as what it needs has come. Times are in any one unit.

A reduction runs beside the computations of its rank, one after the other; the step ends when all have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pycomm.pipeline.schedule.action import REDUCE, Action
from pycomm.pipeline.schedule.order import Order
from pycomm.pipeline.schedule.verify import needs, sequence

__all__ = ["Costs", "Span", "Timeline", "simulate"]


@dataclass(frozen=True)
class Costs:
    """Seconds (or any unit) of one microbatch: a number for all stages, or one for each.

    Attributes:
        forward: F.
        backward_input: I.
        backward_weight: W; a whole backward takes I + W.
        latency: from the end of an action to when another rank can begin with its result.
        reduce: REDUCE_GRAD, of all microbatches at once.
        dispatch: between two actions of a rank, where neither waits: sending, receiving, Python.
    """

    forward: float | Sequence[float] = 1.0
    backward_input: float | Sequence[float] = 1.0
    backward_weight: float | Sequence[float] = 1.0
    latency: float = 0.0
    reduce: float | Sequence[float] = 0.0
    dispatch: float = 0.0

    def of(self, action: Action) -> float:
        """How long an action takes."""
        f, i, w, r = (
            float(cost[action.stage]) if isinstance(cost, Sequence) else float(cost)
            for cost in (self.forward, self.backward_input, self.backward_weight, self.reduce)
        )
        return {"F": f, "I": i, "W": w, "B": i + w, REDUCE: r}[action.kind]


@dataclass(frozen=True)
class Span:
    """One action in time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The actions of every rank in time; simulated or measured.

    Attributes:
        order: of them.
        spans: the computations of every rank.
        reductions: of every rank, beside its computations; empty where no stage has replicas.
    """

    order: Order
    spans: tuple[tuple[Span, ...], ...]
    reductions: tuple[tuple[Span, ...], ...] = ()

    @property
    def makespan(self) -> float:
        """From the first start to the last end."""
        spans = [span for row in (*self.spans, *self.reductions) for span in row]
        return max((s.end for s in spans), default=0.0) - min((s.start for s in spans), default=0.0)

    def busy(self, rank: int) -> float:
        """How long a rank computes."""
        return sum(span.end - span.start for span in self.spans[rank])

    def idle(self, rank: int) -> float:
        """How long it does not, of the whole makespan."""
        return self.makespan - self.busy(rank)

    def gaps(self, rank: int) -> float:
        """How long it does not between its own first and last action.

        What is left of the idle time where steps follow each other without a flush.
        """
        row = self.spans[rank]
        return row[-1].end - row[0].start - self.busy(rank) if row else 0.0

    @property
    def bubble(self) -> float:
        """The share of all ranks' time that is idle."""
        total = self.makespan * len(self.spans)
        return sum(map(self.idle, range(len(self.spans)))) / total if total else 0.0


def simulate(order: Order, costs: Costs | None = None) -> Timeline:
    """Runs an order in thought.

    Raises:
        ValueError: it deadlocks.

    Example:
        >>> from pycomm.pipeline.schedule.gpipe import gpipe
        >>> simulate(gpipe(4, 8)).bubble == 3 / 11  # (p - 1)/(m + p - 1)
        True
    """
    costs = Costs() if costs is None else costs
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in range(order.n_ranks)]
    reductions: list[list[Span]] = [[] for _ in range(order.n_ranks)]
    for rank, action in sequence(order):
        before = spans[rank][-1].end if spans[rank] else 0.0
        if action.kind == REDUCE:
            start = max(before, reductions[rank][-1].end if reductions[rank] else 0.0)
            reductions[rank].append(Span(action, start, start + costs.of(action)))
            continue
        start = before + costs.dispatch if spans[rank] else 0.0
        for choice in needs(order, action):
            made = next(a for a in choice if a in ends)
            far = order.placement[made.stage] != rank
            start = max(start, ends[made] + (costs.latency if far else 0.0))
        ends[action] = start + costs.of(action)
        spans[rank].append(Span(action, start, ends[action]))
    return Timeline(order, tuple(map(tuple, spans)), tuple(map(tuple, reductions)) if any(reductions) else ())
