"""Which action a rank is in, for its peers to read at any time: also while it hangs, is slow or has died.

Each rank writes a word into its part of shared memory before every action (a tenth of a microsecond), and a
bit of it while it waits for a message. Who waits too long reads the words of the others, so a report names
the action: "rank 3 waits for the activation of microbatch 5 from stage 2 (rank 2, which is in 2B4)".
"""

from __future__ import annotations

import warnings

from pycomm.communicator import Communicator
from pycomm.pipeline.schedule.action import KINDS, REDUCE, Action

__all__ = ["LATE_S", "LateWarning", "Watch"]

LATE_S = 5.0
"""After so many seconds of waiting for one message a rank warns, once, and waits on."""

_WAITS = 1 << 62
_CODES = {kind: code for code, kind in enumerate(KINDS, 1)}


class LateWarning(RuntimeWarning):
    """A stage has waited longer than ``LATE_S`` for a message from another."""


class Watch:
    """The word of this rank, and those of its peers.

    Args:
        comm: of the pipeline's ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._set = comm._c.set_note
        self._now = 0

    def begin(self, action: Action) -> None:
        """This rank does an action now."""
        stage, kind, k = action
        self._now = _CODES[kind] << 52 | stage << 32 | k & 0xFFFFFFFF
        self._set(self._now)

    def wait(self) -> None:
        """It waits for a message that the action needs."""
        self._set(self._now | _WAITS)

    def go_on(self) -> None:
        """The message has come."""
        self._set(self._now)

    def end(self) -> None:
        """It is between two steps."""
        self._now = 0
        self._set(0)

    def doing(self, rank: int) -> str:
        """What a rank does, as part of a sentence: ``is in 2B4``."""
        note = self._comm._c.note(rank)
        code = note >> 52 & 0xFF
        if code == 0:
            return "is between two steps"
        kind = KINDS[code - 1]
        action = Action(note >> 32 & 0xFFFFF, kind, -1 if kind == REDUCE else note & 0xFFFFFFFF)
        return f"itself waits for what {action} needs" if note & _WAITS else f"is in {action}"

    def warn(self, waits: str, rank: int) -> None:
        """Says that this rank has waited for ``LATE_S``, and what the other one does."""
        warnings.warn(
            f"{waits} for {LATE_S:g} s now and goes on waiting; it is {self._comm._c.describe(rank)}",
            LateWarning,
            stacklevel=2,
        )
