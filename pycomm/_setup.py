"""Hands torch's classes and its tensor exchange API to the C++ core, once, at import."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from pycomm import _C

# Index = DType of csrc/base/dtype.h.
DTYPES: tuple[torch.dtype, ...] = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
DTYPE_CODES: dict[torch.dtype, int] = {d: i for i, d in enumerate(DTYPES)}

_C.setup(
    torch.Tensor,
    torch.nn.Parameter,
    getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
    torch.is_grad_enabled,
    getattr(torch._C, "_cuda_getCurrentRawStream", None),  # a torch without CUDA has none
)
if _C.cuda.build() != "off":
    _C.cuda.set_empty_cache(torch.cuda.empty_cache)
    # Where pip puts NCCL (nvidia-nccl-cu12, -cu13).
    _C.cuda.set_nccl_folders(
        [str(folder) for p in sys.path if (folder := Path(p, "nvidia/nccl/lib")).is_dir()]
    )
