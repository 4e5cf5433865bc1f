"""What a run has measured, as the simulator takes it, and as a file that the command line reads.

The costs of a stage are the medians over its microbatches. A whole backward B counts as two equal halves I
and W, since nothing tells them apart. The latency is the median of what lies between the end of an action
and the beginning of one on another rank that was idle and waited for it; 0 where no rank ever waited. The
*dispatch* is the median of what lies between two actions of a rank where the second had all that it needs
before the first ended. Of a reduction is known when it began and when the step had waited for it, not when
its last byte came: its cost is not guessed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pycomm.pipeline.schedule.action import Action
from pycomm.pipeline.schedule.order import Order, parse
from pycomm.pipeline.schedule.simulate import Costs, Span, Timeline
from pycomm.pipeline.schedule.verify import needs

__all__ = ["Measured", "costs_of"]


def costs_of(timeline: Timeline) -> Costs:
    """The costs that a run had, in its unit: for each stage, the latency and the dispatch.

    Example:
        >>> from pycomm.pipeline.schedule.one_f_one_b import one_f_one_b
        >>> from pycomm.pipeline.schedule.simulate import simulate
        >>> costs_of(simulate(one_f_one_b(2, 4), Costs(1, 2, 2, 0.5)))
        Costs(forward=(1.0, 1.0), backward_input=(2.0, 2.0), backward_weight=(2.0, 2.0), latency=0.5..., ...)
    """
    took: dict[tuple[int, str], list[float]] = {}
    for row in timeline.spans:
        for span in row:
            took.setdefault((span.action.stage, span.action.kind), []).append(span.end - span.start)

    def median(stage: int, kind: str) -> float:
        return statistics.median(took[stage, kind]) if (stage, kind) in took else 0.0

    stages = range(timeline.order.n_stages)
    latency, dispatch = _gaps(timeline)
    return Costs(
        tuple(median(s, "F") for s in stages),
        tuple(median(s, "I") or median(s, "B") / 2 for s in stages),
        tuple(median(s, "W") or median(s, "B") / 2 for s in stages),
        latency=latency,
        dispatch=dispatch,
    )


def _median(values: Sequence[float]) -> float:
    return max(statistics.median(values), 0.0) if values else 0.0


def _gaps(timeline: Timeline) -> tuple[float, float]:
    """The latency, and the dispatch."""
    order = timeline.order
    ends = {span.action: span.end for row in timeline.spans for span in row}
    gaps, dispatches = [], []
    for rank, row in enumerate(timeline.spans):
        before = float("-inf")
        for span in row:
            came = [
                (ends[made], order.placement[made.stage] != rank)
                for choice in needs(order, span.action)
                for made in choice
                if made in ends
            ]
            end, is_far = max(came, default=(float("-inf"), False))
            if is_far and end >= before:  # it was idle, and this is what it waited for
                gaps.append(span.start - end)
            elif before > float("-inf"):
                latest = max((end for end, is_far in came if is_far), default=float("-inf"))
                dispatches.append((latest, before, span.start))
            before = span.end
    latency = _median(gaps)
    # What was still on its way when the rank became free tells nothing of the dispatch.
    return latency, _median(
        [start - before for came, before, start in dispatches if came + latency <= before]
    )


@dataclass(frozen=True)
class Measured:
    """A measured run.

    Attributes:
        timeline: of the step, in seconds from its first action.
        costs: that it had.
    """

    timeline: Timeline
    costs: Costs

    @staticmethod
    def of(timeline: Timeline) -> Measured:
        """Of a timeline."""
        return Measured(timeline, costs_of(timeline))

    def to_json(self) -> str:
        """The file's text."""
        order, costs = self.timeline.order, self.costs
        return json.dumps(
            {
                "schedule": order.name,
                "placement": order.placement,
                "microbatches": order.n_microbatches,
                "forward": costs.forward,
                "backward_input": costs.backward_input,
                "backward_weight": costs.backward_weight,
                "latency": costs.latency,
                "dispatch": costs.dispatch,
                "reductions": [
                    [[str(s.action), s.start, s.end] for s in row] for row in self.timeline.reductions
                ],
                "actions": [[str(action) for action in row] for row in order.actions],
                "timeline": [[[str(s.action), s.start, s.end] for s in row] for row in self.timeline.spans],
            },
            indent=1,
        )

    @staticmethod
    def from_json(text: str) -> Measured:
        """The run of such a text.

        Raises:
            ValueError: it is none.
        """
        try:
            found = json.loads(text)
            spans, reductions = (
                tuple(
                    tuple(Span(Action.parse(a), float(start), float(end)) for a, start, end in row)
                    for row in rows
                )
                for rows in (found["timeline"], found.get("reductions", ()))
            )
            order = Order(
                str(found["schedule"]),
                tuple(int(rank) for rank in found["placement"]),
                int(found["microbatches"]),
                tuple(parse(" ".join(row)) for row in found["actions"]),
            )
            f, i, w = (_numbers(found, what, order.n_stages) for what in _PER_STAGE)
            latency, dispatch = float(found["latency"]), float(found.get("dispatch", 0.0))
            return Measured(Timeline(order, spans, reductions), Costs(f, i, w, latency, dispatch=dispatch))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"not the file of a measured run, as schedule.save_measured writes it: {error!r}"
            ) from None

    def costs_for(self, order: Order) -> Costs:
        """For another schedule of the same model on the same ranks.

        As many stages: each keeps its costs. Else the whole model's are spread evenly over its stages.

        Raises:
            ValueError: another number of ranks.
        """
        mine = self.timeline.order
        if order.n_ranks != mine.n_ranks:
            raise ValueError(f"measured on {mine.n_ranks} ranks, the schedule is of {order.n_ranks}")
        if order.n_stages == mine.n_stages:
            return self.costs
        n = order.n_stages
        f, i, w = (
            sum(self.costs.of(Action(stage, kind, 0)) for stage in range(mine.n_stages)) / n for kind in "FIW"
        )
        return Costs(f, i, w, self.costs.latency, dispatch=self.costs.dispatch)


_PER_STAGE = ("forward", "backward_input", "backward_weight")


def _numbers(found: dict[str, Any], what: str, n: int) -> tuple[float, ...]:
    values = tuple(float(value) for value in found[what])
    if len(values) != n or not all(value >= 0 for value in values):
        raise ValueError(f"{what} must be {n} times, got {found[what]}")
    return values
