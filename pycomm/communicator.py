"""The communicator: collectives over the ranks of one machine, through shared memory.

Every collective takes CPU tensors of any dtype in ``pycomm._setup.DTYPES`` and any layout; a list of tensors
of one dtype is one coalesced call over their concatenation. Common arguments:

    async_op: return a :class:`pycomm.Work` at once; the tensors must be left alone until it is done.
    algorithm: a name that ``pycomm schedule list`` shows; None takes the measured choice.
    deterministic: reduce in the canonical order of docs/numerics.md, the same bits whatever the algorithm;
        None takes the communicator's default (``PYCOMM_DETERMINISTIC=1``).
    timeout: seconds this call may wait for a peer; None takes the communicator's.

Common errors: ``TypeError`` and ``ValueError`` name a bad argument on the rank that gave it; the other ranks
get ``CommError`` saying so, and the communicator stays usable. ``MismatchError``: valid calls that differ
between ranks. ``PeerLostError``: a peer died or closed. ``CommTimeoutError``: a deadline passed. After these
three the communicator has failed, and every later call raises the same.
"""

from __future__ import annotations

import atexit
import weakref
import zlib
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import torch

from pycomm import _C, _setup, ops, tuning
from pycomm.errors import CommError
from pycomm.point_to_point import PointToPoint
from pycomm.staging import Staged, staged
from pycomm.work import Keeper, Work, _completer

Tensors = torch.Tensor | Sequence[torch.Tensor]

# CallKind of csrc/engine/call.h.
KINDS = {
    name: code
    for code, name in enumerate(
        (
            "all_reduce",
            "reduce_scatter",
            "all_gather",
            "broadcast",
            "reduce",
            "gather",
            "scatter",
            "all_to_all",
            "barrier",
        )
    )
}

_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _part_sizes(tensors: Any) -> list[int] | None:
    """The sizes of a list's tensors, one for each rank; None for anything else, which the core judges."""
    if not isinstance(tensors, (list, tuple)) or not all(type(t) in _PLAIN for t in tensors):
        return None
    return [t.numel() for t in tensors]


