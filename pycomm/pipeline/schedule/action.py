"""One action of a pipeline: what a rank does with a microbatch in a stage, or sends and receives between two.

Written as torch writes it: ``3F5`` is the forward of microbatch 5 in stage 3.

* ``F`` forward; ``B`` whole backward; ``I`` and ``W`` its two halves, the gradients of the stage's input
  and of
  its weights. ``I`` is what the stage before waits for, ``W`` may come any time later.
* ``SEND_F``, ``RECV_F``: a stage's output, to the next stage; ``SEND_B``, ``RECV_B``: the gradient of a
  stage's
  input, to the stage before. They name the stage that sends or receives.
* ``REDUCE_GRAD``: begins to average a stage's gradients over its data-parallel replicas, once in a step. It
  has no microbatch: ``3REDUCE_GRAD``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["BACKWARDS", "COMPUTATIONS", "KINDS", "REDUCE", "TRANSFERS", "Action"]

COMPUTATIONS = ("F", "B", "I", "W")
TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
REDUCE = "REDUCE_GRAD"
KINDS = (*COMPUTATIONS, *TRANSFERS, REDUCE)
BACKWARDS = ("B", "I")  #: what makes the gradient that the stage before needs

_TEXT = re.compile(
    rf"(\d+)(?:({'|'.join(sorted(COMPUTATIONS + TRANSFERS, key=len, reverse=True))})(\d+)|{REDUCE})"
)


class Action(NamedTuple):
    """See the file's text. Stages and microbatches count from 0; of a reduction the microbatch is -1."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.kind == REDUCE else self.microbatch}"

    @staticmethod
    def reduce(stage: int) -> Action:
        """The reduction of a stage's gradients.

        Example:
            >>> str(Action.reduce(3))
            '3REDUCE_GRAD'
        """
        return Action(stage, REDUCE, -1)

    @staticmethod
    def parse(text: str) -> Action:
        """The action of a text such as ``3F5``.

        Raises:
            ValueError: it is none.

        Example:
            >>> Action.parse("3SEND_F5")
            Action(stage=3, kind='SEND_F', microbatch=5)
        """
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise ValueError(
                f"{text!r} is no action: expected STAGE KIND MICROBATCH, as 3F5; kinds are {', '.join(KINDS)}"
            )
        if found[2] is None:
            return Action.reduce(int(found[1]))
        return Action(int(found[1]), found[2], int(found[3]))
