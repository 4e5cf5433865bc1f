"""What the tests of collectives share: dtypes, exact inputs, expected values, and joining.

Inputs are chosen so that every partial result is exact in the dtype, in any order; so the expected value is
one exact number, computed by torch in float64, complex128 or int64 and wrapped to the dtype, and every
algorithm must give its bits. Element i of rank r is a formula of i and r: no rank needs another's data.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

import torch

import pycomm
from pycomm import _C
from pycomm.calling import KINDS

FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
COMPLEX = (torch.complex64, torch.complex128)
INTS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
BOOL = (torch.bool,)
DTYPES = FLOATS + COMPLEX + INTS + BOOL

#: op -> dtypes that have it (docs/numerics.md, "Which operations exist").
DEFINED: dict[str, tuple[torch.dtype, ...]] = {
    "sum": DTYPES,
    "product": DTYPES,
    "min": FLOATS + INTS + BOOL,
    "max": FLOATS + INTS + BOOL,
    "avg": FLOATS + COMPLEX,
    "band": INTS + BOOL,
    "bor": INTS + BOOL,
    "bxor": INTS + BOOL,
    "premul_sum": FLOATS + COMPLEX,
}
FACTOR = 0.5  # of premul_sum: exact on every input here


def op_argument(op: str) -> str | tuple[str, float]:
    """``op`` as a communicator takes it."""
    return ("premul_sum", FACTOR) if op == "premul_sum" else op


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which expected values are computed."""
    if dtype in COMPLEX:
        return torch.complex128
    return torch.float64 if dtype in FLOATS else torch.int64


def values(rank: int, count: int, dtype: torch.dtype, op: str = "sum") -> torch.Tensor:
    """Rank ``rank``'s input: ``count`` elements, every partial result of ``op`` exact for up to 17 ranks."""
    i = torch.arange(count) * 7 + rank * 5
    if dtype is torch.bool:
        return (i * i + rank) % 3 > 0
    if dtype in INTS:  # the whole range: sums and products wrap
        big = (i + 1) * 6364136223846793005 + rank * 14426950408889
        return (big >> 17).to(dtype)
    if op == "product":  # powers of two, few of them not ±1
        x = 1 - 2 * (i % 2).double()
        x = torch.where((i + rank) % 5 == 0, x * 2, x)
        if dtype in COMPLEX:
            x = x * torch.where(i % 3 == 0, 1j, 1 + 0j)
        return x.to(dtype)
    if op in ("min", "max"):
        return ((i * i + 11 * rank) % 15 - 7).double().to(dtype)
    # sum, avg, premul_sum: at most every third rank is not zero, so that 3 bits hold every partial sum
    x = torch.where((i + rank) % 3 == 0, (1 - 2 * (i % 2)).double(), 0.0)
    if dtype in COMPLEX:
        x = x + 1j * torch.where((i + rank) % 2 == 0, 3.0, -1.0)
    return x.to(dtype)


def expected(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The reduction of all ranks' tensors, in wide arithmetic, brought to their dtype."""
    dtype = tensors[0].dtype
    stack = torch.stack([t.to(wide(dtype)) for t in tensors])
    combine: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": lambda x: x.sum(0),
        "product": lambda x: x.prod(0),
        "min": lambda x: x.amin(0),
        "max": lambda x: x.amax(0),
        "avg": lambda x: x.sum(0) / len(tensors),
        "premul_sum": lambda x: (x * FACTOR).sum(0),
        "band": lambda x: _fold(torch.bitwise_and, x),
        "bor": lambda x: _fold(torch.bitwise_or, x),
        "bxor": lambda x: _fold(torch.bitwise_xor, x),
    }
    return combine[op](stack).to(dtype)


def _fold(f: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    result = x[0]
    for other in x[1:]:
        result = f(result, other)
    return result


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's value."""
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def check(got: torch.Tensor, want: torch.Tensor, *where: object) -> None:
    """Same dtype and bits (for complex numbers: same values, since zeros may differ in sign)."""
    assert got.dtype == want.dtype, (where, got.dtype, want.dtype)
    got, want = got.detach().reshape(-1), want.detach().reshape(-1)
    same = torch.equal(got, want) if got.dtype in COMPLEX else torch.equal(bits(got), bits(want))
    assert same, f"{where}: got {got[:20]}, expected {want[:20]}"


def sizes(n: int) -> tuple[int, ...]:
    """Element counts that meet the corners of a partition into n parts."""
    return tuple(sorted({0, 1, n - 1, n, n + 1, 4 * n, 97}))


def algorithms(comm: pycomm.Communicator, collective: str) -> list[str]:
    """Every algorithm of a collective, from the error that lists them. A collective call.

    On emulated devices those that so many ranks can have.
    """
    t, n = torch.zeros(1), comm.size
    part = {
        "reduce_scatter": lambda a: comm.reduce_scatter(t, torch.zeros(n), algorithm=a),
        "all_gather": lambda a: comm.all_gather(torch.zeros(n), t, algorithm=a),
        "gather": lambda a: comm.gather(t, torch.zeros(n), algorithm=a),
        "scatter": lambda a: comm.scatter(t, torch.zeros(n), algorithm=a),
    }
    try:
        part.get(collective, lambda a: getattr(comm, collective)(t, algorithm=a))("nonsense")
    except ValueError as error:
        found = re.search(r"'nonsense' is not one of \w+'s: (.*)", str(error))
        assert found, str(error)
        names = found[1].split(", ")
        if _C.cuda.emulated_device() < 0:
            return names
        comm.all_reduce(t)  # the communicator learns its device
        return [name for name in names if name in comm._c.device_algorithms(KINDS[collective])]
    raise AssertionError("an algorithm named 'nonsense' was accepted")


def prove(comm: pycomm.Communicator, counts: tuple[int, ...]) -> None:
    """Every collective that is measured, on vectors of these sizes. A collective call."""
    for n in counts:
        x = torch.full((n,), float(comm.rank + 1))
        comm.all_reduce(x)
        assert x.unique().tolist() == [comm.size * (comm.size + 1) / 2]
        comm.broadcast(x.fill_(float(comm.rank)), 0)
        assert x.unique().tolist() == [0.0]
        comm.reduce(x.fill_(1.0), 0)
        assert comm.rank != 0 or x.unique().tolist() == [float(comm.size)]
        whole = torch.empty(n * comm.size)
        comm.all_gather(whole, torch.full((n,), float(comm.rank)))
        assert torch.equal(whole, torch.arange(float(comm.size)).repeat_interleave(n))
        part = torch.empty(n)
        comm.reduce_scatter(part, whole)
        assert part.unique().tolist() == [float(comm.rank * comm.size)]


@contextlib.contextmanager
def raises(kind: type[BaseException], *parts: str) -> Iterator[None]:
    """Exactly this class of error, whose message has all ``parts``."""
    try:
        yield
    except BaseException as error:
        assert type(error) is kind, f"{type(error).__name__}: {error}; expected {kind.__name__}"
        for part in parts:
            assert part in str(error), f"{part!r} is not in: {error}"
        return
    raise AssertionError(f"nothing was raised; expected {kind.__name__} with {parts}")
