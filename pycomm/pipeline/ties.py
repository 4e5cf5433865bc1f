"""One weight in several stages: equal from the start, and with the sum of all its gradients after each step.

Only what a step adds is summed, so gradients accumulate over steps; a weight that two stages of one rank
share as one object counts once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pycomm.communicator import Communicator
from pycomm.ddp.agree import gather_bytes
from pycomm.pipeline.names import plain_parameters
from pycomm.pipeline.stage import PipelineStage
from pycomm.tensor_parallel.regions import lengths_of

__all__ = ["Tie", "gather"]

Places = Sequence[tuple[int, str]]


def gather(comm: Communicator, value: Any) -> list[Any]:
    """What every rank gives, as JSON has it."""
    mine = json.dumps(value).encode()
    return [json.loads(text) for text in gather_bytes(comm, mine, lengths_of(len(mine), comm))]


class Tie:
    """One weight in several places. Collective over the pipeline's ranks.

    Args:
        places: (stage, name of the parameter) of each; the first one's values become all's.
        comm: of the pipeline's ranks.
        stages: of this rank.
        placement: the rank of every stage.

    Raises:
        ValueError: a stage or parameter that is not there, or shapes or dtypes that differ; on every rank.
    """

    def __init__(
        self,
        places: Places,
        comm: Communicator,
        stages: Mapping[int, PipelineStage],
        placement: Sequence[int],
    ) -> None:
        self._mine: list[nn.Parameter] = []  # each object once
        self._before: list[Tensor | None] = []
        self.places = list(places)
        first: nn.Parameter | None = None  # where it is on this rank
        what = ""
        for stage, name in places:
            if not 0 <= stage < len(placement):
                what = f"there is no stage {stage} of {len(placement)}"
            elif stage in stages:
                module = stages[stage].submod
                found = plain_parameters(module).get(name)
                if found is None:  # a name with what wrappers put in
                    found = dict(module.named_parameters(remove_duplicate=False)).get(name)
                if found is None:
                    what = f"stage {stage} has no parameter {name!r}"
                elif all(found is not p for p in self._mine):
                    self._mine.append(found)
                    first = found if (stage, name) == tuple(places[0]) else first
        kinds = {(tuple(p.shape), str(p.dtype)) for p in self._mine}
        told = gather(comm, [what, sorted(kinds)])
        problems = [text for text, _ in told if text]
        all_kinds = {(tuple(shape), dtype) for _, some in told for shape, dtype in some}
        if not problems and len(all_kinds) > 1:
            problems = [f"the weights differ: {sorted(all_kinds)}"]
        if problems:
            raise ValueError(f"tie {list(places)}: {problems[0]}")
        #: Parameters here that count where the first place is: for norms of all gradients.
        self.repeated = [p for p in self._mine if p is not first]
        holders = sorted({placement[stage] for stage, _ in places})
        self._comm = comm.new_group(holders) if len(holders) > 1 else None
        if not self._mine:
            return
        with torch.no_grad():
            value = self._mine[0].detach().clone()
            if self._comm is not None:
                self._comm.broadcast(value, holders.index(placement[places[0][0]]))
            for parameter in self._mine:
                parameter.copy_(value)

    def begin(self) -> None:
        """Before a step: what was accumulated so far is laid aside."""
        self._before = [p.grad for p in self._mine]
        for parameter in self._mine:
            parameter.grad = None

    def end(self) -> None:
        """After it: every place has the sum of what the step added."""
        if not self._mine:
            return
        total = torch.zeros_like(self._mine[0])
        for parameter in self._mine:
            if parameter.grad is not None:
                total += parameter.grad
        if self._comm is not None:
            self._comm.all_reduce(total)
        for i, (parameter, before) in enumerate(zip(self._mine, self._before, strict=True)):
            added = total if i == 0 else total.clone()
            parameter.grad = added if before is None else before.add_(added)
        self._before = []

    def undo(self) -> None:
        """After a step that failed."""
        for parameter, before in zip(self._mine, self._before, strict=False):
            parameter.grad = before
        self._before = []
