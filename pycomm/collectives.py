"""The collectives of a communicator: calls that all its ranks make, in the same order.

Every collective takes dense CPU tensors of any dtype in ``pycomm._setup.DTYPES`` and any layout; a list of
tensors of one dtype is one coalesced call over their concatenation. Common arguments:

    op: "sum", "product", "min", "max", "avg", "band", "bor", "bxor", ("premul_sum", factor), or a
        torch.distributed.ReduceOp; docs/numerics.md says which dtype has which.
    async_op: return a :class:`pycomm.Work` at once; the tensors must be left alone until it is done.
    algorithm: a name that ``pycomm schedule list`` shows; None takes the measured choice.
    deterministic: reduce in the canonical order of docs/numerics.md, the same bits whatever the algorithm;
        None takes the communicator's default (``PYCOMM_DETERMINISTIC=1``).
    timeout: seconds this call may wait for a peer; None takes the communicator's.
    compression: "fp16", "bf16", "fp8" (float8_e4m3fn) or "int8": what the elements of float32 (for fp8 and
        int8 also float16 and bfloat16) tensors cross between hosts as, with a scale for each 256. Inside a
        host everything is in full precision, and where all ranks are on one host it has no effect. The same
        on every rank. The bounds are in docs/numerics.md. For op "sum", "avg" and "premul_sum"; between hosts
        not with ``deterministic`` and with no other ``algorithm`` than "direct". On CUDA every rank is as if
        on a host of its own (and ``all_gather`` takes any algorithm).
    error_feedback: a :class:`pycomm.ErrorFeedback` of this vector's own, which keeps what compression loses
        and adds it to the next call; None: it is lost.

Returns: what each method says; with ``async_op`` a Work whose ``result()`` is that.

Common errors: ``TypeError`` and ``ValueError`` name a bad argument on the rank that gave it; the other ranks
get ``CommError`` saying so, and the communicator stays usable. ``MismatchError``: valid calls that differ
between ranks. ``PeerLostError``: a peer died or closed. ``CommTimeoutError``: a deadline passed. After these
three the communicator has failed, and every later call raises the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pycomm import arguments, ops
from pycomm.arguments import refuses_wrong_calls
from pycomm.calling import Caller
from pycomm.error_feedback import ErrorFeedback
from pycomm.staging import Tensors


class Collectives(Caller):
    """What a communicator offers to all its ranks at once; ``all_reduce`` is the base class's, in C."""

    @refuses_wrong_calls
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
        compression: str | None = None,
        error_feedback: ErrorFeedback | None = None,
    ) -> Any:
        """What ``all_reduce`` (of the base class, in C) does not do at once: see there."""
        return self._call(
            "all_reduce", tensor, tensor if out is None else out, async_op, timeout,
            op=op, algorithm=algorithm, deterministic=deterministic,
            coding=(compression, error_feedback, tensor),
        )  # fmt: skip

    @refuses_wrong_calls
    def reduce_scatter(
        self,
        output: Tensors,
        input: Tensors,
        op: ops.Op = "sum",
        *,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        algorithm: str | None = None,
        deterministic: bool | None = None,
        timeout: float | None = None,
        compression: str | None = None,
        error_feedback: ErrorFeedback | None = None,
    ) -> Any:
        """Rank r gets part r of the reduction of all ranks' inputs.

        Args:
            output: part r: ``counts[r]`` elements, or 1/size of ``input``; any shape, the dtype of ``input``.
            input: the whole vector, as many elements and the dtype on every rank; or a list of ``size``
                tensors, one for each rank. ``output`` may be part r of it (in place).
            counts: elements of each part, in rank order, the same on every rank; None: equal parts, or those
                of the list.
            op, async_op, algorithm, deterministic, timeout, compression: see :mod:`pycomm.collectives`.
            error_feedback: likewise, of as many elements as ``input``.

        Returns:
            ``output`` (a :class:`pycomm.Work` with async_op).

        Raises:
            TypeError, ValueError, CommError: the common list of :mod:`pycomm.collectives`; a ValueError also
                when ``input`` does not divide evenly and no counts are given.

        Example:
            >>> import pycomm, torch
            >>> comm = pycomm.init()
            >>> comm.reduce_scatter(torch.zeros(2), torch.tensor([1.0, 2.0]), "max")
            tensor([1., 2.])
        """
        with self._refusing:
            counts = arguments.sizes("reduce_scatter: counts", counts, self.size)
            if counts is None:
                counts = arguments.part_sizes("reduce_scatter: input", input, self.size)
        return self._call(
            "reduce_scatter", input, output, async_op, timeout,
            op=op, algorithm=algorithm, deterministic=deterministic, counts=counts,
            coding=(compression, error_feedback, input),
        )  # fmt: skip

    @refuses_wrong_calls
    def all_gather(
        self,
        output: Tensors,
        input: Tensors,
        *,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        algorithm: str | None = None,
        timeout: float | None = None,
        compression: str | None = None,
        error_feedback: ErrorFeedback | None = None,
    ) -> Any:
        """Every rank gets the concatenation of all ranks' inputs, in rank order.

        Args:
            output: the whole vector, ``size`` times ``input`` or the sum of ``counts`` elements, any shape;
                or a list of ``size`` tensors, one for each rank.
            input: this rank's part, the dtype of ``output``; may be its place in ``output`` (in place).
            counts: elements of each part, in rank order, the same on every rank; None: equal parts, or those
                of the list.
            async_op, algorithm, timeout: see :mod:`pycomm.collectives`.
            compression: likewise; where there are several hosts all ranks, this one included, get what the
                codes of its part say.
            error_feedback: likewise, of as many elements as ``output``.

        Returns:
            ``output`` (a :class:`pycomm.Work` with async_op).

        Raises:
            TypeError, ValueError, CommError: the common list of :mod:`pycomm.collectives`.

        Example:
            >>> import pycomm, torch
            >>> comm = pycomm.init()
            >>> comm.all_gather(torch.zeros(comm.size, 2), torch.ones(2))
            tensor([[1., 1.]])
        """
        with self._refusing:
            counts = arguments.sizes("all_gather: counts", counts, self.size)
            if counts is None:
                counts = arguments.part_sizes("all_gather: output", output, self.size)
        return self._call(
            "all_gather", input, output, async_op, timeout,
            algorithm=algorithm, counts=counts, coding=(compression, error_feedback, output),
        )  # fmt: skip

    @refuses_wrong_calls
    def broadcast(
        self,
        tensor: Tensors,
        src: int = 0,
        *,
        async_op: bool = False,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Every rank's ``tensor`` becomes that of rank ``src``.

        Args:
            tensor: any shape, as many elements and the same dtype on every rank; overwritten except on src.
            src: the rank whose values all get.
            async_op, algorithm, timeout: see :mod:`pycomm.collectives`.

        Returns:
            ``tensor`` (a :class:`pycomm.Work` with async_op).

        Raises:
            TypeError, ValueError, CommError: the common list of :mod:`pycomm.collectives`.

        Example:
            >>> import pycomm, torch
            >>> pycomm.init().broadcast(torch.arange(3), src=0)
            tensor([0, 1, 2])
        """
        with self._refusing:
            src = arguments.rank("broadcast: src", src, self.size)
        source = tensor if src == self.rank else None
        return self._call("broadcast", source, tensor, async_op, timeout, algorithm=algorithm, root=src)

    @refuses_wrong_calls
    def reduce(
        self,
        tensor: Tensors,
        dst: int = 0,
        op: ops.Op = "sum",
        *,
        out: Tensors | None = None,
        async_op: bool = False,
        algorithm: str | None = None,
        deterministic: bool | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Rank ``dst`` gets the reduction of all ranks' tensors; the other ranks' tensors stay as they are.

        Args:
            tensor: any shape, as many elements and the same dtype on every rank.
            dst: the rank that gets the result.
            out: on dst, receives the result: as many elements and the dtype of tensor; None: in tensor.
                Ignored elsewhere.
            op, async_op, algorithm, deterministic, timeout: see :mod:`pycomm.collectives`.

        Returns:
            On dst ``out`` or ``tensor``, elsewhere None (a :class:`pycomm.Work` with async_op).

        Raises:
            TypeError, ValueError, CommError: the common list of :mod:`pycomm.collectives`.

        Example:
            >>> import pycomm, torch
            >>> pycomm.init().reduce(torch.ones(2), dst=0, op="avg")
            tensor([1., 1.])
        """
        with self._refusing:
            dst = arguments.rank("reduce: dst", dst, self.size)
        target = (tensor if out is None else out) if dst == self.rank else None
        return self._call(
            "reduce", tensor, target, async_op, timeout,
            op=op, algorithm=algorithm, deterministic=deterministic, root=dst,
        )  # fmt: skip

    @refuses_wrong_calls
    def gather(
        self,
        tensor: Tensors,
        output: Tensors | None = None,
        dst: int = 0,
        *,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Rank ``dst`` gets all ranks' tensors in rank order.

        Args:
            tensor: this rank's part, any shape, the same dtype on every rank.
            output: on dst, the whole vector: ``size`` times ``tensor``, or the sum of ``counts`` elements;
                or a list of tensors of which it is the concatenation. Ignored elsewhere.
            dst: the rank that gets the result.
            counts: elements of each part, in rank order, the same on every rank; None: equal parts.
            async_op, algorithm, timeout: see :mod:`pycomm.collectives`.

        Returns:
            On dst ``output``, elsewhere None (a :class:`pycomm.Work` with async_op).

        Raises:
            TypeError, ValueError, CommError: the common list of :mod:`pycomm.collectives`; a ValueError also
                when dst gives no output.

        Example:
            >>> import pycomm, torch
            >>> comm = pycomm.init()
            >>> comm.gather(torch.ones(2), torch.zeros(comm.size, 2) if comm.rank == 0 else None)
            tensor([[1., 1.]])
        """
        with self._refusing:
            dst = arguments.rank("gather: dst", dst, self.size)
            counts = arguments.sizes("gather: counts", counts, self.size)
            if dst == self.rank and output is None:
                raise ValueError(f"gather: rank {dst} is dst and needs output=")
        target = output if dst == self.rank else None
        return self._call(
            "gather", tensor, target, async_op, timeout, algorithm=algorithm, root=dst, counts=counts
        )

    @refuses_wrong_calls
    def scatter(
        self,
        output: Tensors,
        input: Tensors | None = None,
        src: int = 0,
        *,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
        algorithm: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Rank r gets part r of rank ``src``'s ``input``.

        Args:
            output: this rank's part, any shape, the same dtype on every rank.
            input: on src, the whole vector: ``size`` times ``output``, or the sum of ``counts`` elements;
                or a list of tensors of which it is the concatenation. Ignored elsewhere.
            src: the rank whose values are handed out.
            counts: elements of each part, in rank order, the same on every rank; None: equal parts.
            async_op, algorithm, timeout: see :mod:`pycomm.collectives`.

        Returns:
            ``output`` (a :class:`pycomm.Work` with async_op).

        Raises:
            TypeError, ValueError, CommError: the common list of :mod:`pycomm.collectives`; a ValueError also
                when src gives no input.

        Example:
            >>> import pycomm, torch
            >>> comm = pycomm.init()
            >>> comm.scatter(torch.zeros(2), torch.ones(comm.size, 2) if comm.rank == 0 else None)
            tensor([1., 1.])
        """
        with self._refusing:
            src = arguments.rank("scatter: src", src, self.size)
            counts = arguments.sizes("scatter: counts", counts, self.size)
            if src == self.rank and input is None:
                raise ValueError(f"scatter: rank {src} is src and needs input=")
        source = input if src == self.rank else None
        return self._call(
            "scatter", source, output, async_op, timeout, algorithm=algorithm, root=src, counts=counts
        )

    @refuses_wrong_calls
    def all_to_all(
        self,
        output: Tensors,
        input: Tensors,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Rank r's q-th block goes to rank q, as its r-th block.

        Args:
            output, input: one tensor each, any shape, of one dtype; or lists of ``size`` tensors (one block
                for each rank). They may not overlap.
            output_split_sizes, input_split_sizes: rows (of dimension 0) of each block, ``size`` of them;
                None: equal blocks. Block q of this rank's input is as large as block r of q's output.
            async_op, timeout: see :mod:`pycomm.collectives`.

        Returns:
            ``output`` (a :class:`pycomm.Work` with async_op).

        Raises:
            TypeError, ValueError, CommError: the common list of :mod:`pycomm.collectives`.

        Example:
            >>> import pycomm, torch
            >>> comm = pycomm.init()
            >>> comm.all_to_all(torch.zeros(2), torch.ones(2), [2], [2])
            tensor([1., 1.])
        """
        with self._refusing:
            sends = arguments.block_sizes("input", input, input_split_sizes, self.size)
            receives = arguments.block_sizes("output", output, output_split_sizes, self.size)
        return self._call(
            "all_to_all", input, output, async_op, timeout, send_counts=sends, recv_counts=receives
        )

    @refuses_wrong_calls
    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Returns when every rank has called it.

        Args:
            async_op, timeout: see :mod:`pycomm.collectives`.

        Returns:
            None (a :class:`pycomm.Work` with async_op).

        Raises:
            TypeError, ValueError, CommError: the common list of :mod:`pycomm.collectives`.

        Example:
            >>> import pycomm
            >>> pycomm.init().barrier()
        """
        return self._call("barrier", None, None, async_op, timeout)
