"""Calls that a communicator refuses, and what it says: shared by the tests of refusals.

VALUES: arguments of a wrong value or type, for 3 ranks. CALLS: arguments that a method does not have, or
whose type tells a slip, for 2 ranks. In both the error names the argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import pycomm

Comm = pycomm.Communicator


def _t(n: int = 6) -> torch.Tensor:
    return torch.ones(n)


Case = tuple[Callable[[Comm], Any], type[Exception], str]

#: the bad call -> what is raised, and what the message says
VALUES: dict[str, Case] = {
    "op": (lambda c: c.all_reduce(_t(), "mean"), ValueError, "op must be one of"),
    "op type": (lambda c: c.reduce_scatter(_t(2), _t(), 3), ValueError, "op must be one of"),
    "dtype": (
        lambda c: c.all_reduce(torch.ones(3, dtype=torch.uint16)),
        TypeError,
        "dtype torch.uint16 is not supported",
    ),
    "dtypes": (lambda c: c.all_reduce(_t(), out=torch.ones(6).double()), TypeError, "input is float32"),
    "device": (lambda c: c.all_reduce(torch.ones(3, device="meta")), TypeError, "meta"),
    "not a tensor": (lambda c: c.all_reduce([1.0, 2.0]), TypeError, "torch.Tensor"),
    "a number": (lambda c: c.broadcast(3), TypeError, "torch.Tensor"),
    "no tensor": (lambda c: c.all_reduce(None), TypeError, "all_reduce"),
    "nobody": (lambda c: c.broadcast(None, c.rank), TypeError, "broadcast: the input must be"),
    "nowhere": (lambda c: c.all_gather(None, _t(0)), TypeError, "all_gather: the output must be"),
    "out size": (lambda c: c.all_reduce(_t(), out=_t(7)), ValueError, "out has 7 elements, expected 6"),
    "root": (lambda c: c.broadcast(_t(), 9), ValueError, "broadcast: src must be a rank in [0, 3), got 9"),
    "negative root": (
        lambda c: c.reduce(_t(), -1),
        ValueError,
        "reduce: dst must be a rank in [0, 3), got -1",
    ),
    "root type": (
        lambda c: c.broadcast(_t(), "x"),
        TypeError,
        "broadcast: src must be a rank in [0, 3), got 'x'",
    ),
    "root float": (
        lambda c: c.scatter(_t(2), _t(), 0.5),
        TypeError,
        "scatter: src must be a rank in [0, 3), got 0.5",
    ),
    "huge root": (lambda c: c.broadcast(_t(), 2**70), ValueError, "broadcast: src must be"),
    "indivisible": (lambda c: c.reduce_scatter(_t(2), _t(7)), ValueError, "do not divide evenly"),
    "part": (lambda c: c.reduce_scatter(_t(3), _t(6)), ValueError, "output has 3 elements, expected 2"),
    "whole": (lambda c: c.all_gather(_t(5), _t(2)), ValueError, "output has 5 elements, expected 6"),
    "counts length": (
        lambda c: c.all_gather(_t(6), _t(2), counts=[2, 4]),
        ValueError,
        "counts must be 3 integers in [0, 2^64), one for each rank, got [2, 4]",
    ),
    "counts sign": (
        lambda c: c.all_gather(_t(6), _t(2), counts=[-1, 3, 4]),
        ValueError,
        "counts must be 3 integers in [0, 2^64)",
    ),
    "counts type": (
        lambda c: c.all_gather(_t(6), _t(2), counts="abc"),
        TypeError,
        "all_gather: counts must be 3 integers",
    ),
    "counts sum": (lambda c: c.all_gather(_t(6), _t(2), counts=[2, 2, 3]), ValueError, "expected"),
    "algorithm": (lambda c: c.all_reduce(_t(), algorithm="quick"), ValueError, "'quick' is not one of"),
    "algorithm type": (
        lambda c: c.all_reduce(_t(), algorithm=5),
        TypeError,
        "all_reduce: algorithm must be a name or None, got 5",
    ),
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
    "timeout type": (
        lambda c: c.all_reduce(_t(), timeout="soon"),
        TypeError,
        "timeout must be positive seconds, got 'soon'",
    ),
    "keyword": (lambda c: c.broadcast(_t(), colour="red"), TypeError, "unexpected keyword argument 'colour'"),
    "gather output": (lambda c: c.gather(_t(2), None, c.rank), ValueError, "needs output="),
    "scatter input": (lambda c: c.scatter(_t(2), None, c.rank), ValueError, "needs input="),
    "a list of none": (lambda c: c.all_gather([None] * 3, _t(2)), TypeError, "all_gather: element 0: output"),
    "list parts": (lambda c: c.reduce_scatter(_t(2), [_t(2), 5, _t(2)]), TypeError, "element 1"),
    "blocks": (lambda c: c.all_to_all([1, 2, 3], [_t(2)] * 3), TypeError, "list of tensors"),
    "splits": (lambda c: c.all_to_all(_t(), _t(), [1, 1, 1], [2, 2, 2]), ValueError, "output_split_sizes"),
    "split list": (lambda c: c.all_to_all([_t(2)] * 2, [_t(2)] * 3), ValueError, "3 tensors"),
    "split type": (
        lambda c: c.all_to_all(_t(), _t(), ["a", 1, 2], None),
        TypeError,
        "all_to_all: output_split_sizes must be",
    ),
    "all_to_all": (lambda c: c.all_to_all(_t(7), _t(7)), ValueError, "does not divide over 3 ranks"),
    "grad": (lambda c: c.all_reduce(torch.ones(3, requires_grad=True)), ValueError, "requires grad"),
    "empty list": (lambda c: c.all_reduce([]), ValueError, "empty list"),
    "sparse": (lambda c: c.all_reduce(torch.eye(3).to_sparse()), TypeError, "dense"),
    "color": (lambda c: c.split(-1), ValueError, "split: color must be an integer in [0, 2^63), got -1"),
    "color type": (
        lambda c: c.split("red"),
        TypeError,
        "split: color must be an integer in [0, 2^63), got 'red'",
    ),
    "key": (lambda c: c.split(0, 1.5), TypeError, "split: key must be an integer in [-2^63, 2^63), got 1.5"),
    "ranks": (lambda c: c.new_group([0, 0]), ValueError, "distinct"),
    "ranks type": (lambda c: c.new_group("ab"), TypeError, "new_group: ranks must be a list"),
    "no ranks": (lambda c: c.new_group(3), TypeError, "new_group: ranks must be a list"),
}

#: every collective method, called right but for the keywords that are added
_RIGHT: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda c, **k: c.all_reduce(_t(), **k),
    "reduce_scatter": lambda c, **k: c.reduce_scatter(_t(3), _t(), **k),
    "all_gather": lambda c, **k: c.all_gather(_t(), _t(3), **k),
    "broadcast": lambda c, **k: c.broadcast(_t(), **k),
    "reduce": lambda c, **k: c.reduce(_t(), **k),
    "gather": lambda c, **k: c.gather(_t(3), _t(), c.rank, **k),
    "scatter": lambda c, **k: c.scatter(_t(3), _t(), c.rank, **k),
    "all_to_all": lambda c, **k: c.all_to_all(_t(), _t(), **k),
    "barrier": lambda c, **k: c.barrier(**k),
    "split": lambda c, **k: c.split(0, **k),
    "new_group": lambda c, **k: c.new_group([0], **k),
    "tune": lambda c, **k: c.tune(**k),
}
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_PARTED = ("reduce_scatter", "all_gather", "gather", "scatter")
_PLAIN = ("all_to_all", "barrier", "split", "new_group", "tune")  # no algorithms
_GROUPS = ("split", "new_group", "tune")


def _unknown(method: str, name: str, value: object) -> Case:
    text = f"{method}: got an unexpected keyword argument {name!r}; it takes ("
    return lambda c: _RIGHT[method](c, **{name: value}), TypeError, text


def _wrong(method: str, name: str, value: object, kind: type[Exception], expected: str) -> Case:
    return lambda c: _RIGHT[method](c, **{name: value}), kind, f"{method}: {name} must be {expected}"


CALLS: dict[str, Case] = {
    **{f"{m} unknown": _unknown(m, "timeout_s", 3) for m in _RIGHT},
    **{f"{m} counts": _unknown(m, "counts", [3, 3]) for m in _RIGHT if m not in _PARTED},
    **{f"{m} op": _unknown(m, "op", "max") for m in _RIGHT if m not in _REDUCING},
    **{f"{m} deterministic": _unknown(m, "deterministic", True) for m in _RIGHT if m not in _REDUCING},
    **{f"{m} algorithm": _unknown(m, "algorithm", "direct") for m in _PLAIN},
    **{f"{m} async_op": _unknown(m, "async_op", True) for m in _GROUPS},
    **{f"{m} timeout": _unknown(m, "timeout", 3.0) for m in _GROUPS},
    **{
        f"{m} async_op type": _wrong(m, "async_op", 1, TypeError, "True or False, got 1")
        for m in _RIGHT
        if m not in _GROUPS
    },
    **{
        f"{m} timeout value": _wrong(m, "timeout", -1, ValueError, "positive seconds, got -1")
        for m in _RIGHT
        if m not in _GROUPS
    },
    **{
        f"{m} algorithm type": _wrong(m, "algorithm", b"ring", TypeError, "a name or None, got b'ring'")
        for m in _RIGHT
        if m not in _PLAIN
    },
    **{
        f"{m} deterministic type": _wrong(m, "deterministic", "yes", TypeError, "True, False or None")
        for m in _REDUCING
    },
    **{
        f"{m} counts type": _wrong(m, "counts", [1.5, 2], TypeError, "2 integers in [0, 2^64)")
        for m in _PARTED
    },
    **{
        f"{m} counts number": _wrong(m, "counts", [6], ValueError, "2 integers in [0, 2^64)") for m in _PARTED
    },
    "no arguments": (
        lambda c: c.all_reduce(),
        TypeError,
        "all_reduce: missing a required argument: 'tensor'",
    ),
    "no input": (lambda c: c.all_gather(_t()), TypeError, "all_gather: missing a required argument: 'input'"),
    "no color": (lambda c: c.split(), TypeError, "split: missing a required argument: 'color'"),
    "too many": (lambda c: c.all_reduce(_t(), "sum", None), TypeError, "all_reduce: too many positional"),
    "async by place": (lambda c: c.broadcast(_t(), 0, True), TypeError, "broadcast: too many positional"),
    "barrier of": (lambda c: c.barrier(_t()), TypeError, "barrier: too many positional arguments"),
    "twice": (lambda c: c.reduce(_t(), 0, dst=0), TypeError, "reduce: multiple values for argument 'dst'"),
    "src is a flag": (lambda c: c.broadcast(_t(), True), TypeError, "src must be a rank in [0, 2), got True"),
    "src is a tensor": (
        lambda c: c.broadcast(_t(), _t()),
        TypeError,
        "src must be a rank in [0, 2), got a tensor",
    ),
    "dst type": (lambda c: c.gather(_t(3), _t(), None), TypeError, "gather: dst must be a rank"),
    "dst range": (
        lambda c: c.gather(_t(3), _t(), 2),
        ValueError,
        "gather: dst must be a rank in [0, 2), got 2",
    ),
    "timeout flag": (
        lambda c: c.barrier(timeout=True),
        TypeError,
        "timeout must be positive seconds, got True",
    ),
    "timeout nan": (lambda c: c.barrier(timeout=float("nan")), ValueError, "positive seconds, got nan"),
    "parts": (
        lambda c: c.all_gather([_t(2)] * 3, _t(2)),
        ValueError,
        "output is a list of 3 tensors, expected 2",
    ),
    "input splits": (
        lambda c: c.all_to_all(_t(), _t(), None, 3),
        TypeError,
        "all_to_all: input_split_sizes must be 2 integers in [0, 2^64), one for each rank, got 3",
    ),
    "split float": (
        lambda c: c.all_to_all(_t(), _t(), [3.0, 3.0]),
        TypeError,
        "output_split_sizes must be 2",
    ),
    "split sign": (lambda c: c.all_to_all(_t(), _t(), [7, -1]), ValueError, "output_split_sizes must be 2"),
    "group type": (
        lambda c: c.new_group([0, "1"]),
        TypeError,
        "new_group: each of ranks must be a rank in [0, 2)",
    ),
    "group range": (
        lambda c: c.new_group([0, 2]),
        ValueError,
        "new_group: each of ranks must be a rank in [0, 2)",
    ),
    "group empty": (lambda c: c.new_group([]), ValueError, "new_group: ranks must be distinct, at least one"),
    "tune seconds": (lambda c: c.tune(-1), ValueError, "tune: seconds must be positive seconds, got -1"),
    "tune type": (lambda c: c.tune("long"), TypeError, "tune: seconds must be positive seconds, got 'long'"),
}


def refused_by_one(rank: int, size: int, names: list[str]) -> None:
    """Each case by one rank, in turn, while the others call a barrier; then all ranks go on."""
    cases = VALUES | CALLS
    with pycomm.init(timeout=20) as comm:
        for i, name in enumerate(names):
            call, kind, text = cases[name]
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
            assert comm.all_reduce(torch.full((5,), float(i))).tolist() == [float(size * i)] * 5, name
