"""The process group: torch's calls with torch's options, made on a communicator.

torch calls these methods from Python (``torch.distributed``) and, through its trampoline for Python groups,
from C++ (torch's reducer, functional collectives). Each gives the work that it is: ``Done`` when torch did not
ask for an asynchronous call, since a call that the caller makes itself needs no other thread. Point-to-point
calls are always asynchronous: their order on a pair of ranks is given by tags, not by program order.

Names: torch has renamed methods over time (``_allgather_base`` is ``all_gather_single`` now, and so on); the
older names are aliases at the end of the class. Ranks, roots and peers are those of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from pycomm.ddp.not_traced import NotTraced
from pycomm.initialize import init
from pycomm.torch_backend import sparse
from pycomm.torch_backend.errors import translated
from pycomm.torch_backend.tensors import movable, plain, reducible
from pycomm.torch_backend.works import Done, Pending
from pycomm.work import Work

__all__ = ["ProcessGroup"]

_Kind = c10d.ReduceOp.RedOpType
_OPS = {
    _Kind.SUM: "sum",
    _Kind.AVG: "avg",
    _Kind.PRODUCT: "product",
    _Kind.MIN: "min",
    _Kind.MAX: "max",
    _Kind.BAND: "band",
    _Kind.BOR: "bor",
    _Kind.BXOR: "bxor",
}


def _op_of(reduce_op: Any) -> Any:
    """pycomm's word for torch's operation."""
    kind = reduce_op.op
    if kind == _Kind.PREMUL_SUM:
        return "premul_sum", float(reduce_op.__getstate__()[1])
    return _OPS[kind]


def _seconds(options: Any) -> float | None:
    """The timeout of one call; torch's "unset" is negative."""
    limit: float = options.timeout.total_seconds()
    return limit if limit > 0 else None


def _is_async(options: Any) -> bool:
    return bool(getattr(options, "asyncOp", True))


