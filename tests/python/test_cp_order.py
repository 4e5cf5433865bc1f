"""Splitting a sequence between ranks: every position once, balanced, and back; and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import pycomm
from pycomm.tensor_parallel.context import (
    context_parallel_positions,
    context_parallel_shard,
    context_parallel_unshard,
    ring_attention,
    ulysses_attention,
)
from pycomm.tensor_parallel.context.order import in_sequence, in_shards, length_of, pieces_of, shard_sizes
from pycomm.tensor_parallel.group import destroy_model_parallel, initialize_model_parallel
from ranks import run_ranks

ORDER = st.sampled_from(["zigzag", "contiguous"])


@hypothesis.given(st.integers(0, 200), st.integers(1, 12), ORDER)
def test_every_position_is_held_once_in_ascending_pieces(length: int, n_ranks: int, order: Any) -> None:
    held = pieces_of(length, n_ranks, order)
    assert sorted(i for own in held for p in own for i in range(p.begin, p.end)) == list(range(length))
    sizes = [p.size for own in held for p in own]
    assert max(sizes) - min(sizes) <= 1
    by_index = sorted((p for own in held for p in own), key=lambda p: p.index)
    assert all(a.end == b.begin for a, b in itertools.pairwise(by_index))
    assert length_of(shard_sizes(length, n_ranks, order), order) == length


@hypothesis.given(st.integers(1, 300), st.integers(1, 12))
def test_zigzag_balances_the_scores_of_a_causal_mask(pieces: int, n_ranks: int) -> None:
    length = 2 * n_ranks * pieces
    scores = [
        sum(i + 1 for p in own for i in range(p.begin, p.end)) for own in pieces_of(length, n_ranks, "zigzag")
    ]
    assert len(set(scores)) == 1  # r and 2n−1−r: the same sum for every rank


@hypothesis.given(st.integers(0, 60), st.integers(1, 9), ORDER)
def test_shards_and_back(length: int, n_ranks: int, order: Any) -> None:
    whole = torch.arange(2 * length).view(2, length)
    shards = in_shards(whole, 1, n_ranks, order)
    assert [s.shape[1] for s in shards] == shard_sizes(length, n_ranks, order)
    assert torch.equal(in_sequence(shards, 1, order), whole)


def there_and_back(rank: int, size: int) -> None:
    comm = pycomm.init()
    for order in ("zigzag", "contiguous"):
        for length in (0, 1, 5, 8, 17):
            x = torch.randn(
                3, length, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(length)
            )
            positions = context_parallel_positions(length, comm, order=order)
            for dim in (1, -2):
                shard = context_parallel_shard(x, dim, comm, order=order)
                assert torch.equal(shard, x[:, positions])
                assert torch.equal(context_parallel_unshard(shard, dim, comm, order=order), x)
            first = context_parallel_shard(x.movedim(1, 0), 0, comm, order=order)
            assert torch.equal(context_parallel_unshard(first, 0, comm, order=order), x.movedim(1, 0))
            # Each rank weighs the whole with its own factor; the sum of factors reaches every shard.
            leaf = shard.clone().requires_grad_()
            (context_parallel_unshard(leaf, 1, comm, order=order) * x).sum().mul(rank + 1).backward()
            assert torch.allclose(leaf.grad, shard * sum(range(1, size + 1)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("degree", [1, 3])
def test_shard_and_unshard_over_ranks(degree: int) -> None:
    run_ranks(degree, there_and_back)


def default_groups(rank: int, size: int) -> None:
    """Without group=, the ranks that share a sequence, not those that share layers."""
    initialize_model_parallel(2, context_parallel_size=2)
    positions = context_parallel_positions(8)
    assert positions.tolist() == ([0, 1, 6, 7] if rank < 2 else [2, 3, 4, 5])
    x = torch.arange(8.0).view(1, 8, 1)
    shard = context_parallel_shard(x)
    assert torch.equal(context_parallel_unshard(shard), x)
    q = shard.unsqueeze(1) * (1 + rank % 2)  # tensor-parallel ranks have other heads
    want = torch.nn.functional.scaled_dot_product_attention(
        *[x.unsqueeze(1) * (1 + rank % 2)] * 3, is_causal=True
    )
    for method in (ring_attention, ulysses_attention):
        torch.testing.assert_close(method(q, q, q, is_causal=True), want[:, :, positions])
    destroy_model_parallel()


@pytest.mark.timeout(60)
def test_default_groups() -> None:
    run_ranks(4, default_groups)


def refusals(rank: int, size: int) -> None:
    comm = pycomm.init()
    q, kv = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8)
    everywhere: list[tuple[Any, type[BaseException], str]] = [
        (lambda f: f(q, torch.ones(1, 3, 3, 8), torch.ones(1, 3, 3, 8), group=comm), ValueError,
         "4 query heads cannot share 3 KV heads"),
        (lambda f: f(q.int(), kv, kv, group=comm), ValueError, "query must be"),
        (lambda f: f(q, kv.double(), kv, group=comm), ValueError, "one dtype"),
        (lambda f: f(q, kv[..., :5], kv, group=comm), ValueError, "do not fit together"),
        (lambda f: f(q, kv[:, :, :2], kv[:, :, :2], is_causal=True, group=comm), ValueError,
         "as many queries as keys"),
        (lambda f: f(q, kv, kv, order="zig", group=comm), ValueError, "'zigzag' or 'contiguous'"),
        (lambda f: f(q, kv, kv, scale="1", group=comm), TypeError, "scale must be a number"),
        (lambda f: f(q, kv[:, :, :0], kv[:, :, :0], group=comm), ValueError, "nothing to attend to"),
        # Arguments that differ between ranks: the same error on every rank.
        (lambda f: f(q, kv, kv, is_causal=rank == 0, group=comm), ValueError, "is_causal must be the same"),
        (lambda f: f(q, kv, kv, scale=[0.5, None][rank], group=comm), ValueError,
         r"scale must be the same on all ranks, rank 0 has 0\.5, rank 1 0\.353"),
        (lambda f: f(*(t.to([torch.float32, torch.float64][rank]) for t in (q, kv, kv)), group=comm),
         ValueError, "dtype must be the same.*float32.*float64"),
        (lambda f: f(*(t[:, :, : 3 - 2 * rank] for t in (q, kv, kv)), is_causal=True, group=comm),
         ValueError, r"hold \[3, 1\] positions.*splits into \[2, 2\]"),
    ]  # fmt: skip
    for method in (ring_attention, ulysses_attention):
        for call, kind, text in everywhere:
            with pytest.raises(kind, match=text):
                call(method)
        # One rank's wrong argument: its own error there, told to the other.
        with pytest.raises(ValueError if rank == 1 else pycomm.CommError, match="do not fit together"):
            method(q, kv if rank == 0 else kv[..., :5], kv, group=comm)
    with pytest.raises(ValueError, match=r"hold \[3, 1\] positions"):
        context_parallel_unshard(torch.ones(1, 3 - 2 * rank), 1, comm)
    with pytest.raises(ValueError, match=r"dim must be an integer in \[-2, 2\)"):
        context_parallel_shard(torch.ones(1, 3), 2, comm)
    assert ring_attention(q, kv, kv, group=comm).shape == q.shape  # the communicator is usable still


@pytest.mark.timeout(60)
def test_refusals() -> None:
    run_ranks(2, refusals)


def blocks_only(rank: int, size: int) -> int:
    """The most elements of any tensor that one call makes, counted by a dispatch mode."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(t, torch.Tensor):
                    self.seen = max(self.seen, t.numel())
            return out

    comm = pycomm.init()
    mine = [torch.randn(1, 1, 2048 // size, 2, requires_grad=True) for _ in range(3)]
    with Largest() as largest:
        ring_attention(*mine, is_causal=True, group=comm).sum().backward()
    return largest.seen


@pytest.mark.timeout(60)
def test_no_matrix_of_scores_beyond_a_tile() -> None:
    # 2048 positions: the whole matrix has 2^22 scores, a rank's block 2^20, a tile 2^18.
    assert max(run_ranks(2, blocks_only)) == 2**18
