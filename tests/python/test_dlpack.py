"""DLPack: our declarations have the layout of the header that torch ships; torch before the exchange API."""

from __future__ import annotations

import shutil
import subprocess
import sys
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
static_assert(sizeof(ours::ManagedTensor) == sizeof(DLManagedTensor));
SAME(ours::ManagedTensor, dl_tensor, DLManagedTensor, dl_tensor);
SAME(ours::ManagedTensor, manager_ctx, DLManagedTensor, manager_ctx);
SAME(ours::ManagedTensor, deleter, DLManagedTensor, deleter);
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


OLD = """
import torch
torch.Tensor.__dlpack_c_exchange_api__ = None
import pycomm
from pycomm import _C, _setup

comm = pycomm.init()
before = comm._c.arena_bytes_in_use()
made = comm._c.empty([2, 3], _setup.DTYPE_CODES[torch.float8_e5m2], -1)
assert 'capsule object "dltensor"' in repr(made), made
assert comm._c.arena_bytes_in_use() > before
del made  # nobody has taken the tensor out
assert comm._c.arena_bytes_in_use() == before
for dtype in _setup.DTYPES:
    for shape in ((), (0, 4), (7,), (2, 3, 5)):
        t = comm.empty(shape, dtype=dtype)
        assert t.dtype == dtype and t.shape == shape and t.is_contiguous(), (dtype, shape)
        source = (torch.arange(t.numel()).reshape(shape) % 2).to(dtype)
        t.copy_(source)
        if dtype not in (torch.bool, torch.complex64, torch.complex128):
            comm.all_reduce(t, op="max")
            out = comm.empty(shape, dtype=dtype)
            assert comm.all_reduce(t.clone(), op="max", out=out) is out
            comm.all_reduce([t, out], op="max")
            assert torch.equal(out.double(), source.double()), dtype
        assert torch.equal(t.to(torch.complex128), source.to(torch.complex128)), dtype
del t, out
assert comm._c.arena_bytes_in_use() == before
"""


@pytest.mark.timeout(60)
def test_torch_without_the_exchange_api() -> None:
    """torch before 2.10; the capsule is the form that torch before 2.9 reads, too."""
    done = subprocess.run([sys.executable, "-c", OLD], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