class Communicator(_C.FastCalls, PointToPoint):
    """The ranks that call collectives together; made by :func:`init`, :meth:`split` or :meth:`new_group`.

    Collectives run in program order, synchronous ones on the caller's thread when nothing is queued. Safe to
    use from several threads (calls are served one after the other). A context manager that closes at its end.

    Example:
        >>> import pycomm, torch
        >>> with pycomm.init() as comm:
        ...     t = torch.full((3,), float(comm.rank + 1))
        ...     _ = comm.all_reduce(t, op="max")
    """

    def __init__(self, core: _C.Communicator) -> None:
        self._c = core
        self._bind_core(core)
        self._works = Keeper()
        #: This process's number, in [0, size).
        self.rank: int = core.rank
        #: How many ranks there are.
        self.size: int = core.size
        _open.add(self)

    def __del__(self) -> None:
        # Before the works and their tensors go: the progress thread may still be writing into them.
        core = getattr(self, "_c", None)
        if core is not None:
            core.close()

    # ---- calls ------------------------------------------------------------------------------------------

    def _refuse(self, error: Exception) -> None:
        """Tells the peers that this rank's call was invalid, so that they raise too instead of waiting."""
        self._c.refuse(str(error))

    def _call(
        self,
        name: str,
        inputs: Tensors | None,
        outputs: Tensors | None,
        result: Any,
        *,
        op: ops.Op = "sum",
        async_op: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> Any:
        try:
            code, scalar = ops.parse(op)
            timeout = None if timeout is None else ops.positive_seconds(timeout)
        except (TypeError, ValueError) as error:
            self._refuse(error)
            raise
        options.update(op=code, scalar=scalar, timeout_s=timeout)
        kind = KINDS[name]
        done = self._c.call(kind, inputs, outputs, options, async_op)
        held: Staged | None = None
        if done is NotImplemented:
            try:
                held = staged(name, inputs, outputs)
            except Exception as error:  # also no memory for the copy
                self._refuse(error)
                raise
            done = self._c.call(kind, held.inputs, held.outputs, options, async_op)
        if not async_op:
            if held is not None:
                held.write_back()
            return result
        finish = held.write_back if held is not None else None
        return self._works.add(Work(done, (inputs, outputs, held), result, finish))

    def _all_reduce(
        self,
        tensor: Tensors,
        op: ops.Op = "sum",
        *,
        out: Tensors | None = None,
        async_op: bool = False,
        algorithm: str | None = None,
        deterministic: bool | None = None,
        timeout: float | None = None,
    ) -> Any:
        """What ``all_reduce`` (of the base class, in C) does not do at once: see there."""
        out = tensor if out is None else out
        return self._call(
            "all_reduce", tensor, out, out, op=op, async_op=async_op, timeout=timeout,
            algorithm=algorithm, deterministic=deterministic,
        )  # fmt: skip

    def reduce_scatter(
        self,
        output: Tensors,
        input: Tensors,
        op: ops.Op = "sum",
        *,
        counts: Sequence[int] | None = None,
        **options: Any,
    ) -> Any:
        """Rank r gets part r of the reduction of all ranks' inputs.

        Args:
            output: part r: ``counts[r]`` elements, or 1/size of ``input``.
            input: the whole vector (or a list, one tensor for each rank).
            counts: elements of each part, in rank order, the same on every rank; None: equal parts.
        """
        counts = _part_sizes(input) if counts is None else counts
        return self._call("reduce_scatter", input, output, output, op=op, counts=counts, **options)

    def all_gather(
        self, output: Tensors, input: Tensors, *, counts: Sequence[int] | None = None, **options: Any
    ) -> Any:
        """Every rank gets the concatenation of all ranks' inputs, in rank order.

        Args:
            output: the whole vector (or a list, one tensor for each rank).
            input: this rank's part; may be its place in ``output`` (in place).
            counts: elements of each part, in rank order, the same on every rank; None: equal parts.
        """
        counts = _part_sizes(output) if counts is None else counts
        return self._call("all_gather", input, output, output, counts=counts, **options)

    def broadcast(self, tensor: Tensors, src: int = 0, **options: Any) -> Any:
        """Every rank's ``tensor`` becomes that of rank ``src``."""
        return self._call(
            "broadcast", tensor if src == self.rank else None, tensor, tensor, root=src, **options
        )

    def reduce(
        self, tensor: Tensors, dst: int = 0, op: ops.Op = "sum", *, out: Tensors | None = None, **options: Any
    ) -> Any:
        """Rank ``dst`` gets the reduction in ``out`` (None: in ``tensor``); the others' tensors stay."""
        target = (tensor if out is None else out) if dst == self.rank else None
        return self._call("reduce", tensor, target, target, op=op, root=dst, **options)

    def gather(
        self,
        tensor: Tensors,
        output: Tensors | None = None,
        dst: int = 0,
        *,
        counts: Sequence[int] | None = None,
        **options: Any,
    ) -> Any:
        """Rank ``dst`` gets all ranks' tensors in rank order in ``output`` (needed there, else ignored)."""
        target = output if dst == self.rank else None
        if dst == self.rank and output is None:
            error = ValueError(f"gather: rank {dst} is dst and needs output=")
            self._refuse(error)
            raise error
        return self._call("gather", tensor, target, target, root=dst, counts=counts, **options)

    def scatter(
        self,
        output: Tensors,
        input: Tensors | None = None,
        src: int = 0,
        *,
        counts: Sequence[int] | None = None,
        **options: Any,
    ) -> Any:
        """Rank r gets part r of rank ``src``'s ``input`` (needed there, ignored elsewhere)."""
        if src == self.rank and input is None:
            error = ValueError(f"scatter: rank {src} is src and needs input=")
            self._refuse(error)
            raise error
        source = input if src == self.rank else None
        return self._call("scatter", source, output, output, root=src, counts=counts, **options)

    def all_to_all(
        self,
        output: Tensors,
        input: Tensors,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        **options: Any,
    ) -> Any:
        """Rank r's q-th block goes to rank q, as its r-th block.

        Args:
            output, input: one tensor each, or lists of ``size`` tensors (one block for each rank). They may
                not overlap.
            output_split_sizes, input_split_sizes: rows (of dimension 0) of each block; None: equal blocks.
        """
        try:
            sends = self._blocks("input", input, input_split_sizes)
            receives = self._blocks("output", output, output_split_sizes)
        except (TypeError, ValueError) as error:
            self._refuse(error)
            raise
        return self._call(
            "all_to_all", input, output, output, send_counts=sends, recv_counts=receives, **options
        )

    def _blocks(self, what: str, tensors: Tensors, splits: Sequence[int] | None) -> list[int]:
        if not isinstance(tensors, torch.Tensor):
            sizes = _part_sizes(tensors)
            if sizes is None:
                raise TypeError(f"all_to_all: {what} must be a tensor or a list of tensors, got {tensors!r}")
            if splits is not None or len(sizes) != self.size:
                raise ValueError(f"all_to_all: a list {what} needs {self.size} tensors and no split sizes")
            return sizes
        if type(tensors) not in _PLAIN:  # a subclass may have sizes of its own
            got = type(tensors).__name__
            raise TypeError(f"all_to_all: {what} must be a torch.Tensor (not a subclass), got {got}")
        if splits is None:
            if tensors.numel() % self.size != 0:
                raise ValueError(
                    f"all_to_all: {what} of {tensors.numel()} elements does not divide over {self.size} "
                    f"ranks; give {what}_split_sizes"
                )
            return [tensors.numel() // self.size] * self.size
        rows = tensors.shape[0] if tensors.dim() > 0 else 1
        if len(splits) != self.size or sum(splits) != rows or min(splits) < 0:
            raise ValueError(
                f"all_to_all: {what}_split_sizes must be {self.size} sizes that add up to {rows} rows, "
                f"got {list(splits)}"
            )
        row = tensors.numel() // rows if rows > 0 else 0
        return [s * row for s in splits]

    def barrier(self, **options: Any) -> Any:
        """Returns when every rank has called it."""
        return self._call("barrier", None, None, None, **options)

    # ---- memory, groups, life ---------------------------------------------------------------------------

    def empty(self, *shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An uninitialised tensor in the shared arena: collectives on such tensors copy nothing.

        It is an ordinary tensor with its own storage, lives until its last reference dies (also after
        :meth:`close`), and is not a collective call.

        Args:
            shape: sizes, or one sequence of sizes.
            dtype: one of ``pycomm._setup.DTYPES``.

        Raises:
            ValueError: a negative size. TypeError: an unsupported dtype. CommError: no memory.
        """
        sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else list(shape)
        if any(not isinstance(s, Integral) or s < 0 for s in sizes):
            raise ValueError(f"empty: sizes must be integers >= 0, got {sizes}")
        if dtype not in _setup.DTYPE_CODES:
            raise TypeError(f"empty: {dtype} is not supported")
        made = self._c.empty([int(s) for s in sizes], _setup.DTYPE_CODES[dtype])
        return made if isinstance(made, torch.Tensor) else torch.utils.dlpack.from_dlpack(made)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A communicator for the ranks that give the same ``color``, ordered by ``key``, then by rank here.

        Collective over this communicator. Ranks with color None get None.
        """
        given: tuple[Any, Any] = (color, key)
        for name, value, lowest in (("color", given[0], 0), ("key", given[1], -(2**63))):
            if name == "color" and value is None:
                continue
            if not isinstance(value, int) or not lowest <= value < 2**63:
                error = ValueError(f"split: {name} must be an integer in [{lowest}, 2^63), got {value!r}")
                self._refuse(error)
                raise error
        return self._split(color, key, 0)

    def _split(self, color: int | None, key: int, plan: int) -> Communicator | None:
        core = self._c.split(-1 if color is None else color, key, plan)
        if core is None:
            return None
        child = Communicator(core)
        tuning.inherit(self, child)
        return child

    def new_group(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of ``ranks``, in that order; every rank of this one calls it, others get None.

        Raises:
            ValueError: ranks repeat, are out of range, or none is given.
            MismatchError: ranks gave different lists.
        """
        given: Any = ranks
        wanted: list[Any] = list(given) if isinstance(given, Iterable) else []
        valid = all(isinstance(r, int) and 0 <= r < self.size for r in wanted)
        if not wanted or not valid or len(set(wanted)) != len(wanted):
            error = ValueError(
                f"new_group: ranks must be distinct, at least one, and in [0, {self.size}), got {ranks!r}"
            )
            self._refuse(error)
            raise error
        inside = self.rank in wanted
        # The same on every rank, or MismatchError; never 0, which is a split.
        plan = 1 + zlib.crc32(repr(wanted).encode())
        return self._split(0 if inside else None, wanted.index(self.rank) if inside else 0, plan)

    @property
    def timeout(self) -> float:
        """Seconds that a call waits for a peer before it raises CommTimeoutError."""
        return self._c.timeout_s

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._c.timeout_s = ops.positive_seconds(seconds)

    @property
    def deterministic(self) -> bool:
        """The default of ``deterministic=``; the same on every rank."""
        return self._c.deterministic

    @deterministic.setter
    def deterministic(self, value: bool) -> None:
        self._c.deterministic = bool(value)

    def tune(self, seconds: float = 1.0) -> None:
        """Measures the candidates on this machine and takes the fastest; collective; see ``pycomm tune``.

        Args:
            seconds: about how long it may take; what is not measured by then keeps its default.
        """
        tuning.measure(self, seconds)

    def close(self) -> None:
        """Waits for what is queued and leaves; peers that need this rank get PeerLostError. Idempotent.

        Ctrl-C aborts what is queued instead, and raises KeyboardInterrupt once the communicator is closed.
        """
        self._c.close()

    def abort(self, reason: str = "aborted") -> None:
        """Ends pending and later calls here with CommError, and tells the peers. Returns at once."""
        self._c.abort(reason)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
        else:
            self.abort(f"left by {kind.__name__}")
            self.close()

    def __repr__(self) -> str:
        state = "failed" if self._c.failed else "closed" if self._c.closed else "open"
        return f"<pycomm.Communicator rank {self.rank} of {self.size}, {state}>"


@atexit.register
def _close_all() -> None:
    # Progress threads must be gone before the interpreter's memory is.
    for comm in list(_open):
        try:
            comm.close()
        except CommError:
            comm.abort("the interpreter ends")
    _completer.stop()
