"""The kernels against torch: every dtype and operation, in float64 or with torch's own casts.

Exact where the mathematics is (integers, bool, min, max, one rounding of an exact sum), within the bound of
docs/numerics.md elsewhere. The order of the tree and the bits on every instruction set are proved in
tests/cpp/kernels.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch

from pycomm import _C

K = _C.kernels
ISAS = K.supported_isas().split(", ")
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
SMALL = FLOATS[2:]
INTS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]
COUNTS = [1, 2, 3, 4, 5, 7, 8, 9, 17]
SIZES = [0, 1, 31, 33, 1000]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def reduce(
    op: str, srcs: list[torch.Tensor], n_dsts: int = 1, scalar: float = 1.0, isa: str = ""
) -> torch.Tensor:
    dsts = [torch.empty_like(srcs[0]) for _ in range(n_dsts)]
    K.reduce(
        name(srcs[0].dtype),
        op,
        [d.data_ptr() for d in dsts],
        [s.data_ptr() for s in srcs],
        srcs[0].numel(),
        scalar,
        isa,
    )
    for d in dsts[1:]:
        assert torch.equal(bits(d), bits(dsts[0]))
    return dsts[0]


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def cast(t: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    out = torch.empty(t.shape, dtype=dtype)
    K.cast(name(dtype), out.data_ptr(), name(t.dtype), t.data_ptr(), t.numel(), scale)
    return out


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, any NaN equal to any NaN."""
    wide_a, wide_b = a.to(torch.float64), b.to(torch.float64)
    nan = wide_a.isnan() & wide_b.isnan()
    return bool((nan | ((wide_a == wide_b) & (wide_a.signbit() == wide_b.signbit()))).all())


def step(dtype: torch.dtype) -> float:
    """Half a unit in the last place, relative."""
    return {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}.get(dtype, torch.finfo(dtype).eps / 2)


