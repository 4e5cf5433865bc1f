"""The handle of an asynchronous call."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import torch

from pycomm import _C
from pycomm.errors import CommTimeoutError
from pycomm.staging import Staged


class Work:
    """An asynchronous call on its way; keeps the call's tensors alive until it is done.

    The tensors must not be read or written before :meth:`wait` has returned. Of a call on CUDA tensors, as
    with torch.distributed: wait() returns when the call is on the device, and torch's current stream then
    waits for it; what is put on that stream after may use the tensors.

    Example:
        >>> import pycomm, torch
        >>> comm = pycomm.init()
        >>> t = torch.ones(4)
        >>> work = comm.all_reduce(t, async_op=True)
        >>> work.wait()
        True
    """

    def __init__(self, work: _C.Work, tensors: Any, result: Any, staged: Staged | None) -> None:
        self._work = work
        self._tensors = tensors
        self._result = result
        self._staged = staged
        self._lock = threading.Lock()
        self._keeper: weakref.ref[Keeper] | None = None

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until the call is done.

        Args:
            timeout: seconds; None waits as long as the call itself may take. With a timeout, the calling
                thread waits until the device has done a call on CUDA tensors.

        Returns:
            True.

        Raises:
            ValueError: a negative timeout.
            CommTimeoutError: ``timeout`` seconds have passed; the call goes on.
            CommError: the call failed (also PeerLostError, MismatchError).
            KeyboardInterrupt: Ctrl-C came. The call goes on; but a small one that this thread was running
                itself ends with it, and the communicator has failed.
        """
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout must be seconds >= 0 or None, got {timeout!r}")
        return self._wait(timeout, False)

    def _wait(self, timeout: float | None, on_host: bool) -> bool:
        if not self._work.wait(-1.0 if timeout is None else float(timeout), on_host):
            raise CommTimeoutError(f"the call is not done after {timeout} s; it goes on, wait again")
        self._complete(False)
        if self._staged is not None:
            self._staged.order(on_host or timeout is not None)
        return True

    def _complete(self, has_passed: bool) -> None:
        """After success: brings a staged output to its tensor, once, and lets go of the tensors.

        Args:
            has_passed: the device has done the call.
        """
        with self._lock:
            if self._staged is not None and self._tensors is not None:
                with self._staged.on_stream():
                    if not has_passed:
                        self._work.wait(-1.0, False)  # the call's stream, too, goes on behind it
                    self._staged.write_back()
            if not has_passed and not self._work.is_ordered():
                return  # kept until over: the call's own stream, which may use their memory again, goes on
            self._tensors = None
        keeper = None if self._keeper is None else self._keeper()
        if keeper is not None:
            keeper.let_go(self)

    def _ended(self) -> bool:
        """True when the call has ended, well or badly; no stream waits for its result then."""
        if not self._work.done():
            return False
        if self.exception() is None:
            self._complete(True)
        return True

    def is_completed(self) -> bool:
        """True when the call has ended, well or badly. Does not block."""
        if not self._ended():
            return False
        if self._staged is not None:
            self._staged.order(False)  # what the caller reads next must be the result
        return True

    def exception(self) -> BaseException | None:
        """The error with which the call ended, or None (also while it goes on)."""
        if not self._work.done():
            return None
        try:
            self._work.raise_if_failed()
        except Exception as error:
            return error
        return None

    def source(self) -> int:
        """For a finished recv: the rank that sent."""
        return self._work.source

    def result(self) -> Any:
        """The output tensor (or list) of the call; wait first."""
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A torch Future of :meth:`result`, completed by a thread of Python when the call ends.

        Of a call on CUDA tensors: when the device has done it.
        """
        tensors = self._result if isinstance(self._result, (list, tuple)) else [self._result]
        on_cuda = {t.device for t in tensors if isinstance(t, torch.Tensor) and t.is_cuda}
        future: torch.futures.Future[Any] = torch.futures.Future(devices=list(on_cuda))
        complete(self, future)
        return future


class _Completer:
    """One daemon thread that completes the Futures of works, in the order in which the works end.

    A callback of a Future runs on that thread, and may make a call and wait for its Future in turn: that one
    is completed by the next completer, or nobody would be left to do it.
    """

    def __init__(self) -> None:
        self._done: _C.Completions | None = None
        self._pending: dict[int, tuple[Work, torch.futures.Future[Any]]] = {}
        self._next = itertools.count()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._after: _Completer | None = None

    def beyond(self, thread: threading.Thread) -> _Completer | None:
        """The completer after the one whose thread this is; None when it is nobody's."""
        if self._thread is thread:
            if self._after is None:
                self._after = _Completer()
            return self._after
        return None if self._after is None else self._after.beyond(thread)

    def add(self, work: Work, future: torch.futures.Future[Any]) -> None:
        with self._lock:
            if self._done is None or self._thread is None or not self._thread.is_alive():
                # A forked child has no thread of its parent's, and none of its works.
                self._done, self._pending = _C.Completions(), {}
                self._thread = threading.Thread(
                    target=self._run, args=(self._done, self._pending), name="pycomm-futures", daemon=True
                )
                self._thread.start()
            number = next(self._next)
            self._pending[number] = (work, future)
            work._work.announce(self._done, number)

    def stop(self) -> None:
        """Ends the thread after what has ended; called before the interpreter's end."""
        if self._after is not None:
            self._after.stop()
        with self._lock:
            if self._done is None or self._thread is None:
                return
            self._done.stop()
        self._thread.join(timeout=5.0)

    @staticmethod
    def _run(done: _C.Completions, pending: dict[int, tuple[Work, torch.futures.Future[Any]]]) -> None:
        while (number := done.pop()) is not None:
            work, future = pending.pop(number)
            try:
                work._wait(None, True)
            except BaseException as error:
                # set_exception takes Exceptions only, and a Future must never stay open.
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            else:
                future.set_result(work.result())


_completer = _Completer()


def complete(work: Work, future: torch.futures.Future[Any]) -> None:
    """Has ``future`` completed by a thread of Python when ``work`` ends."""
    (_completer.beyond(threading.current_thread()) or _completer).add(work, future)


class Keeper:
    """Keeps works alive until they are done: the engine holds addresses only, and owners may drop a work."""

    def __init__(self) -> None:
        self._works: set[Work] = set()
        self._me = weakref.ref(self)
        self._lock = threading.Lock()
        self._next_sweep = 0

    def pending(self) -> bool:
        """Whether one of them goes on."""
        with self._lock:
            return not all(work._ended() for work in list(self._works))

    def add(self, work: Work) -> Work:
        """Returns ``work``. Lets go of finished ones, so that they do not hold their tensors."""
        with self._lock:
            if len(self._works) >= self._next_sweep:
                for kept in list(self._works):
                    # After a failure the device may still use the tensors.
                    if kept._ended() and kept._work.over():
                        self._works.discard(kept)
                # With many pending, a sweep costs as much as it can free.
                self._next_sweep = len(self._works) * 2 if len(self._works) > 64 else 0
            self._works.add(work)
            work._keeper = self._me
        return work

    def let_go(self, work: Work) -> None:
        """Of a work that has ended well, whose result would else live until the next call."""
        self._works.discard(work)
