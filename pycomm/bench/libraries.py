"""How each library is called: bind a collective to one slot's tensors, get a function of no arguments.

``bind`` returns None where a library has no such call (gloo's all_reduce exists only in place): then that
cell of the table stays empty. Everything that can be done before the clock starts is done in ``bind`` (numpy
views for MPI, lists of blocks for torch), at least as kind to the peers as a user's program would be.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

import pycomm
from pycomm.bench.buffers import Memory, Slots
from pycomm.bench.control import load_mpi
from pycomm.bench.exact import PREMUL_FACTOR
from pycomm.ops import NAMES

__all__ = ["Library", "Mpi", "Pycomm", "SymmetricMemory", "Torch"]

Call = Callable[[], object]


class Library(Protocol):
    """What is measured: a name for the table, memory to work on, and calls."""

    name: str
    memory: Memory

    def bind(self, slots: Slots, k: int) -> Call | None:
        """The collective on slot ``k``, or None where the library has no such call."""


class Pycomm:
    """pycomm itself, on ordinary tensors or on arena tensors."""

    def __init__(self, comm: Any, memory: Memory, algorithm: str | None, name: str = "pycomm") -> None:
        """``comm`` is a ``pycomm.Communicator`` over all ranks; ``algorithm`` None: its choice."""
        self._comm, self.memory, self.name = comm, memory, name
        self._options = {} if algorithm is None else {"algorithm": algorithm}

    @staticmethod
    def init() -> Any:
        """A communicator over the control group's ranks."""
        return pycomm.init(group=dist.group.WORLD)

    @staticmethod
    def arena(comm: Any, n_bytes: int, device: Any = None) -> Memory:
        """Memory in the shared arena of ``comm``, on the CPU or on its CUDA device."""
        return Memory("arena", *(comm.empty(n_bytes, dtype=torch.uint8, device=device) for _ in range(2)))

    def bind(self, slots: Slots, k: int) -> Call | None:
        """See ``Library.bind``."""
        shape, comm, options = slots.contents.shape, self._comm, self._options
        data, out = slots.pairs[k]
        root, me, n = shape.root, shape.rank, shape.n_ranks
        op: Any = slots.contents.op
        if op == "premul_sum":
            op = ("premul_sum", PREMUL_FACTOR)
        match shape.collective:
            case "all_reduce":
                if slots.place == "in":
                    return partial(comm.all_reduce, data, op, **options)
                if options:
                    return partial(comm.all_reduce, data, op, out=out, **options)
                # partial would merge keyword dictionaries in each call, which no user's program does.
                all_reduce = comm.all_reduce
                return lambda: all_reduce(data, op, out=out)
            case "reduce":
                if slots.place == "in" or me != root:
                    return partial(comm.reduce, data, root, op, **options)
                return partial(comm.reduce, data, root, op, out=out, **options)
            case "reduce_scatter":
                return partial(comm.reduce_scatter, out, data, op, **options)
            case "all_gather":
                return partial(comm.all_gather, out, data, **options)
            case "broadcast":
                return partial(comm.broadcast, data, root, **options)
            case "gather":
                return partial(comm.gather, data, out if me == root else None, root, **options)
            case "scatter":
                return partial(comm.scatter, out, data if me == root else None, root, **options)
            case "all_to_all":
                return partial(comm.all_to_all, out, data)
            case "sendrecv":
                to, source = (me + 1) % n, (me - 1) % n

                def send_and_recv() -> None:
                    work = comm.irecv(out, source)
                    comm.send(data, to)
                    work.wait()

                return send_and_recv
        raise ValueError(f"pycomm: no call for collective {shape.collective!r}")


class Torch:
    """gloo or NCCL through torch.distributed, on ordinary tensors."""

    _OPS: ClassVar = {name: getattr(dist.ReduceOp, name.upper()) for name in NAMES if name != "premul_sum"}

    def __init__(self, name: str, memory: Memory, group: Any) -> None:
        """``group``: a process group of the backend ``name``; None: the default one, which is gloo."""
        self.name, self.memory, self._group = name, memory, group

    def bind(self, slots: Slots, k: int) -> Call | None:
        """See ``Library.bind``."""
        shape, in_place = slots.contents.shape, slots.place == "in"
        data, out = slots.pairs[k]
        root, me, n = shape.root, shape.rank, shape.n_ranks
        op: Any = self._OPS.get(slots.contents.op)
        group: Any = {} if self._group is None else {"group": self._group}
        match shape.collective:
            case "all_reduce":
                return partial(dist.all_reduce, data, op, **group) if op and in_place else None
            case "reduce":
                return partial(dist.reduce, data, root, op, **group) if op and in_place else None
            case "reduce_scatter":
                return partial(dist.reduce_scatter_tensor, out, data, op, **group) if op else None
            case "all_gather":
                return partial(dist.all_gather_into_tensor, out, data, **group)
            case "broadcast":
                return partial(dist.broadcast, data, root, **group)
            case "gather":
                return partial(dist.gather, data, list(out.chunk(n)) if me == root else None, root, **group)
            case "scatter":
                return partial(dist.scatter, out, list(data.chunk(n)) if me == root else None, root, **group)
            case "all_to_all":
                return partial(dist.all_to_all_single, out, data, **group)
            case "sendrecv":
                to, source = (me + 1) % n, (me - 1) % n
                return (
                    _both_at_once(data, to, out, source, self._group)
                    if group
                    else _both(data, to, out, source)
                )
        raise ValueError(f"{self.name}: no call for collective {shape.collective!r}")


