"""Parallel layers against torch's in one process: values, gradients of any order, initial values, errors.

Every case runs in each of a few launches (ranks are dear); hypothesis picks the sizes. Expected values come
from torch.nn in float64 with the same seed.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor, nn
from torch.nn import functional as F

import pycomm
import pycomm.tensor_parallel as tp
from pycomm.tensor_parallel.overlap import n_chunks_of
from pycomm.tensor_parallel.parameters import shard_index
from pycomm.tensor_parallel.shards import even, heads
from ranks import run_ranks

pytestmark = pytest.mark.timeout(200)
F64 = torch.float64


def close(got: Tensor | None, want: Tensor | None, what: str, tolerance: float = 1e-10) -> None:
    assert got is not None and want is not None, what
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}")


def seeded(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


# ---- one column and one row parallel layer ---------------------------------------------------------------


def linear_case(
    rank: int, size: int, n_in: int, n_out: int, batch: int, length: int, bias: bool, dim: int, seed: int
) -> None:
    """Both layers, with and without sequence parallelism, gathered and not, against nn.Linear."""
    what = f"in {n_in}, out {n_out}, batch {batch}, length {length}, bias {bias}, dim {dim}, ranks {size}"
    torch.manual_seed(seed)
    reference = nn.Linear(n_in, n_out, bias=bias, dtype=F64)
    after = torch.get_rng_state()
    shape = (length, batch, n_in) if dim == 0 else (batch, length, n_in)
    whole = seeded(seed, *shape).requires_grad_()
    gradient = seeded(seed + 1, *shape[:-1], n_out)
    want = reference(whole)
    want.backward(gradient)
    rows, columns, positions = even(n_out, size), even(n_in, size), even(length, size)

    def mine(t: Tensor | None, split: Any, of: int) -> Tensor:
        assert t is not None
        return split.take(t, of, rank)

    for sequence in (False, True):
        for gather in (False, True):
            torch.manual_seed(seed)
            layer = tp.ColumnParallelLinear(n_in, n_out, bias, gather, sequence, sequence_dim=dim, dtype=F64)
            assert torch.equal(torch.get_rng_state(), after), what
            assert torch.equal(layer.weight, mine(reference.weight, rows, 0)), what
            x = whole.detach().clone()
            x = (mine(x, positions, dim) if sequence else x).clone().requires_grad_()
            out = layer(x)
            close(out, want if gather else mine(want, rows, -1), f"column: {what}")
            assert out.is_contiguous()
            out.backward(gradient if gather else mine(gradient, rows, -1))
            dx = whole.grad if not sequence else mine(whole.grad, positions, dim)
            close(x.grad, dx, f"column, sequence {sequence}, gather {gather}: {what}")
            close(layer.weight.grad, mine(reference.weight.grad, rows, 0), f"column weight: {what}")
            if bias:
                close(layer.bias.grad, mine(reference.bias.grad, rows, 0), f"column bias: {what}")
        for parallel in (True, False):
            if sequence and not parallel:
                continue
            torch.manual_seed(seed)
            down = tp.RowParallelLinear(n_in, n_out, bias, parallel, sequence, sequence_dim=dim, dtype=F64)
            assert torch.equal(torch.get_rng_state(), after), what
            assert torch.equal(down.weight, mine(reference.weight, columns, 1)), what
            x = whole.detach()
            x = (mine(x, columns, -1) if parallel else x).clone().requires_grad_()
            out = down(x)
            close(out, mine(want, positions, dim) if sequence else want, f"row: {what}")
            out.backward(mine(gradient, positions, dim) if sequence else gradient)
            close(x.grad, mine(whole.grad, columns, -1) if parallel else whole.grad, f"row input: {what}")
            close(down.weight.grad, mine(reference.weight.grad, columns, 1), f"row weight: {what}")
            if bias:
                close(down.bias.grad, reference.bias.grad, f"row bias, sequence {sequence}: {what}")


def linear_cases(rank: int, size: int, cases: list[tuple[Any, ...]]) -> None:
    for case in cases:
        linear_case(rank, size, *case)


CASE = st.tuples(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(1, 7),
    st.booleans(),
    st.integers(0, 1),
    st.integers(0, 999),
)
# A failure is not made smaller: each try is a launch.
FEW = settings(
    max_examples=1, suppress_health_check=list(HealthCheck), database=None, phases=[Phase.generate]
)


@pytest.mark.parametrize(("n", "chunks"), [(1, ""), (2, "1"), (3, "3"), (4, "2")])
@FEW
@given(cases=st.lists(CASE, min_size=6, max_size=6))
def test_linear_layers_equal_torchs(n: int, chunks: str, cases: list[tuple[Any, ...]]) -> None:
    run_ranks(n, linear_cases, cases, env={"PYCOMM_TP_OVERLAP": chunks})


def test_more_ranks_than_features() -> None:
    cases = [(2, 3, 1, 2, True, 0, 1), (5, 1, 2, 3, True, 1, 2), (12, 9, 1, 17, False, 0, 3)]
    run_ranks(8, linear_cases, cases, env={"PYCOMM_TP_OVERLAP": "2"})


# ---- fused layers and grouped heads ----------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor, size: int) -> Tensor:
    """(B, T, heads x size) each; every key-value head serves equally many query heads."""
    q, k, v = (t.unflatten(-1, (-1, size)).transpose(1, 2) for t in (q, k, v))
    if q.shape[1] != k.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True) if q.shape[1] else q
    return mixed.transpose(1, 2).flatten(2)


def attention(rank: int, size: int) -> None:
    d = 3
    for n_heads, n_kv in ((4, 4), (4, 2), (6, 2), (4, 1), (5, 5), (2, 1), (3, 3)):
        for sequence in (False, True):
            what = f"{n_heads} heads, {n_kv} kv, {size} ranks, sequence {sequence}"
            torch.manual_seed(n_heads)
            qkv = nn.Linear(8, (n_heads + 2 * n_kv) * d, dtype=F64)
            out = nn.Linear(n_heads * d, 8, dtype=F64)
            x = seeded(5, 2, 5, 8).requires_grad_()
            widths = [n_heads * d, n_kv * d, n_kv * d]
            want = out(attend(*qkv(x).split(widths, -1), d))
            g = seeded(6, 2, 5, 8)
            want.backward(g)

            torch.manual_seed(n_heads)
            more = {"sequence_parallel": sequence, "sequence_dim": 1, "dtype": F64}
            qkv_r = tp.FusedColumnParallelLinear.for_attention(8, n_heads, n_kv, d, **more)
            out_r = tp.RowParallelLinear(n_heads * d, 8, split=qkv_r.head_split, **more)
            positions = even(5, size)
            x_r = (positions.take(x.detach(), 1, rank) if sequence else x.detach()).clone().requires_grad_()
            got = out_r(attend(*qkv_r(x_r).split(qkv_r.local_sizes, -1), d))
            got.backward(positions.take(g, 1, rank) if sequence else g)
            close(got, positions.take(want, 1, rank) if sequence else want, what)
            assert x.grad is not None
            close(x_r.grad, positions.take(x.grad, 1, rank) if sequence else x.grad, what)
            for whole, shard in ((qkv, qkv_r), (out, out_r)):
                index = shard_index()
                for name, p in shard.named_parameters():
                    full: Any = dict(whole.named_parameters())[name]
                    note = index.get(id(p))
                    take = note.take if note else lambda t: t
                    assert torch.equal(p, take(full.detach())), what
                    close(p.grad, take(full.grad), f"{what}, {name}")
    # a fused MLP whose gate and up do not divide by the ranks
    torch.manual_seed(1)
    both, down = nn.Linear(4, 14, dtype=F64), nn.Linear(7, 4, dtype=F64)
    torch.manual_seed(1)
    both_r = tp.FusedColumnParallelLinear(4, [7, 7], dtype=F64)
    down_r = tp.RowParallelLinear(7, 4, dtype=F64)
    x = seeded(7, 3, 4)
    gate, up = both(x).split([7, 7], -1)
    gate_r, up_r = both_r(x).split(both_r.local_sizes, -1)
    close(down_r(F.silu(gate_r) * up_r), down(F.silu(gate) * up), "gate and up")
    gathered = tp.FusedColumnParallelLinear(4, [5, 2, 3], gather_output=True, dtype=F64)
    full_weight = tp.gather_from_tensor_model_parallel_region(gathered.weight, dim=0, split=gathered.split)
    full_bias = tp.gather_from_tensor_model_parallel_region(gathered.bias, dim=0, split=gathered.split)
    close(gathered(x), F.linear(x, full_weight, full_bias), "fused and gathered: in the order of one process")


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_fused_layers_and_grouped_heads(n: int) -> None:
    run_ranks(n, attention)


# ---- embedding and loss ----------------------------------------------------------------------------------


def vocabulary(rank: int, size: int, cases: list[tuple[int, int, float, int]]) -> None:
    for v, n, smoothing, seed in cases:
        what = f"vocabulary {v}, {n} tokens, smoothing {smoothing}, {size} ranks"
        torch.manual_seed(seed)
        reference = nn.Embedding(v, 4, padding_idx=seed % v, dtype=F64)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(v, (n, 2), generator=generator)
        target = torch.randint(v, (n, 2), generator=generator)
        target[seed % n, 0] = -100
        want_x = reference(ids)
        want = {
            r: F.cross_entropy(
                (want_x @ reference.weight.t()).flatten(0, 1), target.flatten(), ignore_index=-100,
                label_smoothing=smoothing, reduction=r,
            )
            for r in ("mean", "sum", "none")
        }  # fmt: skip
        sum(t.sum() for t in want.values()).backward()
        mine = even(v, size)
        for sequence in (False, True):
            torch.manual_seed(seed)
            layer = tp.VocabParallelEmbedding(v, 4, seed % v, sequence, dtype=F64)
            assert torch.equal(layer.weight, mine.take(reference.weight, 0, rank))
            x = layer(ids)
            layer.sequence_dim = -2  # counted from the end of the ids, not of their embeddings
            assert torch.equal(layer(ids), x)
            close(x, even(n, size).take(want_x, 0, rank) if sequence else want_x, what)
            logits = tp.parallel_lm_logits(x, layer.weight, sequence_parallel=sequence)  # tied
            got = {
                r: tp.vocab_parallel_cross_entropy(logits, target, -100, smoothing, r)
                for r in ("mean", "sum", "none")
            }
            for r in got:
                close(got[r].flatten(), want[r].flatten(), f"{what}, {r}")
            sum(t.sum() for t in got.values()).backward()
            assert reference.weight.grad is not None
            close(layer.weight.grad, mine.take(reference.weight.grad, 0, rank), f"{what}: tied gradient")


VOCABULARY = st.tuples(
    st.integers(1, 11), st.integers(1, 4), st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 99)
)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@FEW
@given(cases=st.lists(VOCABULARY, min_size=6, max_size=6))
def test_embedding_and_loss_equal_torchs(n: int, cases: list[tuple[int, int, float, int]]) -> None:
    run_ranks(n, vocabulary, cases)


def losses(rank: int, size: int) -> None:
    """What one process's cross entropy does at its edges."""
    v = 7
    part = even(v, size)
    whole = seeded(3, 5, v)
    whole[1, 2:] = -torch.inf  # whole parts of the vocabulary are masked
    whole[2] += 1e4
    target = torch.tensor([6, 1, 0, -100, 3])
    leaf = part.take(whole, 1, rank).clone().requires_grad_()
    reference = whole.clone().requires_grad_()
    want = F.cross_entropy(reference, target)
    got = tp.vocab_parallel_cross_entropy(leaf, target)
    close(got, want, "-inf and large logits")
    want.backward()
    got.backward()
    assert reference.grad is not None
    close(leaf.grad, part.take(reference.grad, 1, rank), "-inf and large logits: gradient")
    nothing = tp.vocab_parallel_cross_entropy(leaf, torch.full((5,), -100))
    assert nothing.isnan() == F.cross_entropy(whole, torch.full((5,), -100)).isnan()
    kept = torch.tensor([6, 1, 0, 2, 3])
    for of in (torch.int8, torch.uint8, torch.int32, torch.int64):  # torch's takes the last only
        again = part.take(whole, 1, rank).clone().requires_grad_()
        tp.vocab_parallel_cross_entropy(again, kept.to(of), ignore_index=2).backward()
        assert again.grad is not None and torch.equal(again.grad, leaf.grad)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        low = seeded(4, 5, v).to(dtype)
        mine = part.take(low, 1, rank).clone().requires_grad_()
        other = low.float().requires_grad_()
        got, want = tp.vocab_parallel_cross_entropy(mine, target), F.cross_entropy(other, target)
        assert got.dtype == torch.float32
        close(got, want, str(dtype), 1e-5)
        got.backward()
        want.backward()
        assert other.grad is not None
        close(mine.grad, part.take(other.grad.to(dtype), 1, rank), str(dtype), 1e-3)
    # every rank has the same bits
    everyones = torch.empty(size)
    tp.communicator_of().all_gather(everyones, got.detach().view(1))
    assert (everyones == everyones[0]).all()


