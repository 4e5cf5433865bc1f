"""Connections between stages that are no neighbours: a module stashes a value, a module of a later stage
pops it.

::

    class Down(nn.Module):                      class Up(nn.Module):
        def forward(self, x):                       def forward(self, x):
            x = self.block(x)                           skip = pop("level 1")
            stash("level 1", x)                         return self.block(torch.cat([x, skip], 1))
            return self.pool(x)

``PipelineSchedule(..., skips={"level 1": (0, 4)})`` says from which stage to which; the value goes straight
there, under every schedule, and its gradient straight back. Without a schedule the same modules run as they
are.

Source: Kim et al., torchgpipe (2020).
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

__all__ = ["Skips", "current", "pop", "serving", "stash"]


class Skips:
    """The values that one forward of one stage takes and gives.

    Args:
        where: the stage and microbatch, for errors.
        incoming: for :func:`pop`.
    """

    def __init__(self, where: str, incoming: dict[str, Any]) -> None:
        self.where = where
        self.incoming = incoming
        self.outgoing: dict[str, Any] = {}

    def differ(self, expected: list[str]) -> str:
        """How a forward that is over differs from the schedule's skips, and what to do.

        Args:
            expected: what it should have stashed.
        """
        found = [
            f"it stashed {name!r}, which no skip begins here with: give the schedule skips={{{name!r}: (this "
            "stage, the stage that pops it)}"
            for name in sorted(self.outgoing.keys() - set(expected))
        ]
        found += [
            f"it did not stash {name!r}, though the schedule's skips have it begin here"
            for name in expected
            if name not in self.outgoing
        ]
        found += [
            f"it did not pop {name!r}, though the schedule's skips have it end here"
            for name in sorted(self.incoming)
        ]
        return "; ".join(found)


_current: contextvars.ContextVar[Skips | None] = contextvars.ContextVar("pycomm.pipeline.skips", default=None)
_alone: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "pycomm.pipeline.alone", default=None
)


def current() -> Skips | None:
    """What stash and pop mean now; None outside of a schedule."""
    return _current.get()


@contextlib.contextmanager
def serving(skips: Skips) -> Iterator[None]:
    """stash and pop mean ``skips`` inside."""
    token = _current.set(skips)
    try:
        yield
    finally:
        _current.reset(token)


def stash(name: str, value: Any) -> None:
    """Keeps a value for a later stage.

    Args:
        name: as in the schedule's ``skips``.
        value: whatever may pass between stages.

    Raises:
        RuntimeError: it is stashed already, and not yet popped.

    Example:
        >>> stash("x", 3)
        >>> pop("x")
        3
    """
    now = _current.get()
    if now is not None:
        held = now.outgoing
    else:
        held = _alone.get() or {}
        _alone.set(held)
    if name in held:
        where = now.where if now is not None else "outside of a schedule"
        raise RuntimeError(f"stash({name!r}) {where}: a value of that name is there already")
    held[name] = value


def pop(name: str) -> Any:
    """The value that an earlier stage has stashed.

    Raises:
        RuntimeError: there is none; the schedule's ``skips`` must name this stage as its end.
    """
    now = _current.get()
    held = now.incoming if now is not None else _alone.get() or {}
    if name not in held:
        where = now.where if now is not None else "outside of a schedule"
        raise RuntimeError(
            f"pop({name!r}) {where}: nothing of that name comes here; there are {sorted(held)}"
            + ("; give the schedule skips={name: (stage that stashes it, this stage)}" if now else "")
        )
    return held.pop(name)
