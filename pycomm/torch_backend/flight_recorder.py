"""The recent calls of this process's groups: what, of which sizes, from where, how far; for after a failure.

A ring of the newest ``TORCH_FR_BUFFER_SIZE`` calls (2000; 0 keeps none). When a group fails and
``TORCH_FR_DUMP_TEMP_FILE`` is set, each rank writes them to that name with its rank behind it, in the form of
torch's flight recorder, so that torch's ``torchfrtrace`` reads them; :func:`dump` gives them at any time.
That program knows backends by name and not ours: the entries call themselves ``gloo:…``.

Words: a *site* is the innermost line outside torch and pycomm that led to a call.
"""

from __future__ import annotations

import collections
import itertools
import os
import pickle
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pycomm.errors import MismatchError
from pycomm.work import Work

__all__ = ["Entry", "Recorder", "dump", "write_after_failure"]

_INSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_N_FRAMES = 8
# torch's words for these calls; the others are ours.
_TORCHS = {
    "all_gather_into_tensor": "_all_gather_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
}


def _capacity() -> int:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):  # the older name
        text = os.environ.get(name)
        if text is not None:
            if not text.isdecimal():
                raise ValueError(f"{name} must be a number of calls >= 0, got {text!r}")
            return int(text)
    return 2000


class Entry:
    """One call."""

    __slots__ = (
        "created_ns", "ended_with", "frames", "group", "inputs", "name", "number", "outputs", "record",
        "works",
    )  # fmt: skip

    def __init__(self, group: Recorder, name: str, number: int, inputs: Any, outputs: Any) -> None:
        self.group = group
        self.name = name
        self.number = number
        self.record = next(_records)
        self.created_ns = time.time_ns()
        self.inputs = [(tensor.shape, tensor.dtype) for tensor in inputs]
        self.outputs = self.inputs
        if outputs is not inputs:
            self.outputs = [(tensor.shape, tensor.dtype) for tensor in outputs]
        self.frames = _stack()
        #: None until the engine has the call; then what is to end (nothing: it has ended).
        self.works: list[Any] | None = None
        #: What was raised in the call itself. (Not the exception, whose frames keep tensors alive.)
        self.ended_with: type[BaseException] | None = None

    def made(self, works: Iterable[Work]) -> None:
        """The engine has the call. Keeps no tensor alive."""
        self.works = [work._work for work in works]

    def state(self) -> str:
        """``started``, ``completed`` or ``failed``."""
        if self.failure() is not None:
            return "failed"
        return "completed" if self.works is not None and self._is_over() else "started"

    def failure(self) -> type[BaseException] | None:
        """What the call ended with, if it ended badly."""
        if self.ended_with is None and self.works and self._is_over():
            try:
                for work in self.works:
                    work.raise_if_failed()
            except Exception as error:
                return type(error)
        return self.ended_with

    def _is_over(self) -> bool:
        return all(work.done() for work in self.works or ())

    def site(self) -> str:
        """Where the program made the call."""
        for code, place in self.frames:
            return f"{code.co_filename}:{_line(code, place)} in {code.co_name}"
        return "a place without Python code"

    def as_torchs(self) -> dict[str, Any]:
        """As torch's flight recorder has it."""
        is_p2p = self.name.startswith(("send", "recv"))
        state = self.state()
        return {
            "record_id": self.record,
            "pg_id": self.group.id,
            "process_group": (self.group.name, self.group.desc),
            "collective_seq_id": 0 if is_p2p else self.number,
            "p2p_seq_id": self.number if is_p2p else 0,
            "op_id": self.record,
            "profiling_name": f"gloo:{_TORCHS.get(self.name, self.name)}",
            "time_created_ns": self.created_ns,
            "input_sizes": [list(shape) for shape, _ in self.inputs],
            "input_dtypes": [str(dtype) for _, dtype in self.inputs],
            "output_sizes": [list(shape) for shape, _ in self.outputs],
            "output_dtypes": [str(dtype) for _, dtype in self.outputs],
            "state": "started" if state == "failed" else state,
            "failed": state == "failed",
            "is_p2p": is_p2p,
            "retired": state == "completed",
            "timeout_ms": self.group.timeout_ms,
            "frames": [
                {"name": code.co_name, "filename": code.co_filename, "line": _line(code, place)}
                for code, place in self.frames
            ],
        }


