"""The communicator: its ranks, the collectives and transfers between them, memory, groups and life.

Collectives are in pycomm/collectives.py, with their common arguments and errors; send and recv in
pycomm/point_to_point.py. What is here: tensors in the shared arena, communicators of some of the ranks,
defaults of calls, and the ends: ``close``, ``abort``, garbage collection and the interpreter's exit.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import weakref
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from pycomm import _C, _setup, arguments, devices, tuning_cuda, tuning_hosts
from pycomm.arguments import refuses_wrong_calls
from pycomm.collectives import Collectives
from pycomm.errors import CommError
from pycomm.point_to_point import PointToPoint
from pycomm.work import _completer

_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
# A program that ends (sys.exit, too) does not wait longer for a call that nobody has waited for: its peers
# may wait for this process in turn, and torchrun sees no exit code before it ends.
_AT_EXIT_S = 10.0


class Communicator(Collectives, PointToPoint):
    """The ranks that call collectives together; made by :func:`init`, :meth:`split` or :meth:`new_group`.

    Collectives run in program order, synchronous ones on the caller's thread when nothing is queued. Safe to
    use from several threads (calls are served one after the other). A context manager that closes at its end.

    Example:
        >>> import pycomm, torch
        >>> with pycomm.init() as comm:
        ...     t = torch.full((3,), float(comm.rank + 1))
        ...     _ = comm.all_reduce(t, op="max")
    """

    #: The run folder in which :func:`init` met the others, a name no other meeting has; else empty.
    _met_in = ""
    #: What ``pycomm ps`` calls it: the job, which of its communicators, and this rank in the job.
    _shown_as = ("", "", 0)
    _n_children = 0

    def __init__(self, core: _C.Communicator) -> None:
        super().__init__(core)
        _open.add(self)

    def __del__(self) -> None:
        # Before the works and their tensors go: the progress thread may still be writing into them.
        core = getattr(self, "_c", None)
        if core is not None:
            core.close()

    def empty(
        self,
        *shape: Any,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | int | None = None,
    ) -> torch.Tensor:
        """An uninitialised tensor in the shared arena: collectives on such tensors copy nothing.

        It is an ordinary tensor with its own storage, lives until its last reference dies (also after
        :meth:`close`), and is not a collective call; but on CUDA a communicator's first call is collective,
        whichever it is.

        Args:
            shape: sizes, or one sequence of sizes; none: a tensor of one element without dimensions.
            dtype: one of ``pycomm._setup.DTYPES``.
            device: None: the CPU. A CUDA device: memory that the GPUs of this machine's ranks reach, of which
                each communicator has ``PYCOMM_DEVICE_ARENA`` bytes (64 MiB). It is handed out again when two
                of torch's streams have done what was on them as the last reference died, that which was
                current then and that which was current here, and so have all calls. A tensor that other
                streams use, or a CUDA graph, has to be kept until they have passed, and a stream that torch
                does not own (``ExternalStream``) until the tensor is gone.

        Returns:
            A contiguous tensor of that shape, dtype and device, its values undefined.

        Raises:
            TypeError: a size that is no integer, an unsupported dtype, or no device.
            ValueError: a negative size, or more bytes than any machine has; a device that is neither the CPU
                nor CUDA, or another CUDA device than this communicator's.
            CommError: the arena's limit (``PYCOMM_ARENA_MAX``, ``PYCOMM_DEVICE_ARENA``) or the machine's
                memory is reached, on CUDA also after 5 s for streams to be done with tensors that are gone;
                the ranks' GPUs do not reach each other's memory; the communicator is
                closed or has failed.

        Example:
            >>> import pycomm, torch
            >>> pycomm.init().empty(2, 3, dtype=torch.int64).shape
            torch.Size([2, 3])
        """
        with self._refusing if self._meets_device(device) else contextlib.nullcontext():
            given = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else list(shape)
            sizes = [arguments.integer("empty: a size", n, 0, 2**63) for n in given]
            arguments.instance("empty: dtype", dtype, torch.dtype, "a torch.dtype")
            if dtype not in _setup.DTYPE_CODES:
                known = ", ".join(str(d).removeprefix("torch.") for d in _setup.DTYPES)
                raise TypeError(f"empty: dtype {dtype} is not supported; supported are {known}")
            index = -1 if device is None else arguments.cuda_index("empty: device", device)
            if index >= 0 and torch.cuda.is_available():
                initialize: Any = torch.cuda.init  # nothing of torch's may have used CUDA so far
                initialize()
        made = self._c.empty(sizes, _setup.DTYPE_CODES[dtype], index)
        if isinstance(made, torch.Tensor):
            return made
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(made)
        return tensor if tensor.dtype == dtype else tensor.view(dtype)  # older torch has no float8 there

    def _meets_device(self, device: Any) -> bool:
        """Whether ``empty`` there is the first call on CUDA, which is collective: the others wait in it."""
        if device is None or self._c.device >= 0:
            return False
        try:
            return torch.device(device).type == "cuda"
        except (RuntimeError, TypeError):  # whatever it was to be
            return True

    @refuses_wrong_calls
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A communicator for the ranks that give the same ``color``. Collective over this communicator.

        Args:
            color: an integer in [0, 2^63); None: this rank joins none.
            key: an integer in [-2^63, 2^63); the new ranks are in the order of keys, then of ranks here.

        Returns:
            The communicator of this rank's color, with this one's defaults; None for color None.

        Raises:
            TypeError, ValueError, CommError: the common list of :mod:`pycomm.collectives`.

        Example:
            >>> import pycomm
            >>> comm = pycomm.init()
            >>> comm.split(color=comm.rank % 2, key=-comm.rank).size
            1
        """
        with self._refusing:
            color = None if color is None else arguments.integer("split: color", color, 0, 2**63)
            key = arguments.integer("split: key", key, -(2**63), 2**63)
        return self._split(color, key, 0)

    def _split(self, color: int | None, key: int, plan: int) -> Communicator | None:
        core = self._c.split(-1 if color is None else color, key, plan)
        self._n_children += 1
        if core is None:
            return None
        child = Communicator(core)
        child._show(*self._next_shown())
        tuning_hosts.inherit(self, child)
        return child

    def _show(self, job: str, label: str, job_rank: int) -> None:
        """Lets ``pycomm ps`` find this communicator, under these names."""
        self._shown_as = (job, label, job_rank)
        self._c.introduce(job, label, job_rank)

    def _next_shown(self) -> tuple[str, str, int]:
        job, label, job_rank = self._shown_as
        return job, f"{label}.{self._n_children}" if label else str(self._n_children), job_rank

    @refuses_wrong_calls
    def new_group(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of some of the ranks. Every rank of this one calls it.

        Args:
            ranks: distinct ranks of this communicator, at least one, the same list on every rank; the new
                ranks are in its order.

        Returns:
            The communicator of ``ranks``; None on a rank that is not one of them.

        Raises:
            TypeError, ValueError, CommError: the common list of :mod:`pycomm.collectives`; MismatchError
                also when the lists differ.

        Example:
            >>> import pycomm
            >>> pycomm.init().new_group([0]).size
            1
        """
        with self._refusing:
            wanted = self._distinct(ranks)
        inside = self.rank in wanted
        # The same on every rank, or MismatchError; never 0, which is a split.
        plan = 1 + zlib.crc32(repr(wanted).encode())
        return self._split(0 if inside else None, wanted.index(self.rank) if inside else 0, plan)

    def _distinct(self, ranks: Any) -> list[int]:
        wanted = self._ranks("new_group", "ranks", ranks)
        if not wanted or len(set(wanted)) != len(wanted):
            raise ValueError(f"new_group: ranks must be distinct, at least one, got {arguments.short(ranks)}")
        return wanted

    def _ranks(self, call: str, name: str, ranks: Any) -> list[int]:
        if not isinstance(ranks, Iterable) or isinstance(ranks, (str, bytes)):
            raise TypeError(f"{call}: {name} must be a list of ranks, got {arguments.short(ranks)}")
        return [arguments.rank(f"{call}: each of {name}", r, self.size) for r in ranks]

    def shrink(self, exclude: Sequence[int] = (), timeout: float = 30.0) -> Communicator:
        """The communicator of the ranks that are left, to go on with after a failure.

        Every rank that is left calls it, after its call here has raised (each is told of a failure). It works
        on a communicator that has not failed, too, there with ``exclude``. It agrees on who is left, also
        when more ranks die meanwhile, or when ranks see different things (csrc/engine/shrink.h). The new
        ranks are in the order of those here. This communicator is over then: its calls raise, ``close`` it.

        A rank that is alive and does not call it within ``timeout`` is left out; whatever it calls here later
        raises PeerLostError, which says so. Between hosts, those ranks go on whose hosts had more than half
        of the ranks, or half with rank 0: when a link fails, never both sides. (A host whose ranks are all
        dead cannot be told from one out of reach.) On one host, one rank is enough.

        Args:
            exclude: ranks to go on without, though they live; they need not call it. It counts what any
                caller names.
            timeout: seconds to wait for ranks that live and do not come. The agreement itself takes
                milliseconds, and at most 10 s more.

        Returns:
            The new communicator, of one rank or more, with this one's timeout, ``deterministic`` and forced
            algorithms. A rank that died in the last moment may be in it: then it fails as this one did.

        Raises:
            TypeError: ``exclude`` is no list of integers, or ``timeout`` is no number.
            ValueError: ``exclude`` names this rank or none of this communicator, ``timeout`` is not positive,
                or this communicator was shrunk already.
            PeerLostError: the others went on without this rank, or too few hosts are in reach.
            CommTimeoutError: no agreement within ``timeout`` and 10 s; it may be called again.
            CommError: the communicator is closed.

        Example:
            >>> import pycomm, torch
            >>> comm = pycomm.init()
            >>> try:
            ...     _ = comm.all_reduce(torch.ones(3))
            ... except pycomm.CommError:  # a rank died: DistributedDataParallel etc. must be built anew
            ...     old, comm = comm, comm.shrink()
            ...     old.close()
            >>> comm.size
            1
        """
        excluded = self._ranks("shrink", "exclude", exclude)
        core = self._c.shrink(excluded, arguments.seconds("shrink: timeout", timeout))
        self._n_children += 1
        child = Communicator(core)
        child._show(*self._next_shown())
        if child.size == self.size or tuning_hosts.several_hosts(child):
            tuning_hosts.inherit(self, child)  # else the built-in table: asking rank 0 might wait for it
        return child

    @property
    def timeout(self) -> float:
        """Seconds that a call waits for a peer before it raises CommTimeoutError."""
        return self._c.timeout_s

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._c.timeout_s = arguments.seconds("timeout", seconds)

    @property
    def deterministic(self) -> bool:
        """The default of ``deterministic=``; the same on every rank."""
        return self._c.deterministic

    @deterministic.setter
    def deterministic(self, value: bool) -> None:
        arguments.instance("deterministic", value, bool, "True or False")
        self._c.deterministic = value

    @refuses_wrong_calls
    def tune(self, seconds: float = 1.0, *, device: torch.device | str | int | None = None) -> None:
        """Measures the candidate algorithms on this machine, takes the fastest, and caches that; collective.

        The same as ``pycomm tune``.

        Args:
            seconds: about how long it may take; what is not measured by then keeps its default.
            device: None or the CPU: for CPU tensors. A CUDA device, on every rank: for tensors there; nothing
                else should run on the GPUs meanwhile, and no stream be captured.

        Raises:
            TypeError, ValueError, CommError: the common list of :mod:`pycomm.collectives`.

        Example:
            >>> import pycomm
            >>> pycomm.init().tune(seconds=0.5)
        """
        with self._refusing:
            seconds = arguments.seconds("tune: seconds", seconds)
            on_cpu = device is None or arguments.device_of("tune: device", device).type == "cpu"
            where = None if on_cpu else devices.named("tune: device", device)
        if where is None:
            tuning_hosts.measure(self, seconds)
        elif self.size > 1:
            tuning_cuda.measure(self, seconds, where)

    def close(self) -> None:
        """Waits for what is queued and leaves. Idempotent.

        Later calls here raise CommError; peers that still need this rank get PeerLostError. How queued calls
        ended, their works tell.

        Raises:
            KeyboardInterrupt: Ctrl-C came: what was queued is aborted, and the communicator is closed.

        Example:
            >>> import pycomm
            >>> comm = pycomm.init()
            >>> comm.close()
            >>> comm
            <pycomm.Communicator rank 0 of 1, closed>
        """
        self._c.close()

    def abort(self, reason: str = "aborted") -> None:
        """Ends pending and later calls here and on the peers with CommError. Returns at once.

        Args:
            reason: what the errors say.

        Raises:
            TypeError: ``reason`` is no string.

        Example:
            >>> import pycomm
            >>> comm = pycomm.init()
            >>> comm.abort("the loss is NaN")
            >>> comm
            <pycomm.Communicator rank 0 of 1, failed>
        """
        arguments.instance("abort: reason", reason, str, "a string")
        self._c.abort(reason)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abort(f"left by {kind.__name__}")
            self.close()

    def __deepcopy__(self, memo: Any) -> Communicator:
        """Itself: a copy of a module that communicates is one more user of the same connection."""
        return self

    @property
    def device_description(self) -> str:
        """Lines that say what calls on CUDA tensors use; "" before the first of them.

        The device's number; whether ranks reach each other's memory, and if not, why; NCCL's version and
        file, or why it is not used.

        Example:
            >>> import pycomm
            >>> comm = pycomm.init()
            >>> print(comm.device_description)
            <BLANKLINE>
        """
        return self._c.device_description()

    def __repr__(self) -> str:
        state = "failed" if self._c.failed else "closed" if self._c.closed else "open"
        device = "" if self._c.device < 0 else f", cuda:{self._c.device}"
        return f"<pycomm.Communicator rank {self.rank} of {self.size}, {state}{device}>"


def ended_by(what: str, error: BaseException) -> str:
    """Why this rank is gone, for those that still need it."""
    return f"{what} ended with {type(error).__name__}" + (f": {error}" if str(error) else "")


@atexit.register
def _close_all() -> None:
    # Progress threads must be gone before the interpreter's memory is.
    error: BaseException | None = getattr(sys, "last_value", None)
    last_words = "" if error is None else ended_by("the program", error)
    for comm in list(_open):
        if last_words and comm._works.pending():
            # Nobody will read the results, and the peers of these calls may themselves wait for this rank.
            comm.abort(last_words)
        try:
            comm._c.close(_AT_EXIT_S, last_words)  # peers that still need this rank are told why it is gone
        except CommError:
            comm.abort("the interpreter ends")
    _completer.stop()
