"""What a step took: every rank's actions on one clock, and the costs that the simulator needs.

Words: a rank's *offset* is how far its clock is ahead of rank 0's. It is estimated from the quickest of
some round trips, to half of that round trip; a smaller one counts as none (ranks of one host share a clock).
The *latency* is what lies between the end of an action and the beginning of the one on another rank that
waited for its result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pycomm.communicator import Communicator
from pycomm.ddp.agree import gather_bytes
from pycomm.pipeline.schedule.action import Action
from pycomm.pipeline.schedule.measured import Measured
from pycomm.pipeline.schedule.order import Order
from pycomm.pipeline.schedule.simulate import Span, Timeline
from pycomm.tensor_parallel.regions import lengths_of

__all__ = ["clock_offset", "gather", "save"]

_ROUND_TRIPS = 9


def clock_offset(comm: Communicator, clock: Callable[[], float] = time.monotonic) -> float:
    """Seconds by which this rank's clock is ahead of rank 0's; 0.0 where none can be seen. Collective.

    Args:
        comm: of the ranks.
        clock: to compare; every rank's own.
    """
    mine = torch.zeros(1, dtype=torch.float64)
    best, offset = float("inf"), 0.0
    for rank in range(1, comm.size):
        for _ in range(_ROUND_TRIPS):
            if comm.rank == 0:
                comm.recv(mine, src=rank)
                mine.fill_(clock())
                comm.send(mine, dst=rank)
            elif comm.rank == rank:
                began = clock()
                comm.send(mine, dst=0)
                comm.recv(mine, src=0)
                took = clock() - began
                if took < best:
                    best, offset = took, began + took / 2 - float(mine)
    return offset if abs(offset) > best / 2 else 0.0


def gather(
    comm: Communicator, order: Order, spans: Sequence[Span], reductions: Sequence[Span] = ()
) -> Timeline:
    """The timeline of the last step, the same on every rank. Collective.

    Args:
        comm: of the pipeline's ranks.
        order: that ran.
        spans: of this rank's computations, in seconds of its own clock.
        reductions: likewise.
    """
    offset = clock_offset(comm)
    mine = json.dumps(
        [[[str(s.action), s.start - offset, s.end - offset] for s in some] for some in (spans, reductions)]
    ).encode()
    told = [json.loads(text) for text in gather_bytes(comm, mine, lengths_of(len(mine), comm))]
    origin = min((start for both in told for row in both for _, start, _ in row), default=0.0)
    made = [
        [
            tuple(Span(Action.parse(text), start - origin, end - origin) for text, start, end in row)
            for row in both
        ]
        for both in told
    ]
    reduced = tuple(both[1] for both in made)
    return Timeline(order, tuple(both[0] for both in made), reduced if any(reduced) else ())


def save(measured: Measured, path: str | Path, comm: Communicator) -> None:
    """Rank 0 writes the file; all ranks learn whether it could. Collective.

    Raises:
        OSError: on every rank, that rank 0 could not write.
    """
    said: Any = ""
    if comm.rank == 0:
        try:
            Path(path).write_text(measured.to_json() + "\n")
        except OSError as error:
            said = f"rank 0 cannot write {path}: {error.strerror}"
    text = said.encode()
    told = gather_bytes(comm, text, lengths_of(len(text), comm))[0].decode()
    if told:
        raise OSError(told)