_records = itertools.count()
_entries: collections.deque[Entry] = collections.deque(maxlen=_capacity())
_ids = itertools.count()
_is_written = False


def _stack() -> list[tuple[CodeType, int]]:
    """The calls that led here from outside torch and pycomm, innermost first; lines are found when asked."""
    frame: Any = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < _N_FRAMES:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found


def _line(code: CodeType, place: int) -> int:
    for start, end, line in code.co_lines():
        if start <= place < end and line is not None:
            return line
    return code.co_firstlineno


class Recorder:
    """Records the calls of one process group, and keeps neither it nor its tensors alive.

    Args:
        group: of torch; what it is called is asked at its first call, torch sets that late.
    """

    def __init__(self, group: Any) -> None:
        self._group = weakref.ref(group)
        self.id = next(_ids)
        self.name, self.desc, self.ranks, self.timeout_ms = "", "", list[int](), 0
        self._collectives, self._transfers = itertools.count(1), itertools.count(1)

    def _learn(self) -> None:
        group = self._group()
        if group is None:
            return
        known = dist.distributed_c10d._world.pg_group_ranks.get(group)
        self.ranks = sorted(known, key=lambda rank: known[rank]) if known else list(range(group.size()))
        self.name, self.desc = group.getGroupName(), group.getGroupDesc()
        self.timeout_ms = int(group.communicator.timeout * 1e3)

    def whose_ranks(self) -> str:
        """What an error's ranks are in the world, where they are others there."""
        if self.ranks == list(range(len(self.ranks))):
            return ""
        return f'these are ranks of the group "{self.desc or self.name}"; in the world they are {self.ranks}'

    def begin(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Entry | None:
        """A call that is being made; None when none are kept."""
        if not _entries.maxlen:
            return None
        if not self.ranks:
            self._learn()
        numbers = self._transfers if name.startswith(("send", "recv")) else self._collectives
        entry = Entry(self, name, next(numbers), inputs, outputs)
        _entries.append(entry)
        return entry

    def open(self) -> Entry | None:
        """This group's oldest collective that has not ended, or that differed from those of other ranks.

        One that was refused, or whose time was over, is behind the group.
        """
        for entry in _copy():
            if entry.group is not self or entry.name.startswith(("send", "recv")):
                continue
            failure = entry.failure()
            if issubclass(failure, MismatchError) if failure else entry.state() == "started":
                return entry
        return None


def _copy() -> list[Entry]:
    while True:
        try:
            return list(_entries)
        except RuntimeError:  # another thread has added one meanwhile
            continue


def _groups(entries: Iterable[Entry]) -> Iterator[Recorder]:
    return iter({id(entry.group): entry.group for entry in entries}.values())


def dump() -> dict[str, Any]:
    """The recent calls of all pycomm groups of this process, the oldest first.

    Returns:
        What torch's flight recorder writes: ``version``, ``pg_config`` (the groups), and ``entries``, a dict
        a call with ``profiling_name``, ``process_group``, ``collective_seq_id``, sizes and dtypes, ``state``
        (``started`` or ``completed``; ``failed`` tells the calls that ended badly) and ``frames``.

    Example:
        >>> from pycomm.torch_backend.flight_recorder import dump
        >>> [entry["profiling_name"] for entry in dump()["entries"]]
        []
    """
    entries = _copy()
    return {
        "version": "2.10",  # of torch's format
        "backend": "pycomm",
        "pg_config": {
            group.name: {"name": group.name, "desc": group.desc, "ranks": str(group.ranks)}
            for group in _groups(entries)
        },
        "pg_status": {},
        "entries": [entry.as_torchs() for entry in entries],
    }


def write_after_failure() -> str:
    """Writes the calls, once in a process, if a file is named; returns what to tell the user about it."""
    global _is_written
    prefix = os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    if not prefix or _is_written:
        return ""
    _is_written = True
    rank = dist.get_rank() if dist.is_initialized() else 0
    path = f"{prefix}{rank}"
    try:
        with open(path, "wb") as file:
            pickle.dump(dump(), file)
    except OSError as error:
        return f"the recent calls could not be written: {error}"
    return f"the recent calls are in {path} (torchfrtrace reads the files of all ranks)"
