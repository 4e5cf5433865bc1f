"""Kernels on tensors of one place: those of csrc/kernels on the host, of csrc/kernels/cuda on a GPU.

On CUDA they are put on torch's current stream, one launch for about 128 tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pycomm import _C
from pycomm.placement import cuda_index, current_stream

__all__ = ["name_of", "pack", "unpack"]


def name_of(dtype: torch.dtype) -> str:
    """What the core calls it."""
    return str(dtype).removeprefix("torch.")


def pack(buffer: Tensor, gradients: Sequence[Tensor], scale: float) -> None:
    """The gradients, of one dtype, one after another into a flat buffer; cast and scaled in one pass."""
    sources = [gradient.resolve_neg().contiguous() for gradient in gradients]
    blocks = [(source.data_ptr(), source.numel()) for source in sources]
    to, at, dtype = name_of(buffer.dtype), buffer.data_ptr(), name_of(sources[0].dtype)
    device = cuda_index(buffer)
    if device < 0:
        _C.kernels.pack(to, at, dtype, blocks, scale)
    else:
        _C.cuda.pack(to, at, dtype, blocks, scale, device, current_stream(device))


def unpack(gradients: Sequence[Tensor], buffer: Tensor, scale: float) -> None:
    """The opposite of :func:`pack`."""
    targets = [g if g.is_contiguous() and not g.is_neg() else g.new_empty(g.shape) for g in gradients]
    blocks = [(target.data_ptr(), target.numel()) for target in targets]
    to, dtype, at = name_of(targets[0].dtype), name_of(buffer.dtype), buffer.data_ptr()
    device = cuda_index(buffer)
    if device < 0:
        _C.kernels.unpack(to, blocks, dtype, at, scale)
    else:
        _C.cuda.unpack(to, blocks, dtype, at, scale, device, current_stream(device))
    for gradient, target in zip(gradients, targets, strict=True):
        if target is not gradient:
            gradient.copy_(target)
