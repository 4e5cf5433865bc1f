"""all_reduce, reduce_scatter and reduce: every dtype, operation and size against exact expected values.

Expected values come from torch in float64, complex128 or int64 (cases.py). Many cases run inside one set of
processes; a failure names rank, operation, dtype, size and form.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import pycomm
from cases import (
    COMPLEX,
    DEFINED,
    DTYPES,
    FLOATS,
    algorithms,
    bits,
    check,
    expected,
    op_argument,
    raises,
    sizes,
    values,
    wide,
)
from ranks import run_ranks

BIG = 1_000_003


def one_case(comm: pycomm.Communicator, op: str, dtype: torch.dtype, count: int, **options: str) -> None:
    """The three reductions of ``count`` elements, in place and out of place."""
    n, me = comm.size, comm.rank
    inputs = [values(q, count, dtype, op) for q in range(n)]
    want, mine, name = expected(op, inputs), inputs[me], op_argument(op)
    where = (me, n, op, dtype, count, options)

    out = torch.empty_like(mine)
    assert comm.all_reduce(mine, name, out=out, **options) is out
    check(out, want, *where, "out of place")
    check(mine, inputs[me], *where, "the input stays")
    again = mine.clone()
    assert comm.all_reduce(again, name, **options) is again
    check(again, want, *where, "in place")


def scatter_case(comm: pycomm.Communicator, op: str, dtype: torch.dtype, per_rank: list[int]) -> None:
    """reduce_scatter with these counts (in place too), and reduce to every root."""
    n, me = comm.size, comm.rank
    total, start = sum(per_rank), sum(per_rank[:me])
    inputs = [values(q, total, dtype, op) for q in range(n)]
    want, name, where = expected(op, inputs), op_argument(op), (me, n, op, dtype, per_rank)
    own = want[start : start + per_rank[me]]
    even = len(set(per_rank)) == 1

    out = torch.empty(per_rank[me], dtype=dtype)
    assert comm.reduce_scatter(out, inputs[me], name, counts=None if even else per_rank) is out
    check(out, own, *where, "reduce_scatter")
    whole = inputs[me].clone()
    comm.reduce_scatter(whole[start : start + per_rank[me]], whole, name, counts=per_rank)
    check(whole[start : start + per_rank[me]], own, *where, "reduce_scatter in place")
    parts = list(inputs[me].split(per_rank))
    comm.reduce_scatter(out.zero_(), parts, name)
    check(out, own, *where, "reduce_scatter of a list")

    for root in {0, n - 1, total % n}:
        whole, out = inputs[me].clone(), torch.full_like(inputs[me], 1)
        comm.reduce(whole, root, name, out=out if me == root else None)
        check(whole, inputs[me], *where, "reduce leaves its input")
        if me == root:
            check(out, want, *where, "reduce", root)
        comm.reduce(whole, root, name)
        check(whole, want if me == root else inputs[me], *where, "reduce in place", root)


def every_reduction(rank: int, size: int) -> int:
    n_cases = 0
    with pycomm.init(timeout=60) as comm:
        for op, dtypes in DEFINED.items():
            for dtype, count in itertools.product(dtypes, sizes(size)):
                one_case(comm, op, dtype, count)
                n_cases += 1
            for dtype in dtypes:
                for per_rank in ([3] * size, [0] * size, [(5 * q) % 7 for q in range(size)]):
                    scatter_case(comm, op, dtype, per_rank)
                    n_cases += 1
    return n_cases


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_every_dtype_operation_and_size(n: int) -> None:
    counts = run_ranks(n, every_reduction, timeout=110)
    assert len(set(counts)) == 1
    assert counts[0] > 500


def large_reductions(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        for dtype in DTYPES if size == 2 else (torch.float32, torch.int8):
            one_case(comm, "sum", dtype, BIG)
        for op, dtype in (("avg", torch.bfloat16), ("premul_sum", torch.float32), ("max", torch.float16)):
            one_case(comm, op, dtype, 70_001)
        # Parts of very different sizes, over many tiles; one rank gets nothing.
        scatter_case(comm, "sum", torch.float32, [300_000 * q + 7 * (q > 0) for q in range(size)])


@pytest.mark.parametrize("n", [2, 3])
def test_large(n: int) -> None:
    run_ranks(n, large_reductions, timeout=110)


def many_ranks(rank: int, size: int) -> None:
    with pycomm.init(timeout=100) as comm:
        for op, dtype, count in itertools.product(
            ("sum", "avg"), (torch.float32, torch.float8_e5m2), (0, 5, 1000)
        ):
            one_case(comm, op, dtype, count)
        one_case(comm, "sum", torch.float32, 100_003)
        scatter_case(comm, "sum", torch.bfloat16, [q % 4 for q in range(size)])
        for name in algorithms(comm, "all_reduce"):
            one_case(comm, "sum", torch.float32, 1003, algorithm=name)


def test_seventeen_ranks() -> None:
    run_ranks(17, many_ranks, timeout=110)


def every_algorithm(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        n, me = comm.size, comm.rank
        names = algorithms(comm, "all_reduce")
        assert {"ring", "direct", "one_shot", "halving_doubling", "recursive_doubling"} <= set(names)
        cases = [("sum", torch.float32), ("avg", torch.float16), ("max", torch.int16)]
        for name, (op, dtype), count in itertools.product(names, cases, (0, 1, n, 37, 600, 50_000)):
            one_case(comm, op, dtype, count, algorithm=name)
        for name in algorithms(comm, "reduce_scatter"):
            for per_rank in ([0] * n, [11] * n, [40_000] * n, [(q * 1009) % 2000 for q in range(n)]):
                inputs = [values(q, sum(per_rank), torch.float32) for q in range(n)]
                out, start = torch.empty(per_rank[me]), sum(per_rank[:me])
                comm.reduce_scatter(out, inputs[me], counts=per_rank, algorithm=name)
                check(out, expected("sum", inputs)[start : start + per_rank[me]], me, name, per_rank)
        for name, root, count in itertools.product(algorithms(comm, "reduce"), range(n), (0, 3, 900, 90_000)):
            inputs = [values(q, count, torch.float32) for q in range(n)]
            mine = inputs[me].clone()
            comm.reduce(mine, root, algorithm=name)
            check(mine, expected("sum", inputs) if me == root else inputs[me], me, name, root, count)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_algorithm_by_name(n: int) -> None:
    run_ranks(n, every_algorithm, timeout=110)


def rounded(rank: int, size: int) -> list[bytes]:
    """Sums of random numbers: within the bound of docs/numerics.md, and the bits of every result."""
    results = []
    with pycomm.init(timeout=60) as comm:
        generators = [torch.Generator().manual_seed(100 + q) for q in range(size)]
        for dtype in FLOATS + COMPLEX:
            high = wide(dtype)
            for name in algorithms(comm, "all_reduce"):
                inputs = [torch.randn(1003, generator=g, dtype=high).to(dtype) for g in generators]
                got = comm.all_reduce(inputs[rank].clone(), algorithm=name)
                exact = torch.stack([t.to(high) for t in inputs]).sum(0)
                magnitude = torch.stack([t.to(high).abs() for t in inputs]).sum(0)
                unit = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}.get(dtype)
                unit = torch.finfo(dtype).eps / 2 if unit is None else unit
                # One rounding a hop, every hop's partial sum is at most 1 + unit above the exact one.
                bound = size * unit * (1 + unit) ** size * magnitude + 2.0**-16 * (dtype in FLOATS[4:])
                assert bool(((got.to(high) - exact).abs() <= bound).all()), (dtype, name)
                results.append(bytes(bits(got).tolist()))
    return results


@pytest.mark.parametrize("n", [2, 3, 5])
def test_rounded_sums_are_the_same_bits_on_every_rank(n: int) -> None:
    results = run_ranks(n, rounded, timeout=110)
    assert all(r == results[0] for r in results[1:])


def specials(rank: int, size: int) -> None:
    nan, inf = float("nan"), float("inf")
    with pycomm.init(timeout=60) as comm:
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2):
            mine = torch.tensor([nan, 1.0, inf, inf, -0.0] if rank == 0 else [1.0, nan, -inf, inf, 0.0])
            for op in ("sum", "min", "max"):
                got = comm.all_reduce(mine.to(dtype, copy=True), op).float()
                assert got[0].isnan(), (op, dtype)
                assert got[1].isnan(), (op, dtype)
                if op == "sum":
                    assert got[2].isnan(), dtype
                    assert got[3] == inf, dtype
                else:
                    assert got[2] == (-inf if op == "min" else inf), (op, dtype)
                    assert bool(got[4].signbit()) == (op == "min"), (op, dtype)  # −0 is below +0
        # e4m3fn has no infinity: a sum beyond its range is its largest number.
        big = comm.all_reduce(torch.full((3,), 448.0).to(torch.float8_e4m3fn)).float()
        assert big.tolist() == [448.0] * 3


def test_nan_infinity_and_signed_zero() -> None:
    run_ranks(2, specials)


def undefined(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        for op, dtypes in DEFINED.items():
            for dtype in set(DTYPES) - set(dtypes):
                mine = torch.ones(4, dtype=dtype)
                # The same mistake on every rank: everybody hears of his own.
                with raises(ValueError, f"'{op}' is not defined for", "sum", str(dtype)[6:]):
                    comm.all_reduce(mine, op_argument(op))
                # On one rank: the others hear of him. reduce_scatter and reduce check alike.
                calls = (
                    lambda m=mine, o=op: comm.reduce_scatter(m[:1], m[:size].clone(), op_argument(o)),
                    lambda m=mine, o=op: comm.reduce(m, 0, op_argument(o)),
                )
                for call in calls:
                    if rank == 1:
                        with raises(ValueError, f"'{op}' is not defined for"):
                            call()
                    else:
                        with raises(pycomm.CommError, "rank 1 refused", f"'{op}' is not defined for"):
                            comm.barrier()
        one_case(comm, "sum", torch.float32, 9)


def test_undefined_operations_are_refused_with_what_exists() -> None:
    run_ranks(3, undefined, timeout=110)


def names_of_operations(rank: int, size: int) -> None:
    import torch.distributed as dist

    with pycomm.init(timeout=60) as comm:
        mine, other = torch.tensor([6, 3]), torch.tensor([5, 1])
        both = [other, mine] if rank else [mine, other]
        for op in ("sum", "SUM", dist.ReduceOp.SUM):
            assert comm.all_reduce(both[0].clone(), op).tolist() == [11, 4]
        assert comm.all_reduce(both[0].clone(), dist.ReduceOp.PRODUCT).tolist() == [30, 3]
        assert comm.all_reduce(both[0].clone(), dist.ReduceOp.BXOR).tolist() == [3, 2]
        assert comm.all_reduce(both[0].float(), dist.ReduceOp.AVG).tolist() == [5.5, 2.0]
        # Each rank has a factor of its own.
        scaled = comm.all_reduce(torch.tensor([2.0]), ("premul_sum", float(rank + 1)))
        assert scaled.tolist() == [2.0 * 1 + 2.0 * 2]
        for bad in ("mean", "premul_sum", ("premul_sum",), ("premul_sum", "x"), 3, None):
            with raises(ValueError, "op must be one of", "'sum'"):
                comm.all_reduce(torch.ones(2), bad)
        one_case(comm, "sum", torch.int64, 9)


def test_operations_by_name_and_reduce_op() -> None:
    run_ranks(2, names_of_operations)
