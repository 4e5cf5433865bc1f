"""all_reduce of sparse tensors: indices and values of all ranks are gathered, and summed where they meet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pycomm.communicator import Communicator
from pycomm.ddp.sparse import sparse_average
from pycomm.torch_backend.works import Done

__all__ = ["all_reduce"]


def all_reduce(comm: Communicator, tensor: Tensor, op: Any) -> Done:
    """The sum (or average) of all ranks' tensors, of one shape, takes the place of ``tensor``'s contents.

    Raises:
        ValueError: another operation, or a layout other than COO.
    """
    with comm._refusing:
        if op not in ("sum", "avg") or tensor.layout is not torch.sparse_coo:
            raise ValueError(
                f"all_reduce of a sparse tensor takes sum or avg of COO tensors, got {op} of {tensor.layout}"
            )
    with torch.no_grad():
        share = 1.0 if op == "sum" else 1.0 / comm.size
        like: Any = tensor  # of a parameter only shape and dtype are asked
        result = sparse_average(comm, like, tensor, share)
        tensor.sparse_resize_and_clear_(tensor.shape, result.sparse_dim(), result.dense_dim())
        tensor.copy_(result)
    return Done([tensor])
