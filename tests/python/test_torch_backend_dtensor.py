"""DTensor on the backend: every pair of placements, operations, and a Transformer, against one process.

torch's wheel ships no tests of DTensor, only what they are made of: ``DTensorTestBase`` (its ``_test_op``
runs an operation for all ways to shard its arguments) and models with plans for tensor parallelism.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ranks import run_ranks
from torch_backend_ranks import world

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="for torch 2.13 and its helpers"),
]
placements = pytest.importorskip("torch.distributed.tensor.placement_types", reason="torch before 2.5")
if not hasattr(torch.distributed.tensor, "DTensor"):
    pytest.skip("torch before 2.5", allow_module_level=True)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402 (what torch has decides)

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)


def chunk(tensor: torch.Tensor, dim: int, n: int, index: int) -> torch.Tensor:
    """Part ``index`` of ``n`` of a dimension, as torch shards it: the first parts are the larger ones."""
    parts = tensor.chunk(n, dim)
    return parts[index] if index < len(parts) else tensor.narrow(dim, 0, 0)


def local_part(whole: torch.Tensor, mesh: Any, to: Any) -> torch.Tensor:
    """What this rank holds of ``whole``: sharded by the mesh's dimensions from the left."""
    for mesh_dim, placement in enumerate(to):
        if placement.is_shard():
            n, index = mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
            whole = chunk(whole, placement.dim, n, index)
    return whole


def check(tensor: DTensor, whole: torch.Tensor, mesh: Any, to: Any, what: Any) -> None:
    got = tensor.to_local()
    right = local_part(whole, mesh, to)
    assert got.shape == right.shape and torch.equal(got, right), (what, got, right)
    assert torch.equal(tensor.full_tensor(), whole), (what, "full_tensor")


def redistributed(rank: int, size: int) -> None:
    mesh = dist.init_device_mesh("cpu", (size,))
    for dtype in (torch.float64, torch.int64, torch.bfloat16):
        whole = torch.arange(5 * 7 * 2).view(5, 7, 2).to(dtype) % 50  # 2 rows, 3 ranks: an empty shard
        sources: dict[Any, tuple[DTensor, torch.Tensor]] = {
            p: (distribute_tensor(whole, mesh, [p]), whole) for p in (R, S0, S1, S2)
        }
        factors = [1, 4, 2, 3]  # of the ranks' parts of a partial value; small, so all is exact
        wanted = {"sum": sum(factors[:size]), "max": 4, "min": 1}
        for op, factor in wanted.items():
            part = DTensor.from_local(whole * factors[rank], mesh, [Partial(op)])
            sources[Partial(op)] = part, whole * factor
        for (source, (tensor, value)), to in itertools.product(sources.items(), (R, S0, S1, S2)):
            check(tensor.redistribute(mesh, [to]), value, mesh, [to], (source, to, dtype))
    gradients(mesh)


