"""The process group: torch's calls with torch's options, made on a communicator.

torch calls these methods from Python (``torch.distributed``) and, through its trampoline for Python groups,
from C++ (torch's reducer, functional collectives). Each gives a work: ``Done`` when torch did not ask for an
asynchronous call, since a call that the caller makes itself needs no other thread. Point-to-point calls are
always asynchronous: their order on a pair of ranks is given by tags, not by program order.

A wrong argument of a collective is refused: it raises here what it is, and on the other ranks, which would
wait otherwise, that this rank was refused; the group stays usable.

Names: torch has renamed methods over time (``_allgather_base`` is ``all_gather_single`` now, and so on); the
older names are aliases at the end of the class. Ranks, roots and peers are those of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from pycomm.errors import CommError
from pycomm.initialize import init
from pycomm.ops import NAMES
from pycomm.torch_backend import sparse
from pycomm.torch_backend.backend import Backend
from pycomm.torch_backend.errors import as_torchs
from pycomm.torch_backend.integer_mean import as_sum, division
from pycomm.torch_backend.making import Maker
from pycomm.torch_backend.monitored_barrier import MonitoredBarrier
from pycomm.torch_backend.tensors import movable, reducible
from pycomm.torch_backend.untraced import Untraced
from pycomm.work import Work

__all__ = ["ProcessGroup"]

_Kind: Any = c10d.ReduceOp.RedOpType
_OPS = {getattr(_Kind, name.upper()): name for name in NAMES if name != "premul_sum"}


def _op_of(reduce_op: Any) -> Any:
    """pycomm's word for torch's operation."""
    word = _OPS.get(reduce_op.op)
    return word if word is not None else ("premul_sum", float(reduce_op.__getstate__()[1]))


class ProcessGroup(Backend, dist.ProcessGroup):
    """A group of torch.distributed on a communicator of its own; made by torch, see the package's text."""

    _is_pycomms = True

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        cast(Any, super()).__init__(rank, size)  # of a group that has no backends of its own
        self._store = store
        self._group_name = ""
        self._group_desc = ""
        try:
            self._comm = init(store=store, rank=rank, size=size, timeout=timeout.total_seconds())
        except CommError as error:
            raise as_torchs(error) from error
        self._refusing = self._comm._refusing
        self._is_checked = False
        # Of these ranks' meeting alone: torch gives the same names to the groups of a world made anew, and in
        # the same store what is left of an earlier one would count.
        own: Any = dist.PrefixStore(self._comm._met_in, store)  # type: ignore[attr-defined]
        self._barriers = MonitoredBarrier(own, rank, size)
        self._maker = Maker(self, self._comm, own)

    # ---- what it is -------------------------------------------------------------------------------------

    @property
    def communicator(self) -> Any:
        """The :class:`pycomm.Communicator` that serves the group, also closed by it."""
        return self._comm

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

    def _check_backends(self) -> None:
        """At the first call, when torch has noted what the group was asked to be.

        torch lets a backend written in Python stand for the whole group, whatever the other devices were to
        have: "cpu:gloo,cuda:pycomm" would silently run CPU tensors here.

        Raises:
            ValueError: a device was to have another backend, or none is the CPU.
        """
        asked: str | None = dist.distributed_c10d._world.pg_backend_config.get(self)
        if asked is None:
            return
        backends = dict(pair.split(":") for pair in asked.split(",") if ":" in pair)
        if set(backends.values()) != {"pycomm"} or "cpu" not in backends:
            raise ValueError(
                f'a group of the backends "{asked}" cannot be: pycomm serves all devices of its group and '
                'has an engine for CPU tensors only; make it with "cpu:pycomm", and one for other devices '
                'with new_group(backend="nccl")'
            )
        self._is_checked = True

    # ---- collectives ---------------------------------------------------------------------------------

    def _make(self, *call: Any) -> Any:
        if not self._is_checked:
            self._check_backends()
        return self._maker.make(*call)

    @Untraced
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """See torch.distributed.all_reduce."""
        opts = c10d.AllreduceOptions() if opts is None else opts
        [tensor] = tensors
        if tensor.layout is not torch.strided:
            with self._maker.noting("all_reduce", tensors):
                return sparse.all_reduce(self._comm, tensor, _op_of(opts.reduceOp))
        with self._refusing:
            op, [plain] = _op_of(opts.reduceOp), reducible("all_reduce", tensors)
        calls = [partial(self._comm.all_reduce, plain, as_sum(op, plain))]
        return self._make("all_reduce", opts, tensors, tensors, calls, division(op, [plain], self._comm.size))

    @Untraced
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Several all_reduces of one operation."""
        opts = c10d.AllreduceCoalescedOptions() if opts is None else opts
        with self._refusing:
            op, found = _op_of(opts.reduceOp), reducible("all_reduce", tensors)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in found:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        calls = [
            lambda group=(group[0] if len(group) == 1 else group), **how: self._comm.all_reduce(
                group, as_sum(op, group if isinstance(group, Tensor) else group[0]), **how
            )
            for group in by_dtype.values()
        ]
        return self._make("all_reduce", opts, tensors, tensors, calls, division(op, found, self._comm.size))

    @Untraced
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """See torch.distributed.broadcast."""
        opts = c10d.BroadcastOptions() if opts is None else opts
        with self._refusing:
            [tensor], root = movable("broadcast", tensors), opts.rootRank
        calls = [lambda **how: self._comm.broadcast(tensor, root, **how)]
        return self._make("broadcast", opts, tensors, tensors, calls)

    @Untraced
    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """See torch.distributed.reduce."""
        with self._refusing:
            [tensor], op, root = reducible("reduce", tensors), _op_of(opts.reduceOp), opts.rootRank
        calls = [lambda **how: self._comm.reduce(tensor, root, as_sum(op, tensor), **how)]
        finish = division(op, [tensor] if self._comm.rank == root else [], self._comm.size)
        return self._make("reduce", opts, tensors, tensors, calls, finish)

    @Untraced
    def allgather(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """See torch.distributed.all_gather: ``output_lists[i]`` are the ranks' ``inputs[i]``, of any size."""
        opts = c10d.AllgatherOptions() if opts is None else opts
        with self._refusing:
            pairs = [
                (movable("all_gather", outputs), given)
                for outputs, given in zip(output_lists, movable("all_gather", inputs), strict=True)
            ]
        calls = [lambda o=o, i=i, **how: self._comm.all_gather(o, i, **how) for o, i in pairs]
        return self._make("all_gather", opts, inputs, output_lists[0], calls)

    @Untraced
    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """See torch.distributed.all_gather_coalesced: ``output_lists[r]`` are all inputs of rank r."""
        with self._refusing:
            by_input = [list(parts) for parts in zip(*output_lists, strict=True)]
        return self.allgather(by_input, inputs, opts)

    @Untraced
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """See torch.distributed.all_gather_into_tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    @Untraced
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """Several of them."""
        opts = c10d.AllgatherOptions() if opts is None else opts
        with self._refusing:
            pairs = list(zip(movable("all_gather", outputs), movable("all_gather", inputs), strict=True))
        calls = [lambda o=o, i=i, **how: self._comm.all_gather(o, i, **how) for o, i in pairs]
        return self._make("all_gather_into_tensor", opts, inputs, outputs, calls)

    @Untraced
    def gather(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        """See torch.distributed.gather."""
        outputs = output_lists[0] if output_lists else []
        with self._refusing:
            root, [given] = opts.rootRank, movable("gather", inputs)
            parts = movable("gather", outputs) if self._comm.rank == root else None
        calls = [lambda **how: self._comm.gather(given, parts, root, **how)]
        return self._make("gather", opts, inputs, outputs, calls)

    @Untraced
    def scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any) -> Any:
        """See torch.distributed.scatter."""
        with self._refusing:
            root, [output] = opts.rootRank, movable("scatter", outputs)
            parts = movable("scatter", input_lists[0]) if self._comm.rank == root else None
        calls = [lambda **how: self._comm.scatter(output, parts, root, **how)]
        return self._make("scatter", opts, input_lists[0] if input_lists else [], outputs, calls)

    @Untraced
    def reduce_scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any = None) -> Any:
        """See torch.distributed.reduce_scatter; the inputs of a list may differ in size."""
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        with self._refusing:
            op, parts = _op_of(opts.reduceOp), reducible("reduce_scatter", outputs)
            given = [reducible("reduce_scatter", inputs) for inputs in input_lists]
            pairs = list(zip(parts, given, strict=True))
        calls = [
            lambda o=o, i=i, **how: self._comm.reduce_scatter(o, i, as_sum(op, o), **how) for o, i in pairs
        ]
        finish = division(op, parts, self._comm.size)
        return self._make("reduce_scatter", opts, input_lists[0], outputs, calls, finish)

    @Untraced
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """See torch.distributed.reduce_scatter_tensor."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    @Untraced
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        """Several of them."""
        opts = c10d.ReduceScatterOptions() if opts is None else opts
        with self._refusing:
            op, parts = _op_of(opts.reduceOp), reducible("reduce_scatter", outputs)
            pairs = list(zip(parts, reducible("reduce_scatter", inputs), strict=True))
        calls = [
            lambda o=o, i=i, **how: self._comm.reduce_scatter(o, i, as_sum(op, o), **how) for o, i in pairs
        ]
        finish = division(op, parts, self._comm.size)
        return self._make("reduce_scatter_tensor", opts, inputs, outputs, calls, finish)

    @Untraced
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
        with self._refusing:
            [out, given] = movable("all_to_all_single", [output, input])
        splits = list(output_split_sizes) or None, list(input_split_sizes) or None
        calls = [lambda **how: self._comm.all_to_all(out, given, *splits, **how)]
        return self._make("all_to_all", opts, [input], [output], calls)

    @Untraced
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """See torch.distributed.all_to_all."""
        opts = c10d.AllToAllOptions() if opts is None else opts
        with self._refusing:
            outs, given = movable("all_to_all", outputs), movable("all_to_all", inputs)
        calls = [lambda **how: self._comm.all_to_all(outs, given, **how)]
        return self._make("all_to_all", opts, inputs, outputs, calls)

    @Untraced
    def barrier(self, opts: Any = None) -> Any:
        """See torch.distributed.barrier."""
        opts = c10d.BarrierOptions() if opts is None else opts
        return self._make("barrier", opts, [], [], [self._comm.barrier])

    @Untraced
    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """See torch.distributed.monitored_barrier; a negative timeout is the group's."""
        if isinstance(timeout, (int, float)):
            timeout = timedelta(seconds=timeout)
        if timeout is None or timeout < timedelta(0):
            timeout = timedelta(seconds=min(self._comm.timeout, 1e8))
        self._barriers(timeout, wait_all_ranks)

    # ---- point to point ---------------------------------------------------------------------------------

    @Untraced
    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        """See torch.distributed.isend."""
        [tensor] = movable("send", tensors)
        peers = f"{self._comm.rank}->{dst}"
        return self._transfer("send", peers, tensors, lambda: self._comm.isend(tensor, dst, tag))

    @Untraced
    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        """See torch.distributed.irecv."""
        [tensor] = movable("recv", tensors)
        peers = f"{self._comm.rank}<-{src}"
        return self._transfer("recv", peers, tensors, lambda: self._comm.irecv(tensor, src, tag))

    @Untraced
    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        """See torch.distributed.irecv without ``src``."""
        [tensor] = movable("recv", tensors)
        peers = f"{self._comm.rank}<--1"
        return self._transfer("recvAnySource", peers, tensors, lambda: self._comm.irecv(tensor, None, tag))

    def _transfer(self, name: str, peers: str, tensors: list[Tensor], start: Callable[[], Work]) -> Any:
        if not self._is_checked:
            self._check_backends()
        return self._maker.transfer(name, peers, tensors, start)

    # ---- older names ------------------------------------------------------------------------------------

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
