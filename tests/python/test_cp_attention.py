"""Ring and all-to-all attention against torch's attention over the whole sequence, in float64.

One launch of ranks per degree runs all cases. The bound in float64: the work sums at most S + D products of
values of order one, so that both sides are within (S + D)·2⁻⁵² of the truth times a small constant; 1e-12
covers that a hundred times over and is a thousand times below any fault of order or of a missing block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import pycomm
from pycomm.tensor_parallel.context import (
    context_parallel_shard,
    context_parallel_unshard,
    ring_attention,
    tiles,
    ulysses_attention,
)
from ranks import run_ranks

#: (batch, heads, KV heads, positions, head dimension, value dimension)
SHAPES = [
    (2, 4, 2, 13, 8, 6),
    (1, 3, 1, 5, 4, 4),  # fewer KV heads than ranks
    (1, 6, 3, 2, 4, 4),  # fewer positions than ranks
    (1, 2, 2, 40, 4, 4),  # fewer heads than ranks
    (2, 5, 5, 33, 3, 5),
    (1, 1, 1, 1, 2, 2),
    (0, 2, 1, 7, 2, 2),
]


def drawn_shapes(n: int) -> list[tuple[int, ...]]:
    """Random ones: small, so that pieces, heads and shards are often empty or uneven."""
    random = Random(n)
    shapes = []
    for _ in range(8):
        kv = random.randint(1, 4)
        heads = kv * random.randint(1, 3)
        shapes.append(
            (random.randint(1, 2), heads, kv, random.randint(1, 24), *random.choices(range(1, 7), k=2))
        )
    return shapes


METHODS = {"ring": ring_attention, "ulysses": ulysses_attention}


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Query, key, value and the gradient of the output, of the whole sequence; leaves."""
    batch, heads, kv, positions, d, d_value = shape
    random = torch.Generator().manual_seed(sum(shape))
    sizes = [(heads, d), (kv, d), (kv, d_value), (heads, d_value)]
    made = [torch.randn(batch, h, positions, w, generator=random, dtype=torch.float64) for h, w in sizes]
    return [t.to(dtype).requires_grad_() for t in made]


def whole(tensors: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """torch's output and input gradients."""
    q, k, v, grad = tensors
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.detach())]


def parallel(
    method: str, comm: Any, tensors: list[torch.Tensor], order: Any, **options: Any
) -> list[torch.Tensor]:
    """The same from shards, brought together again."""
    shards = [context_parallel_shard(t.detach(), 2, comm, order=order).requires_grad_() for t in tensors]
    out = METHODS[method](*shards[:3], group=comm, order=order, **options)
    grads = torch.autograd.grad(out, shards[:3], shards[3].detach())
    return [context_parallel_unshard(t.detach(), 2, comm, order=order) for t in (out, *grads)]


