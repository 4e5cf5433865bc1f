"""What can go wrong with a gradient in one backward, in words that are the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, IntFlag

__all__ = ["Whole", "Problem", "report"]


class Problem(IntEnum):
    """Why a rank has no gradient to contribute for a parameter; NONE when it has one."""

    NONE = 0
    UNUSED = 1
    SPARSE = 2
    RETYPED = 3
    GONE = 4
    LATE = 5
    JOINED = 6  # none: the rank has no input left (join), and counts as zeros
    WOKE = 7  # none: it has one, of a parameter that was asleep (pycomm/ddp/asleep.py)


class Whole(IntFlag):
    """What is wrong with a whole backward of a rank."""

    FINE = 0
    CHANGED = 1
    BROKEN = 2
    WEIGHTS = 4
    HOOK = 8


_SAYING = {
    Problem.UNUSED: "got no gradient in this backward",
    Problem.RETYPED: "has a gradient whose class, shape, dtype or device is not the parameter's when wrapped",
    Problem.GONE: "lost its gradient to a hook before it was reduced (an optimizer that steps in backward?)",
    Problem.LATE: "got another gradient in this backward after it had been reduced",
}

_REMEDY = {
    Problem.UNUSED: "Let every parameter take part in the loss, freeze it (requires_grad_(False)), or wrap "
    "with find_unused_parameters=True",
    Problem.RETYPED: "Wrap the module again after changing its parameters in place",
    Problem.LATE: "Give checkpoints use_reentrant=False, or wrap with overlap='end' (the next backward waits "
    "for as many gradients as came in this one)",
}

_SHOWN = 20


def report(names: Sequence[str], table: Sequence[Sequence[int]], allowed: frozenset[Problem]) -> str | None:
    """The message for a table of problems, or None when there is nothing to complain about.

    Args:
        names: of the parameters.
        table: for each rank one number for each parameter (a Problem), then one for the whole (a Whole).
        allowed: problems that are none.
    """
    findings: list[str] = []
    seen: set[Problem] = set()
    for rank, row in enumerate(table):
        if row[-1] & Whole.BROKEN:
            findings.append(f"rank {rank}: backward ended in an exception")
            continue  # what did not come, did not come for that reason
        if row[-1] & Whole.WEIGHTS:
            findings.append(f"rank {rank}: forwards with different weights share this backward")
        if row[-1] & Whole.HOOK:
            findings.append(f"rank {rank}: its communication hook raised an exception")
        for problem, saying in _SAYING.items():
            if problem in allowed:
                continue
            concerned = [name for name, found in zip(names, row[:-1], strict=True) if found == problem]
            if concerned:
                seen.add(problem)
                more = f" and {len(concerned) - _SHOWN} more" if len(concerned) > _SHOWN else ""
                shown = ", ".join(concerned[:_SHOWN]) + more
                findings.append(f"rank {rank}: {saying}: {shown} ({len(concerned)} of {len(names)})")
    if not findings:
        return None
    advice = "".join(f" {remedy}." for problem, remedy in _REMEDY.items() if problem in seen)
    return (
        f"DistributedDataParallel: gradients could not be averaged. {'; '.join(findings)}.{advice} The "
        "gradients of this backward are undefined on every rank; the communicator stays usable"
    )
