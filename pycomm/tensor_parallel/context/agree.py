"""What context-parallel attention demands of its arguments, on this rank and across the ranks.

A wrong argument of one rank is told to all of them (they would wait for it otherwise); ranks whose arguments
do not belong together get the same ValueError on every rank. Cost: one all_gather of 11 integers a call,
through shared memory a microsecond.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from pycomm import arguments
from pycomm.communicator import Communicator
from pycomm.tensor_parallel.context.order import (
    ORDERS,
    Order,
    check_order,
    length_of,
    shard_sizes,
    wrong_sizes,
)

__all__ = ["Agreed", "agree", "autocast_to"]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SAME = (
    "batch",
    "query heads",
    "KV heads",
    "head dimension",
    "value dimension",
    "dtype",
    "is_causal",
    "order",
    "scale",
)


def _bits(scale: float) -> int:
    """A float64 as an int64, to travel with the other numbers."""
    return int.from_bytes(struct.pack("<d", scale), "little", signed=True)


def _scale_of(bits: int) -> float:
    scale: float = struct.unpack("<d", bits.to_bytes(8, "little", signed=True))[0]
    return scale


class Agreed:
    """What all ranks agreed on: the sizes of every rank's shard of queries and of keys, and the scale."""

    def __init__(self, query_sizes: list[int], key_sizes: list[int], order: Order, scale: float) -> None:
        self.query_sizes = query_sizes
        self.key_sizes = key_sizes
        self.order = order
        self.scale = scale


def autocast_to(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Under autocast, what scaled_dot_product_attention does to its arguments: casts them."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind) or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(t.to(torch.get_autocast_dtype(kind)) for t in tensors)


def _check(name: str, q: Any, k: Any, v: Any, causal: Any, scale: Any) -> None:
    for what, t in (("query", q), ("key", k), ("value", v)):
        arguments.instance(f"{name}: {what}", t, torch.Tensor, "a tensor")
        if t.dim() != 4 or t.dtype not in _FLOATS:
            raise ValueError(
                f"{name}: {what} must be (batch, heads, positions, head dimension) of float64, float32, "
                f"bfloat16 or float16, got {arguments.short(t)}"
            )
    arguments.instance(f"{name}: is_causal", causal, bool, "True or False")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise TypeError(f"{name}: scale must be a number or None, got {arguments.short(scale)}")
    shapes = f"query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}"
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ValueError(f"{name}: query, key and value must have one dtype and device, got {shapes}, "
                         f"{q.dtype}, {k.dtype}, {v.dtype}")  # fmt: skip
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(f"{name}: query, key and value do not fit together: {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"{name}: {q.shape[1]} query heads cannot share {k.shape[1]} KV heads evenly: the number of "
            "query heads must be a multiple of that of KV heads"
        )
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"{name}: is_causal needs as many queries as keys on each rank, got {shapes}")
    if q.shape[3] == 0:
        raise ValueError(f"{name}: the head dimension must not be 0, got {shapes}")


def agree(
    name: str,
    comm: Communicator,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    order: Order,
) -> Agreed:
    """Checks this rank's arguments, then all ranks' against each other.

    Raises:
        TypeError, ValueError: as the header says; ``CommError`` where another rank's argument was wrong.
    """
    with comm._refusing:
        _check(name, q, k, v, causal, scale)
        order = check_order(name, order)
    scale = float(q.shape[3] ** -0.5 if scale is None else scale)
    mine = [
        q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], _FLOATS.index(q.dtype), int(causal),
        ORDERS.index(order), _bits(scale), q.shape[2], k.shape[2],
    ]  # fmt: skip
    rows = [mine]
    if comm.size > 1:
        table = torch.empty(comm.size, len(mine), dtype=torch.int64)
        comm.all_gather(table, torch.tensor(mine))
        rows = table.tolist()
    for rank, row in enumerate(rows):
        for i, what in enumerate(_SAME):
            if row[i] != rows[0][i]:
                meaning: tuple[Any, ...] = {"dtype": _FLOATS, "order": ORDERS}.get(what, ())
                values = [meaning[x] if meaning else x for x in (rows[0][i], row[i])]
                if what == "scale":
                    values = [_scale_of(x) for x in values]
                raise ValueError(
                    f"{name}: {what} must be the same on all ranks, rank 0 has {values[0]}, "
                    f"rank {rank} {values[1]}"
                )
    query_sizes, key_sizes = [row[-2] for row in rows], [row[-1] for row in rows]
    if causal and length_of(query_sizes, order) is None:
        raise ValueError(wrong_sizes(name, query_sizes, order))
    if sum(key_sizes) == 0 and sum(query_sizes) > 0:
        raise ValueError(f"{name}: no rank has a key, so there is nothing to attend to")
    assert not causal or query_sizes == shard_sizes(sum(query_sizes), comm.size, order)
    return Agreed(query_sizes, key_sizes, order, scale)
