"""The collectives that move data: every dtype, size, root, per-rank counts, lists, all_to_all, barrier.

Reductions are in test_reductions.py. Every rank can compute every rank's input (cases.values), so expected
values are plain slicing and concatenation by torch.
"""

from __future__ import annotations

import itertools
import time

import pytest
import torch

import pycomm
from cases import DTYPES, algorithms, bits, check, raises, sizes, values
from ranks import run_ranks


def per_rank_counts(n: int) -> list[list[int]]:
    """Equal and unequal counts; ranks with nothing; nothing at all; one rank has all."""
    only_last = [0] * (n - 1) + [13]
    return [[c] * n for c in sizes(n)] + [[(5 * q + 3) % 7 for q in range(n)], only_last, [0] * n]


def one_gather(
    comm: pycomm.Communicator, dtype: torch.dtype, counts: list[int], algorithm: str | None
) -> None:
    """all_gather, and gather to some roots: one tensor, lists as parts, in place."""
    n, me = comm.size, comm.rank
    whole = torch.cat([values(q, counts[q], dtype) for q in range(n)])
    mine, start = values(me, counts[me], dtype), sum(counts[:me])
    given = None if len(set(counts)) == 1 else counts
    where = (me, n, dtype, counts, algorithm)

    out = torch.zeros_like(whole)
    assert comm.all_gather(out, mine, counts=given, algorithm=algorithm) is out
    check(out, whole, *where, "all_gather")
    out = torch.zeros_like(whole)
    out[start : start + counts[me]] = mine
    comm.all_gather(out, out[start : start + counts[me]], counts=counts, algorithm=algorithm)
    check(out, whole, *where, "all_gather in place")
    parts = [torch.zeros(c, dtype=dtype) for c in counts]
    assert comm.all_gather(parts, mine, algorithm=algorithm) is parts
    for q in range(n):
        check(parts[q], values(q, counts[q], dtype), *where, "all_gather into a list")


def one_rooted(
    comm: pycomm.Communicator, dtype: torch.dtype, counts: list[int], root: int, names: tuple[str | None, ...]
) -> None:
    """gather to, scatter and broadcast from ``root``: one tensor, lists, in place. One algorithm for each."""
    n, me = comm.size, comm.rank
    gather, scatter, broadcast = names
    whole = torch.cat([values(q, counts[q], dtype) for q in range(n)])
    mine, start = values(me, counts[me], dtype), sum(counts[:me])
    where, here = (me, n, dtype, counts, root, names), me == root

    out = torch.zeros_like(whole) if here else None
    assert comm.gather(mine, out, root, counts=counts, algorithm=gather) is out
    if here:
        check(out, whole, *where, "gather")
    parts = [torch.zeros(c, dtype=dtype) for c in counts]
    comm.gather(mine, parts if here else None, root, counts=counts, algorithm=gather)
    if here:
        check(torch.cat(parts), whole, *where, "gather into a list")
        out = torch.zeros_like(whole)
        out[start : start + counts[me]] = mine
        mine = out[start : start + counts[me]]
    comm.gather(mine, out, root, counts=counts, algorithm=gather)
    if here:
        check(out, whole, *where, "gather in place")

    got = torch.zeros(counts[me], dtype=dtype)
    comm.scatter(got, whole if here else None, root, counts=counts, algorithm=scatter)
    check(got, values(me, counts[me], dtype), *where, "scatter")
    comm.scatter(
        got.zero_(), list(whole.split(counts)) if here else None, root, counts=counts, algorithm=scatter
    )
    check(got, values(me, counts[me], dtype), *where, "scatter of a list")
    source = whole.clone()
    got = source[start : start + counts[me]] if here else got.zero_()
    comm.scatter(got, source if here else None, root, counts=counts, algorithm=scatter)
    check(got, values(me, counts[me], dtype), *where, "scatter in place")
    check(source, whole, *where, "scatter leaves its input")

    sent = whole.clone() if here else torch.zeros_like(whole)
    assert comm.broadcast(sent, root, algorithm=broadcast) is sent
    check(sent, whole, *where, "broadcast")