def _both(data: torch.Tensor, to: int, out: torch.Tensor, source: int) -> Call:
    def send_and_recv() -> None:
        work = dist.isend(data, to)
        dist.recv(out, source)
        if work is not None:
            work.wait()

    return send_and_recv


def _both_at_once(data: torch.Tensor, to: int, out: torch.Tensor, source: int, group: Any) -> Call:
    """In one NCCL group: one after the other, ranks that all send first would wait for ever."""
    pair = [dist.P2POp(dist.isend, data, to, group), dist.P2POp(dist.irecv, out, source, group)]

    def send_and_recv() -> None:
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    return send_and_recv


class SymmetricMemory:
    """torch's own kernels on peers' memory (torch.ops.symm_mem): sums, all_reduce; one-shot or two-shot."""

    name = "torch-symm-mem"

    def __init__(self, memory: Memory, call: Any, place: str) -> None:
        """``call(data, out)`` is made out of place or in place, as ``place`` says."""
        self.memory, self._call, self._place = memory, call, place

    @classmethod
    def both(cls, group: Any, n_bytes: int, device: torch.device) -> tuple[list[SymmetricMemory], str]:
        """The two, over the NCCL group; or why torch has them not here. Collective."""
        ops: Any = torch.ops.symm_mem
        name = group.group_name
        try:
            symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
            buffers = [symmetric.empty(n_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
            for buffer in buffers:
                symmetric.rendezvous(buffer, name)
            one, two = ops.one_shot_all_reduce_out, ops.two_shot_all_reduce_
        except (ImportError, AttributeError, RuntimeError, TypeError) as error:
            return [], f"{cls.name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        return [
            cls(Memory("one-shot", *buffers), lambda data, out: one(data, "sum", name, out), "out"),
            cls(Memory("two-shot", *buffers), lambda data, _: two(data, "sum", name), "in"),
        ], ""

    def bind(self, slots: Slots, k: int) -> Call | None:
        """See ``Library.bind``."""
        contents = slots.contents
        if (contents.shape.collective, contents.op, slots.place) != ("all_reduce", "sum", self._place):
            return None
        return partial(self._call, *slots.pairs[k])


class Mpi:
    """MPI through mpi4py, on ordinary tensors (as numpy arrays that share their memory)."""

    name = "mpi"

    _OPS: ClassVar = {
        "sum": "SUM",
        "product": "PROD",
        "min": "MIN",
        "max": "MAX",
        "band": "BAND",
        "bor": "BOR",
        "bxor": "BXOR",
    }

    def __init__(self, memory: Memory) -> None:
        """Needs ranks that mpirun started."""
        self.memory = memory
        self._mpi = load_mpi()
        self._comm = self._mpi.COMM_WORLD

    def bind(self, slots: Slots, k: int) -> Call | None:
        """See ``Library.bind``."""
        shape, comm, mpi = slots.contents.shape, self._comm, self._mpi
        reduces = shape.collective in ("all_reduce", "reduce", "reduce_scatter")
        data, out = (_array(t, reduces) for t in slots.pairs[k])
        op = self._OPS.get(slots.contents.op)
        if data is None or out is None or (reduces and op is None):
            return None
        mpi_op = getattr(mpi, op) if op else None
        in_place, root, n = slots.place == "in", shape.root, shape.n_ranks
        is_root = shape.rank == root
        match shape.collective:
            case "all_reduce":
                return partial(comm.Allreduce, mpi.IN_PLACE if in_place else data, out, mpi_op)
            case "reduce":
                sent = mpi.IN_PLACE if in_place and is_root else data
                return partial(comm.Reduce, sent, out if is_root else None, mpi_op, root)
            case "reduce_scatter":
                if in_place:  # MPI leaves the block at the start of the buffer, not where it belongs
                    return None
                return partial(comm.Reduce_scatter_block, data, out, mpi_op)
            case "all_gather":
                return partial(comm.Allgather, mpi.IN_PLACE if in_place else data, out)
            case "broadcast":
                return partial(comm.Bcast, data, root)
            case "gather":
                return partial(comm.Gather, data, out if is_root else None, root)
            case "scatter":
                return partial(comm.Scatter, data if is_root else None, out, root)
            case "all_to_all":
                return partial(comm.Alltoall, data, out)
            case "sendrecv":
                to, source = (shape.rank + 1) % n, (shape.rank - 1) % n
                return partial(comm.Sendrecv, data, to, 0, out, source, 0)
        raise ValueError(f"mpi: no call for collective {shape.collective!r}")


def _array(tensor: torch.Tensor, reduces: bool) -> Any:
    """The tensor as a numpy array; its bytes when numpy lacks the dtype and nothing is reduced, else None."""
    try:
        return tensor.numpy()
    except TypeError:
        return None if reduces else tensor.view(torch.uint8).numpy()
