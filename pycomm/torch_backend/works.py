"""Handles of the backend's calls, as torch.distributed and its users ask them.

A call that is over when it returns (the caller did not ask for an asynchronous one) has a ``Done``; the others
have a ``Pending`` around a ``pycomm.Work``. Futures are made only when asked for. A Future whose call fails
must fail in C++'s eyes, too (torch's reducer reads it there): ``then`` does that, ``set_exception`` does not.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycomm.torch_backend.errors import translated
from pycomm.work import Work

__all__ = ["Done", "Pending"]


class Done(dist.Work):
    """A call that is over; ``result`` is the list of its output tensors."""

    def __init__(self, result: list[torch.Tensor], source: int = -1) -> None:
        super().__init__()
        self._outputs = result
        self._source = source

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
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class Pending(dist.Work):
    """A call on its way.

    Args:
        works: what must end; a coalesced call has several.
        result: its output tensors.
        finish: called once when all have ended well, before any result is handed out.
    """

    def __init__(
        self, works: list[Work], result: list[torch.Tensor], finish: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._works = works
        self._outputs = result
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = None if timeout is None or timeout.total_seconds() <= 0 else timeout.total_seconds()
        with translated():
            for work in self._works:
                work.wait(limit)
            self._complete()
        return True

    def _complete(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not all([work.is_completed() for work in self._works]):
            return False
        if self.exception() is None:
            self._complete()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        return next((e for work in self._works if (e := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def source_rank(self) -> int:
        return self._works[-1].source()

    def _source_rank(self) -> int:
        return self._works[-1].source()

    def get_future(self) -> torch.futures.Future[Any]:
        futures = [work.get_future() for work in self._works]
        ended = futures[0] if len(futures) == 1 else torch.futures.collect_all(futures)

        def outputs(ended: torch.futures.Future[Any]) -> list[torch.Tensor]:
            ended.value()  # raises what the call ended with
            self.wait()
            return self._outputs

        return ended.then(outputs)
