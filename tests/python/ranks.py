"""Ranks as real processes: ``run_ranks(n, fn, *args)`` returns ``[fn(0, n, *args), …, fn(n-1, n, *args)]``.

Every rank is forked from one server process that has torch imported already, with the modules that take it
a second more, so a rank starts in tens of milliseconds. (What of pycomm reads the environment is imported
in the rank.) It runs with one thread, RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and a private
PYCOMM_RUN_DIR in its environment, and its output in a file. No test touches the network or a fixed name.

What goes wrong in a rank comes back as an exception here:

* ``fn`` raises: the same exception is raised; its cause is a ``RankError`` with rank, traceback and output;
* a rank dies (signal, ``os._exit``): ``RankError`` with the signal, unless ``may_die`` lists the rank;
* the time is over: ``RanksTimedOut`` with the Python stacks of every rank that still runs.

After the first failure the others have ``GRACE_S`` to finish; then they are killed. No rank outlives the
call, nor the test process: the kernel kills ranks whose parent is gone.

``fn`` is pickled by reference: a function at the top level of a test module (whose names are unique, see
pyproject.toml). Results and exceptions travel by pickle; tensors are copied, not shared.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRELOADED = (
    "pytest",  # every child imports the parent's main module, which is pytest's
    "hypothesis",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.optim",
    "torch.distributed.tensor",
    "ranks",
)
"""What the fork server imports: half of a test's time, when every rank did. None of them starts a thread.
(What pycomm does where Dynamo is not imported is tested in test_without_dynamo.py.)"""
HOST = socket.gethostname()
"""What errors name as the host of every rank."""
GRACE_S = 5.0
"""How long the other ranks may go on after the first one failed."""
STACKS_S = 3.0
"""How long ranks may take to write their stacks after the time is over."""
OUTPUT_CHARS = 4000
"""How much of a failed rank's output an error shows, from the end."""

_PR_SET_PDEATHSIG = 1
_ROOT = Path(__file__).resolve().parents[2]


class RankError(RuntimeError):
    """A rank failed. ``rank`` is the first one that did; the message tells of all of them."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class RanksTimedOut(RankError, TimeoutError):
    """Not every rank returned in time; the message has the stacks of those that did not."""


@dataclass(frozen=True)
class Died:
    """In place of the result of a rank listed in ``may_die`` that died: a negative exit code is a signal."""

    exitcode: int


@dataclass
class _Rank:
    number: int
    process: Any
    pipe: multiprocessing.connection.Connection
    log: Path
    stacks: Path
    value: Any = None
    error: BaseException | None = None
    report: str = ""  # what went wrong, for a person; empty while all is well
    done_at: float | None = None  # time.monotonic() when it returned, raised or died

    def output(self) -> str:
        return _read(self.log)[-OUTPUT_CHARS:]


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _context() -> Any:
    """The multiprocessing context whose fork server imports what every rank needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


@contextlib.contextmanager
def _server_environment() -> Iterator[None]:
    """The environment in which the fork server starts, if it starts now; its children inherit it."""
    wanted = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "tests" / "python")]),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _child(
    rank: int,
    environment: Mapping[str, str],
    pipe: multiprocessing.connection.Connection,
    log: str,
    stacks: str,
    call: bytes,
) -> None:
    """A rank: sets itself up, calls the function, sends ("value" | "error" | "text", object, text)."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (lives as long as the process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    stack_file = open(stacks, "w")  # noqa: SIM115
    faulthandler.enable(stack_file, all_threads=True)
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    gc.freeze()  # what the server imported is not looked through in every collection

    import torch

    torch.set_num_threads(1)
    message: tuple[str, Any, str]
    try:
        function, args = pickle.loads(call)
        message = ("value", function(rank, int(environment["WORLD_SIZE"]), *args), "")
    except BaseException as error:  # also SystemExit: the parent raises it
        message = ("error", error, traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(_portable(message))
    pipe.close()


def _portable(message: tuple[str, Any, str]) -> bytes:
    """Pickles a message so that the parent is sure to read it; what cannot be pickled travels as text."""
    kind, value, text = message
    try:
        data = pickle.dumps(message)
        if kind == "error":
            pickle.loads(data)  # an exception with a constructor of its own often fails only here
        return data
    except Exception as error:
        if kind == "error":
            return pickle.dumps(("text", None, text))
        why = f"the result of type {type(value).__name__} cannot be pickled: {error}"
        return pickle.dumps(("text", None, why))


def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Calls ``fn(rank, n, *args)`` in ``n`` processes and returns the results in rank order.

    Args:
        n: how many ranks, at least 1.
        fn: a function at the top level of an importable module.
        args: picklable arguments, the same for every rank.
        timeout: seconds until all ranks must have returned.
        env: environment variables for every rank, over those of the fork server. (A variable that a test sets
            in its own process does not reach the ranks.)
        may_die: ranks that may be killed or exit; their result is then a ``Died``.

    Raises:
        RanksTimedOut: a rank did not return in time; the message has the stacks.
        RankError: a rank died, or raised something that cannot be pickled.
        BaseException: whatever ``fn`` raised on the rank that failed first.

    Example:
        >>> def double(rank, size, offset):
        ...     return 2 * rank + offset
        >>> run_ranks(2, double, 10)
        [10, 12]
    """
    __tracebackhide__ = True  # pytest shows the test and the message, not this file
    if n < 1:
        raise ValueError(f"run_ranks: n must be at least 1, not {n}")
    call = pickle.dumps((fn, args))
    folder = Path(tempfile.mkdtemp(prefix="pycomm-ranks-"))
    ranks: list[_Rank] = []
    try:
        (folder / "run").mkdir(mode=0o700)
        for number in range(n):
            ranks.append(_start(number, n, folder, call, env or {}))
        _collect(ranks, timeout, frozenset(may_die))
        _raise_failure(ranks)
        for rank in ranks:
            if output := rank.output():
                print(f"--- output of rank {rank.number}\n{output}", end="")
        return [rank.value for rank in ranks]
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()
            rank.pipe.close()
        shutil.rmtree(folder, ignore_errors=True)


