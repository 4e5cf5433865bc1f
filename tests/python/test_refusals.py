"""Bad input: refused with an error that names the argument, told to every rank, and no harm done."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pycomm
from cases import raises
from ranks import run_ranks

Comm = pycomm.Communicator


def _t(n: int = 6) -> torch.Tensor:
    return torch.ones(n)


#: the bad call -> what is raised, and what the message says
BAD: dict[str, tuple[Callable[[Comm], Any], type[Exception], str]] = {
    "op": (lambda c: c.all_reduce(_t(), "mean"), ValueError, "op must be one of"),
    "op type": (lambda c: c.reduce_scatter(_t(2), _t(), 3), ValueError, "op must be one of"),
    "dtype": (lambda c: c.all_reduce(torch.ones(3, dtype=torch.uint16)), TypeError, "dtype is not supported"),
    "dtypes": (lambda c: c.all_reduce(_t(), out=torch.ones(6).double()), TypeError, "input is float32"),
    "device": (lambda c: c.all_reduce(torch.ones(3, device="meta")), TypeError, "meta"),
    "not a tensor": (lambda c: c.all_reduce([1.0, 2.0]), TypeError, "torch.Tensor"),
    "a number": (lambda c: c.broadcast(3), TypeError, "torch.Tensor"),
    "no tensor": (lambda c: c.all_reduce(None), TypeError, "all_reduce"),
    "nobody": (lambda c: c.broadcast(None, c.rank), TypeError, "broadcast: the input must be"),
    "nowhere": (lambda c: c.all_gather(None, _t(0)), TypeError, "all_gather: the output must be"),
    "out size": (lambda c: c.all_reduce(_t(), out=_t(7)), ValueError, "out has 7 elements, expected 6"),
    "root": (lambda c: c.broadcast(_t(), 9), ValueError, "rank 9 is not in this communicator of 3"),
    "negative root": (lambda c: c.reduce(_t(), -1), ValueError, "rank -1"),
    "root type": (lambda c: c.broadcast(_t(), "x"), TypeError, "root='x'"),
    "root float": (lambda c: c.scatter(_t(2), _t(), 0.5), TypeError, "root=0.5"),
    "huge root": (lambda c: c.broadcast(_t(), 2**70), TypeError, "root="),
    "indivisible": (lambda c: c.reduce_scatter(_t(2), _t(7)), ValueError, "do not divide evenly"),
    "part": (lambda c: c.reduce_scatter(_t(3), _t(6)), ValueError, "output has 3 elements, expected 2"),
    "whole": (lambda c: c.all_gather(_t(5), _t(2)), ValueError, "output has 5 elements, expected 6"),
    "counts length": (
        lambda c: c.all_gather(_t(6), _t(2), counts=[2, 4]),
        ValueError,
        "counts has 2 entries",
    ),
    "counts sign": (lambda c: c.all_gather(_t(6), _t(2), counts=[-1, 3, 4]), TypeError, "counts=[-1, 3, 4]"),
    "counts type": (lambda c: c.all_gather(_t(6), _t(2), counts="abc"), TypeError, "counts="),
    "counts sum": (lambda c: c.all_gather(_t(6), _t(2), counts=[2, 2, 3]), ValueError, "expected"),
    "algorithm": (lambda c: c.all_reduce(_t(), algorithm="quick"), ValueError, "'quick' is not one of"),
    "algorithm type": (lambda c: c.all_reduce(_t(), algorithm=5), TypeError, "algorithm=5"),
    "its algorithm": (
        lambda c: c.broadcast(_t(), algorithm="one_shot"),
        ValueError,
        "not one of broadcast's",
    ),
    "deterministic": (
        lambda c: c.all_reduce(_t(), algorithm="ring", deterministic=True),
        ValueError,
        "'ring' does not reduce in the deterministic order",
    ),
    "timeout": (lambda c: c.all_reduce(_t(), timeout=0), ValueError, "timeout must be positive"),
    "timeout type": (lambda c: c.all_reduce(_t(), timeout="soon"), TypeError, ""),
    "keyword": (lambda c: c.broadcast(_t(), colour="red"), TypeError, "colour='red'"),
    "gather output": (lambda c: c.gather(_t(2), None, c.rank), ValueError, "needs output="),
    "scatter input": (lambda c: c.scatter(_t(2), None, c.rank), ValueError, "needs input="),
    "a list of none": (lambda c: c.all_gather([None] * 3, _t(2)), TypeError, "all_gather: element 0: output"),
    "list parts": (lambda c: c.reduce_scatter(_t(2), [_t(2), 5, _t(2)]), TypeError, "element 1"),
    "blocks": (lambda c: c.all_to_all([1, 2, 3], [_t(2)] * 3), TypeError, "list of tensors"),
    "splits": (lambda c: c.all_to_all(_t(), _t(), [1, 1, 1], [2, 2, 2]), ValueError, "output_split_sizes"),
    "split list": (lambda c: c.all_to_all([_t(2)] * 2, [_t(2)] * 3), ValueError, "3 tensors"),
    "split type": (lambda c: c.all_to_all(_t(), _t(), ["a", 1, 2], None), TypeError, ""),
    "all_to_all": (lambda c: c.all_to_all(_t(7), _t(7)), ValueError, "does not divide over 3 ranks"),
    "grad": (lambda c: c.all_reduce(torch.ones(3, requires_grad=True)), ValueError, "requires grad"),
    "empty list": (lambda c: c.all_reduce([]), ValueError, "empty list"),
    "sparse": (lambda c: c.all_reduce(torch.eye(3).to_sparse()), TypeError, "dense"),
    "color": (lambda c: c.split(-1), ValueError, "color"),
    "color type": (lambda c: c.split("red"), ValueError, "color"),
    "key": (lambda c: c.split(0, 1.5), ValueError, "key"),
    "ranks": (lambda c: c.new_group([0, 0]), ValueError, "distinct"),
    "ranks type": (lambda c: c.new_group("ab"), ValueError, "new_group"),
    "no ranks": (lambda c: c.new_group(3), ValueError, "new_group"),
}


def refused_by_one(rank: int, size: int, names: list[str]) -> None:
    with pycomm.init(timeout=20) as comm:
        for i, name in enumerate(names):
            call, kind, text = BAD[name]
            culprit = i % size
            try:
                call(comm) if rank == culprit else comm.barrier()
            except Exception as error:
                told = f"{name}: {type(error).__name__}: {error}"
                if rank == culprit:
                    assert isinstance(error, kind), told
                    assert not isinstance(error, pycomm.CommError), told
                    assert text in str(error), told
                else:
                    assert type(error) is pycomm.CommError, told
                    assert f"rank {culprit} refused its call" in str(error), told
                    assert text in str(error), told
                    assert "stays usable" in str(error), told
            else:
                raise AssertionError(f"{name}: nothing was raised on rank {rank}")
            assert comm.all_reduce(torch.full((5,), float(i))).tolist() == [3.0 * i] * 5, name


def test_one_rank_makes_a_bad_call() -> None:
    run_ranks(3, refused_by_one, list(BAD), timeout=100)


def refused_by_all(rank: int, size: int) -> None:
    with pycomm.init(timeout=20) as comm:
        for name, (call, kind, _) in BAD.items():
            try:
                call(comm)
            except Exception as error:
                assert isinstance(error, kind), (name, error)
                assert not isinstance(error, pycomm.CommError), (name, error)
            else:
                raise AssertionError(f"{name}: nothing was raised")
        # Two of three at once, with different mistakes: the third hears of one of them.
        if rank == 0:
            with raises(ValueError, "quick"):
                comm.all_reduce(_t(), algorithm="quick")
        elif rank == 1:
            with raises(ValueError, "rank 9"):
                comm.broadcast(_t(), 9)
        else:
            with raises(pycomm.CommError, "refused its call"):
                comm.all_reduce(_t(50_000))
        assert comm.all_reduce(torch.ones(1)).item() == 3


def test_all_ranks_make_bad_calls() -> None:
    run_ranks(3, refused_by_all, timeout=100)


def bursts(rank: int, size: int) -> None:
    """Many refused calls in a row, from one rank and from several, among small and large ones."""
    with pycomm.init(timeout=30) as comm:
        for round_ in range(30):
            for k in range(10):
                culprit = (round_ + k) % size if round_ % 2 else round_ % size
                if rank == culprit:
                    with raises(ValueError):
                        comm.all_reduce(_t(), "mean")
                else:
                    with raises(pycomm.CommError, f"rank {culprit} refused"):
                        comm.all_reduce(torch.ones([3, 700, 90_000][k % 3]))
            count = [1, 600, 50_000, 300_000][round_ % 4]
            assert bool((comm.all_reduce(torch.ones(count)) == size).all())
        # Asynchronous calls around refused ones keep their order.
        works: list[tuple[bool, pycomm.Work | None, torch.Tensor]] = []
        for k in range(20):
            t, bad = torch.ones(1000 * k), k % 3 == 1
            if bad and rank == 0:
                with raises(ValueError):
                    comm.all_reduce(t, "mean", async_op=True)
                works.append((bad, None, t))
            else:
                works.append((bad, comm.all_reduce(t, async_op=True), t))
        for bad, work, t in works:
            if work is None:
                continue
            if bad:
                with raises(pycomm.CommError, "rank 0 refused"):
                    work.wait()
            else:
                work.wait()
                assert bool((t == size).all())
        comm.barrier()


@pytest.mark.parametrize("n", [2, 3, 4])
def test_bursts_of_refused_calls(n: int) -> None:
    run_ranks(n, bursts)


def alone(rank: int, size: int) -> None:
    """One rank: the same arguments are wrong, and the same calls work."""
    with pycomm.init() as comm:
        for name in ("op", "dtype", "not a tensor", "out size", "root type", "algorithm", "keyword", "grad"):
            call, kind, _ = BAD[name]
            try:
                call(comm)
            except kind:
                continue
            raise AssertionError(f"{name}: nothing was raised")
        assert comm.all_reduce(torch.full((2,), 3.0), "avg").tolist() == [3, 3]
        comm.barrier()


def test_alone() -> None:
    run_ranks(1, alone)


def arena_limit(rank: int, size: int) -> None:
    with pycomm.init(timeout=20) as comm:
        with raises(pycomm.CommError, "shared arena", "PYCOMM_ARENA_MAX"):
            comm.empty(1 << 30)
        for bad in ((-1,), (2, -3), ("a",), ([2, -1],)):
            with raises(ValueError, "sizes must be integers"):
                comm.empty(*bad)
        for huge in ((2**40, 2**40), (2**62,)):
            with raises(ValueError, "too many bytes"):
                comm.empty(*huge)
        with raises(TypeError, "not supported"):
            comm.empty(3, dtype=torch.uint16)
        with raises(ValueError, "timeout"):
            comm.timeout = 0.0
        comm.barrier()


def test_arena_tensors_that_cannot_be() -> None:
    run_ranks(2, arena_limit, env={"PYCOMM_ARENA_MAX": str(64 << 20)})
    assert "PYCOMM_ARENA_MAX" not in os.environ
