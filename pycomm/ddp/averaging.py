"""The average of dense gradients where they lie, each rank's counting by its weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pycomm.communicator import Communicator

__all__ = ["average", "operation"]


def operation(weight: float | None) -> Any:
    """The all_reduce that averages: ``weight`` is this rank's share of the sum; None: 1/size, on all ranks.

    Example:
        >>> operation(None), operation(0.25)
        ('avg', ('premul_sum', 0.25))
    """
    return "avg" if weight is None else ("premul_sum", weight)


def average(comm: Communicator, gradients: Sequence[Tensor], weight: float | None) -> None:
    """Averages gradients of one dtype, one coalesced call. Collective.

    A rank of weight 0 counts as zeros, not as 0 times what it has, which may be NaN where it had no input.
    """
    if weight == 0:
        torch._foreach_zero_(list(gradients))
    comm.all_reduce(gradients, op=operation(weight))
