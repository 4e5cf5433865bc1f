"""Making a group's calls: now or asynchronously, for the profiler and the recorder, with torch's errors.

When ranks made different calls, each tells the others in the group's store where its program made its own,
and waits up to ``_SITES_S`` for theirs: the error then shows all of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from pycomm.communicator import Communicator
from pycomm.errors import CommError, MismatchError
from pycomm.torch_backend import flight_recorder
from pycomm.torch_backend.errors import DistCommError, as_torchs
from pycomm.torch_backend.flight_recorder import Entry, Recorder
from pycomm.torch_backend.recording import Event, is_recording
from pycomm.torch_backend.works import Done, Pending
from pycomm.work import Work

__all__ = ["Call", "Maker"]

Call = Callable[..., Any]  #: of ``async_op`` and ``timeout``
_SITES_S = 1.0


def _limit(options: Any) -> float | None:
    """Seconds that one call may take; torch's "unset" is negative."""
    limit: float = options.timeout.total_seconds()
    return limit if limit > 0 else None


class Maker:
    """Makes the calls of one group.

    Args:
        group: of torch.
        comm: that serves it.
        store: of this group alone.
    """

    def __init__(self, group: Any, comm: Communicator, store: Any) -> None:
        self._comm = comm
        self._store = store
        self.n_made = 0  # collectives
        self._recorder = Recorder(group)
        self._told: dict[str, str] = {}  # of an error's text: what was added to it

    def _begin(self, name: str, given: Sequence[Tensor], outputs: Sequence[Tensor]) -> Entry | None:
        try:
            return self._recorder.begin(name, given, outputs)
        except Exception as error:  # a tensor without a shape
            self._comm._c.refuse(str(error))
            raise

    def make(
        self,
        name: str,
        options: Any,
        given: Sequence[Tensor],
        outputs: list[Tensor],
        calls: Sequence[Call],
        finish: Callable[[], None] | None = None,
    ) -> Any:
        """Makes calls in order; the work of all of them.

        Args:
            name: for the profiler and the recorder.
            options: torch's of this call.
            given: what the caller gave, likewise.
            outputs: the work's result.
            calls: what to make.
            finish: what is left to do with the outputs after the calls.
        """
        is_async, timeout = getattr(options, "asyncOp", True), _limit(options)
        self.n_made += 1
        entry = self._begin(name, given, outputs)
        try:
            if is_async or is_recording():
                pending = self._start(name, given, outputs, calls, timeout, entry, finish)
                return pending if is_async or not pending.wait() else Done(outputs)
            for call in calls:
                call(async_op=False, timeout=timeout)
            if entry is not None:
                entry.made(())
            if finish is not None:
                finish()
            return Done(outputs)
        except BaseException as error:
            self._raise_as_torchs(entry, error)
            raise

    def _raise_as_torchs(self, entry: Entry | None, error: BaseException) -> None:
        """Notes what a call ended with; raises it in torch's family if it is one of the engine's."""
        if entry is not None:
            entry.ended_with = type(error)
        if isinstance(error, CommError):
            raise self.explained(error) from None  # the same, in torch's family

    @contextlib.contextmanager
    def noting(self, name: str, tensors: list[Tensor]) -> Iterator[None]:
        """Around what is made without :meth:`make`: recorded, and with torch's errors."""
        entry = self._begin(name, tensors, tensors)
        try:
            yield
        except BaseException as error:
            self._raise_as_torchs(entry, error)
            raise
        if entry is not None:
            entry.made(())

    def transfer(self, name: str, peers: str, tensors: list[Tensor], start: Callable[[], Work]) -> Any:
        """A send or a recv, always asynchronous: their order on a pair is given by tags.

        Args:
            name: for the profiler.
            peers: who sends to whom, for the recorder.
            tensors: the one of the call.
            start: makes it.
        """
        ends = (tensors, ()) if name == "send" else ((), tensors)
        entry = self._recorder.begin(f"{name[:4]} {peers}", *ends)
        try:
            return self._start(name, tensors, tensors, [lambda **_: start()], None, entry, None)
        except BaseException as error:
            self._raise_as_torchs(entry, error)
            raise

    def _start(
        self,
        name: str,
        given: Sequence[Tensor],
        outputs: list[Tensor],
        calls: Sequence[Call],
        timeout: float | None,
        entry: Entry | None,
        finish: Callable[[], None] | None,
    ) -> Pending:
        event = Event(name, given) if is_recording() else None
        works: list[Work] = []
        try:
            for call in calls:
                works.append(call(async_op=True, timeout=timeout))
        finally:
            if event is not None:
                event.end_with(works)
        if entry is not None:
            entry.made(works)
        return Pending(works, outputs, self.explained, event, finish)

    def explained(self, error: CommError) -> CommError:
        """The error in torch's family, with the sites of calls that differ, and where the dump is."""
        if isinstance(error, DistCommError):
            return error
        text = str(error)
        more = self._told.get(text)
        if more is None:
            lines = [self._recorder.whose_ranks()]
            if self._comm._c.failed:  # a call that was refused leaves it usable
                # A message that differs from its recv is no collective's doing.
                differ = isinstance(error, MismatchError) and "made different calls" in text
                lines += self._sites() if differ else []
                lines.append(flight_recorder.write_after_failure())
            more = "".join(f"\n  {line}" for line in lines if line)
            self._told = {text: more}
        return as_torchs(error, more)

    def _sites(self) -> list[str]:
        """Where each rank's program made the call that differs."""
        mine = self._recorder.open()
        if mine is None:
            return []
        keys = [f"mismatch/{rank}" for rank in range(self._comm.size)]
        sites: dict[int, str] = {self._comm.rank: mine.site()}
        end = time.monotonic() + _SITES_S
        try:
            self._store.set(keys[self._comm.rank], sites[self._comm.rank])
            for rank, key in enumerate(keys):
                left = max(end - time.monotonic(), 1e-3)
                if rank not in sites and (self._store.check([key]) or _comes(self._store, key, left)):
                    sites[rank] = self._store.get(key).decode()
        except RuntimeError:  # the store has gone; what is known is told
            sites.setdefault(self._comm.rank, mine.site())
        unknown = "is busy elsewhere and has not told from where it called"
        return [
            f"rank {rank} {f'called at {sites[rank]}' if rank in sites else unknown}"
            for rank in range(self._comm.size)
        ]


def _comes(store: Any, key: str, within_s: float) -> bool:
    """Whether somebody sets the key in that time."""
    try:
        store.wait([key], timedelta(seconds=within_s))
    except RuntimeError:
        return bool(store.check([key]))
    return True