def second_order(rank: int, size: int) -> None:
    """All parts of a model may be differentiated twice: all ranks perturb the same element together."""
    torch.manual_seed(0)
    more: dict[str, Any] = {"dtype": F64}
    up = tp.ColumnParallelLinear(3, 5, **more)
    down = tp.RowParallelLinear(5, 3, **more)
    s_up = tp.ColumnParallelLinear(3, 5, sequence_parallel=True, **more)
    s_down = tp.RowParallelLinear(5, 3, sequence_parallel=True, **more)
    norm = tp.LayerNorm(3, sequence_parallel=True, dtype=F64)
    head = tp.ColumnParallelLinear(3, 5, **more)
    target = torch.tensor([4, 0, -100])

    def loss(x: Tensor) -> Tensor:
        x = x + down(torch.tanh(up(x)))
        part = tp.scatter_to_sequence_parallel_region(x)
        part = s_down(torch.tanh(s_up(norm(part))))
        x = tp.gather_from_sequence_parallel_region(part, tensor_parallel_output_grad=False)
        return tp.vocab_parallel_cross_entropy(head(x), target, label_smoothing=0.1)

    x = torch.randn(3, 3, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, (x,))
    assert torch.autograd.gradgradcheck(loss, (x,), [torch.tensor(0.7, dtype=F64)])
    # gradient penalty: the gradient of a function of the gradient reaches the weights
    (g,) = torch.autograd.grad(loss(x), x, create_graph=True)
    g.square().sum().backward()
    assert all(
        p.grad is not None for m in (up, down, s_up, s_down, norm) for p in m.parameters() if p.dim() > 1
    )


