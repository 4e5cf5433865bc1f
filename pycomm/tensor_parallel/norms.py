"""Layer norms between sequence parallel layers: each rank normalises its part of the sequence.

Weight and bias are replicated, but a rank's gradient of them comes from its part of the sequence only, so it
is summed over the ranks in backward; without that the ranks' copies would silently drift apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pycomm.communicator import Communicator
from pycomm.tensor_parallel.group import Group, communicator_of
from pycomm.tensor_parallel.regions import copy_many

__all__ = ["LayerNorm", "RMSNorm"]


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` whose input is this rank's part of the sequence.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as for torch's.
        sequence_parallel: False: every rank has the whole sequence, and this is torch's layer.
        group: the ranks; see :mod:`pycomm.tensor_parallel.group`.

    Example:
        >>> LayerNorm(4, sequence_parallel=True)(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        sequence_parallel: bool = False,
        group: Group = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device=device, dtype=dtype)
        self.sequence_parallel = sequence_parallel
        self.group: Communicator = communicator_of(group, who="LayerNorm: group")

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        weight, bias = self.weight, self.bias
        if self.sequence_parallel:
            weight, bias = _summed(self.group, weight, bias)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` whose input is this rank's part of the sequence; arguments as
    :class:`LayerNorm`'s.

    Example:
        >>> RMSNorm(4, sequence_parallel=True)(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        normalized_shape: Any,
        eps: float | None = None,
        elementwise_affine: bool = True,
        sequence_parallel: bool = False,
        group: Group = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device=device, dtype=dtype)
        self.sequence_parallel = sequence_parallel
        self.group: Communicator = communicator_of(group, who="RMSNorm: group")

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        weight: Any = self.weight
        if self.sequence_parallel:
            (weight,) = _summed(self.group, weight)
        return F.rms_norm(input, list(self.normalized_shape), weight, self.eps)


def _summed(comm: Communicator, *parameters: Any) -> list[Any]:
    """The parameters, those that are there with gradients that are summed over the ranks."""
    copies = iter(copy_many(comm, *(p for p in parameters if p is not None)))
    return [None if p is None else next(copies) for p in parameters]
