"""The average of integers, as NCCL gives it: the sum, divided, without its fraction.

pycomm's own calls refuse it (docs/numerics.md: the mean of integers is no integer), but trainers count on it:
Lightning averages its counts of samples on every backend but gloo, where it makes this very sum and division
itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_sum", "division"]

_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})


def as_sum(op: Any, tensor: Tensor) -> Any:
    """The operation to call for ``op`` of such a tensor: the sum for an average of integers, else ``op``."""
    return "sum" if op == "avg" and tensor.dtype in _INTEGERS else op


def division(op: Any, outputs: Sequence[Tensor], n: int) -> Callable[[], None] | None:
    """What is left to do with the outputs of such calls, None when nothing is; may be called often."""
    sums = [tensor for tensor in outputs if as_sum(op, tensor) != op]
    return _Division(sums, n) if sums else None


class _Division:
    """Divides once, whoever asks for it, and how often."""

    def __init__(self, sums: list[Tensor], n: int) -> None:
        self._sums, self._n = sums, n
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            for tensor in self._sums:
                tensor.div_(self._n, rounding_mode="trunc")
            self._sums = []
