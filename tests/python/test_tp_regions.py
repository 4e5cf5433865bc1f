"""Groups, shards and regions of tensor parallelism: values, gradients of any order, and errors."""

from __future__ import annotations

import copy
import re
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import pycomm
import pycomm.tensor_parallel as tp
from pycomm.tensor_parallel.shards import Split, blocks, chunks, even, fused, heads
from ranks import run_ranks
from torch_backend_ranks import world

pytestmark = pytest.mark.timeout(200)


# ---- shards: no ranks needed -----------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_those_of_torch_and_dtensor(size: int, degree: int) -> None:
    got = [b - a for a, b in chunks(size, degree)]
    pieces = [len(c) for c in torch.arange(size).chunk(degree)] if size else []
    assert got == pieces + [0] * (degree - len(pieces))
    assert even(size, degree).lengths == got


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 9))
def test_heads_give_each_rank_what_its_queries_need(n_kv: int, group: int, degree: int) -> None:
    queries, keys = heads(n_kv * group, n_kv, degree)
    for rank in range(degree):
        local_q = [q for a, b in queries.pieces[rank] for q in range(a, b)]
        local_k = [k for a, b in keys.pieces[rank] for k in range(a, b)]
        assert bool(local_q) == bool(local_k)
        if local_q:
            served = len(local_q) // len(local_k)
            assert [local_k[i // served] for i in range(len(local_q))] == [q // group for q in local_q]
    owned = sorted(p for rank in range(degree) for p, _ in keys.owned(rank))
    assert [i for a, b in owned for i in range(a, b)] == list(range(n_kv))  # each once
    assert not queries.is_replicated
    assert keys.is_replicated == (sum(keys.lengths) > n_kv)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 6))
def test_fused_parts_are_split_each_by_itself(sizes: list[int], degree: int) -> None:
    split = fused(sizes, degree)
    whole = torch.arange(sum(sizes) * 2).view(-1, 2)
    rebuilt = torch.full_like(whole, -1)
    for rank in range(degree):
        shard = split.take(whole, 0, rank)
        want = [part[slice(*chunks(len(part), degree)[rank])] for part in whole.split(sizes)]
        assert torch.equal(shard, torch.cat(want))
        split.put(rebuilt, 0, rank, shard)
    assert torch.equal(rebuilt, whole)


def test_splits_that_are_none_are_refused() -> None:
    for size, pieces in ((3, (((0, 2),),)), (3, (((0, 2),), ((1, 3),))), (2, (((0, 1),), ((0, 1), (0, 1))))):
        with pytest.raises(ValueError, match="disjoint or equal"):
            Split(size, pieces)
    with pytest.raises(ValueError, match="5 query heads cannot share 2"):
        heads(5, 2, 2)
    with pytest.raises(ValueError, match="expected 6"):
        even(6, 2).take(torch.zeros(5), 0, 0)
    assert blocks(3, 8, 2).lengths == [16, 8]


# ---- regions ---------------------------------------------------------------------------------------------

SHAPES = [((5, 3), 0), ((5, 3), -1), ((2, 7, 3), 1), ((1, 2), 1), ((0, 3), 1), ((3, 0), 0), ((1, 6, 2), 1)]


def whole_of(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def regions(rank: int, size: int) -> None:
    """Every function and gradient, of uneven, empty and non-contiguous tensors, against one process."""
    assert tp.communicator_of() is tp.communicator_of()
    for seed, (shape, dim) in enumerate(SHAPES):
        for name, (function, given_, out, grad_out, grad_in) in cases(rank, size, seed, shape, dim).items():
            for layout in ("plain", "transposed"):
                leaf = given_.clone()
                if layout == "transposed":
                    leaf = leaf.transpose(0, -1).contiguous().transpose(0, -1)
                leaf.requires_grad_()
                got = function(leaf)
                got.backward(grad_out)
                what = f"{name}, shape {shape}, dim {dim}, {layout}"
                assert leaf.grad is not None, what
                same(got, out, f"{what}: output")
                same(leaf.grad, grad_in, f"{what}: gradient")


def same(got: Tensor, want: Tensor, what: str) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, msg=lambda m: f"{what}: {m}")


