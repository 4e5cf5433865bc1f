"""What is no plain tensor in CPU memory, or cannot hold a result: refused in every place of every call.

The rank that gives it hears which argument it was (TypeError, ValueError), the others hear of the refusal
(CommError), and the communicator stays usable. The other bad arguments are in test_refusals.py.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import pycomm
from cases import check, raises
from ranks import run_ranks

Comm = pycomm.Communicator
warnings.filterwarnings("ignore", message=".*(quantize_per_tensor|nested tensors|CSR).*")


class Sub(torch.Tensor):
    pass


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(6)


def freed() -> torch.Tensor:
    t = torch.ones(6)
    t.untyped_storage().resize_(0)
    return t


#: a thing that no call takes -> its class of error, and what the message says of it
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "meta": (lambda: torch.ones(6, device="meta"), TypeError, "meta"),
    "fake": (fake, TypeError, "got FakeTensor"),
    "subclass": (lambda: torch.ones(6).as_subclass(Sub), TypeError, "got Sub"),
    "lazy Parameter": (torch.nn.UninitializedParameter, TypeError, "got UninitializedParameter"),
    "numpy array": (lambda: np.ones(6), TypeError, "array"),
    "sparse COO": (lambda: torch.eye(6).to_sparse(), TypeError, "not a plain dense tensor"),
    "sparse CSR": (lambda: torch.eye(6).to_sparse_csr(), TypeError, "not a plain dense tensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(6)]), TypeError, "not a plain dense tensor"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(6)], layout=torch.jagged),
        TypeError,
        "got NestedTensor",
    ),
    "zero tensor": (lambda: torch._efficientzerotensor(6), TypeError, "has no memory"),
    "freed": (freed, TypeError, "has no memory"),
    "uint16": (
        lambda: torch.ones(6, dtype=torch.uint16),
        TypeError,
        "dtype torch.uint16 is not supported; supported are",
    ),
    "uint64": (lambda: torch.ones(6, dtype=torch.uint64), TypeError, "dtype torch.uint64 is not supported"),
    "complex32": (
        lambda: torch.ones(6, dtype=torch.complex32),
        TypeError,
        "dtype torch.complex32 is not supported",
    ),
    "e4m3fnuz": (
        lambda: torch.ones(6).to(torch.float8_e4m3fnuz),
        TypeError,
        "dtype torch.float8_e4m3fnuz is not supported",
    ),
    "leaf": (lambda: torch.ones(6, requires_grad=True), ValueError, "requires grad"),
    "Parameter": (lambda: torch.nn.Parameter(torch.ones(6)), ValueError, "requires grad"),
    "not a leaf": (lambda: torch.ones(6, requires_grad=True) * 1, ValueError, "requires grad"),
    "strided leaf": (lambda: torch.ones(12, requires_grad=True)[::2], ValueError, "requires grad"),
}
if torch.backends.mkldnn.is_available():
    REFUSED["mkldnn"] = (lambda: torch.ones(6).to_mkldnn(), TypeError, "not a plain dense tensor")
if hasattr(torch, "quantize_per_tensor"):
    REFUSED["quantised"] = (
        lambda: torch.quantize_per_tensor(torch.ones(6), 0.1, 0, torch.qint8),
        TypeError,
        "not a plain dense tensor",
    )
#: what cannot hold a result
OVERLAPPING: dict[str, Callable[[], torch.Tensor]] = {
    "expanded": lambda: torch.ones(1).expand(6),
    "expanded matrix": lambda: torch.ones(2, 1).expand(2, 3),
    "windows": lambda: torch.ones(4).unfold(0, 3, 1),
    "negated, expanded": lambda: torch._neg_view(torch.ones(3, 1)).expand(3, 2),
}


def _t(n: int = 6) -> torch.Tensor:
    return torch.ones(n)


#: where a tensor of six elements is given -> the call, and the argument's name
OUTPUTS: dict[str, tuple[Callable[[Comm, Any], Any], str]] = {
    "all_reduce": (lambda c, t: c.all_reduce(t), "all_reduce: "),
    "all_reduce, max": (lambda c, t: c.all_reduce(t, "max"), "all_reduce: "),
    "all_reduce, asynchronous": (lambda c, t: c.all_reduce(t, async_op=True), "all_reduce: "),
    "all_reduce, out": (lambda c, t: c.all_reduce(_t(), out=t), "all_reduce: "),
    "a list": (lambda c, t: c.all_reduce([_t(), t]), "all_reduce: "),
    "broadcast": (lambda c, t: c.broadcast(t, 1 - c.rank), "broadcast: "),
    "all_gather": (lambda c, t: c.all_gather(t, _t(2)), "all_gather: "),
    "reduce_scatter": (lambda c, t: c.reduce_scatter(t, _t(18)), "reduce_scatter: "),
    "reduce": (lambda c, t: c.reduce(_t(), c.rank, out=t), "reduce: "),
    "gather": (lambda c, t: c.gather(_t(2), t, c.rank), "gather: "),
    "scatter": (lambda c, t: c.scatter(t, None, 1 - c.rank), "scatter: "),
    "all_to_all": (lambda c, t: c.all_to_all(t, _t(6)), "all_to_all: "),
}
INPUTS: dict[str, tuple[Callable[[Comm, Any], Any], str]] = {
    "all_reduce": (lambda c, t: c.all_reduce(t, out=_t()), "all_reduce: tensor"),
    "all_gather": (lambda c, t: c.all_gather(_t(18), t), "all_gather: input"),
    "reduce_scatter": (lambda c, t: c.reduce_scatter(_t(2), t), "reduce_scatter: input"),
    "broadcast": (lambda c, t: c.broadcast(t, c.rank), "broadcast: tensor"),
    "reduce": (lambda c, t: c.reduce(t, 1 - c.rank), "reduce: tensor"),
    "gather": (lambda c, t: c.gather(t, None, 1 - c.rank), "gather: tensor"),
    "scatter": (lambda c, t: c.scatter(_t(2), t, c.rank), "scatter: input"),
}


def refused(comm: Comm, culprit: int, call: Callable[[], Any], kind: type[Exception], *words: str) -> None:
    """``call`` of one rank is refused: that rank hears why, and the others do."""
    if comm.rank == culprit:
        with raises(kind, *words):
            call()
    else:
        with raises(pycomm.CommError, f"rank {culprit} refused its call", "stays usable", words[-1]):
            comm.barrier()


def given(call: Callable[[Comm, Any], Any], comm: Comm, make: Callable[[], Any]) -> None:
    call(comm, make())


def refusals(rank: int, size: int) -> None:
    with pycomm.init(timeout=20) as comm:
        for make, kind, words in REFUSED.values():
            culprit = 0 if size == 1 else len(words) % 2
            for call, argument in [*INPUTS.values(), *OUTPUTS.values()]:
                if size == 1 and argument[:6] in ("broadc", "reduce", "gather", "scatte"):
                    continue  # the call may need another rank
                refused(comm, culprit, functools.partial(given, call, comm, make), kind, argument, words)
            for transfer in (comm.send, comm.recv, comm.isend, comm.irecv):
                with raises(kind, "tensor", words):  # nobody else is in such a call
                    transfer(make(), 0)
            check(comm.all_reduce(torch.ones(3)), torch.full((3,), float(size)))
        for make_output in OVERLAPPING.values():
            for call, argument in OUTPUTS.values():
                if size == 1 and argument[:6] in ("broadc", "reduce", "gather", "scatte"):
                    continue
                told = "shares memory between its elements"
                refused(
                    comm, 0, functools.partial(given, call, comm, make_output), ValueError, argument, told
                )
            with raises(ValueError, "recv: the output of shape", "shares memory between its elements"):
                comm.recv(make_output(), 0)
            check(comm.all_reduce(torch.ones(3)), torch.full((3,), float(size)))
        comm.isend(torch.ones(2), rank)  # the transfers that were refused have taken nothing
        comm.recv(torch.zeros(2), rank)


@pytest.mark.parametrize("n", [1, 3])
def test_what_is_no_plain_tensor_is_refused_everywhere(n: int) -> None:
    run_ranks(n, refusals, timeout=110)


def transforms(rank: int, size: int) -> None:
    """Inside torch.func a tensor stands for something else than its memory."""
    with pycomm.init(timeout=20) as comm:
        x = torch.ones(2, 3)

        def total(t: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return torch.sum(comm.all_reduce(t))

        for call in (
            lambda: torch.vmap(comm.all_reduce)(x),
            lambda: torch.func.grad(total)(x),
            lambda: torch.func.jvp(comm.all_reduce, (x,), (x,)),
            lambda: torch.func.functionalize(comm.all_reduce)(x),
        ):
            refused(comm, 0, call, TypeError, "all_reduce: tensor")
        check(comm.all_reduce(torch.ones(3)), torch.full((3,), float(size)))


def test_function_transforms_are_refused() -> None:
    run_ranks(2, transforms)
