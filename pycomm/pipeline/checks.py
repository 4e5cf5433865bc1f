"""What is wrong with a call, told on every rank before anything is sent, so that nobody waits for nothing.

A rank that finds something wrong with its own arguments says so in a small exchange that every step begins
with; then all raise. What a stage was told to take and to give (``input_args``, ``output_args``) is compared
between neighbours before the first step, and with what comes in every one. Dimension 0 is the samples of a
microbatch, and may differ.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pycomm.communicator import Communicator
from pycomm.ddp.agree import gather_bytes
from pycomm.errors import CommError
from pycomm.pipeline.messages import Spec, leaves
from pycomm.pipeline.stage import PipelineStage
from pycomm.tensor_parallel.regions import lengths_of

__all__ = ["Arguments", "alone", "between_stages", "check", "coming", "together"]


@dataclass
class Arguments:
    """What a rank tells of its part of a call.

    Attributes:
        n_rows: of the tensors that it cuts into microbatches; 0: it has none.
        everyones: of all ranks, when the exchange is over; empty where ranks do not begin together.
    """

    n_rows: int = 0
    everyones: tuple[int, ...] = ()


@contextlib.contextmanager
def coming(comm: Communicator, what: str) -> Iterator[None]:
    """An exchange that all ranks must come to; where one does not, the error says to what.

    Raises:
        CommError: as inside, beginning with who waits for what.
    """
    try:
        yield
    except CommError as error:
        waits = f"{what}: rank {comm.rank} waits for every rank of the pipeline to come to it"
        raise type(error)(f"{waits}: {error}") from None  # which has its whole text


@contextlib.contextmanager
def together(comm: Communicator, who: str) -> Iterator[Arguments]:
    """An exception inside, on any rank, is raised on every rank. Collective.

    Args:
        comm: of the ranks.
        who: begins the error of the others.

    Yields:
        What this rank tells the others, and then what they have told.

    Raises:
        Exception: this rank's own.
        ValueError: another's, which it names.
        CommError: a rank does not come.
    """
    problem: Exception | None = None
    mine = Arguments()
    try:
        yield mine
    except Exception as error:
        problem = error
    text = b"" if problem is None else f"{type(problem).__name__}: {problem}".encode()
    with coming(comm, who):
        told = lengths_of(len(text) if problem is not None else -mine.n_rows, comm)  # one number says both
    lengths = [max(number, 0) for number in told]
    mine.everyones = tuple(max(-number, 0) for number in told)
    if any(lengths):
        texts = gather_bytes(comm, text, lengths)
        if problem is None:
            rank = next(rank for rank, found in enumerate(texts) if found)
            raise ValueError(f"{who}: rank {rank} refused this call: {texts[rank].decode()}")
    if problem is not None:
        raise problem


@contextlib.contextmanager
def alone(comm: Communicator, who: str) -> Iterator[Arguments]:
    """Likewise where ranks do not begin together: calls of the others, and later ones, end with CommError."""
    try:
        yield Arguments()
    except Exception as error:
        if comm.size > 1:
            comm.abort(f"{who}: rank {comm.rank} refused this call: {type(error).__name__}: {error}")
        raise


def _fits(expected: Spec, found: Spec) -> bool:
    return (
        expected.dtype == found.dtype
        and len(expected.shape) == len(found.shape)
        and expected.shape[1:] == found.shape[1:]
    )


def _text(found: Sequence[Spec]) -> str:
    return ", ".join(map(str, found)) or "no tensor"


def _differs(expected: Sequence[Spec] | None, found: Sequence[Spec]) -> str | None:
    """None when it fits; else what was expected and what came."""
    if expected is None:
        return None
    if len(expected) == len(found) and all(map(_fits, expected, found)):
        return None
    return f"expected {_text(expected)} (dimension 0 may differ), got {_text(found)}"


def check(stage: PipelineStage, microbatch: int, value: Any, peer: int | None) -> None:
    """Compares an input or an output of a stage with what it was told.

    Args:
        stage: whose.
        microbatch: its number.
        value: a nest.
        peer: the rank from which an input comes; None: it is the output.

    Raises:
        ValueError: they differ; the text has stage, microbatch, peer, and both shapes.
    """
    expected = stage.output_specs if peer is None else stage.input_specs
    if expected is None:
        return
    found = _differs(expected, [Spec.of(t) for t in leaves(value)])
    if found is None:
        return
    if peer is None:
        what = "its output is not as output_args says"
    elif stage.is_first:
        what = "the batch's part is not as input_args says"
    else:
        what = f"what came from stage {stage.stage_index - 1} (rank {peer}) is not as input_args says"
    raise ValueError(f"stage {stage.stage_index}, microbatch {microbatch}: {what}: {found}")


def between_stages(comm: Communicator, stages: Mapping[int, PipelineStage], placement: Sequence[int]) -> None:
    """Compares what every stage was told to give with what the next was told to take. Collective.

    Raises:
        ValueError: they differ; on every rank.
    """
    mine = json.dumps([[number, s.input_specs, s.output_specs] for number, s in stages.items()]).encode()
    takes: dict[int, list[Spec]] = {}
    gives: dict[int, list[Spec]] = {}
    for text in gather_bytes(comm, mine, lengths_of(len(mine), comm)):
        for number, *both in json.loads(text):
            for where, specs in zip((takes, gives), both, strict=True):
                if specs is not None:
                    where[number] = [Spec(dtype, tuple(shape), *rest) for dtype, shape, *rest in specs]
    for number in sorted(gives):
        if number + 1 in takes and (found := _differs(takes[number + 1], gives[number])) is not None:
            raise ValueError(
                f"stage {number + 1} (rank {placement[number + 1]}), by its input_args, does not take what "
                f"stage {number} (rank {placement[number]}) gives by its output_args: {found}"
            )