def cases(
    rank: int, size: int, seed: int, shape: tuple[int, ...], dim: int
) -> dict[str, tuple[Any, Tensor, Tensor, Tensor, Tensor]]:
    """By name: function, input, output, gradient of the output, gradient of the input."""
    split = even(shape[dim], size)

    def mine(t: Tensor) -> Tensor:
        return split.take(t, dim, rank)

    everyones = [whole_of(shape, 100 * seed + r) for r in range(size)]
    total = sum(everyones[1:], everyones[0])
    own = everyones[rank]
    x, g = whole_of(shape, seed), whole_of(shape, 1000 + seed)
    gather = partial(tp.gather_from_sequence_parallel_region, dim=dim)
    replicated = partial(gather, tensor_parallel_output_grad=False)
    return {
        "copy": (tp.copy_to_tensor_model_parallel_region, x, x, own, total),
        "reduce": (tp.reduce_from_tensor_model_parallel_region, own, total, g, g),
        "scatter": (partial(tp.scatter_to_tensor_model_parallel_region, dim=dim), x, mine(x), mine(g), g),
        "gather": (partial(tp.gather_from_tensor_model_parallel_region, dim=dim), mine(x), x, g, mine(g)),
        "scatter sequence": (
            partial(tp.scatter_to_sequence_parallel_region, dim=dim), x, mine(x), mine(g), g,
        ),
        "gather sequence": (gather, mine(x), x, own, mine(total)),
        "gather sequence for all": (replicated, mine(x), x, g, mine(g)),
        "reduce_scatter": (
            partial(tp.reduce_scatter_to_sequence_parallel_region, dim=dim), own, mine(total), mine(g), g,
        ),
    }  # fmt: skip


def higher_orders(rank: int, size: int) -> None:
    """gradcheck and gradgradcheck of chains: all ranks perturb the same replicated element together."""
    torch.manual_seed(0)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    scale = float(rank + 1)

    def column_row(t: Tensor) -> Tensor:
        return tp.reduce_from_tensor_model_parallel_region(
            (tp.copy_to_tensor_model_parallel_region(t) * scale).tanh()
        )

    def scatter_gather(t: Tensor) -> Tensor:
        mine = tp.scatter_to_tensor_model_parallel_region(t, dim=0)
        return tp.gather_from_tensor_model_parallel_region(mine.tanh() * scale, dim=0)

    def sequence(t: Tensor) -> Tensor:
        mine = tp.scatter_to_sequence_parallel_region(t, dim=1)
        whole = tp.gather_from_sequence_parallel_region(mine.sin(), dim=1)
        back = tp.reduce_scatter_to_sequence_parallel_region((whole * scale).tanh(), dim=1)
        return tp.gather_from_sequence_parallel_region(back.cos(), dim=1, tensor_parallel_output_grad=False)

    for function in (column_row, scatter_gather, sequence):
        assert torch.autograd.gradcheck(function, (x,))
        assert torch.autograd.gradgradcheck(function, (x,), [torch.full((3, 2), 0.5, dtype=torch.float64)])


def splits_and_dtypes(rank: int, size: int) -> None:
    split = fused([4, 2, 3], size)
    whole = torch.arange(18.0).view(2, 9)
    shard = tp.scatter_to_tensor_model_parallel_region(whole, split=split)
    assert torch.equal(shard, split.take(whole, 1, rank))
    assert torch.equal(tp.gather_from_tensor_model_parallel_region(shard, split=split), whole)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.int64, torch.bool):
        t = torch.arange(6).view(3, 2).to(dtype)
        part = tp.scatter_to_sequence_parallel_region(t)
        back = tp.gather_from_sequence_parallel_region(part)
        assert back.dtype == dtype and torch.equal(back, t)


def all_of_it(rank: int, size: int) -> None:
    regions(rank, size)
    higher_orders(rank, size)
    splits_and_dtypes(rank, size)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_regions(n: int) -> None:
    run_ranks(n, all_of_it)


# ---- errors and groups -----------------------------------------------------------------------------------