def gradients(mesh: Any) -> None:
    """A gradient travels the way back, from every placement to every other."""
    weights = torch.randn(5, 7, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for source, to in itertools.product((R, S0, S1, S2), repeat=2):
        leaf = distribute_tensor(torch.ones_like(weights), mesh, [source]).requires_grad_()
        (leaf.redistribute(mesh, [to]) * distribute_tensor(weights, mesh, [to])).sum().backward()
        assert torch.equal(leaf.grad.full_tensor(), weights), (source, to)


def on_two_dimensions(rank: int, size: int) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2))
    whole = torch.arange(7.0 * 5).view(7, 5)
    choices = (R, S0, S1, Partial())
    for source in itertools.product(choices, repeat=2):
        factor, total, base = 1, 1, whole
        for mesh_dim, placement in enumerate(source):
            if placement.is_partial():
                factor *= mesh.get_local_rank(mesh_dim) + 1
                total *= 3
        part = local_part(base, mesh, source) * factor
        tensor = DTensor.from_local(
            part.contiguous(), mesh, source, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        for to in itertools.product((R, S0, S1), repeat=2):
            check(tensor.redistribute(mesh, to), whole * total, mesh, to, (source, to))
    strided(mesh, whole)


def strided(mesh: Any, whole: torch.Tensor) -> None:
    """Sharded by the mesh's second dimension first, as FSDP2 leaves a tensor-parallel parameter."""
    kind = getattr(placements, "_StridedShard", None)
    if kind is None:  # torch before 2.5
        return
    first, second = mesh.get_local_rank(1), mesh.get_local_rank(0)
    for rows in (8, 7):
        value = whole[:1].expand(8, 5).cumsum(0)[:rows].contiguous()
        part = chunk(chunk(value, 0, 2, first), 0, 2, second).contiguous()
        source = (kind(0, split_factor=2), S0)
        tensor = DTensor.from_local(
            part, mesh, source, run_check=False, shape=value.shape, stride=value.stride()
        )
        for to in ((R, R), (R, S0), (S1, R), (R, S1)):
            check(tensor.redistribute(mesh, to), value, mesh, to, ("_StridedShard", rows, to))


def harness() -> Any:
    """torch's helpers for tests of DTensor."""
    pytest.importorskip("expecttest", reason="torch's helpers need it: pip install expecttest")
    with contextlib.redirect_stderr(io.StringIO()):
        from torch.testing._internal.distributed._tensor import common_dtensor
    return common_dtensor


def operations() -> list[tuple[Any, ...]]:
    torch.manual_seed(1)
    a, b, v = torch.randn(8, 12), torch.randn(12, 4), torch.randn(12)
    square, image = torch.randn(8, 8), torch.randn(4, 8, 4)
    mask = torch.randn(8, 12) > 0
    return [
        (torch.matmul, a, b),
        (torch.mm, a, b),
        (torch.add, a, v),
        (torch.addmm, torch.randn(8, 4), a, b),
        (torch.bmm, image, image.transpose(1, 2).contiguous()),
        (torch.mul, a, a + 1),
        (F.linear, a, torch.randn(4, 12), torch.randn(4)),
        (F.gelu, a),
        (torch.softmax, a, 1),
        (torch.log_softmax, a, 0),
        (F.layer_norm, a, [12], v, v),
        (torch.sum, a),
        (torch.sum, a, 0),
        (torch.mean, a, 1),
        (torch.amax, a, 0),
        (torch.argmax, a, 1),
        (torch.cumsum, a, 1),
        (torch.transpose, a, 0, 1),
        (torch.flatten, image, 1, 2),
        (lambda t: torch.cat([t, t], 1), a),
        (lambda t: torch.stack([t, 2 * t]), square),
        (lambda t: t.view(4, 2, 12), a),
        (lambda t: t.split(4, 1)[2], a),
        (torch.where, mask, a, a - 1),
        (F.embedding, torch.arange(8).view(2, 4) % 8, torch.randn(8, 4)),
        (F.mse_loss, a, a * 2),
        (torch.linalg.vector_norm, a),
        (torch.topk, a, 3, 1),
        (torch.equal, a, a),
    ]


def operated(rank: int, size: int) -> None:
    mesh = dist.init_device_mesh("cpu", (size,))
    suite = harness()

    class Test(suite.DTensorTestBase):
        world_size = size

        def runTest(self) -> None: ...

    test = Test("runTest")
    test.rank = rank
    for function, *arguments in operations():
        if function is torch.topk:
            test._test_op(mesh, lambda *args: torch.topk(*args).values, *arguments)
        elif function is torch.equal:
            for args, _ in suite.DTensorConverter(mesh, tuple(arguments), {}):
                assert torch.equal(*args), args
        else:
            test._test_op(mesh, function, *arguments)


def a_transformer(rank: int, size: int) -> None:
    suite = harness()
    arguments = suite.ModelArgs(n_layers=2, vocab_size=8, max_seq_len=16, dim=16, n_heads=4, dropout_p=0.0)
    mesh = dist.init_device_mesh("cpu", (size,))
    for sequence_parallel in (False, True):
        torch.manual_seed(5)
        alone = suite.Transformer(arguments).double()
        torch.manual_seed(5)
        model = suite.Transformer(arguments).double()
        # Attention on local heads: torch shards no flash attention of the CPU.
        model = suite.Transformer.parallelize(model, mesh, sequence_parallel, local_output_for_attn=True)
        tokens = torch.randint(8, (4, 8), generator=torch.Generator().manual_seed(6))
        losses = []
        for each in (alone, model):
            out = each(tokens)
            losses.append(F.cross_entropy(out.flatten(0, 1), tokens.roll(1, 1).flatten()))
            losses[-1].backward()
        torch.testing.assert_close(losses[1].detach(), losses[0].detach(), rtol=1e-6, atol=1e-7)
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            got = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            torch.testing.assert_close(
                got, q.grad, rtol=1e-5, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}"
            )


def of_three(rank: int, size: int) -> None:
    with world(rank, size):
        redistributed(rank, size)


def of_four(rank: int, size: int) -> None:
    with world(rank, size):
        on_two_dimensions(rank, size)
        operated(rank, size)
        a_transformer(rank, size)


def test_redistribute_from_every_placement_to_every_other():
    run_ranks(3, of_three, timeout=170)


def test_two_dimensions_operations_and_a_transformer():
    harness()
    run_ranks(4, of_four, timeout=170)
