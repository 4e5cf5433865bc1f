"""Every layout of tensors, of every origin: collectives and transfers see values, not strides.

A layout is a function that gives a matrix's values another place in memory; the logical values are the same,
so what collectives must return is known from the plain matrix.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pycomm
from cases import algorithms, check, expected, values
from ranks import run_ranks

Layout = Callable[[torch.Tensor], torch.Tensor]
warnings.filterwarnings("ignore", message=".*not writable.*")


def put(place: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``place`` with the values of x."""
    with torch.inference_mode():  # some places are inference tensors
        return place.copy_(x.reshape(place.shape))


def permuted(x: torch.Tensor) -> torch.Tensor:
    return put(torch.zeros(3, x.shape[0], 2, dtype=x.dtype).permute(1, 2, 0), x)


def odd_strides(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, though a dimension of size 1 has a stride that says otherwise."""
    return put(torch.zeros(x.numel(), dtype=x.dtype).as_strided((1, *x.shape), (999, 6, 1)), x)


def misaligned(x: torch.Tensor) -> torch.Tensor:
    raw = bytearray(x.numel() * x.element_size() + 1)
    return put(torch.frombuffer(raw, dtype=x.dtype, offset=1), x)


def fortran(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.asfortranarray(x.numpy()))


def inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


def grad_leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


def imaginary(x: torch.Tensor) -> torch.Tensor:
    """A lazily negated view of every second number."""
    return torch.complex(torch.zeros_like(x), -x).conj().imag


LAYOUTS: dict[str, Layout] = {
    "contiguous": torch.clone,
    "transposed": lambda x: put(torch.zeros(x.shape[1], x.shape[0], dtype=x.dtype).t(), x),
    "every second": lambda x: put(torch.zeros(x.shape[0], 12, dtype=x.dtype)[:, ::2], x),
    "columns": lambda x: put(torch.zeros(x.shape[0], 9, dtype=x.dtype)[:, 2:8], x),
    "storage offset": lambda x: put(torch.zeros(x.numel() + 9, dtype=x.dtype)[7:-2], x),
    "channels_last": lambda x: x.view(1, -1, 2, 3).clone(memory_format=torch.channels_last),
    "channels_last_3d": lambda x: x.view(1, -1, 3, 1, 2).clone(memory_format=torch.channels_last_3d),
    "permuted": permuted,
    "odd strides": odd_strides,
    "misaligned": misaligned,
    "numpy": lambda x: torch.from_numpy(x.numpy().copy()),
    "numpy, Fortran": fortran,
    "shared": lambda x: x.clone().share_memory_(),
    "inference": inference,
    "Parameter": lambda x: torch.nn.Parameter(x.clone(), requires_grad=False),
    "Buffer": lambda x: torch.nn.Buffer(x.clone()),
    "Parameter, transposed": lambda x: torch.nn.Parameter(LAYOUTS["transposed"](x), requires_grad=False),
    "leaf": grad_leaf,
    "Parameter, grad": lambda x: torch.nn.Parameter(x.clone()),
    "not a leaf": lambda x: grad_leaf(x) * 1,
    "not a leaf, transposed": lambda x: LAYOUTS["transposed"](grad_leaf(x)) * 1,
    "negated": lambda x: torch._neg_view(-x),
    "imaginary": imaginary,
}
COMPLEX_LAYOUTS: dict[str, Layout] = {
    "contiguous": torch.clone,
    "conjugated": lambda x: x.conj_physical().conj(),
    "conjugated, transposed": lambda x: LAYOUTS["transposed"](x.conj_physical()).conj(),
    "negated": lambda x: torch._neg_view(-x),
    "both": lambda x: torch._neg_view(-x.conj_physical()).conj(),
}


def plain(t: torch.Tensor) -> torch.Tensor:
    return t.detach().resolve_conj().resolve_neg().contiguous()


class Place:
    """An output tensor of a layout: after the call the values are right, and it is where it was."""

    def __init__(self, lay: Layout, rows: int, dtype: torch.dtype) -> None:
        self.tensor = lay(torch.zeros(rows, 6, dtype=dtype))
        self.facts = self._facts()

    def _facts(self) -> tuple[Any, ...]:
        t = self.tensor
        return t.data_ptr(), t.shape, t.stride(), t.is_conj(), t.is_neg(), t.requires_grad

    def check(self, want: torch.Tensor, *where: object) -> None:
        assert self._facts() == self.facts, where
        check(plain(self.tensor), want, *where)


def every_call(
    comm: pycomm.Communicator, give: Layout, take: Layout, dtype: torch.dtype, *where: object
) -> None:
    """All collectives and transfers with inputs of layout ``give`` and outputs of layout ``take``."""
    n, me = comm.size, comm.rank
    rows = [values(q, 24, dtype).view(4, 6) for q in range(n)]
    all_rows, total = torch.cat(rows), expected("sum", rows)
    wide = [values(q, 24 * n, dtype).view(4 * n, 6) for q in range(n)]
    mine = give(rows[me])

    def place(parts: int = 1) -> Place:
        return Place(take, 4 * parts, dtype)

    out = place()
    comm.all_reduce(mine, out=out.tensor)
    out.check(total, *where, "all_reduce, out")
    out = place()
    comm.all_reduce(mine, "avg", out=out.tensor, async_op=True).wait()
    out.check(expected("avg", rows), *where, "all_reduce, avg, asynchronous")
    out = place()
    put(out.tensor, rows[me])
    comm.all_reduce(out.tensor)
    out.check(total, *where, "all_reduce, in place")
    out, more = place(), torch.full((5,), me, dtype=dtype)
    put(out.tensor, rows[me])
    comm.all_reduce([more, out.tensor])
    out.check(total, *where, "all_reduce, a list")
    check(more, torch.full((5,), sum(range(n)), dtype=dtype), *where)
    out = place(n)
    comm.all_gather(out.tensor, mine)
    out.check(all_rows, *where, "all_gather")
    places = [place() for _ in range(n)]
    comm.all_gather([p.tensor for p in places], mine)
    for p, want in zip(places, rows, strict=True):
        p.check(want, *where, "all_gather, a list")
    out = place()
    comm.reduce_scatter(out.tensor, give(wide[me]))
    out.check(expected("sum", wide).chunk(n)[me], *where, "reduce_scatter")
    for root in range(n):
        at_root = me == root
        out = place()
        put(out.tensor, rows[me])
        comm.broadcast(out.tensor, root)
        out.check(rows[root], *where, "broadcast")
        out = place()
        comm.reduce(mine, root, out=out.tensor)
        out.check(total if at_root else torch.zeros_like(total), *where, "reduce")
        out = place(n)
        comm.gather(mine, out.tensor if at_root else None, root)
        out.check(all_rows if at_root else torch.zeros_like(all_rows), *where, "gather")
        out = place()
        comm.scatter(out.tensor, give(wide[root]) if at_root else None, root)
        out.check(wide[root].chunk(n)[me], *where, "scatter")
    out = place(n)
    comm.all_to_all(out.tensor, give(wide[me]))
    out.check(torch.cat([w.chunk(n)[me] for w in wide]), *where, "all_to_all")
    out = place()
    sent = comm.isend(mine, (me + 1) % n)
    assert comm.recv(out.tensor, (me - 1) % n) == (me - 1) % n
    sent.wait()
    out.check(rows[(me - 1) % n], *where, "recv")
    out = place()
    received = comm.irecv(out.tensor, (me + 1) % n)
    comm.send(mine, (me - 1) % n)
    received.wait()
    out.check(rows[(me + 1) % n], *where, "irecv")
    check(plain(mine), rows[me], *where, "inputs stay")


@torch.no_grad()
def layouts(rank: int, size: int) -> None:
    """Ranks have other layouts at the same time; outputs others than inputs."""
    with pycomm.init(timeout=60) as comm:
        for dtype, table in ((torch.float32, LAYOUTS), (torch.complex64, COMPLEX_LAYOUTS)):
            names = list(table)
            for i in range(len(names)):
                give, take = names[(i + rank) % len(names)], names[(i + 3 * rank + 1) % len(names)]
                every_call(comm, table[give], table[take], dtype, rank, give, take)

        def arena(x: torch.Tensor) -> torch.Tensor:
            return put(comm.empty(x.shape), x)

        def arena_columns(x: torch.Tensor) -> torch.Tensor:
            return put(comm.empty(6, x.shape[0]).t(), x)

        for lay, other in ((arena, arena), (arena, LAYOUTS["columns"]), (arena_columns, arena_columns)):
            every_call(comm, lay, other, torch.float32, rank, "arena")


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_layout(n: int) -> None:
    run_ranks(n, layouts, timeout=110)


def shapes(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        for make in (torch.zeros, comm.empty):
            for shape in ((), (1,), (0,), (3, 0), (0, 3), (1, 1, 1), (2, 1, 3)):
                t = make(shape).fill_(rank + 1.0)
                assert comm.all_reduce(t) is t
                assert t.shape == shape
                check(t, torch.full(shape, size * (size + 1) / 2), shape)
                comm.broadcast(t.fill_(rank), size - 1)
                check(t, torch.full(shape, size - 1.0), shape)
                whole = make((size * t.numel(),)).zero_()
                comm.all_gather(whole, t)
                check(whole, torch.full_like(whole, size - 1.0), shape)
                work = comm.isend(t, rank)
                comm.recv(t, rank)
                work.wait()
        # A wide tensor seen as narrow ones, and what lies between is left alone.
        base = torch.arange(40.0)
        before = base.clone()
        comm.all_reduce(base.view(8, 5)[1:-1, 1:4])
        before.view(8, 5)[1:-1, 1:4] *= size
        check(base, before)
        # As input, an expanded tensor is its values.
        got = comm.all_reduce(torch.tensor([rank + 1.0]).expand(4, 3), out=torch.zeros(12))
        check(got, torch.full((12,), size * (size + 1) / 2))
        windows = torch.arange(4.0).unfold(0, 3, 1)
        check(comm.all_reduce(windows, "max", out=torch.zeros(6)), torch.tensor([0.0, 1, 2, 1, 2, 3]))
        sent = comm.isend(torch.tensor([rank + 5.0]).expand(4), 1 - rank)
        got = torch.zeros(4)
        comm.recv(got, 1 - rank)
        sent.wait()
        check(got, torch.full((4,), 6.0 - rank))


def test_shapes_views_and_expanded_inputs() -> None:
    run_ranks(2, shapes)


def autograd(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        x = torch.full((3,), 2.0, requires_grad=True)
        y = x * 3
        with torch.no_grad():
            comm.all_reduce(y)
            comm.broadcast(x, 0)
        assert y.requires_grad
        assert x.is_leaf
        check(y, torch.full((3,), 6.0 * size))
        y.sum().backward()
        assert x.grad is not None
        check(x.grad, torch.full((3,), 3.0))
        comm.all_reduce(x.detach())  # the same memory
        comm.all_reduce(x.grad)
        check(x, torch.full((3,), 2.0 * size))
        check(x.grad, torch.full((3,), 3.0 * size))
        with torch.inference_mode():
            check(comm.all_reduce(torch.ones(2)), torch.full((2,), float(size)))


def test_tensors_that_require_grad() -> None:
    run_ranks(2, autograd)


def lazy_bits(rank: int, size: int) -> None:
    """What was plain in one call may be lazy in the next: same object or same memory."""
    with pycomm.init(timeout=60) as comm:
        z = torch.tensor([1 + 2j, 3 - 1j])
        out = torch.zeros_like(z)
        for _ in range(3):
            check(comm.all_reduce(z, out=out), z * size)
            for _ in range(3):  # views that come and go at one address
                check(comm.all_reduce(z.conj(), out=out), z.conj_physical() * size)
                check(comm.all_reduce(z.view(2), out=out), z * size)
                check(comm.all_reduce(torch._neg_view(z), out=out), -z * size)
        z.data = z.conj()
        check(comm.all_reduce(z, out=out), torch.tensor([1 - 2j, 3 + 1j]) * size)
        # A Parameter, and anything large, may be swapped after a call (Module.to does so).
        for t in (torch.nn.Parameter(torch.zeros(3), requires_grad=False), torch.zeros(100_000)):
            comm.all_reduce(t)
            torch.utils.swap_tensors(t, type(t)(torch.ones(4)) if t.numel() > 3 else _parameter(4))
            check(comm.all_reduce(t), torch.full((4,), float(size)))


def _parameter(n: int) -> torch.Tensor:
    return torch.nn.Parameter(torch.ones(n), requires_grad=False)


def test_lazy_bits_that_change() -> None:
    run_ranks(2, lazy_bits)


def read_only(rank: int, size: int, file: str) -> None:
    """Inputs in memory that cannot be written: a write would be a SIGSEGV."""
    with pycomm.init(timeout=60) as comm:
        for count in (6, 60_000):
            mapped = np.memmap(file, dtype=np.float32, mode="r", shape=(count,))
            t = torch.from_numpy(mapped)
            ones = torch.ones(count)
            for name in [*algorithms(comm, "all_reduce"), None]:
                check(comm.all_reduce(t, out=torch.zeros(count), algorithm=name), ones * size, name)
            for name in [*algorithms(comm, "broadcast"), None]:
                comm.broadcast(t if rank == 0 else torch.zeros(count), 0, algorithm=name)
            for name in [*algorithms(comm, "reduce"), None]:
                comm.reduce(t if rank == 0 else torch.ones(count), 1, algorithm=name)
                comm.reduce(t, 1, out=torch.zeros(count), algorithm=name)
            comm.all_gather(torch.zeros(count * size), t)
            comm.reduce_scatter(torch.zeros(count // size), t)
            comm.gather(t, torch.zeros(count * size) if rank == 0 else None)
            comm.scatter(torch.zeros(count // size), t if rank == 0 else None)
            comm.all_to_all(torch.zeros(count), t)
            comm.isend(t, 1 - rank)
            got = torch.zeros(count)
            comm.recv(got, 1 - rank)
            check(got, ones)
            check(comm.all_reduce(t, "avg", out=got), ones)


def test_inputs_are_only_read(tmp_path: Path) -> None:
    file = tmp_path / "ones"
    np.ones(60_000, dtype=np.float32).tofile(file)
    run_ranks(2, read_only, str(file), timeout=110)
