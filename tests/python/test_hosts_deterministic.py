"""deterministic=True over several hosts: the bits of one host, wherever the ranks are, for the bytes that
``pycomm schedule verify --hosts`` computes.

The reference is test_deterministic's: the canonical tree written once more, on torch tensors. Every placement
of up to five ranks is in tests/cpp/engine/exact_test.cc; here are processes, dtypes, operations and sizes.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_deterministic import draw, reference

from cases import check, raises
from hosts_ranks import join, meet
from pycomm import hosts
from pycomm.cli import across
from ranks import run_ranks

#: Some that keep the order of ranks (as many in a row on each host, a power of two), and those that do not.
PLACEMENTS = {
    "3x1": [0, 1, 2],
    "2x2": [0, 0, 1, 1],
    "3x2": [0, 0, 1, 1, 2, 2],
    "1+2": [0, 1, 1],
    "3+3": [0, 0, 0, 1, 1, 1],
    "0101": [0, 1, 0, 1],
    "01022": [0, 1, 0, 2, 2],
    "120": [0, 1, 2, 0],
}
BY_PLACEMENT = pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS.keys())

CASES = [(torch.float32, op) for op in ("sum", "avg", "premul_sum", "product")]
CASES += [(torch.bfloat16, op) for op in ("sum", "avg", "premul_sum")]
CASES += [(torch.float16, op) for op in ("sum", "product")]
CASES += [(torch.float64, "sum"), (torch.float64, "avg"), (torch.complex64, "sum")]
EXACT = [(torch.float32, "min"), (torch.bfloat16, "max"), (torch.float16, "min"), (torch.int32, "sum")]


def inputs_of(size: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    if dtype.is_floating_point:
        return [draw(q, count, dtype) for q in range(size)]
    return [(100 * draw(q, count, torch.float32)).to(dtype) for q in range(size)]


def wanted(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    together = torch.stack(inputs)
    if op in ("min", "max"):
        return together.amin(0) if op == "min" else together.amax(0)
    if not together.is_floating_point() and not together.is_complex():
        return together.sum(0, dtype=together.dtype)
    return reference(inputs, op)


def argument(op: str) -> Any:
    return ("premul_sum", 0.3) if op == "premul_sum" else op


def reductions(rank: int, size: int, placement: list[int]) -> None:
    with join(rank, placement) as comm:
        for (dtype, op), count in itertools.product(CASES + EXACT, (0, 1, 1009)):
            inputs = inputs_of(size, count, dtype)
            want, where = wanted(inputs, op), (rank, placement, dtype, op, count)
            check(comm.all_reduce(inputs[rank].clone(), argument(op), deterministic=True), want, *where)
            root = count % size
            comm.reduce(got := inputs[rank].clone(), root, argument(op), deterministic=True)
            check(got, want if rank == root else inputs[rank], *where, "reduce", root)
            counts = [count // size + (3 if q == 0 else 0) for q in range(size)]
            counts[-1] = count - sum(counts[:-1])
            if counts[-1] < 0:
                counts = [0] * (size - 1) + [count]
            out = torch.empty(counts[rank], dtype=dtype)
            comm.reduce_scatter(out, inputs[rank], argument(op), counts=counts, deterministic=True)
            check(out, want.split(counts)[rank], *where, "reduce_scatter")


@BY_PLACEMENT
def test_the_bits_of_one_host(placement: list[int]) -> None:
    run_ranks(len(placement), reductions, placement, timeout=110)


def large(rank: int, size: int, placement: list[int]) -> None:
    """Over several tiles and slices; lists; tensors in the arena; asynchronous; a child's ranks."""
    with join(rank, placement) as comm:
        for dtype, count in ((torch.float32, 2_300_003), (torch.bfloat16, 1_100_003)):
            inputs = [draw(q, count, dtype) for q in range(size)]
            want, where = reference(inputs, "sum"), (rank, placement, dtype, count)
            check(comm.all_reduce(inputs[rank].clone(), deterministic=True), want, *where)
            pieces = [t.clone() for t in torch.split(inputs[rank], 99_991)]
            comm.all_reduce(pieces, deterministic=True)
            check(torch.cat(pieces), want, *where, "coalesced")
            arena = comm.empty(count, dtype=dtype).copy_(inputs[rank])
            comm.all_reduce(arena, deterministic=True, async_op=True).wait()
            check(arena, want, *where, "arena, asynchronous")
            counts = [count // size + (q < count % size) for q in range(size)]
            out = torch.empty(counts[rank], dtype=dtype)
            comm.reduce_scatter(out, inputs[rank], counts=counts, deterministic=True)
            check(out, want.split(counts)[rank], *where, "reduce_scatter")
        turned = comm.split(0, key=-rank)
        assert turned is not None
        check(
            turned.all_reduce(inputs[rank].clone(), deterministic=True), reference(inputs[::-1], "sum"), rank
        )


@pytest.mark.parametrize("name", ["1+2", "0101", "01022"])
def test_large_and_other_ways(name: str) -> None:
    run_ranks(len(PLACEMENTS[name]), large, PLACEMENTS[name], timeout=110)


def bytes_by_collective(rank: int, size: int, placement: list[int], count: int) -> dict[str, int]:
    """What this rank's sockets send in one deterministic call of each reduction."""
    nets: list[Any] = []
    make = hosts._net
    hosts._net = lambda *args: nets.append(make(*args)) or nets[-1]
    found = {}
    with join(rank, placement) as comm:
        (net,) = nets
        t, part = torch.ones(count), torch.empty(count // size)
        calls = {
            "all_reduce": lambda: comm.all_reduce(t, deterministic=True),
            "reduce_scatter": lambda: comm.reduce_scatter(part, t, deterministic=True),
            "reduce": lambda: comm.reduce(t, 0, deterministic=True),
        }
        for name, call in calls.items():
            call()  # connections are made
            meet(rank, size, f"before-{name}")
            before = net.bytes_sent
            meet(rank, size, f"counted-{name}")
            call()
            meet(rank, size, f"after-{name}")
            found[name] = net.bytes_sent - before
    return found


@BY_PLACEMENT
def test_the_bytes_are_those_that_verify_computes(placement: list[int]) -> None:
    count = 60 * 65536  # every share and part is whole cache lines
    by_rank = run_ranks(len(placement), bytes_by_collective, placement, count, timeout=110)
    for name in ("all_reduce", "reduce_scatter", "reduce"):
        want = across.bytes_leaving(name, placement, 4.0 * count)
        for host, expected in enumerate(want):
            sent = sum(found[name] for q, found in enumerate(by_rank) if placement[q] == host)
            # Beside the data: heads of messages, and who is in the call.
            assert expected <= sent <= 1.005 * expected + 8192, (name, placement, host, sent, expected)


def an_algorithm(rank: int, size: int) -> None:
    with join(rank, [0, 1, 0]) as comm:
        t = torch.ones(10)
        comm.all_reduce(t, algorithm="direct", deterministic=True)
        assert t.tolist() == [3.0] * 10
        with raises(
            ValueError, "'halving_doubling' between hosts keeps", "host 0: ranks 0 2, host 1: ranks 1"
        ):
            comm.all_reduce(t, algorithm="halving_doubling", deterministic=True)
        with raises(ValueError, "'ring' does not reduce in the deterministic order"):
            comm.all_reduce(t, algorithm="ring", deterministic=True)
        comm.all_reduce(t, algorithm="halving_doubling")
        assert t.tolist() == [9.0] * 10


def test_an_algorithm_that_cannot_is_refused() -> None:
    run_ranks(3, an_algorithm)