def edges(rank: int, size: int) -> None:
    losses(rank, size)
    second_order(rank, size)


@pytest.mark.parametrize(("n", "chunks"), [(1, ""), (2, ""), (3, "2"), (8, "")])
def test_edges_of_the_loss_and_second_derivatives(n: int, chunks: str) -> None:
    run_ranks(n, edges, env={"PYCOMM_TP_OVERLAP": chunks}, timeout=90.0)


# ---- norms, autocast, copies, errors ---------------------------------------------------------------------


def low_dtypes(rank: int, size: int, sequence: bool, dtype: torch.dtype, tolerance: float) -> None:
    """Two layers against float64 with the same rounded weights; one rounding for each step."""
    more: dict[str, Any] = {"sequence_parallel": sequence, "dtype": dtype}
    torch.manual_seed(2)
    up, down = tp.ColumnParallelLinear(8, 6, **more), tp.RowParallelLinear(6, 8, **more)
    torch.manual_seed(2)
    whole_up, whole_down = (nn.Linear(*sizes, dtype=dtype).double() for sizes in ((8, 6), (6, 8)))
    part = even(4, size)
    x = seeded(3, 4, 8).to(dtype)
    mine = (part.take(x, 0, rank) if sequence else x).clone().requires_grad_()
    reference = x.double().requires_grad_()
    want, got = whole_down(whole_up(reference)), down(up(mine))
    want.square().sum().backward()
    got.float().square().sum().backward()
    assert got.dtype == dtype and reference.grad is not None and mine.grad is not None
    what = f"{dtype}, sequence {sequence}"
    close(got.double(), part.take(want, 0, rank) if sequence else want, what, tolerance)
    dx = part.take(reference.grad, 0, rank) if sequence else reference.grad
    close(mine.grad.double(), dx, f"{what}: gradient", tolerance)


