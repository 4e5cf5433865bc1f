"""_C.cuda, the device kernels by address, where CUDA is emulated: device memory is then the host's.

Expected values are torch's in float64. That the bits are those of the CPU's kernels, for every dtype and
alignment, is shown in tests/cpp/cuda; here it is the binding's arguments that are tested.
"""

from __future__ import annotations

import pytest
import torch

import pycomm
from pycomm import _C

if _C.cuda.build() != "emulated":
    pytest.skip(
        f"PYCOMM_CUDA={_C.cuda.build()}: needs the CUDA emulation, device memory is not the host's",
        allow_module_level=True,
    )

C = _C.cuda
HERE = (0, 0)  # the first device, its default stream
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SIZES = [0, 1, 33, 1000]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def random(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed + n), dtype=torch.float64).to(dtype)


def blocks(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    return [(t.data_ptr(), t.numel()) for t in tensors]


def test_the_host_stands_for_a_device_only_when_asked() -> None:
    assert C.why_not_built() is None
    assert C.device_count() > 0
    assert C.emulated_device() >= -1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_cast(dtype: torch.dtype, scale: float) -> None:
    source, out = random(777, torch.float32), torch.empty(777, dtype=dtype)
    C.cast(name(dtype), out.data_ptr(), "float32", source.data_ptr(), 777, scale, *HERE)
    assert torch.equal(out, (source.double() * scale).to(dtype))  # a power of two: one rounding


@pytest.mark.parametrize("dtype", FLOATS)
def test_pack_and_unpack_many_tensors(dtype: torch.dtype) -> None:
    sources = [random(n, dtype, seed) for seed in range(70) for n in SIZES]  # more than one launch takes
    n = sum(t.numel() for t in sources)
    buffer = torch.empty(n)
    C.pack("float32", buffer.data_ptr(), name(dtype), blocks(sources), 0.5, *HERE)
    assert torch.equal(buffer, (torch.cat(sources).double() * 0.5).float())
    targets = [torch.empty_like(t) for t in sources]
    C.unpack(name(dtype), blocks(targets), "float32", buffer.data_ptr(), 2.0, *HERE)
    wanted = (buffer.double() * 2.0).to(dtype)
    assert torch.equal(torch.cat(targets), wanted)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64])
def test_the_sum_of_squares_and_what_is_not_finite(dtype: torch.dtype) -> None:
    tensors = [random(n, torch.float32, seed).to(dtype) for seed in range(40) for n in SIZES]
    given = blocks(tensors)
    workspace = torch.empty(C.norm_workspace_bytes(name(dtype), given) // 8, dtype=torch.int64)
    result = torch.empty(2, dtype=torch.int64)
    C.norm(name(dtype), given, workspace.data_ptr(), result.data_ptr(), *HERE)
    whole = torch.cat(tensors).to(torch.complex128 if dtype.is_complex else torch.float64)
    assert result.view(torch.float64)[0].item() == pytest.approx(whole.abs().square().sum().item(), rel=1e-12)
    assert result[1].item() == 0
    tensors[-1][5], tensors[-2][7] = float("inf"), float("nan")
    C.norm(name(dtype), given, workspace.data_ptr(), result.data_ptr(), *HERE)
    assert result[1].item() == 2
    assert not torch.isfinite(result.view(torch.float64)[0])


def test_what_cannot_be_is_refused() -> None:
    source, out = torch.ones(4), torch.empty(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="int32"):
        C.cast("int32", out.data_ptr(), "float32", source.data_ptr(), 4, 1.0, *HERE)
    with pytest.raises(ValueError, match="dtype is 'float3'; expected one of"):
        C.pack("float3", out.data_ptr(), "float32", blocks([source]), 1.0, *HERE)
    with pytest.raises(pycomm.CommError, match="cuda:4095"):
        C.cast("float32", out.data_ptr(), "float32", source.data_ptr(), 4, 1.0, 4095, 0)
