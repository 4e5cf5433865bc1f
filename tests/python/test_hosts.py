"""Collectives of ranks on several hosts: every dtype, operation, size, root and list, by placement.

The cases and their exact expected values are those of one host (test_collectives.py, test_reductions.py,
cases.py): where a rank runs must not matter.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from test_collectives import one_gather, one_rooted, one_to_all
from test_reductions import one_case, scatter_case

from cases import DEFINED, DTYPES, FLOATS, INTS, algorithms, check, expected, values
from hosts_ranks import PLACEMENTS, join
from ranks import run_ranks

BY_PLACEMENT = pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS.keys())


def sizes(n: int) -> tuple[int, ...]:
    return tuple(sorted({0, 1, n - 1, n + 1, 97}))


def parts(n: int) -> list[list[int]]:
    """Equal and unequal; ranks with nothing; one has all."""
    return [[1] * n, [97] * n, [(5 * q + 3) % 7 for q in range(n)], [0] * (n - 1) + [13], [0] * n]


def some(dtypes: tuple[torch.dtype, ...], placement: list[int]) -> tuple[torch.dtype, ...]:
    """Every third, and float32: all placements together have all."""
    first = list(PLACEMENTS.values()).index(placement)
    return (torch.float32, *dtypes[first % 3 :: 3]) if torch.float32 in dtypes else dtypes[first % 3 :: 3]


def reductions(rank: int, size: int, placement: list[int]) -> int:
    n_cases = 0
    with join(rank, placement) as comm:
        for op, dtypes in DEFINED.items():
            for dtype, count in itertools.product(some(dtypes, placement), sizes(size)):
                one_case(comm, op, dtype, count)
                n_cases += 1
            for dtype, per_rank in itertools.product(some(dtypes, placement)[:2], parts(size)[1:4]):
                scatter_case(comm, op, dtype, per_rank)
                n_cases += 1
    return n_cases


@BY_PLACEMENT
def test_reductions(placement: list[int]) -> None:
    counts = run_ranks(len(placement), reductions, placement, timeout=110)
    assert len(set(counts)) == 1
    assert counts[0] > 100


def movements(rank: int, size: int, placement: list[int]) -> None:
    with join(rank, placement) as comm:
        for i, (dtype, counts) in enumerate(itertools.product(some(DTYPES, placement), parts(size))):
            one_gather(comm, dtype, counts, None)
            one_rooted(comm, dtype, counts, i % size, (None, None, None))
        uneven = [[(3 * p + 5 * q) % 4 for q in range(size)] for p in range(size)]
        one_sender = [[9 if p == 1 else 0 for _ in range(size)] for p in range(size)]
        for dtype, blocks in itertools.product(DTYPES[::3], (uneven, one_sender, [[0] * size] * size)):
            one_to_all(comm, dtype, blocks)
        for _ in range(20):
            comm.barrier()


@BY_PLACEMENT
def test_movements(placement: list[int]) -> None:
    run_ranks(len(placement), movements, placement, timeout=110)


def large(rank: int, size: int, placement: list[int]) -> None:
    """Over many slices (engine/rounds.h) and tiles (engine/hierarchy.h)."""
    with join(rank, placement) as comm:
        one_case(comm, "sum", torch.float64, 1_600_003)
        one_case(comm, "max", torch.int16, 2_097_152)
        one_case(comm, "avg", torch.bfloat16, 70_001)
        one_case(comm, "premul_sum", torch.float16, 70_001)
        scatter_case(comm, "sum", torch.float32, [90_000 * q + 7 * (q > 0) for q in range(size)])
        counts = [(q * 200_011) % 500_000 for q in range(size)]
        one_gather(comm, torch.float32, counts, None)
        for root in range(size):
            one_rooted(comm, torch.int16, counts, root, (None, None, None))
        blocks = [[(p * 40_009 + q * 99_991) % 90_000 for q in range(size)] for p in range(size)]
        one_to_all(comm, torch.float64, blocks)


@pytest.mark.parametrize("placement", [PLACEMENTS[name] for name in ("2x1", "1+2", "2x2", "01022")])
def test_large(placement: list[int]) -> None:
    run_ranks(len(placement), large, placement, timeout=110)


def by_name(rank: int, size: int, placement: list[int]) -> None:
    """Every algorithm of the catalog between the hosts."""
    with join(rank, placement) as comm:
        for name, count in itertools.product(algorithms(comm, "all_reduce"), (0, 1, 37, 50_000)):
            one_case(comm, "sum", torch.float32, count, algorithm=name)
        for name, per_rank in itertools.product(algorithms(comm, "reduce_scatter"), parts(size)):
            inputs = [values(q, sum(per_rank), torch.float32) for q in range(size)]
            out, start = torch.empty(per_rank[rank]), sum(per_rank[:rank])
            comm.reduce_scatter(out, inputs[rank], counts=per_rank, algorithm=name)
            want = expected("sum", inputs)[start : start + per_rank[rank]]
            check(out, want, rank, name, per_rank)
        for name, root, count in itertools.product(algorithms(comm, "reduce"), range(size), (3, 50_000)):
            inputs = [values(q, count, torch.float32) for q in range(size)]
            mine = inputs[rank].clone()
            comm.reduce(mine, root, algorithm=name)
            check(mine, expected("sum", inputs) if rank == root else inputs[rank], rank, name, root, count)
        for name, counts in itertools.product(
            algorithms(comm, "all_gather"), [*parts(size), [20_011] * size]
        ):
            one_gather(comm, torch.float32, counts, name)
        found = [algorithms(comm, c) for c in ("gather", "scatter", "broadcast")]
        for names, root in itertools.product(itertools.zip_longest(*found, fillvalue="direct"), range(size)):
            for counts in (parts(size)[2], [20_011] * size):
                one_rooted(comm, torch.int16, counts, root, names)


@BY_PLACEMENT
def test_every_algorithm_between_hosts(placement: list[int]) -> None:
    run_ranks(len(placement), by_name, placement, timeout=110)


def lists_and_layouts(rank: int, size: int, placement: list[int]) -> None:
    """Coalesced lists, cut differently on each rank; tensors in the arena; strided and transposed ones."""
    shapes = [(3,), (0,), (2, 5), (1,), (), (700, 300)]
    with join(rank, placement) as comm:
        lengths = [torch.Size(s).numel() for s in shapes]
        total = sum(lengths)
        inputs = [values(q, total, torch.float32) for q in range(size)]
        want = torch.stack(inputs).sum(0)

        def cut(t: torch.Tensor) -> list[torch.Tensor]:
            return [p.reshape(s).clone() for p, s in zip(t.split(lengths), shapes, strict=True)]

        def flat(given: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([t.reshape(-1) for t in given]) if isinstance(given, list) else given

        own = inputs[rank].clone() if rank == 0 else cut(inputs[rank])
        assert comm.all_reduce(own) is own
        check(flat(own), want, rank, "all_reduce of a list")
        out = torch.zeros(total)
        comm.all_reduce(cut(inputs[rank]), out=out)
        check(out, want, rank, "many in, one out")
        for root in range(size):
            own = inputs[rank].clone() if rank == 0 else cut(inputs[rank])
            comm.broadcast(own, root)
            check(flat(own), inputs[root], rank, "broadcast of a list")
        comm.all_gather(out := torch.zeros(size * total), cut(inputs[rank]))
        check(out, torch.cat(inputs), rank, "all_gather of a list")

        arena = comm.empty(total)
        arena.copy_(inputs[rank])
        comm.all_reduce(arena)
        check(arena, want, rank, "in the arena")
        wide = torch.zeros(total, 2)
        wide[:, 1] = inputs[rank]
        comm.all_reduce(wide[:, 1])
        check(wide[:, 1], want, rank, "strided")
        assert not bool(wide[:, 0].any())
        square = values(rank, 10_000, torch.float32).reshape(100, 100)
        comm.all_reduce(turned := square.t())
        sums = torch.stack([values(q, 10_000, torch.float32) for q in range(size)]).sum(0)
        check(turned, sums.reshape(100, 100).t(), rank, "transposed")


@BY_PLACEMENT
def test_lists_and_layouts(placement: list[int]) -> None:
    run_ranks(len(placement), lists_and_layouts, placement, timeout=110)


def other_settings(rank: int, size: int, placement: list[int], settings: dict[str, str]) -> None:
    with join(rank, placement, **settings) as comm:
        for dtype in (*FLOATS[1:3], *INTS[:1]):
            for count in (0, 1, 97, 70_001, 1_600_003):
                one_case(comm, "sum", dtype, count)
        scatter_case(comm, "sum", torch.float32, [(5 * q) % 7 for q in range(size)])
        counts = [(q * 200_011) % 500_000 for q in range(size)]
        one_gather(comm, torch.uint8, counts, None)
        one_rooted(comm, torch.float32, counts, size - 1, (None, None, None))
        one_to_all(
            comm,
            torch.float64,
            [[(p * 40_009 + q * 9_991) % 90_000 for q in range(size)] for p in range(size)],
        )
        x = torch.full((300_000,), float(rank))
        got = torch.zeros_like(x)
        comm.isend(x, (rank + 1) % size)
        comm.recv(got, (rank - 1) % size)
        check(got, torch.full_like(x, float((rank - 1) % size)), rank, "send")
        comm.barrier()


SETTINGS: dict[str, dict[str, str]] = {
    "3 sockets": {"PYCOMM_SOCKETS": "3"},
    "without copies": {"PYCOMM_ZERO_COPY": "1"},
    "encrypted": {"PYCOMM_ENCRYPT": "1"},
    "encrypted, 3 sockets": {"PYCOMM_ENCRYPT": "1", "PYCOMM_SOCKETS": "3"},
    "IPv6": {"PYCOMM_SOCKET_IFNAME": "::1"},
    "ports": {"PYCOMM_PORT_RANGE": "42000-42999"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_settings(settings: dict[str, str]) -> None:
    run_ranks(3, other_settings, PLACEMENTS["1+2"], settings, timeout=100)
