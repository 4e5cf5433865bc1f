"""The limit: each collective as nothing but its memory traffic, on shared pages, in the same run.

Every rank maps every other rank's buffers (``pycomm._C.Probe``, csrc/engine/probe.h) and does its share of
the reads, additions and writes straight on them, in float32 whatever the dtype (the same bytes), then one
exchange of flags. The probe also gives the start line of every timed call, whoever is measured, and the
regime probe.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable

import torch

from pycomm import _C
from pycomm.bench.buffers import Contents, Memory, Slots
from pycomm.bench.collectives import Shape, shape_of
from pycomm.bench.control import Control
from pycomm.bench.report import Regime

__all__ = ["Limit"]

_SHARD_ELEMS = 32  # shards begin at multiples of two cache lines, so that ranks do not write the same line

Place = tuple[int, int]
Move = tuple[list[Place], list[Place], int]


class Limit:
    """A library like the others, except that it computes nothing but float32 sums."""

    name = "limit"

    def __init__(self, control: Control, max_bytes: int) -> None:
        """Collective: makes this rank's segment and maps those of all others (one host, one user)."""
        self._control = control
        page = os.sysconf("SC_PAGE_SIZE")
        self._half = -(-Memory.n_bytes_for(max(max_bytes, 256 << 10)) // page) * page
        self.probe = _C.Probe(control.rank, control.n_ranks, 2 * self._half)
        segments = control.exchange("probe", [os.getpid(), self.probe.fd])
        for peer, (pid, peer_fd) in enumerate(segments):
            if peer != control.rank:
                fd = os.open(f"/proc/{pid}/fd/{peer_fd}", os.O_RDWR | os.O_CLOEXEC)
                self.probe.attach(peer, fd)
                os.close(fd)
        control.barrier()  # nobody may leave (and close its memfd) before everybody has mapped it
        data = torch.frombuffer(self.probe, dtype=torch.uint8)
        self.memory = Memory("probe", data[: self._half], data[self._half :])

    def contents(self, shape: Shape, itemsize: int, n_slots: int) -> Contents:
        """The float32 contents that have as many bytes as ``shape`` with elements of ``itemsize`` bytes."""
        n_bytes = shape.n_buffer * itemsize
        mine = shape_of(shape.collective, -(-n_bytes // 4) * 4, 4, shape.n_ranks, shape.rank, shape.root)
        return Contents(mine, "sum", torch.float32, n_slots)

    def bind(self, slots: Slots, k: int) -> Callable[[], object]:
        """The call on slot ``k``."""
        return functools.partial(self.probe.run, self.probe.plan(self._moves(slots, k)))

    def regime(self) -> Regime:
        """Measures how near the cores are now; a few milliseconds, collective."""
        crowded = self._control.n_ranks > (os.cpu_count() or 1)
        exchange_s = self.probe.seconds_per_exchange(50 if crowded else 2000)
        shape = shape_of("all_reduce", 256 << 10, 4, self._control.n_ranks, self._control.rank, 0)
        slots = Slots(self.memory, Contents(shape, "sum", torch.float32, 1), "in")
        call = self.bind(slots, 0)
        fresh_s = []
        for _ in range(5 if crowded else 15):
            slots.dirty()
            self.probe.exchange()
            start = time.perf_counter()
            call()
            fresh_s.append(time.perf_counter() - start)
        exchange_us, fresh_us = self._control.max([exchange_s * 1e6, statistics.median(fresh_s) * 1e6])
        return Regime(exchange_us, fresh_us)

    def _moves(self, slots: Slots, k: int) -> list[Move]:
        shape, in_place = slots.contents.shape, slots.place == "in"
        n, me, root, count = shape.n_ranks, shape.rank, shape.root, shape.count
        in_start, out_start = slots.offsets(k)

        def source(rank: int, elem: int) -> Place:
            if in_place and shape.n_in < shape.n_buffer:
                elem += rank * count
            return rank, in_start + 4 * elem

        def target(rank: int, elem: int) -> Place:
            if not in_place:
                return rank, self._half + out_start + 4 * elem
            if shape.n_out < shape.n_buffer:
                elem += rank * count
            return rank, in_start + 4 * elem

        everyone = range(n)
        match shape.collective:
            case "all_reduce" | "reduce":
                low, high = _shard(shape.n_in, me, n)
                owners = everyone if shape.collective == "all_reduce" else [root]
                moves = [([source(q, low) for q in everyone], [target(q, low) for q in owners], high - low)]
            case "reduce_scatter":
                moves = [([source(q, me * count) for q in everyone], [target(me, 0)], count)]
            case "all_gather":
                moves = [([source(q, 0)], [target(me, q * count)], count) for q in everyone]
            case "all_to_all":
                moves = [([source(q, me * count)], [target(me, q * count)], count) for q in everyone]
            case "gather":
                moves = [([source(me, 0)], [target(root, me * count)], count)]
            case "scatter":
                moves = [([source(root, me * count)], [target(me, 0)], count)]
            case "broadcast":
                moves = [([source(root, 0)], [target(me, 0)], count)]
            case "sendrecv":
                moves = [([source((me - 1) % n, 0)], [target(me, 0)], count)]
            case other:
                raise ValueError(f"limit: no memory plan for collective {other!r}")
        # a copy onto itself (the own block, in place) is no traffic
        return [move for move in moves if move[2] and not (len(move[0]) == 1 and move[0] == move[1])]


def _shard(n_elems: int, rank: int, n_ranks: int) -> tuple[int, int]:
    low = n_elems * rank // n_ranks // _SHARD_ELEMS * _SHARD_ELEMS
    high = n_elems * (rank + 1) // n_ranks // _SHARD_ELEMS * _SHARD_ELEMS
    return low, n_elems if rank == n_ranks - 1 else high
