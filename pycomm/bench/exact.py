"""Inputs whose right result is exact in every dtype, and that result, in closed form.

As in nccl-tests, elements are small integers chosen so that no partial result in any order rounds: a sum over
all ranks stays within the dtype's exact integers. Values repeat with a prime period, which no block size
divides, so that data in the wrong place is seen as wrong. Nothing here calls a collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from pycomm.bench.collectives import REDUCES, Shape

__all__ = ["POISON", "PREMUL_FACTOR", "expected", "inputs"]

PERIOD = 1009
PREMUL_FACTOR = 2.0
POISON = 0x5A  # the byte that buffers are filled with where a result is to appear

_LARGEST_EXACT = {
    torch.float8_e4m3fn: 16,
    torch.float8_e5m2: 8,
    torch.bfloat16: 256,
    torch.float16: 2048,
    torch.int8: 127,
    torch.uint8: 255,
}

Integers = npt.NDArray[np.int64]
_COMBINE: dict[str, Callable[[Integers, Integers], Integers]] = {
    "sum": np.add,
    "avg": np.add,
    "premul_sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def _one_period(rank: int, n_ranks: int, op: str | None, dtype: torch.dtype) -> Integers:
    """One period of what ``rank`` puts in (int64, shape [PERIOD]); ``op`` is None when nothing is reduced."""
    i = np.arange(PERIOD, dtype=np.int64)
    turn: Integers = ((i + rank) % n_ranks == 0).astype(np.int64)  # one rank's turn at each element
    if dtype is torch.bool:
        return _mixed(rank, 2)
    if op == "product":
        turn += 1
        return turn
    n_values = 8
    if op in ("sum", "avg", "premul_sum"):
        largest = _LARGEST_EXACT.get(dtype, 1 << 15)
        n_values = min(8, largest // (n_ranks * (2 if op == "premul_sum" else 1)) + 1)
        if op == "avg":
            # all the same but for +1, -1, +1, -1 … (0) over the ranks: the average is exact for any n
            k = (i + rank) % n_ranks
            sign: Integers = np.where((k == n_ranks - 1) & (n_ranks % 2 == 1), 0, 1 - 2 * (k % 2))
            return _mixed(0, n_values) + sign
        if n_values < 2:
            return turn
    return _mixed(rank, n_values)


def _mixed(rank: int, n_values: int) -> Integers:
    i = np.arange(PERIOD, dtype=np.int64)
    mixed: Integers = (i * 7 + i // 5 + rank * 3) % n_values
    return mixed


def _reduced_period(n_ranks: int, op: str, dtype: torch.dtype) -> npt.NDArray[np.float64]:
    if dtype is torch.bool:
        op = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}.get(op, op)
    total = functools.reduce(_COMBINE[op], [_one_period(r, n_ranks, op, dtype) for r in range(n_ranks)])
    result = total.astype(np.float64)
    if op == "avg":
        return result / n_ranks
    return result * PREMUL_FACTOR if op == "premul_sum" else result


def _spread(period: npt.NDArray[np.generic], start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Elements ``start … start + count`` of the periodic sequence (shape [count])."""
    one = torch.from_numpy(np.roll(period, -(start % PERIOD)).copy()).to(dtype)
    n_bytes = count * one.element_size()
    one_bytes = one.view(torch.uint8)  # by bytes, since not every dtype has every tensor function
    return one_bytes.repeat(-(-n_bytes // one_bytes.numel()))[:n_bytes].view(dtype)


def inputs(shape: Shape, op: str, dtype: torch.dtype) -> torch.Tensor:
    """What this rank puts in (shape [n_in]); only the root's matters for broadcast and scatter."""
    reducing = op if shape.collective in REDUCES else None
    return _spread(_one_period(shape.rank, shape.n_ranks, reducing, dtype), 0, shape.n_in, dtype)


def expected(shape: Shape, op: str, dtype: torch.dtype) -> torch.Tensor | None:
    """What this rank's output must be (shape [n_out]), or None when this rank gets none (not the root)."""
    n, rank, root, count = shape.n_ranks, shape.rank, shape.root, shape.count
    if shape.collective in ("reduce", "gather") and rank != root:
        return None
    if shape.collective in REDUCES:
        start = rank * count if shape.collective == "reduce_scatter" else 0
        return _spread(_reduced_period(n, op, dtype), start, shape.n_out, dtype)

    def sent(source: int, start: int) -> torch.Tensor:
        return _spread(_one_period(source, n, None, dtype), start, count, dtype)

    if shape.collective in ("all_gather", "gather"):
        return torch.cat([sent(source, 0).view(torch.uint8) for source in range(n)]).view(dtype)
    if shape.collective == "all_to_all":
        blocks = [sent(source, rank * count).view(torch.uint8) for source in range(n)]
        return torch.cat(blocks).view(dtype)
    if shape.collective == "scatter":
        return sent(root, rank * count)
    if shape.collective == "sendrecv":
        return sent((rank - 1) % n, 0)
    return sent(root, 0)  # broadcast
