"""deterministic=True: the canonical tree T over the ranks, whatever the algorithm, size, tile or memory.

The reference is T written here once more, from docs/numerics.md, on torch tensors: low precision in float32,
rounded once at the end.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import pytest
import torch

import pycomm
from cases import COMPLEX, algorithms, check, raises
from ranks import run_ranks

ROUNDING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LOW = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def tree(tensors: Sequence[torch.Tensor], op: str = "sum") -> torch.Tensor:
    """T of docs/numerics.md: lower ranks are the left operand."""
    n = len(tensors)
    if n == 1:
        return tensors[0]
    p = 1 << (n.bit_length() - 1)
    m = min(p, n - p // 2)
    left, right = tree(tensors[:m], op), tree(tensors[m:], op)
    return left * right if op == "product" else left + right


def reference(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    dtype = tensors[0].dtype
    high = [t.float() for t in tensors] if dtype in LOW else list(tensors)
    if op == "premul_sum":
        high = [t * 0.3 if t.dtype is torch.float64 else t * torch.tensor(0.3, dtype=t.dtype) for t in high]
    total = tree(high, op)
    return (total / len(tensors) if op == "avg" else total).to(dtype)


def draw(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose sums round: many magnitudes, both signs; for low precision also ones that cancel.

    (Sums of few float8_e4m3fn are exact in float32, in every order.)
    """
    generator = torch.Generator().manual_seed(1000 + rank)
    x = torch.randn(count, generator=generator, dtype=torch.float64)
    scale = torch.randint(-3, 4, (count,), generator=generator)
    if dtype in (torch.float16, torch.bfloat16, torch.float8_e5m2):
        sign = torch.randint(-1, 2, (count,), generator=generator)
        return torch.where(sign == 0, x * 2.0 ** (scale - 6), sign * 2.0**15).to(dtype)
    return (x * 2.0**scale).to(dtype)


def test_the_reference_is_not_any_order() -> None:
    """What the tests below compare with tells T from other orders, and fp32 from low precision on the way."""
    for dtype, n in itertools.product(ROUNDING, (3, 4, 5, 6, 7)):
        tensors = [draw(q, 2000, dtype) for q in range(n)]
        want = reference(tensors, "sum")
        high = [t.float() for t in tensors] if dtype in LOW else tensors
        left = functools.reduce(torch.add, high).to(dtype)
        right = functools.reduce(torch.add, high[::-1]).to(dtype)
        assert torch.equal(left, want) == (n == 3), (dtype, n)  # T of three is the left-hand order
        assert not torch.equal(right, want), (dtype, n)
        if dtype in LOW:
            assert not torch.equal(tree(tensors), want), (dtype, n)


def honest(comm: pycomm.Communicator, collective: str) -> list[str]:
    """The algorithms that take deterministic=True; the others say so, on every rank."""
    found = []
    for name in algorithms(comm, collective):
        try:
            if collective == "all_reduce":
                comm.all_reduce(torch.ones(1), algorithm=name, deterministic=True)
            elif collective == "reduce":
                comm.reduce(torch.ones(1), algorithm=name, deterministic=True)
            else:
                comm.reduce_scatter(torch.ones(1), torch.ones(comm.size), algorithm=name, deterministic=True)
        except ValueError as error:
            assert f"'{name}' does not reduce in the deterministic order" in str(error)
        else:
            found.append(name)
    return found