def _start(number: int, n: int, folder: Path, call: bytes, env: Mapping[str, str]) -> _Rank:
    environment = {
        "RANK": str(number),
        "WORLD_SIZE": str(n),
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(n),
        "PYCOMM_RUN_DIR": str(folder / "run"),
        "OMP_NUM_THREADS": "1",
        "PYCOMM_TUNE": "off",  # no test depends on, or writes, what was measured on this machine
        **env,
    }
    context = _context()
    receiver, sender = context.Pipe(duplex=False)
    log, stacks = folder / f"rank{number}.log", folder / f"rank{number}.stacks"
    arguments = (number, environment, sender, str(log), str(stacks), call)
    process = context.Process(target=_child, args=arguments, name=f"rank {number}")
    with _server_environment():
        process.start()
    sender.close()
    return _Rank(number, process, receiver, log, stacks)


def _collect(ranks: list[_Rank], timeout: float, may_die: frozenset[int]) -> None:
    """Waits until every rank returned or died; no longer than GRACE_S after the first failure."""
    deadline = time.monotonic() + timeout
    failed = False
    while waiting := [rank for rank in ranks if rank.done_at is None]:
        left = max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait([rank.pipe for rank in waiting], timeout=left)
        if not ready:
            what = (
                "did not finish after the failure above"
                if failed
                else f"was still running after {timeout:g} s"
            )
            _dump_stacks(waiting, what)
            return
        for rank in waiting:
            if rank.pipe in ready:
                _receive(rank, rank.number in may_die)
                if rank.report and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE_S)


def _receive(rank: _Rank, may_die: bool) -> None:
    """Takes a rank's message, or notes how it died (the pipe then ends without one)."""
    rank.done_at = time.monotonic()
    try:
        kind, value, text = pickle.loads(rank.pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        rank.process.join()
        code = rank.process.exitcode
        if may_die:
            rank.value = Died(code)
            return
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        rank.report = f"{how} before it returned\n{_read(rank.stacks)}"
        return
    if kind == "value":
        rank.value = value
    else:
        rank.error = value
        rank.report = f"raised:\n{text}"


def _dump_stacks(ranks: list[_Rank], what: str) -> None:
    """Asks every rank for the stacks of its threads (a C-level handler: it needs no GIL) and notes them."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + STACKS_S
    before: list[str] = []
    while time.monotonic() < deadline:  # until every file has something and none grows any more
        texts = [_read(rank.stacks) for rank in ranks]
        if all(texts) and texts == before:
            break
        before = texts
        time.sleep(0.05)
    for rank in ranks:
        stacks = _read(rank.stacks) or f"(no stack within {STACKS_S:g} s)\n"
        rank.report = f"{what} (pid {rank.process.pid}, {_state(rank.process.pid)}):\n{stacks}"


def _state(pid: int) -> str:
    """What the kernel says that a process is doing."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone"
    letter = stat.rpartition(")")[2].split()[0]
    names = {"R": "running", "S": "sleeping", "D": "in a system call", "T": "stopped", "Z": "dead"}
    return names.get(letter, letter)


def _raise_failure(ranks: list[_Rank]) -> None:
    """Raises the first failure in time, with a report of all."""
    __tracebackhide__ = True
    failures = [rank for rank in ranks if rank.report]
    if not failures:
        return
    failures.sort(key=lambda rank: float("inf") if rank.done_at is None else rank.done_at)
    first = failures[0]
    parts = []
    for rank in failures:
        parts.append(f"rank {rank.number} of {len(ranks)} {rank.report.rstrip()}")
        if output := rank.output():
            parts.append(f"output of rank {rank.number}:\n{output.rstrip()}")
    text = "\n\n".join(parts)
    if first.done_at is None:
        raise RanksTimedOut(text, first.number)
    if first.error is not None:
        raise first.error from RankError(text, first.number)
    raise RankError(text, first.number)