def the_rest(rank: int, size: int) -> None:
    comm = tp.communicator_of()
    for make, name in ((tp.LayerNorm, "LayerNorm"), (tp.RMSNorm, "RMSNorm")):
        reference = getattr(nn, name)(4, dtype=F64)
        layer = make(4, sequence_parallel=True, dtype=F64)
        x = seeded(1, 5, 2, 4).requires_grad_()
        mine = even(5, size).take(x.detach(), 0, rank).clone().requires_grad_()
        reference(x).square().sum().backward()
        layer(mine).square().sum().backward()
        for p, want in zip(layer.parameters(), reference.parameters(), strict=True):
            close(p.grad, want.grad, f"{name}: the same on every rank")
        assert x.grad is not None
        close(mine.grad, even(5, size).take(x.grad, 0, rank), name)
    for sequence in (False, True):
        up = tp.ColumnParallelLinear(8, 6, sequence_parallel=sequence)
        down = tp.RowParallelLinear(6, 8, sequence_parallel=sequence)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = up(torch.ones(4, 8))
            out = down(hidden)
        assert hidden.dtype == out.dtype == torch.bfloat16, sequence
        out.float().sum().backward()
        assert up.weight.grad is not None and up.weight.grad.dtype == torch.float32
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
            low_dtypes(rank, size, sequence, dtype, tolerance)
    # copies have notes of their own
    twin = copy.deepcopy(up)
    assert twin.group is up.group and twin.weight is not up.weight
    assert shard_index()[id(twin.weight)] == shard_index()[id(up.weight)]
    twin.to(torch.float64)
    twin.to_empty(device="cpu")
    assert id(twin.weight) in shard_index()
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(twin)  # a connection; its state_dict is what to save
    # what is wrong is said, and the communicator stays usable
    with pytest.raises(ValueError, match=r"ColumnParallelLinear\(8, 6\): the last .* in_features, 8"):
        up(torch.ones(2, 7))
    with pytest.raises(ValueError, match=r"RowParallelLinear\(6, 8\): .*this rank's share of in_features, 3"):
        down(torch.ones(2, 6))
    for dim in (1, -1, 2):
        up.sequence_dim = dim
        with pytest.raises(ValueError, match=f"sequence_dim {dim} is no dimension before the last"):
            up(torch.ones(2, 8))
    up.sequence_dim = -2
    assert up(torch.ones(2, 8)).shape == (4, 3)
    embedding = tp.VocabParallelEmbedding(5, 2, sequence_parallel=True, sequence_dim=2)
    with pytest.raises(ValueError, match=r"sequence_dim 2 is no dimension of ids of shape \(1, 2\)"):
        embedding(torch.tensor([[0, 1]]))
    embedding = tp.VocabParallelEmbedding(5, 2)
    for ids, bad in (([[0, 5]], 5), ([[-1, 0]], -1)):
        with pytest.raises(IndexError, match=re.escape(f"id {bad} at position (0, {1 if bad == 5 else 0})")):
            embedding(torch.tensor(ids))
    with pytest.raises(IndexError, match=r"cross_entropy: target: id 9 at position \(1,\)"):
        tp.vocab_parallel_cross_entropy(torch.zeros(2, 3), torch.tensor([0, 9]))
    with pytest.raises(TypeError, match="class probabilities"):
        tp.vocab_parallel_cross_entropy(torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(ValueError, match="do not fit"):
        tp.vocab_parallel_cross_entropy(torch.zeros(2, 3), torch.tensor([0]))
    with pytest.raises(ValueError, match="label_smoothing must be"):
        tp.vocab_parallel_cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]), label_smoothing=1.5)
    with pytest.raises(ValueError, match="needs input_is_parallel"):
        tp.RowParallelLinear(4, 4, input_is_parallel=False, sequence_parallel=True)
    with pytest.raises(ValueError, match="several of the 2 ranks"):
        tp.FusedColumnParallelLinear.for_attention(4, 2, 1, 2, gather_output=True)
    with pytest.raises(ValueError, match=r"for_attention\(4, 3, 2, 1\) over 2 ranks: 3 query heads cannot"):
        tp.FusedColumnParallelLinear.for_attention(4, 3, 2, 1)
    with pytest.raises(ValueError, match="6 features over 2 ranks; got a split of 4 over 2"):
        tp.ColumnParallelLinear(4, 6, split=heads(4, 2, 2)[0])
    # one rank alone is wrong: the others are told
    if rank == 0:
        with pytest.raises(IndexError):
            embedding(torch.tensor([7]))
    else:
        with pytest.raises(pycomm.CommError, match="id 7 at position"):
            embedding(torch.tensor([1]))
    close(embedding(torch.tensor([1])), embedding(torch.tensor([1])), "usable")
    assert comm.size == 2


