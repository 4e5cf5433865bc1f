"""Handles of the backend's calls, as torch.distributed and its users ask them.

A call that is over when it returns (the caller did not ask for an asynchronous one) has a ``Done``; the
others have a ``Pending`` around ``pycomm.Work``s. Futures are made only when asked for. A Future whose call
fails must fail in C++'s eyes, too (torch's reducer reads it there): ``then`` does that, ``set_exception``
does not.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycomm.errors import CommError
from pycomm.torch_backend.recording import Event
from pycomm.work import Work

__all__ = ["Done", "Pending"]


class Done(dist.Work):
    """A call that is over; ``result`` is the list of its output tensors."""

    def __init__(self, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def synchronize(self) -> None: ...

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> Any:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def source_rank(self) -> int:
        raise RuntimeError("source_rank: only a recv has one, and this work is of a collective")

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class Pending(dist.Work):
    """A call on its way.

    Args:
        works: what must end, in the order of their calls; a coalesced call has several.
        result: its output tensors.
        explained: an error of the engine, as torch's callers are to see it.
        event: the call's event in a profiler, which ends with the works.
        finish: what is left to do with the outputs when the works have ended well; may be called often.
    """

    def __init__(
        self,
        works: list[Work],
        result: list[torch.Tensor],
        explained: Callable[[CommError], CommError],
        event: Event | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._works = works
        self._explained = explained
        self._finish = finish
        self._outputs = result
        self._event = event

    @property
    def works(self) -> list[Work]:
        """What it waits for."""
        return self._works

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = None if timeout is None or timeout.total_seconds() <= 0 else timeout.total_seconds()
        try:
            for work in self._works:
                work.wait(limit)
        except CommError as error:
            raise self._explained(error) from None
        if self._event is not None:
            self._event.wait()
        if self._finish is not None:
            self._finish()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not all(work.is_completed() for work in self._works):
            return False
        if self._finish is not None and self.exception() is None:
            self._finish()  # what the caller reads next must be the result
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        found = next((e for work in self._works if (e := work.exception()) is not None), None)
        return self._explained(found) if isinstance(found, CommError) else found

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def source_rank(self) -> int:
        return self._works[-1].source()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        if self.is_success():  # torch's reducer reads the value right after wait()
            self.wait()
            return Done(self._outputs).get_future()
        futures = [work.get_future() for work in self._works]
        ended = futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)

        def outputs(ended: torch.futures.Future[Any]) -> list[torch.Tensor]:
            self.wait()  # raises what the call ended with
            return self._outputs

        return ended.then(outputs)