def wrong(rank: int, size: int) -> None:
    x = torch.zeros(4, 2)
    with pytest.raises(ValueError, match=re.escape("no dimension 2 in a tensor of shape (4, 2)")):
        tp.scatter_to_sequence_parallel_region(x, dim=2)
    with pytest.raises(ValueError, match="has 4 elements over 2 ranks; got a split of 5 over 2"):
        tp.scatter_to_tensor_model_parallel_region(x, dim=0, split=even(5, 2))
    with pytest.raises(ValueError, match=r"rank . of 2 must give 2 of the 4 elements"):
        tp.gather_from_tensor_model_parallel_region(torch.zeros(3, 2), dim=0, split=even(4, 2))
    # One rank alone is wrong: the other is told, and does not wait for it.
    kind = ValueError if rank == 0 else pycomm.CommError
    with pytest.raises(kind, match="rank 0 of 2 must give 2 of the 4 elements"):
        tp.gather_from_tensor_model_parallel_region(torch.zeros(3 - rank, 2), dim=0, split=even(4, 2))
    for function in (tp.gather_from_sequence_parallel_region, tp.reduce_scatter_to_sequence_parallel_region):
        with pytest.raises(kind, match="no dimension 3"):
            function(x, dim=3 if rank == 0 else 0)
    with pytest.raises(TypeError, match=r"must be a pycomm\.Communicator, a torch process group.*got str"):
        tp.copy_to_tensor_model_parallel_region(x, "tp")
    with pytest.raises(RuntimeError, match="call initialize_model_parallel"):
        tp.get_tensor_model_parallel_rank()
    with pytest.raises(
        ValueError,
        match="tensor_model_parallel_size 3 × pipeline_model_parallel_size 1 × context_parallel_size 1 = 3 ",
    ):
        tp.initialize_model_parallel(3)
    with pytest.raises(ValueError, match=re.escape("ranks gave different")):
        tp.initialize_model_parallel(1 + rank)
    with pytest.raises((TypeError, pycomm.CommError), match="must be an integer, got '2'"):
        tp.initialize_model_parallel("2" if rank == 0 else 2)  # type: ignore[arg-type]
    tp.initialize_model_parallel(2)
    with pytest.raises(RuntimeError, match="initialised already"):
        tp.initialize_model_parallel(2)
    comm = tp.get_tensor_model_parallel_group()
    assert copy.deepcopy({"c": comm})["c"] is comm
    tp.destroy_model_parallel()
    tp.initialize_model_parallel(1)
    assert tp.get_tensor_model_parallel_world_size() == 1 and tp.get_data_parallel_rank() == rank
    assert tp.communicator_of() is tp.get_tensor_model_parallel_group()


def test_errors_say_what_to_do() -> None:
    run_ranks(2, wrong)


def ranks_of(rank: int, size: int) -> tuple[int, int, int]:
    tp.initialize_model_parallel(2, context_parallel_size=2)
    assert tp.get_context_parallel_world_size() == tp.get_data_parallel_world_size() == 2
    found = []
    for comm in (
        tp.get_tensor_model_parallel_group(),
        tp.get_context_parallel_group(),
        tp.get_data_parallel_group(),
    ):
        everyones = torch.empty(comm.size, dtype=torch.int64)
        comm.all_gather(everyones, torch.tensor([rank]))
        found.append(everyones.tolist())
    assert tp.get_context_parallel_rank() == found[1].index(rank)
    return tuple(found)


def test_ranks_lie_as_megatrons() -> None:
    got = run_ranks(8, ranks_of)
    assert got[0] == ([0, 1], [0, 2], [0, 4])
    assert got[7] == ([6, 7], [5, 7], [3, 7])


def torchs_groups(rank: int, size: int) -> None:
    with world(rank, size):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        gloo = dist.new_group([0, 1, 2, 3], backend="gloo")
        pair = dist.new_group([0, 1], backend="gloo")
        one = torch.full((2,), float(rank))
        for group, want in (
            (None, 6.0),
            (gloo, 6.0),
            (dist.group.WORLD, 6.0),
            (mesh["tp"], 1.0 if rank < 2 else 5.0),
        ):
            assert tp.reduce_from_tensor_model_parallel_region(one, group).tolist() == [want] * 2
        assert tp.communicator_of(gloo) is tp.communicator_of(gloo)
        with pytest.raises(
            ValueError, match=re.escape("needs one dimension of the mesh, got one with 2, ('dp', 'tp')")
        ):
            tp.communicator_of(mesh)
        if rank >= 2:
            with pytest.raises(ValueError, match=f"rank {rank} of torch's world is not in this group"):
                tp.communicator_of(pair)


def test_groups_of_torch_and_meshes() -> None:
    run_ranks(4, torchs_groups)