def test_norms_copies_and_errors() -> None:
    run_ranks(2, the_rest)


def wrong_settings(rank: int, size: int) -> None:
    """Wrong on one rank: it says so, and the other is told."""
    layer = tp.ColumnParallelLinear(3, 4, sequence_parallel=True)
    with pytest.raises((ValueError, pycomm.CommError), match="a number of chunks, at least 1, got '0'"):
        os.environ["PYCOMM_TP_OVERLAP"] = "0" if rank == 0 else "2"
        layer(torch.ones(2, 3))
    os.environ["PYCOMM_TP_OVERLAP"] = str(2 + rank)
    assert layer(torch.ones(2, 3)).shape == (4, 2)
    assert n_chunks_of(layer.group) == 2  # the smallest
    os.environ["PYCOMM_TP_CHECK"] = "yes"
    with pytest.raises(ValueError, match="PYCOMM_TP_CHECK must be 0 or 1, got 'yes'"):
        tp.ColumnParallelLinear(3, 4)(torch.ones(2, 3))


def test_wrong_settings_are_said() -> None:
    run_ranks(2, wrong_settings)


def checked(rank: int, size: int) -> None:
    layer = tp.ColumnParallelLinear(3, 4)
    layer(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"input of ColumnParallelLinear\(in_f.*its values on rank 2"):
        layer(torch.full((2, 3), float(rank == 2)))
    with pytest.raises(ValueError, match="its shape or dtype on ranks 1, 2"):
        layer(torch.ones(2 if rank == 0 else 3, 3))


def test_inputs_that_differ_are_found_on_request() -> None:
    run_ranks(3, checked, env={"PYCOMM_TP_CHECK": "1"})
