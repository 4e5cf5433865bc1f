"""Ranks on several hosts that make different or invalid calls: told to all of them, in time.

The calls and what the messages hold are those of one host (test_faults.py, refusal_cases.py).
"""

from __future__ import annotations

import time

import pytest
import torch
from test_faults import DIFFERENCES, _make

import pycomm
from cases import raises
from hosts_ranks import PLACEMENTS, join, meet
from ranks import run_ranks
from refusal_cases import VALUES

SOON_S = 3.0  # the promise is a second; this machine may be busy


def differs(rank: int, size: int, placement: list[int], odd: int, what: str) -> float:
    comm = join(rank, placement)
    comm.all_reduce(torch.ones(3))
    meet(rank, size, "begin")
    begin = time.monotonic()
    with raises(pycomm.MismatchError, *DIFFERENCES[what]):
        _make(comm, what, rank == odd)
        comm.barrier()  # a rank that has done its part is told in its next call
    took = time.monotonic() - begin
    with pytest.raises(pycomm.MismatchError) as again:
        comm.barrier()
    for part in DIFFERENCES[what]:
        assert part in str(again.value)
    if len(placement) == len(set(placement)):  # it blames nobody who only saw it
        assert " failed: " not in str(again.value)
    with raises(pycomm.MismatchError):
        comm.all_reduce(torch.ones(3), async_op=True).wait()
    meet(rank, size, "end")  # a rank that ends is lost to one that only now connects to it
    return took


@pytest.mark.parametrize("what", [d for d in DIFFERENCES if d != "all_to_all"])
def test_calls_that_differ(what: str) -> None:
    for placement, odd in (([0, 1], 0), ([0, 1, 1], 2)) if what != "root" else (([0, 1], 1), ([0, 1, 2], 1)):
        if what == "counts" and placement == [0, 1]:
            continue  # two ranks with these counts give one another the same list
        assert max(run_ranks(len(placement), differs, placement, odd, what)) < SOON_S, (placement, odd)


def test_sizes_of_all_to_all_that_differ() -> None:
    for placement in ([0, 1], [0, 1, 1]):
        assert max(run_ranks(len(placement), differs, placement, 1, "all_to_all")) < SOON_S


def rooted(rank: int, size: int, collective: str, counts: list[int], roots: list[int]) -> float:
    """Roots or sizes that differ: a rank, or each, could believe that all is well, or wait for ever."""
    comm = join(rank, [0, 1], timeout=30)
    comm.barrier()
    meet(rank, size, "begin")
    t, root = torch.ones(counts[rank]), roots[rank]
    begin = time.monotonic()
    with raises(pycomm.MismatchError, collective):
        if collective == "broadcast":
            comm.broadcast(t, root)
        elif collective == "reduce":
            comm.reduce(t, root)
        elif collective == "gather":
            comm.gather(t, torch.ones(2 * t.numel()) if rank == root else None, root)
        else:
            comm.scatter(t, torch.ones(2 * t.numel()) if rank == root else None, root)
        comm.barrier()
    took = time.monotonic() - begin
    meet(rank, size, "end")
    return took


@pytest.mark.parametrize("collective", ["broadcast", "reduce", "gather", "scatter"])
def test_roots_and_sizes_that_differ(collective: str) -> None:
    small, large = 4, 400_000
    for counts, roots in (
        ([small, small], [0, 1]),
        ([small, small], [1, 0]),
        ([large, large], [0, 1]),
        ([large, large], [1, 0]),
        ([small, large], [0, 0]),
        ([large, small], [0, 0]),
        ([small, large], [1, 0]),
    ):
        took = run_ranks(2, rooted, collective, counts, roots, timeout=40)
        assert max(took) < SOON_S, (counts, roots, took)


def refused(rank: int, size: int, placement: list[int]) -> None:
    """Each rank in turn makes an invalid call: all are told, and the communicator stays usable."""
    others = {
        "all_reduce": lambda c: c.all_reduce(torch.ones(6)),
        "large all_reduce": lambda c: c.all_reduce(torch.ones(2_500_000)),
        "barrier": lambda c: c.barrier(),
        "all_gather": lambda c: c.all_gather(torch.ones(90_000 * size), torch.ones(90_000)),
        "reduce_scatter": lambda c: c.reduce_scatter(torch.ones(9_000), torch.ones(9_000 * size)),
        "all_to_all": lambda c: c.all_to_all(torch.ones(90_000 * size), torch.ones(90_000 * size)),
        "asynchronous": lambda c: c.all_reduce(torch.ones(6), async_op=True).wait(),
    }
    with join(rank, placement, timeout=30) as comm:
        for culprit in range(size):
            for name, call in others.items():
                if rank == culprit:
                    with raises(ValueError, "op must be one of"):
                        comm.all_reduce(torch.ones(6), "mean")
                else:
                    with raises(pycomm.CommError, f"rank {culprit} refused its call", "op must be one of"):
                        call(comm)
                t = torch.full((1000,), float(rank))
                comm.all_reduce(t)
                assert bool((t == sum(range(size))).all()), (culprit, name)
        # Rooted calls: whoever still needs the culprit is told; a rank that has done its part may go on.
        for culprit, root, count in ((0, 1, 4), (1, 1, 400_000), (1, 0, 4)):
            told = 0
            if rank == culprit:
                with raises(ValueError):
                    comm.broadcast(torch.ones(count), 99)
            else:
                try:
                    comm.broadcast(torch.ones(count), root)
                except pycomm.CommError as error:
                    assert f"rank {culprit} refused" in str(error)
                    told = 1
            assert comm.all_reduce(torch.tensor([1 + told])).item() >= size
        comm.barrier()


@pytest.mark.parametrize("name", ["2x1", "1+2", "2x2", "01022"])
def test_refused_calls(name: str) -> None:
    run_ranks(len(PLACEMENTS[name]), refused, PLACEMENTS[name])


def refused_by_all(rank: int, size: int, placement: list[int]) -> None:
    with join(rank, placement, timeout=20) as comm:
        for name, (call, kind, _) in VALUES.items():
            try:
                call(comm)
            except Exception as error:
                assert isinstance(error, kind), (name, error)
                assert not isinstance(error, pycomm.CommError), (name, error)
            else:
                raise AssertionError(f"{name}: nothing was raised")
        assert comm.all_reduce(torch.ones(1)).item() == 3
        for round_ in range(20):  # bursts, from several
            culprit = round_ % size
            if rank == culprit:
                with raises(ValueError):
                    comm.all_reduce(torch.ones(3), "mean")
            else:
                with raises(pycomm.CommError, f"rank {culprit} refused"):
                    comm.all_reduce(torch.ones([3, 700, 90_000][round_ % 3]))
        assert comm.all_reduce(torch.ones(1)).item() == 3


def test_all_ranks_make_bad_calls() -> None:
    for placement in ([0, 1, 2], [0, 1, 1]):
        run_ranks(3, refused_by_all, placement, timeout=60)