def every_algorithm(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        names = honest(comm, "all_reduce")
        assert {"direct", "one_shot", "halving_doubling", "recursive_doubling"} <= set(names)
        assert "ring" not in names
        cases = [(d, "sum") for d in (*ROUNDING, *LOW[2:])]
        cases += [(torch.float32, "avg"), (torch.float16, "avg"), (torch.float64, "premul_sum")]
        cases += [(torch.float32, "product"), (torch.bfloat16, "product"), (torch.bfloat16, "premul_sum")]
        for (dtype, op), count in itertools.product(cases, (1, 7, 300, 5003)):
            inputs = [draw(q, count, dtype) for q in range(size)]
            want = reference(inputs, op)
            argument = ("premul_sum", 0.3) if op == "premul_sum" else op
            for name in [*names, None]:
                where = (rank, size, dtype, op, count, name)
                out = torch.empty(count, dtype=dtype)
                comm.all_reduce(inputs[rank], argument, out=out, algorithm=name, deterministic=True)
                check(out, want, *where)
                arena = comm.empty(count, dtype=dtype).copy_(inputs[rank])
                comm.all_reduce(arena, argument, algorithm=name, deterministic=True)
                check(arena, want, *where, "arena")
                mixed = inputs[rank].clone() if rank == size - 1 else arena.copy_(inputs[rank])
                comm.all_reduce(mixed, argument, algorithm=name, deterministic=True)
                check(mixed, want, *where, "mixed")


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_algorithm_gives_the_tree(n: int) -> None:
    run_ranks(n, every_algorithm, timeout=110)


def many_ranks(rank: int, size: int) -> None:
    with pycomm.init(timeout=100) as comm:
        inputs = [draw(q, 1003, torch.bfloat16) for q in range(size)]
        want = reference(inputs, "sum")
        for name in honest(comm, "all_reduce"):
            check(comm.all_reduce(inputs[rank].clone(), algorithm=name, deterministic=True), want, size, name)


@pytest.mark.parametrize("n", [6, 7, 11, 17])
def test_many_ranks(n: int) -> None:
    run_ranks(n, many_ranks, timeout=110)


def tiles_and_sizes(rank: int, size: int) -> None:
    """Element i has the same bits however much is around it, however it is cut, wherever it lies."""
    count = 200_003
    with pycomm.init(timeout=60) as comm:
        names = honest(comm, "all_reduce")
        for dtype in (torch.float32, torch.bfloat16):
            inputs = [draw(q, count, dtype) for q in range(size)]
            want = reference(inputs, "sum")
            for name, tile in itertools.product(names, (4096, 65536, 262144)):
                where = (rank, dtype, name, tile)
                comm._c.set_selection(0, [(2**64 - 1, name, name, tile)])
                for part in (1, 50, 3000, 70_001, count):
                    got = comm.all_reduce(inputs[rank][:part].clone(), deterministic=True)
                    check(got, want[:part], *where, part)
                arena = comm.empty(count, dtype=dtype).copy_(inputs[rank])
                check(comm.all_reduce(arena, deterministic=True), want, *where, "arena")
                pieces = [t.clone() for t in torch.split(inputs[rank], 9999)]
                comm.all_reduce(pieces, deterministic=True)
                check(torch.cat(pieces), want, *where, "coalesced")
                pairs = torch.zeros(count, 2, dtype=dtype)
                pairs[:, 1] = inputs[rank]
                comm.all_reduce(pairs[:, 1], deterministic=True, async_op=True).wait()
                check(pairs[:, 1].contiguous(), want, *where, "not contiguous, asynchronous")
        # A measured choice that cannot keep the order is passed over, not obeyed.
        comm._c.set_selection(0, [(2**64 - 1, "ring", "ring", 65536)])
        comm.deterministic = True
        check(comm.all_reduce(inputs[rank].clone()), want, rank, "selection")


@pytest.mark.parametrize("n", [2, 3])
def test_tiles_sizes_and_lists(n: int) -> None:
    run_ranks(n, tiles_and_sizes, timeout=110)


def other_reductions(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        scatters, reduces = honest(comm, "reduce_scatter"), honest(comm, "reduce")
        assert "ring" not in scatters
        assert "direct" in scatters
        assert "direct" in reduces
        for dtype in (*ROUNDING, *COMPLEX[:1]):
            counts = [100 + 7 * q for q in range(size)]
            inputs = [draw(q, sum(counts), torch.float32).to(dtype) for q in range(size)]
            want, start = reference(inputs, "sum"), sum(counts[:rank])
            for name in [*scatters, None]:
                out = torch.empty(counts[rank], dtype=dtype)
                comm.reduce_scatter(out, inputs[rank], counts=counts, algorithm=name, deterministic=True)
                check(out, want[start : start + counts[rank]], rank, dtype, name)
            for name, root in itertools.product([*reduces, None], range(size)):
                mine = inputs[rank].clone()
                comm.reduce(mine, root, algorithm=name, deterministic=True)
                check(mine, want if rank == root else inputs[rank], rank, dtype, name, root)


@pytest.mark.parametrize("n", [3, 5])
def test_reduce_scatter_and_reduce(n: int) -> None:
    run_ranks(n, other_reductions, timeout=110)


def by_environment(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        assert comm.deterministic
        inputs = [draw(q, 40_000, torch.float32) for q in range(size)]
        check(comm.all_reduce(inputs[rank].clone()), reference(inputs, "sum"), rank)
        with raises(ValueError, "'ring' does not reduce in the deterministic order"):
            comm.all_reduce(inputs[rank].clone(), algorithm="ring")
        comm.all_reduce(inputs[rank].clone(), algorithm="ring", deterministic=False)
        comm.deterministic = False
        comm.all_reduce(inputs[rank].clone(), algorithm="ring")


def test_by_environment() -> None:
    run_ranks(3, by_environment, env={"PYCOMM_DETERMINISTIC": "1"})


def forced_ring(rank: int, size: int) -> None:
    """PYCOMM_ALGORITHM asks for the ring; it cannot keep the order, so it is refused, not replaced."""
    with pycomm.init(timeout=60) as comm:
        with raises(ValueError, "'ring' does not reduce in the deterministic order"):
            comm.all_reduce(torch.ones(4))
        comm.broadcast(torch.ones(4))


def test_a_forced_algorithm_that_cannot() -> None:
    run_ranks(2, forced_ring, env={"PYCOMM_DETERMINISTIC": "1", "PYCOMM_ALGORITHM": "ring"})
