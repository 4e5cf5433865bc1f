"""A pipeline schedule as data: which stages each rank holds, and the order of its computations.

An order holds computations only, and reductions where stages have data-parallel replicas
(:mod:`pycomm.pipeline.schedule.reductions`); :mod:`pycomm.pipeline.schedule.transfers` puts the sends and
receives in.

Words: p ranks, v stages on each of them (so p v stages), m microbatches. *Loop* places stage s on rank s
mod p; *V* goes down the ranks and comes back, so that the last rank holds two neighbours, the first rank
both ends.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pycomm.pipeline.schedule.action import COMPUTATIONS, REDUCE, Action

__all__ = ["Order", "loop_placement", "v_placement"]


def loop_placement(n_ranks: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """The rank of every stage, round after round.

    Example:
        >>> loop_placement(3, 2)
        (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(n_ranks)) * stages_per_rank


def v_placement(n_ranks: int, stages_per_rank: int = 2) -> tuple[int, ...]:
    """The rank of every stage, every other round backwards.

    Example:
        >>> v_placement(3)
        (0, 1, 2, 2, 1, 0)
    """
    down, up = tuple(range(n_ranks)), tuple(reversed(range(n_ranks)))
    return tuple(rank for turn in range(stages_per_rank) for rank in (up if turn % 2 else down))


@dataclass(frozen=True)
class Order:
    """What every rank computes, in order.

    Attributes:
        name: of the schedule.
        placement: the rank of every stage.
        n_microbatches: m.
        actions: of every rank.
    """

    name: str
    placement: tuple[int, ...]
    n_microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def n_ranks(self) -> int:
        """p."""
        return len(self.actions)

    @property
    def n_stages(self) -> int:
        """p v."""
        return len(self.placement)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, in their order."""
        return [stage for stage, holder in enumerate(self.placement) if holder == rank]

    @property
    def has_backward(self) -> bool:
        """False for an order of forwards only, which evaluates."""
        return any(action.kind != "F" for actions in self.actions for action in actions)

    def to_csv(self) -> str:
        """A line for each rank, as torch's compute-only files of schedules are.

        Example:
            >>> Order("mine", (0, 1), 1, (parse("0F0 0B0"), parse("1F0 1B0"))).to_csv()
            '0F0,0B0\\n1F0,1B0\\n'
        """
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(map(str, actions) for actions in self.actions)
        return text.getvalue()

    @staticmethod
    def from_csv(text: str, name: str = "csv") -> Order:
        """The order that :meth:`to_csv` (or torch) wrote; empty cells, torch's idle steps, are left out.

        Raises:
            ValueError: a cell that is no computation, or stages whose place cannot be told.
        """
        return Order.from_actions([parse(" ".join(row)) for row in csv.reader(io.StringIO(text))], name)

    @staticmethod
    def from_actions(actions: Sequence[Iterable[Action | str]], name: str = "given") -> Order:
        """An order of a user's own; the stages are where their actions are.

        Args:
            actions: of every rank, as :class:`Action` or text.
            name: of the schedule.

        Raises:
            ValueError: a transfer among them, a stage on two ranks, or numbers that are left out.
        """
        ranks = tuple(
            tuple(a if isinstance(a, Action) else Action.parse(a) for a in ordered) for ordered in actions
        )
        holder: dict[int, int] = {}
        for rank, ordered in enumerate(ranks):
            for action in ordered:
                if action.kind not in (*COMPUTATIONS, REDUCE):
                    raise ValueError(
                        f"rank {rank} has {action}: an order holds computations only, transfers follow"
                    )
                if holder.setdefault(action.stage, rank) != rank:
                    raise ValueError(
                        f"stage {action.stage} is on rank {holder[action.stage]} and rank {rank}"
                    )
        n_microbatches = 1 + max((a.microbatch for ordered in ranks for a in ordered), default=-1)
        if sorted(holder) != list(range(len(holder))) or n_microbatches == 0:
            raise ValueError(
                f"the actions must be of stages 0 … n-1, with none left out, got those of {sorted(holder)}"
            )
        placement = tuple(holder[stage] for stage in range(len(holder)))
        return Order(name, placement, n_microbatches, ranks)


def parse(text: str) -> tuple[Action, ...]:
    """The actions of a text such as ``0F0 0F1 0B0 0B1``."""
    return tuple(Action.parse(word) for word in text.split())