def difference(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
    pairs = [(a.double(), b.double()) for a, b in zip(got, want, strict=True) if a.numel()]
    return max((float((a - b).abs().max()) for a, b in pairs), default=0.0)


def exact(rank: int, size: int) -> None:
    comm = pycomm.init()
    for method, order, (causal, scale), shape in itertools.product(
        METHODS, ("zigzag", "contiguous"), ((True, None), (False, 0.3)), SHAPES + drawn_shapes(size)
    ):
        tensors = inputs(shape)
        options: dict[str, Any] = {"is_causal": causal, "scale": scale}
        worst = difference(parallel(method, comm, tensors, order, **options), whole(tensors, **options))
        assert worst < 1e-12, (method, order, shape, options, worst)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_equals_attention_over_the_whole_sequence(degree: int) -> None:
    run_ranks(degree, exact)


def many_tiles(rank: int, size: int) -> None:
    comm = pycomm.init()
    tiles.TILE = 7  # so that a block has several tiles, cut unevenly
    for method, order, causal in itertools.product(METHODS, ("zigzag", "contiguous"), (True, False)):
        tensors = inputs((2, 4, 2, 61, 4, 3))
        got = parallel(method, comm, tensors, order, is_causal=causal)
        assert difference(got, whole(tensors, is_causal=causal)) < 1e-12, (method, order, causal)
    # Queries and keys of different sequences, split as it comes: rank r has r + 1 queries and 5 − r keys.
    queries, keys = sum(range(1, size + 1)), sum(5 - r for r in range(size))
    q, grad = (inputs((1, 4, 2, queries, 4, 3))[i] for i in (0, 3))
    k, v = inputs((1, 4, 2, keys, 4, 3))[1:3]
    want = whole([q, k, v, grad])
    parts = [
        list(t.detach().split([r + 1 for r in range(size)] if t.shape[2] == queries else
                              [5 - r for r in range(size)], 2)) for t in (q, k, v, grad, *want)
    ]  # fmt: skip
    mine = [of[rank].clone().requires_grad_() for of in parts]
    for method in METHODS.values():
        out = method(*mine[:3], group=comm)
        got = [out, *torch.autograd.grad(out, mine[:3], mine[3].detach())]
        assert difference(got, mine[4:]) < 1e-12


@pytest.mark.timeout(60)
def test_small_tiles_and_cross_attention() -> None:
    run_ranks(3, many_tiles)


class _Whole(torch.autograd.Function):
    """A tensor that all ranks have. Every rank counts the loss, so what reaches its copies is averaged."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, comm: Any) -> torch.Tensor:
        ctx.comm = comm
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        total = grad.clone()
        ctx.comm.all_reduce(total, op="avg")
        return total, None


def checked_numerically(rank: int, size: int) -> None:
    comm = pycomm.init()
    tensors = [t.detach() for t in inputs((1, 2, 1, 5, 2, 2))[:3]]
    for method, causal in itertools.product(METHODS.values(), (True, False)):

        def attend(*whole: torch.Tensor) -> torch.Tensor:
            # Of whole tensors, so that every rank perturbs the same element in the same call.
            mine = [context_parallel_shard(_Whole.apply(t, comm), 2, comm) for t in whole]
            out = method(*mine, is_causal=causal, group=comm)  # noqa: B023 (used within the iteration)
            return context_parallel_unshard(out, 2, comm)

        assert torch.autograd.gradcheck(attend, [t.clone().requires_grad_() for t in tensors])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_gradcheck(degree: int) -> None:
    run_ranks(degree, checked_numerically)


def cases_of_low_precision() -> Iterator[tuple[torch.dtype, float]]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield dtype, float(torch.finfo(dtype).eps)


def low_precision(rank: int, size: int) -> None:
    """Against float64 attention of the same (already rounded) inputs.

    Bound. Let u be the dtype's unit roundoff eps/2, u32 float32's, with scores s = scale·q·k of magnitude at
    most s_max. In the accumulation dtype a score is off by at most (D + 1) u32 Σ|q||k|·scale, so a weight is
    off relatively by e^δ − 1 ≈ δ = (D + 4) u32 s_abs with s_abs = scale·max Σ|q||k|, in numerator and
    denominator alike, and sums of S terms add S u32: out is off by at most (2δ + 2 S u32) max|v|, then one
    rounding, u max|v|. In the backward the same relative errors meet Σ over rows and columns, whose terms are
    at most p (|dp| + |delta|), and delta takes `out` as rounded: |dp|, |delta| ≤ D_v max|do| max|v| =: g, so
    that dk of a column, with column sums of p at most S, is off by at most
    scale·max|q|·S·(2δ + 2(S + D_v) u32 + u)·2g, and then rounded once; dq (row sums of p are one) and dv are
    smaller. Rounding of the results is relative to their size, at most scale·max|q|·S·2g as well.
    """
    comm = pycomm.init()
    u32 = float(torch.finfo(torch.float32).eps) / 2
    for (dtype, eps), (method, causal) in itertools.product(
        cases_of_low_precision(), itertools.product(METHODS, (True, False))
    ):
        shape = (2, 4, 2, 37, 8, 8)
        tensors = inputs(shape, dtype)
        exact_inputs = [t.detach().double().requires_grad_() for t in tensors]
        want = whole(exact_inputs, is_causal=causal)
        options: dict[str, Any] = {"is_causal": causal}
        if method == "ulysses" and dtype != torch.float32:
            # torch's attention computes in the dtype of its inputs where it likes: ours is only the exchange.
            options["attention"] = in_float32
        got = parallel(method, comm, tensors, "zigzag", **options)
        assert all(t.dtype == dtype for t in got)
        q, k, v, grad = (t.detach() for t in exact_inputs)
        scale = shape[4] ** -0.5
        s_abs = scale * float((q.abs() @ k.abs().repeat_interleave(2, 1).mT).max())
        u, delta = eps / 2, (shape[4] + 4) * u32 * s_abs
        v_max, g = float(v.abs().max()), shape[5] * float(grad.abs().max() * v.abs().max())
        out_bound = (2 * delta + 2 * shape[3] * u32 + u) * v_max
        top = scale * max(float(q.abs().max()), float(k.abs().max()), 1.0) * shape[3] * 2 * 2 * g
        grad_bound = top * (2 * delta + 2 * (shape[3] + shape[5]) * u32 + 2 * u)
        assert difference(got[:1], want[:1]) <= out_bound, (dtype, method, causal)
        assert difference(got[1:], want[1:]) <= grad_bound, (dtype, method, causal)
        # The bound is a worst case; a fault of order is of the size of the values themselves.
        assert difference(got[1:], want[1:]) <= 8 * eps * max(float(t.abs().max()) for t in want[1:])


def in_float32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    out = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options)
    return out.to(q.dtype)


@pytest.mark.timeout(60)
def test_low_precision_is_within_the_derived_bound() -> None:
    run_ranks(3, low_precision)


def under_autocast_and_compile(rank: int, size: int) -> None:
    comm = pycomm.init()
    q, k, v, _ = inputs((1, 4, 2, 24, 8, 8), torch.float32)
    mine = [context_parallel_shard(t.detach(), 2, comm) for t in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        out = ring_attention(*mine, is_causal=True, group=comm)
    assert out.dtype == torch.bfloat16  # as scaled_dot_product_attention gives

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ring_attention(q * 2, k, v, is_causal=True, group=comm) + 1

    compiled = torch.compile(model, backend="aot_eager")
    leaves = [t.clone().requires_grad_() for t in mine]
    out = compiled(*leaves)
    again = [t.clone().requires_grad_() for t in mine]
    plain = model(*again)
    assert torch.equal(out, plain)
    grads = torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(plain.sum(), again)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.timeout(90)
def test_autocast_and_compile() -> None:
    run_ranks(2, under_autocast_and_compile)