def every_movement(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        for dtype, counts in itertools.product(DTYPES, per_rank_counts(size)):
            one_gather(comm, dtype, counts, None)
            one_rooted(comm, dtype, counts, sum(counts) % size, (None, None, None))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_every_dtype_and_counts(n: int) -> None:
    run_ranks(n, every_movement, timeout=110)


def every_algorithm(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        cases = [*per_rank_counts(size), [30_011] * size, [(q * 20_011) % 50_000 for q in range(size)]]
        for name, counts in itertools.product(algorithms(comm, "all_gather"), cases):
            one_gather(comm, torch.float32, counts, name)
        found = [algorithms(comm, c) for c in ("gather", "scatter", "broadcast")]
        assert {"chain", "binomial", "direct"} <= set(found[2])
        for names, counts, root in itertools.product(
            itertools.zip_longest(*found, fillvalue="direct"), cases, range(size)
        ):
            one_rooted(comm, torch.int16, counts, root, names)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_algorithm_by_name(n: int) -> None:
    run_ranks(n, every_algorithm, timeout=110)


def large_and_many(rank: int, size: int) -> None:
    with pycomm.init(timeout=100) as comm:
        counts = [1_000_003 // size + (q < 1_000_003 % size) for q in range(size)] if size < 9 else [3] * size
        one_gather(comm, torch.uint8, counts, None)
        one_rooted(comm, torch.float32, counts, size - 1, (None, None, None))
        one_to_all(comm, torch.float32, [[(p * 3 + q) % 5 for q in range(size)] for p in range(size)])
        if size < 9:
            one_to_all(
                comm,
                torch.float64,
                [[(p * 40_009 + q * 99_991) % 90_000 for q in range(size)] for p in range(size)],
            )


@pytest.mark.parametrize("n", [2, 3, 17])
def test_large_messages_and_many_ranks(n: int) -> None:
    run_ranks(n, large_and_many, timeout=110)


def block(source: int, target: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return values(17 * source + target, count, dtype)


def one_to_all(comm: pycomm.Communicator, dtype: torch.dtype, counts: list[list[int]]) -> None:
    """all_to_all where rank p sends counts[p][q] elements to rank q: tensors with splits, and lists."""
    n, me = comm.size, comm.rank
    sends, receives = counts[me], [counts[q][me] for q in range(n)]
    inputs = [block(me, q, sends[q], dtype) for q in range(n)]
    wants = [block(q, me, receives[q], dtype) for q in range(n)]
    where = (me, n, dtype, counts)
    output = torch.zeros(sum(receives), dtype=dtype)
    assert comm.all_to_all(output, torch.cat(inputs), receives, sends) is output
    check(output, torch.cat(wants), *where, "tensors")
    outputs = [torch.zeros_like(w) for w in wants]
    assert comm.all_to_all(outputs, inputs) is outputs
    for got, want in zip(outputs, wants, strict=True):
        check(got, want, *where, "lists")
    comm.all_to_all(outputs, torch.cat(inputs), input_split_sizes=sends)
    check(torch.cat(outputs), torch.cat(wants), *where, "mixed")


def every_all_to_all(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        n = size
        uneven = [[(3 * p + 5 * q) % 4 for q in range(n)] for p in range(n)]
        one_sender = [[9 if p == 0 else 0 for _ in range(n)] for p in range(n)]
        for dtype in DTYPES:
            for counts in (uneven, one_sender, [[0] * n] * n, [[7] * n] * n):
                one_to_all(comm, dtype, counts)
        # Equal blocks need no sizes; sizes count rows of dimension 0.
        x = torch.arange(2 * n * 3).reshape(2 * n, 3) + 1000 * rank
        got = torch.zeros_like(x)
        comm.all_to_all(got, x)
        want = [torch.arange(6 * rank, 6 * rank + 6).reshape(2, 3) + 1000 * q for q in range(n)]
        check(got, torch.cat(want), rank, "equal blocks")
        rows = [q + 1 for q in range(n)]
        x = torch.arange(sum(rows) * 2).reshape(-1, 2) + 1000 * rank
        got = torch.zeros(n * (rank + 1), 2, dtype=torch.int64)
        comm.all_to_all(got, x, [rank + 1] * n, rows)
        first = sum(rows[:rank])
        want = [torch.arange(2 * first, 2 * (first + rank + 1)).reshape(-1, 2) + 1000 * q for q in range(n)]
        check(got, torch.cat(want), rank, "rows")


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_all_to_all(n: int) -> None:
    run_ranks(n, every_all_to_all, timeout=110)


def coalesced(rank: int, size: int) -> None:
    """A list of tensors is one call over their concatenation, whatever the cuts on each side."""
    shapes = [(3,), (0,), (2, 5), (1,), (), (700, 3)]
    with pycomm.init(timeout=60) as comm:
        lengths = [torch.Size(s).numel() for s in shapes]
        total = sum(lengths)
        inputs = [values(q, total, torch.float32) for q in range(size)]
        mine = [t.reshape(s) for t, s in zip(inputs[rank].split(lengths), shapes, strict=True)]
        want = torch.stack(inputs).sum(0)
        for name in algorithms(comm, "all_reduce"):
            tensors = [t.clone() for t in mine]
            assert comm.all_reduce(tensors, algorithm=name) is tensors
            assert [t.shape for t in tensors] == [torch.Size(s) for s in shapes]
            check(torch.cat([t.reshape(-1) for t in tensors]), want, rank, name)
        out = torch.zeros(total)
        comm.all_reduce(tuple(mine), out=out)  # many in, one out; a tuple is a list
        check(out, want, rank)
        # The cuts are each rank's own affair: rank 0 gives one tensor.
        own = inputs[rank].clone() if rank == 0 else [t.clone() for t in mine]
        comm.broadcast(own, src=size - 1)
        flat = own if rank == 0 else torch.cat([t.reshape(-1) for t in own])
        check(flat, inputs[size - 1], rank, "broadcast")
        comm.all_gather(out := torch.zeros(size * total), list(mine))
        check(out, torch.cat(inputs), rank, "all_gather of a list")
        for bad, kind, part in (
            ([], ValueError, "empty list"),
            ([torch.ones(1), torch.ones(1).double()], TypeError, "one call takes one dtype"),
            ([torch.ones(1), 3], TypeError, "element 1"),
        ):
            with raises(kind, part):
                comm.all_reduce(bad)


@pytest.mark.parametrize("n", [2, 3])
def test_lists_are_one_coalesced_call(n: int) -> None:
    run_ranks(n, coalesced)


def barriers(rank: int, size: int) -> float:
    with pycomm.init(timeout=60) as comm:
        for _ in range(100):
            comm.barrier()
        begin = time.monotonic()
        if rank == 0:
            time.sleep(0.3)
        comm.barrier()
        took = time.monotonic() - begin
    return took


def test_barrier_waits_for_the_last() -> None:
    assert all(took >= 0.28 for took in run_ranks(3, barriers))


def long_sequence(rank: int, size: int) -> None:
    """More calls than the 16 bits in which their numbers travel, with refusals and large calls among them."""
    t, total = torch.zeros(1, dtype=torch.int64), 0
    big = torch.ones(40_000)
    with pycomm.init(timeout=60) as comm:
        for i in range(70_000):
            t[0] = i + rank
            comm.all_reduce(t)
            total += int(t[0])
            if i % 5000 == 4999:
                comm.all_reduce(big, "max")
                if rank == 1:
                    with raises(ValueError):
                        comm.all_reduce(big, "band")
                else:
                    with raises(pycomm.CommError):
                        comm.barrier()
        assert total == sum(2 * i + 1 for i in range(70_000))
        assert bool((big == 1).all())


def test_call_numbers_wrap_around() -> None:
    run_ranks(2, long_sequence, timeout=110)


def mixed_sequence(rank: int, size: int) -> None:
    """Calls of all sizes and kinds back to back, chosen by one random sequence, ranks at varied speed."""
    import random

    plan, pace = random.Random(1), random.Random(rank)
    with pycomm.init(timeout=60) as comm:
        for _ in range(400):
            kind, count = (
                plan.choice(["ar", "ag", "bc", "a2a", "barrier"]),
                plan.choice([0, 1, 8, 300, 5000, 90_000]),
            )
            root = plan.randrange(size)
            if pace.random() < 0.05:
                time.sleep(0.002)
            if kind == "ar":
                got = comm.all_reduce(values(rank, count, torch.float32))
                check(
                    got,
                    torch.stack([values(q, count, torch.float32) for q in range(size)]).sum(0),
                    kind,
                    count,
                )
            elif kind == "ag":
                one_gather(comm, torch.int32, [count] * size, None)
            elif kind == "bc":
                t = values(root if rank == root else 99, count, torch.int32)
                assert torch.equal(bits(comm.broadcast(t, root)), bits(values(root, count, torch.int32)))
            elif kind == "a2a":
                one_to_all(comm, torch.int32, [[count % 1000] * size] * size)
            else:
                comm.barrier()


@pytest.mark.parametrize("n", [2, 4])
def test_sequences_of_different_calls(n: int) -> None:
    run_ranks(n, mixed_sequence, timeout=110)