def draw(dtype: torch.dtype, n_srcs: int, n: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(n_srcs * 10007 + n)
    if dtype == torch.bool:
        return [torch.rand(n, generator=g) < 0.5 for _ in range(n_srcs)]
    if dtype in INTS:
        info = torch.iinfo(dtype)
        return [
            torch.randint(info.min, info.max, (n,), generator=g, dtype=torch.int64).to(dtype)
            for _ in range(n_srcs)
        ]
    if dtype in COMPLEX:
        return [torch.randn(n, generator=g, dtype=dtype) for _ in range(n_srcs)]
    return [
        torch.randn(n, generator=g, dtype=torch.float64).to(torch.float32).to(dtype) for _ in range(n_srcs)
    ]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", FLOATS + COMPLEX, ids=name)
@pytest.mark.parametrize("op", ["sum", "avg", "premul_sum", "product"])
def test_float_arithmetic_is_within_the_stated_bound(dtype: torch.dtype, op: str, isa: str) -> None:
    wide = torch.complex128 if dtype in COMPLEX else torch.float64
    low = dtype in SMALL
    acc = 2.0**-24 if low or dtype in (torch.float32, torch.complex64) else 2.0**-53
    tiny = torch.finfo(dtype if not dtype.is_complex else dtype.to_real()).smallest_normal
    for n_srcs, n in itertools.product(COUNTS, SIZES):
        srcs = draw(dtype, n_srcs, n)
        # 0.375 is exact in every format; 3 is not a power of two
        scalar = {"avg": 3.0, "premul_sum": 0.375}.get(op, 1.0)
        got = reduce(op, srcs, scalar=scalar, isa=isa).to(wide)
        stack = torch.stack([s.to(wide) for s in srcs])
        if op == "product":
            want, size = stack.prod(0), stack.abs().prod(0)
        else:
            factor = {"avg": 1 / 3.0, "premul_sum": 0.375}.get(op, 1.0)
            want, size = stack.sum(0) * factor, stack.abs().sum(0) * factor
        depth = max(1, (n_srcs - 1).bit_length())
        operations = 3 * n_srcs if op == "product" else depth + 2
        bound = operations * acc * size * (1 + 1e-3) + step(dtype) * want.abs() * (1 if low else 0)
        bound = bound * 1.01 + tiny * step(dtype) * 2
        if dtype == torch.float8_e4m3fn:  # saturates
            want = want.clamp(-448, 448)
        error = (got - want).abs()
        finite = want.abs() <= torch.finfo(got.real.dtype if dtype.is_complex else dtype).max
        assert bool((error <= bound)[finite].all()), (n_srcs, n, (error / bound).max())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", SMALL, ids=name)
def test_small_floats_are_rounded_once(dtype: torch.dtype, isa: str) -> None:
    """A sum of few multiples of 1/16 is exact in fp32, so the result is torch's cast of the exact sum."""
    for n_srcs in COUNTS:
        g = torch.Generator().manual_seed(n_srcs)
        srcs = [(torch.randint(-7, 8, (513,), generator=g) * 2.0**-4).to(dtype) for _ in range(n_srcs)]
        exact = torch.stack([s.to(torch.float64) for s in srcs]).sum(0)
        assert same(reduce("sum", srcs, isa=isa), exact.float().to(dtype))
        assert same(reduce("avg", srcs, scalar=4.0, isa=isa), (exact / 4).float().to(dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTS], ids=name)
def test_min_max_equal_torch(dtype: torch.dtype, isa: str) -> None:
    for n_srcs, n in itertools.product(COUNTS, SIZES):
        srcs = draw(dtype, n_srcs, n)
        if dtype in FLOATS and n > 20:
            srcs[-1][3] = float("nan")
            srcs[0][7] = float("nan")
            if dtype != torch.float8_e4m3fn:
                srcs[0][9], srcs[-1][11] = float("inf"), float("-inf")
        stack = torch.stack([s.to(torch.float64 if dtype in FLOATS else torch.int64) for s in srcs])
        assert same(reduce("min", srcs, 2, isa=isa), stack.amin(0).to(dtype))
        assert same(reduce("max", srcs, 2, isa=isa), stack.amax(0).to(dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", INTS, ids=name)
def test_integers_equal_torch_with_wraparound(dtype: torch.dtype, isa: str) -> None:
    for n_srcs, n in itertools.product(COUNTS, SIZES):
        srcs = draw(dtype, n_srcs, n)
        want = {op: srcs[0].clone() for op in ("sum", "product", "band", "bor", "bxor")}
        for s in srcs[1:]:
            want["sum"] += s
            want["product"] *= s
            want["band"] &= s
            want["bor"] |= s
            want["bxor"] ^= s
        for op, w in want.items():
            assert torch.equal(reduce(op, srcs, 3, isa=isa), w), (op, n_srcs, n)


@pytest.mark.parametrize("isa", ISAS)
def test_bool_is_logic(isa: str) -> None:
    for n_srcs, n in itertools.product(COUNTS, SIZES):
        srcs = draw(torch.bool, n_srcs, n)
        stack = torch.stack(srcs)
        for op in ("sum", "max", "bor"):
            assert torch.equal(reduce(op, srcs, isa=isa), stack.any(0))
        for op in ("product", "min", "band"):
            assert torch.equal(reduce(op, srcs, isa=isa), stack.all(0))
        assert torch.equal(reduce("bxor", srcs, isa=isa), stack.sum(0) % 2 == 1)


def test_infinity_and_nan_propagate() -> None:
    inf, nan = float("inf"), float("nan")
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2):
        a = torch.tensor([inf, inf, nan, -inf, 1.0, 0.0]).to(dtype)
        b = torch.tensor([1.0, -inf, 1.0, -inf, nan, inf]).to(dtype)
        assert same(reduce("sum", [a, b]), (a.double() + b.double()).to(dtype))
        assert same(reduce("product", [a, b]), (a.double() * b.double()).to(dtype))


@pytest.mark.parametrize("dtype", SMALL, ids=name)
def test_every_code_casts_up_as_torch_does(dtype: torch.dtype) -> None:
    raw = torch.uint8 if dtype.itemsize == 1 else torch.int16
    codes = torch.arange(256**dtype.itemsize).to(torch.uint8 if dtype.itemsize == 1 else torch.int32)
    t = codes.to(raw).view(dtype)
    assert same(cast(t, torch.float32), t.float())


@pytest.mark.parametrize("dtype", SMALL, ids=name)
def test_casts_down_as_torch_does(dtype: torch.dtype) -> None:
    """Every upper half of a float with nine lower halves: all exponents, ties, denormals, overflow, NaN."""
    upper = torch.arange(0x10000, dtype=torch.int64).unsqueeze(1) << 16
    lower = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = (upper | lower).flatten().to(torch.int32).view(torch.float32)
    if dtype == torch.float8_e4m3fn and torch.tensor(1e4).to(dtype).float().isnan():
        x = x[
            x.abs() < 464
        ]  # this torch makes NaN of an overflow; pycomm saturates, as torch does from 2.13 on
    assert same(cast(x, dtype), x.to(dtype))


def test_e4m3_saturates() -> None:
    x = torch.tensor([448.0, 464.0, 464.1, 1e30, float("inf"), -float("inf"), float("nan")])
    got = cast(x, torch.float8_e4m3fn).float()
    assert got[:6].tolist() == [448.0, 448.0, 448.0, 448.0, 448.0, -448.0]
    assert bool(got[6].isnan())


@pytest.mark.parametrize("dtype", SMALL, ids=name)
def test_scale_is_fused_before_the_rounding(dtype: torch.dtype) -> None:
    x = torch.randn(1001, generator=torch.Generator().manual_seed(1))
    assert same(cast(x, dtype, 0.3), (x * torch.tensor(0.3)).to(dtype))
    low = x.to(dtype)
    assert same(cast(low, torch.float32, 0.3), low.float() * torch.tensor(0.3))


@pytest.mark.parametrize("dtype", [torch.float32, *SMALL], ids=name)
def test_pack_and_unpack_many_tensors(dtype: torch.dtype) -> None:
    tensors = [torch.randn(n) for n in (0, 1, 5, 64, 1000, 3)]
    total = sum(t.numel() for t in tensors)
    packed = torch.empty(total, dtype=dtype)
    K.pack(name(dtype), packed.data_ptr(), "float32", [(t.data_ptr(), t.numel()) for t in tensors], 0.5)
    assert same(packed, (torch.cat(tensors) * 0.5).to(dtype))
    outs = [torch.empty_like(t) for t in tensors]
    K.unpack("float32", [(t.data_ptr(), t.numel()) for t in outs], name(dtype), packed.data_ptr(), 2.0)
    assert same(torch.cat(outs), packed.float() * 2)


def test_flushing_denormals_changes_nothing() -> None:
    x = torch.full((40,), 1e-40)
    assert torch.set_flush_denormal(True), "this processor cannot flush denormals"
    try:
        got = reduce("sum", [x, x, x])
        small = cast(torch.full((40,), 2.0**-23), torch.float16)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got, x + x + x)
    assert torch.equal(small, torch.full((40,), 2.0**-23).to(torch.float16))


def test_what_is_undefined_is_refused_with_what_exists() -> None:
    x = torch.ones(4, dtype=torch.float32)
    with pytest.raises(
        ValueError, match=r"band is not defined for float32, which has: sum, product, min, max, avg"
    ):
        reduce("band", [x])
    with pytest.raises(
        ValueError, match=r"avg is not defined for int32, which has: sum, product, min, max, band"
    ):
        reduce("avg", [x.int()])
    with pytest.raises(ValueError, match=r"op is 'mean'; float32 has: sum"):
        reduce("mean", [x])
    with pytest.raises(ValueError, match=r"dtype is 'float4'; expected one of: float64, float32"):
        K.defined_ops("float4")
    with pytest.raises(ValueError, match=r"no cast from int32 to float32"):
        cast(x.int(), torch.float32)
    with pytest.raises(ValueError, match=r"scale is 2 for int32"):
        cast(x.int(), torch.int32, 2.0)


def run_with_isa(isa: str) -> subprocess.CompletedProcess[str]:
    code = "from pycomm import _C; print(_C.kernels.active_isa())"
    env = {**os.environ, "PYCOMM_ISA": isa, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("isa", ISAS)
def test_the_environment_lowers_the_instruction_set(isa: str) -> None:
    assert run_with_isa(isa).stdout.strip() == isa


def test_an_unknown_instruction_set_fails_the_import() -> None:
    done = run_with_isa("sse9")
    assert done.returncode != 0
    assert (
        "PYCOMM_ISA=sse9: expected an instruction set that this build and this processor have" in done.stderr
    )
    assert "baseline" in done.stderr
