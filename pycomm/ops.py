"""Reduction operations by the names that people know: strings, or torch.distributed.ReduceOp."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# Index = ReduceOp of csrc/base/dtype.h.
NAMES = ("sum", "product", "min", "max", "avg", "band", "bor", "bxor", "premul_sum")
CODES = {name: code for code, name in enumerate(NAMES)}

#: "sum", "product", "min", "max", "avg", "band", "bor", "bxor", ("premul_sum", factor), or a ReduceOp.
Op = str | tuple[str, float] | Any


def parse(op: Op) -> tuple[int, float]:
    """The operation's code and its scalar (1.0 unless premul_sum).

    Raises:
        ValueError: ``op`` is not one of the operations above.

    Example:
        >>> parse("max"), parse(("premul_sum", 0.5))
        ((3, 1.0), (8, 0.5))
    """
    if isinstance(op, str):
        code = CODES.get(op.lower())
        if code is not None and code != CODES["premul_sum"]:
            return code, 1.0
    elif isinstance(op, tuple):
        if len(op) == 2 and op[0] == "premul_sum" and isinstance(op[1], (int, float)):
            return CODES["premul_sum"], float(op[1])
    elif dist.is_available():
        code = CODES.get(str(op).rpartition(".")[2].lower())
        if code is not None and code != CODES["premul_sum"]:
            return code, 1.0
    known = ", ".join(repr(n) for n in NAMES[:-1])
    raise ValueError(f"op must be one of {known}, ('premul_sum', factor) or a ReduceOp, got {op!r}")