class ProcessGroup(dist.ProcessGroup):
    """A group of torch.distributed on a communicator of its own; made by torch, see the package's text."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = store
        self._group_name = ""
        self._group_desc = ""
        with translated():
            self._comm = init(store=store, rank=rank, size=size, timeout=timeout.total_seconds())

    # ---- what it is -------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """For torch."""
        return "pycomm"

    def setGroupName(self, name: str) -> None:
        """For torch."""
        self._group_name = name

    def getGroupName(self) -> str:
        """For torch."""
        return self._group_name

    def setGroupDesc(self, desc: str) -> None:
        """For torch."""
        self._group_desc = desc

    def getGroupDesc(self) -> str:
        """For torch."""
        return self._group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]  # DCP's async_save asks

    def get_group_store(self) -> Any:
        """Of this group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """The default of later calls."""
        self._comm.timeout = timeout.total_seconds()

    def abort(self) -> None:
        """Ends pending calls here and on the peers with an error."""
        self._comm.abort("the process group was aborted")

    def shutdown(self) -> None:
        """Waits for what is queued and leaves."""
        self._comm.close()

    # ---- making calls -----------------------------------------------------------------------------------

    def _make(
        self,
        options: Any,
        outputs: list[Tensor],
        calls: Sequence[Callable[..., Any]],
        finish: Callable[[], None] | None = None,
    ) -> Any:
        """Makes calls (functions of ``async_op`` and ``timeout``) in order; the work of all of them."""
        timeout = _seconds(options)
        with translated():
            if not _is_async(options):
                for call in calls:
                    call(async_op=False, timeout=timeout)
                if finish is not None:
                    finish()
                return Done(outputs)
            works = [call(async_op=True, timeout=timeout) for call in calls]
        return Pending(works, outputs, finish)

    @NotTraced
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """See torch.distributed.all_reduce."""
        opts = c10d.AllreduceOptions() if opts is None else opts
        if tensors[0].layout is not torch.strided:
            return sparse.all_reduce(self._comm, tensors[0], _op_of(opts.reduceOp))
        return self.allreduce_coalesced(tensors, opts)

    @NotTraced
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Several all_reduces of one operation."""
        opts = c10d.AllreduceCoalescedOptions() if opts is None else opts
        op, found = _op_of(opts.reduceOp), reducible("all_reduce", tensors)
        if len(found) == 1:
            [one] = found
            return self._make(opts, tensors, [lambda **how: self._comm.all_reduce(one, op, **how)])
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in found:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        calls = [
            lambda group=group, **how: self._comm.all_reduce(group, op, **how) for group in by_dtype.values()
        ]
        return self._make(opts, tensors, calls)

    @NotTraced
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """See torch.distributed.broadcast."""
        opts = c10d.BroadcastOptions() if opts is None else opts
        [tensor] = movable("broadcast", tensors)
        root = opts.rootRank
        return self._make(opts, tensors, [lambda **how: self._comm.broadcast(tensor, root, **how)])

    @NotTraced
    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """See torch.distributed.reduce."""
        [tensor], op, root = reducible("reduce", tensors), _op_of(opts.reduceOp), opts.rootRank
        return self._make(opts, tensors, [lambda **how: self._comm.reduce(tensor, root, op, **how)])

    @NotTraced
    def allgather(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """See torch.distributed.all_gather; the outputs of a list may differ in size."""
        opts = c10d.AllgatherOptions() if opts is None else opts
        calls = []
        for outputs, given in zip(output_lists, movable("all_gather", inputs), strict=True):
            parts = movable("all_gather", outputs)
            calls.append(
                lambda parts=parts, given=given, **how: self._comm.all_gather(parts, given, **how)
            )
        return self._make(opts, output_lists[0], calls)

    @NotTraced
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """See torch.distributed.all_gather_into_tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    @NotTraced
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """Several of them."""
        opts = c10d.AllgatherOptions() if opts is None else opts
        pairs = zip(movable("all_gather", outputs), movable("all_gather", inputs), strict=True)
        calls = [lambda o=o, i=i, **how: self._comm.all_gather(o, i, **how) for o, i in pairs]
        return self._make(opts, outputs, calls)

    @NotTraced
    def gather(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        """See torch.distributed.gather."""
        root, [given] = opts.rootRank, movable("gather", inputs)
        outputs = output_lists[0] if output_lists else []
        parts = movable("gather", outputs) if self._comm.rank == root else None
        return self._make(opts, outputs, [lambda **how: self._comm.gather(given, parts, root, **how)])

    @NotTraced
    def scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any) -> Any:
        """See torch.distributed.scatter."""
        root, [output] = opts.rootRank, movable("scatter", outputs)
        parts = movable("scatter", input_lists[0]) if self._comm.rank == root else None
        return self._make(opts, outputs, [lambda **how: self._comm.scatter(output, parts, root, **how)])

    @NotTraced
    def reduce_scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any = None) -> Any:
        """See torch.distributed.reduce_scatter; the inputs of a list may differ in size."""
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        op, calls = _op_of(opts.reduceOp), []
        for output, parts in zip(reducible("reduce_scatter", outputs), input_lists, strict=True):
            given = reducible("reduce_scatter", parts)
            calls.append(
                lambda output=output, given=given, **how: self._comm.reduce_scatter(output, given, op, **how)
            )
        return self._make(opts, outputs, calls)

    @NotTraced
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """See torch.distributed.reduce_scatter_tensor."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    @NotTraced
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """Several of them."""
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        op = _op_of(opts.reduceOp)
        pairs = zip(reducible("reduce_scatter", outputs), reducible("reduce_scatter", inputs), strict=True)
        calls = [lambda o=o, i=i, **how: self._comm.reduce_scatter(o, i, op, **how) for o, i in pairs]
        return self._make(opts, outputs, calls)

    @NotTraced
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Any:
        """See torch.distributed.all_to_all_single; empty split sizes mean equal ones."""
        opts = c10d.AllToAllOptions() if opts is None else opts
        [out, given] = movable("all_to_all_single", [output, input])
        splits = list(output_split_sizes) or None, list(input_split_sizes) or None
        return self._make(opts, [output], [lambda **how: self._comm.all_to_all(out, given, *splits, **how)])

    @NotTraced
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """See torch.distributed.all_to_all."""
        opts = c10d.AllToAllOptions() if opts is None else opts
        outs, given = movable("all_to_all", outputs), movable("all_to_all", inputs)
        return self._make(opts, outputs, [lambda **how: self._comm.all_to_all(outs, given, **how)])

    @NotTraced
    def barrier(self, opts: Any = None) -> Any:
        """See torch.distributed.barrier."""
        opts = c10d.BarrierOptions() if opts is None else opts
        return self._make(opts, [], [self._comm.barrier])

    # ---- point to point ---------------------------------------------------------------------------------

    @NotTraced
    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        """See torch.distributed.isend."""
        [tensor] = movable("send", tensors)
        return self._transfer(tensors, lambda: self._comm.isend(tensor, dst, tag))

    @NotTraced
    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        """See torch.distributed.irecv."""
        [tensor] = movable("recv", tensors)
        return self._transfer(tensors, lambda: self._comm.irecv(tensor, src, tag))

    @NotTraced
    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        """See torch.distributed.irecv without ``src``."""
        [tensor] = movable("recv", tensors)
        return self._transfer(tensors, lambda: self._comm.irecv(tensor, None, tag))

    def _transfer(self, tensors: list[Tensor], start: Callable[[], Work]) -> Any:
        with translated():
            return Pending([start()], tensors)

    # ---- older names, and those of C++ ------------------------------------------------------------------

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    @NotTraced
    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """Several all_gathers; ``output_lists[i]`` are the outputs of ``inputs[i]``."""
        return self.allgather(output_lists, inputs, opts)

    @NotTraced
    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names who did not come; every barrier's does."""
        limit = None if timeout is None or timeout.total_seconds() <= 0 else timeout.total_seconds()
        with translated():
            self._comm.barrier(timeout=limit)
