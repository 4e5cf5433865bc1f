"""Our declarations of DLPack (csrc/bind/dlpack.h) have the layout of the header that torch ships."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "dlpack.h"
COMPILER = shutil.which("c++") or shutil.which("g++")

SOURCE = """
#include <ATen/dlpack.h>
#include <cstddef>
#include "bind/dlpack.h"
namespace ours = pycomm::dlpack;
#define SAME(a, x, b, y) static_assert(offsetof(a, x) == offsetof(b, y))
static_assert(sizeof(ours::Tensor) == sizeof(DLTensor));
SAME(ours::Tensor, device, DLTensor, device);
SAME(ours::Tensor, ndim, DLTensor, ndim);
SAME(ours::Tensor, dtype, DLTensor, dtype);
SAME(ours::Tensor, shape, DLTensor, shape);
SAME(ours::Tensor, strides, DLTensor, strides);
SAME(ours::Tensor, byte_offset, DLTensor, byte_offset);
static_assert(sizeof(ours::ManagedTensorVersioned) == sizeof(DLManagedTensorVersioned));
SAME(ours::ManagedTensorVersioned, deleter, DLManagedTensorVersioned, deleter);
SAME(ours::ManagedTensorVersioned, flags, DLManagedTensorVersioned, flags);
SAME(ours::ManagedTensorVersioned, dl_tensor, DLManagedTensorVersioned, dl_tensor);
static_assert(sizeof(ours::ExchangeApi) == sizeof(DLPackExchangeAPI));
SAME(ours::ExchangeApi, managed_tensor_to_py_object_no_sync, DLPackExchangeAPI, managed_tensor_to_py_object_no_sync);
SAME(ours::ExchangeApi, dltensor_from_py_object_no_sync, DLPackExchangeAPI, dltensor_from_py_object_no_sync);
static_assert(ours::kCpu == kDLCPU && ours::kCudaHost == kDLCUDAHost);
static_assert(ours::kInt == kDLInt && ours::kUInt == kDLUInt && ours::kFloat == kDLFloat);
static_assert(ours::kBfloat == kDLBfloat && ours::kComplex == kDLComplex && ours::kBool == kDLBool);
static_assert(ours::kFloat8E4M3FN == kDLFloat8_e4m3fn && ours::kFloat8E5M2 == kDLFloat8_e5m2);
"""  # noqa: E501


@pytest.mark.timeout(60)
def test_layout_is_torchs(tmp_path: Path) -> None:
    if COMPILER is None or not HEADER.exists() or "DLPackExchangeAPI" not in HEADER.read_text():
        pytest.skip("needs a C++ compiler and a torch that ships DLPack's exchange API")
    source = tmp_path / "layout.cc"
    source.write_text(SOURCE)
    command = [
        COMPILER,
        "-std=c++20",
        "-fsyntax-only",
        f"-I{HEADER.parents[1]}",
        f"-I{ROOT / 'csrc'}",
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
