"""Bad input: refused with an error that names the argument, told to every rank, and no harm done."""

from __future__ import annotations

import inspect
import os

import pytest
import torch

import pycomm
from cases import raises
from ranks import run_ranks
from refusal_cases import CALLS, VALUES, _t, refused_by_one


def test_one_rank_makes_a_bad_call() -> None:
    run_ranks(3, refused_by_one, list(VALUES), timeout=100)


def test_one_rank_makes_a_call_that_there_is_not() -> None:
    run_ranks(2, refused_by_one, list(CALLS), timeout=100)


def refused_by_all(rank: int, size: int) -> None:
    with pycomm.init(timeout=20) as comm:
        for name, (call, kind, _) in VALUES.items():
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
            with raises(ValueError, "got 9"):
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
            call, kind, _ = (VALUES | CALLS)[name]
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
        for bad in ((-1,), (2, -3), ([2, -1],)):
            with raises(ValueError, "empty: a size must be an integer in [0, 2^63), got -"):
                comm.empty(*bad)
        for wrong in (("a",), (1.5,), (2, None), ([[2]],)):
            with raises(TypeError, "empty: a size must be an integer in [0, 2^63), got"):
                comm.empty(*wrong)
        for huge in ((2**40, 2**40), (2**62,)):
            with raises(ValueError, "too many bytes"):
                comm.empty(*huge)
        with raises(TypeError, "empty: dtype torch.uint16 is not supported; supported are float64"):
            comm.empty(3, dtype=torch.uint16)
        with raises(TypeError, "empty: dtype must be a torch.dtype, got 'float32'"):
            comm.empty(3, dtype="float32")
        with raises(ValueError, "timeout must be positive seconds, got 0.0"):
            comm.timeout = 0.0
        with raises(TypeError, "deterministic must be True or False, got 'no'"):
            comm.deterministic = "no"
        with raises(TypeError, "abort: reason must be a string, got 3"):
            comm.abort(3)
        comm.barrier()


def test_arena_tensors_that_cannot_be() -> None:
    run_ranks(2, arena_limit, env={"PYCOMM_ARENA_MAX": str(64 << 20)})
    assert "PYCOMM_ARENA_MAX" not in os.environ


def transfers(rank: int, size: int) -> None:
    """Wrong arguments of send and recv: nobody else is in the call, so the others hear nothing."""
    with pycomm.init(timeout=20) as comm:
        t = _t(2)
        for name, wrong in {
            "send": [lambda **k: comm.send(t, 1 - rank, **k), lambda **k: comm.send(t, **k)],
            "isend": [lambda **k: comm.isend(t, 1 - rank, **k), lambda **k: comm.isend(t, **k)],
            "recv": [lambda **k: comm.recv(t, **k), lambda **k: comm.recv(t, **k)],
            "irecv": [lambda **k: comm.irecv(t, **k), lambda **k: comm.irecv(t, **k)],
        }.items():
            call, to = wrong
            peer, more = ("dst", "") if "send" in name else ("src", ", or None or -1 for any")
            for tag in (-1, 2**31, 2**40, 2**70):
                with raises(ValueError, f"{name}: tag must be an integer in [0, 2^31), got {tag}"):
                    call(tag=tag)
            for kind in ("a", 0.5, None, True):
                with raises(TypeError, f"{name}: tag must be an integer in [0, 2^31), got {kind!r}"):
                    call(tag=kind)
            for number in (2, -2, 2**40):
                with raises(ValueError, f"{name}: {peer} must be a rank in [0, 2){more}, got {number}"):
                    to(**{peer: number})
            for kind in ("a", 0.5, False, [0]):
                with raises(TypeError, f"{name}: {peer} must be a rank in [0, 2){more}, got {kind!r}"):
                    to(**{peer: kind})
            for kind, got in ((ValueError, 0), (ValueError, -3.0), (TypeError, "1"), (TypeError, True)):
                with raises(kind, f"{name}: timeout must be positive seconds, got {got!r}"):
                    call(timeout=got)
            with raises(TypeError, "unexpected keyword argument 'group'"):
                call(group=None)
        for missing in (lambda: comm.send(t), lambda: comm.send(t, None), lambda: comm.send(t, -1)):
            try:
                missing()
            except (TypeError, ValueError) as error:
                assert "dst" in str(error), error
            else:
                raise AssertionError("a send to nobody was accepted")
        with raises(TypeError, "torch.Tensor"):
            comm.send([t], 1 - rank)
        with raises(TypeError, "torch.Tensor"):
            comm.recv(None)
        # Nothing was sent or waits; None and -1 are any source, and the largest tag is one.
        for source in (None, -1):
            work = comm.isend(torch.full((2,), float(rank)), 1 - rank, 2**31 - 1)
            assert comm.recv(t, source, 2**31 - 1, timeout=float("inf")) == 1 - rank
            assert t.tolist() == [1.0 - rank] * 2
            work.wait()
        comm.barrier()


def test_wrong_arguments_of_transfers() -> None:
    run_ranks(2, transfers)


#: what every method takes: names, "*" before those that are given by name only
SIGNATURES = {
    "all_reduce": "tensor op * out async_op algorithm deterministic timeout compression error_feedback",
    "reduce_scatter": "output input op * counts async_op algorithm deterministic timeout compression "
    "error_feedback",
    "all_gather": "output input * counts async_op algorithm timeout compression error_feedback",
    "broadcast": "tensor src * async_op algorithm timeout",
    "reduce": "tensor dst op * out async_op algorithm deterministic timeout",
    "gather": "tensor output dst * counts async_op algorithm timeout",
    "scatter": "output input src * counts async_op algorithm timeout",
    "all_to_all": "output input output_split_sizes input_split_sizes * async_op timeout",
    "barrier": "* async_op timeout",
    "empty": "shape dtype device",
    "split": "color key",
    "new_group": "ranks",
    "shrink": "exclude timeout",
    "send": "tensor dst tag * timeout",
    "recv": "tensor src tag * timeout",
    "isend": "tensor dst tag * timeout",
    "irecv": "tensor src tag * timeout",
    "tune": "seconds * device",
    "close": "",
    "abort": "reason",
}


def test_signatures_are_exact_and_documented() -> None:
    public = {n for n, f in inspect.getmembers(pycomm.Communicator, callable) if not n.startswith("_")}
    assert public == set(SIGNATURES)
    for name, wanted in SIGNATURES.items():
        method = getattr(pycomm.Communicator, name)
        parameters = list(inspect.signature(method).parameters.values())[1:]
        text = []
        for before, p in zip([None, *parameters], parameters, strict=False):
            named = p.kind is p.KEYWORD_ONLY and (before is None or before.kind is p.POSITIONAL_OR_KEYWORD)
            text += ["*", p.name] if named else [p.name]
        assert " ".join(text) == wanted, name
        doc = inspect.getdoc(method) or ""
        arguments, _, rest = doc.partition("Args:")[2].partition("Example:")
        for p in parameters:
            assert p.name in arguments, f"{name} does not document {p.name}"
        assert ">>> " in (rest or doc), f"{name} has no example"
        assert "Raises:" in doc, f"{name} does not say what it raises"
        assert "Returns:" in doc or name in ("send", "tune", "close", "abort"), f"{name}: returns what?"
