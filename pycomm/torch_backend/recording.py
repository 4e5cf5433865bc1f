"""Calls in torch's profiler: events such as "pycomm:all_reduce" with the shapes of what was given.

An event lasts from the call until the engine is done. So while a profiler records, every call is made
asynchronously and its event ends on the thread that completes futures; a call that the caller makes
synchronously waits for that. Without a profiler this costs one question of 30 ns for each call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pycomm.work import Work, complete

__all__ = ["Event", "is_recording"]

_autograd: Any = torch.autograd
is_recording = torch._C._autograd._profiler_enabled


class Event:
    """An event of the profiler, begun when it is made.

    Args:
        name: of the call.
        tensors: what the caller gave; their shapes are recorded where the profiler asks for shapes.
    """

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        self._handle: Any = _autograd._record_function_with_args_enter(f"pycomm:{name}", *tensors)
        self._ended = threading.Event()

    def end_with(self, works: Sequence[Work]) -> None:
        """It ends when the last of these calls does; at once when there is none."""
        if not works:
            self._end(None)
            return
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.add_done_callback(self._end)  # before anybody can complete it, so that it runs over there
        complete(works[-1], future)

    def _end(self, _: object) -> None:
        _autograd._record_function_with_args_exit(self._handle)
        self._ended.set()

    def wait(self) -> None:
        """Until it has ended; to be called when the calls have, or it takes as long as they do."""
        self._ended.wait()
