"""split and new_group: members, order, independence, and many communicators at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pycomm
from cases import expected, raises, values
from pycomm import cache_files, tuning
from ranks import run_ranks


def gathered(comm: pycomm.Communicator, value: int) -> list[int]:
    return comm.all_gather(torch.zeros(comm.size, dtype=torch.int64), torch.tensor([value])).tolist()


def splits(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        parity = comm.split(rank % 2)
        assert parity is not None
        members = [q for q in range(size) if q % 2 == rank % 2]
        assert (parity.rank, parity.size) == (members.index(rank), len(members))
        assert gathered(parity, rank) == members
        # key orders; equal keys keep the parent's order
        reverse = comm.split(7, key=-rank)
        assert reverse is not None
        assert gathered(reverse, rank) == list(range(size))[::-1]
        same = comm.split(2**40, key=3)
        assert same is not None
        assert gathered(same, rank) == list(range(size))
        # not everybody
        some = comm.split(0 if rank in (0, 2) else None)
        assert (some is None) == (rank not in (0, 2))
        if some is not None:
            assert gathered(some, rank) == [0, 2]
        # a group of a group, with every operation
        child = parity.split(0, key=rank)
        assert child is not None
        inputs = [values(q, 1000, torch.float32) for q in members]
        got = child.all_reduce(values(rank, 1000, torch.float32))
        assert torch.equal(got, expected("sum", inputs))
        for root in range(child.size):
            t = torch.tensor([rank])
            child.broadcast(t, root)
            assert t.item() == members[root]
        alone = comm.split(rank)
        assert alone is not None
        assert (alone.rank, alone.size) == (0, 1)
        assert alone.all_reduce(torch.ones(2)).tolist() == [1, 1]
        with raises(ValueError, "color"):
            comm.split(-1)
        assert gathered(comm, rank) == list(range(size))


@pytest.mark.parametrize("n", [3, 4, 5])
def test_split(n: int) -> None:
    run_ranks(n, splits)


def new_groups(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        for ranks in ([0, 1], [2, 0], list(range(size))[::-1], [1]):
            group = comm.new_group(ranks)
            assert (group is not None) == (rank in ranks)
            if group is not None:
                assert group.rank == ranks.index(rank)
                assert gathered(group, rank) == ranks
                for q, peer in enumerate(ranks):  # point to point by the group's own ranks
                    if peer != rank:
                        group.send(torch.tensor([rank]), q)
                for q, peer in enumerate(ranks):
                    got = torch.zeros(1, dtype=torch.int64)
                    if peer != rank:
                        group.recv(got, q)
                        assert got.item() == peer
        for bad in ([0, 0], [0, size], [-1], []):
            with raises(ValueError, "new_group"):
                comm.new_group(bad)
        # one rank's mistake is told to all
        if rank == 0:
            with raises(ValueError, "new_group"):
                comm.new_group([0, 0])
        else:
            with raises(pycomm.CommError, "rank 0 refused", "new_group"):
                comm.new_group([0, 1])
        assert gathered(comm, rank) == list(range(size))


def test_new_group() -> None:
    run_ranks(3, new_groups)


#: what rank 0 calls, what the others call
DIFFERENT: dict[str, tuple[Callable[[pycomm.Communicator], Any], Callable[[pycomm.Communicator], Any]]] = {
    "order": (lambda c: c.new_group([0, 1]), lambda c: c.new_group([1, 0])),
    "members": (lambda c: c.new_group([0, 1]), lambda c: c.new_group([0, 2])),
    "more": (lambda c: c.new_group([0, 1]), lambda c: c.new_group([0, 1, 2])),
    "without me": (lambda c: c.new_group([1]), lambda c: c.new_group([2])),
    "split": (lambda c: c.new_group([0, 1, 2]), lambda c: c.split(0)),
}


def different_lists(rank: int, size: int, what: str) -> float:
    comm = pycomm.init(timeout=60)
    older = comm.split(0)
    assert older is not None
    begin = time.monotonic()
    with raises(pycomm.MismatchError, "new_group", "different lists of ranks"):
        DIFFERENT[what][min(rank, 1)](comm)
    with raises(pycomm.MismatchError, "different lists of ranks"):
        comm.barrier()
    took = time.monotonic() - begin
    assert gathered(older, rank) == list(range(size))  # others are not harmed
    return took


@pytest.mark.parametrize("what", DIFFERENT)
def test_new_group_with_different_lists(what: str) -> None:
    assert max(run_ranks(3, different_lists, what)) < 3.0


def inherits(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        comm.deterministic = True
        comm.timeout = 42.0
        child = comm.split(0)
        assert child is not None
        assert child.deterministic
        assert child.timeout == 42.0
        with raises(ValueError, "deterministic"):
            child.all_reduce(torch.ones(1), algorithm="ring")
        child.close()
        # The parent's life is its own, and the child's is not the parent's.
        comm.barrier()
        second = comm.split(0)
        assert second is not None
        comm.close()
        second.barrier()
        assert second.all_reduce(torch.ones(1)).item() == size
        second.close()


def test_options_are_inherited_and_lives_are_separate() -> None:
    run_ranks(2, inherits)


def inherits_tables(rank: int, size: int) -> None:
    """A child of as many ranks has its parent's table, whatever the order; one of fewer the cached one."""
    with pycomm.init(timeout=60) as comm:
        default = tuning.read(comm)
        rows = [(4096, "direct", "direct", 65536), (2**64 - 1, "ring", "direct", 131072)]
        tuning.apply(comm, {"all_reduce": rows})
        assert tuning.read(comm) == default | {"all_reduce": rows}
        for child in (comm.split(0), comm.split(0, key=-rank), comm.new_group([1, 2, 0])):
            assert child is not None
            assert tuning.read(child) == tuning.read(comm)
            # It is used: what one rank forces, the others hear of beside the table's choice.
            big = torch.ones(100_000)
            forced = "double_tree" if child.rank == 0 else None
            with raises(pycomm.MismatchError, "all_reduce/ring", "all_reduce/double_tree"):
                child.all_reduce(big, algorithm=forced)
        child = comm.split(rank // 2)
        assert child is not None
        if rank < 2:
            cached = tuning.read(child) | {"all_reduce": [(2**64 - 1, "ring", "ring", 65536)]}
            assert tuning.read(child) != cached
            if rank == 0:
                cache_files.save(tuning.cache_file(2), tuning.FORMAT, cached)
            comm.barrier()
            pair = comm.split(0)
            assert pair is not None
            assert tuning.read(pair) == cached
        else:
            comm.barrier()
            assert comm.split(None) is None
        # The table is a copy: the parent's later choice is its own.
        same = comm.split(0)
        assert same is not None
        tuning.apply(comm, default)
        assert tuning.read(same)["all_reduce"] == rows


def test_selection_tables_are_inherited(tmp_path: Path) -> None:
    env = {"PYCOMM_CACHE_DIR": str(tmp_path), "PYCOMM_TUNE": "auto"}
    run_ranks(3, inherits_tables, env=env)


def independent(rank: int, size: int) -> None:
    """Communicators progress independently: each rank serves them in another order, from threads."""
    with pycomm.init(timeout=60) as comm:
        groups = [comm.split(0) for _ in range(6)]
        works = []
        for i in range(6) if rank == 0 else reversed(range(6)):
            works.append((i, groups[i].all_reduce(torch.full((5000,), float(i)), async_op=True)))
        for i, work in works:
            work.wait()
            assert bool((work.result() == size * i).all())
        sums = [0.0] * 6

        def use(i: int) -> None:
            for _ in range(100):
                sums[i] += float(groups[i].all_reduce(torch.ones(1 << i))[0])

        threads = [threading.Thread(target=use, args=(i,)) for i in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert sums == [100.0 * size] * 6


def test_many_communicators_are_independent() -> None:
    run_ranks(2, independent)


def made_and_dropped(rank: int, size: int) -> None:
    """Forty groups, closed or only forgotten: their memory is used again."""
    with pycomm.init(timeout=60) as comm:
        used = []
        for i in range(40):
            group = comm.split(0)
            assert group is not None
            assert group.all_reduce(torch.ones(3)).tolist() == [size] * 3
            group.send(torch.ones(1), rank)  # its pipes are memory too
            group.recv(torch.ones(1), rank)
            if i % 2:
                group.close()
            del group
            comm.barrier()
            used.append(comm._c.arena_bytes_in_use())
        assert used[-1] < used[0] + 4 * 3_000_000, f"the arena grew from {used[0]} to {used[-1]} bytes"


def test_groups_can_be_made_and_dropped() -> None:
    run_ranks(2, made_and_dropped)


def failure_of_a_child(rank: int, size: int) -> None:
    """A mismatch in one communicator leaves the others usable."""
    with pycomm.init(timeout=60) as comm:
        child = comm.split(0)
        assert child is not None
        with raises(pycomm.MismatchError, "sum", "max"):
            child.all_reduce(torch.ones(3), "sum" if rank == 0 else "max")
        with raises(pycomm.MismatchError, "sum", "max"):
            child.barrier()
        assert gathered(comm, rank) == list(range(size))


def test_a_failed_child_does_not_harm_its_parent() -> None:
    run_ranks(3, failure_of_a_child)
