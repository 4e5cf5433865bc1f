"""Gradients' norm and overflow, parameter counts, checkpoints and meta initialisation of a cut model.

One small model with everything: a tied vocabulary that does not divide, fused queries with key-value heads on
several ranks, sequence parallel norms. Expected values are those of the same model in one process.
"""

from __future__ import annotations

import copy
import gc
import math
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import pycomm
import pycomm.tensor_parallel as tp
from pycomm.tensor_parallel.parameters import shard_index
from pycomm.tensor_parallel.whole import WholeTensor
from ranks import run_ranks
from torch_backend_ranks import world

pytestmark = pytest.mark.timeout(200)
F64 = torch.float64


class Model(nn.Module):
    """(B, T) ids to logits of 7; one layer of attention with 3 query heads and 1 key-value head."""

    def __init__(self, device: str | None = "cpu", sequence_parallel: bool = False) -> None:
        super().__init__()
        more: dict[str, Any] = {"device": device, "dtype": F64}
        sequence = {"sequence_parallel": sequence_parallel, "sequence_dim": 1}
        self.sequence = sequence
        self.embedding = tp.VocabParallelEmbedding(7, 6, **sequence, **more)
        self.norm = tp.LayerNorm(6, sequence_parallel=sequence_parallel, **more)
        self.qkv = tp.FusedColumnParallelLinear.for_attention(6, 3, 1, 2, **sequence, **more)
        self.out = tp.RowParallelLinear(6, 6, split=self.qkv.head_split, **sequence, **more)
        self.head = nn.Linear(6, self.embedding.weight.shape[0], bias=False, **more)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        q, k, v = self.qkv(self.norm(x)).split(self.qkv.local_sizes, -1)
        n = self.qkv.n_local_heads
        if n:
            k, v = (t.unsqueeze(2).expand(-1, -1, n, -1) for t in (k, v))
            q = (q.unflatten(-1, (n, 2)).tanh() * k + v).flatten(2)
        x = x + self.out(q)
        return tp.parallel_lm_logits(
            x, self.head.weight, sequence_parallel=self.sequence["sequence_parallel"], sequence_dim=1
        )


IDS = torch.tensor([[0, 6, 3, 2, 5], [1, 1, 4, 6, 0]])


def model(**options: Any) -> Model:
    torch.manual_seed(4)
    return Model(**options)


def backward(module: nn.Module, ids: Tensor = IDS) -> Tensor:
    loss = tp.vocab_parallel_cross_entropy(module(ids), (ids + 1) % 7)
    loss.backward()
    return loss.detach()


def norms(rank: int, size: int) -> list[float]:
    found = []
    for sequence in (False, True):
        for p in (2.0, 3.5, math.inf):
            m = model(sequence_parallel=sequence)
            found.append(float(backward(m)))
            given: Any = m if p == 2.0 else [*m.parameters(), m.head.weight]  # twice given counts once
            norm = tp.clip_grad_norm_(given, 0.01, p)
            everyones = torch.empty(size, dtype=F64)
            tp.communicator_of().all_gather(everyones, norm.view(1))
            assert (everyones == norm).all()  # the same bits
            found += [float(norm), float(tp.clip_grad_norm_(m, 1e9, p)), float(m.norm.weight.grad.sum())]
    assert not tp.has_overflow(m)
    if rank == size - 1:
        m.embedding.weight.grad = torch.full_like(m.embedding.weight, math.nan)
    assert tp.has_overflow(m)
    with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 is nan and cannot be clipped"):
        tp.clip_grad_norm_(m, 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="norm_type must be above 0"):
        tp.clip_grad_norm_(m, 1.0, 0.0)
    assert tp.count_parameters(m) == 7 * 6 + 2 * 6 + (6 + 2 + 2) * 7 + 6 * 6 + 6
    twin = copy.deepcopy(m)
    assert tp.count_parameters(twin) == tp.count_parameters(m)
    for fused in (False, True):  # a fused optimizer unscales by itself, and is asked otherwise
        scaler = tp.GradScaler(init_scale=8.0)
        adam = torch.optim.AdamW(twin.parameters(), lr=0.1, fused=fused)
        before = {name: p.detach().clone() for name, p in twin.named_parameters()}
        for p in twin.parameters():
            p.grad = torch.ones_like(p)
        if rank == 0:
            twin.norm.weight.grad = torch.full((6,), math.inf, dtype=F64)
        scaler.scale(torch.ones(()))
        scaler.step(adam)
        scaler.update()
        assert scaler.get_scale() == 4.0
        assert all(torch.equal(p, before[name]) for name, p in twin.named_parameters())
    return found


def test_norms_overflow_and_counts_are_those_of_one_process() -> None:
    [alone] = run_ranks(1, norms)
    half = len(alone) // 2
    assert alone[:half] == pytest.approx(alone[half:], rel=1e-10)
    # torch's own, in one process
    m = model()
    backward(m)
    want = torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01)
    assert alone[1] == pytest.approx(float(want), rel=1e-12)
    for n in (2, 4):
        for found in run_ranks(n, norms):
            assert found == pytest.approx(alone, rel=1e-9, abs=1e-12)


# ---- full and sharded ------------------------------------------------------------------------------------


def trained(steps: int = 2) -> tuple[Model, torch.optim.Optimizer]:
    m = model()
    adam = torch.optim.AdamW(m.parameters(), lr=0.05)
    train(m, adam, steps)
    return m, adam


def train(m: Model, optimizer: torch.optim.Optimizer, steps: int = 1) -> float:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = backward(m)
        optimizer.step()
    return float(loss)


def full(rank: int, size: int, given: Any) -> Any:
    """Trains, gives the whole; or takes a whole and goes on."""
    if given is None:
        m, adam = trained()
        state, optimizer = tp.full_state_dict(m), tp.full_optimizer_state_dict(m, adam)
        only = tp.full_state_dict(m, rank0_only=True)
        assert (rank == 0) == bool(only)
        assert all(torch.equal(only[name], state[name]) for name in only)
    else:
        state, optimizer = given
        torch.manual_seed(99)
        m = Model()
        adam = torch.optim.AdamW(m.parameters(), lr=0.05)
        assert not tp.load_full_state_dict(m, state).missing_keys
        tp.load_full_optimizer_state_dict(m, adam, optimizer)
        assert m.head.weight is m.embedding.weight
        with pytest.raises(ValueError, match=r"embedding.weight': the whole has the shape \(8, 6\), "):
            tp.load_full_state_dict(m, {"embedding.weight": torch.zeros(8, 6)})
        if size > 1:  # means of a shard's rows are no part of the whole's
            layer = tp.ColumnParallelLinear(2, 3 * size)
            factored = torch.optim.Adafactor(layer.parameters())
            with pytest.raises(ValueError, match=r"\.row_var': an optimizer's state of shape .* by element"):
                tp.full_optimizer_state_dict(layer, factored)
        with pytest.raises(RuntimeError, match="Missing key"):
            tp.load_full_state_dict(m, {"embedding.weight": state["embedding.weight"]})
    return state, optimizer, train(m, adam, 2)


def test_full_state_goes_to_any_degree_and_back() -> None:
    [(alone, optimizer, loss)] = run_ranks(1, full, None)
    for n in (2, 3):
        for state, of_optimizer, after in run_ranks(n, full, None):
            assert after == pytest.approx(loss, rel=1e-9)
            assert list(state) == list(alone)
            for name in alone:
                torch.testing.assert_close(state[name], alone[name], rtol=1e-9, atol=1e-12)
            for name, of_parameter in optimizer["state"].items():
                for key, value in of_parameter.items():
                    torch.testing.assert_close(of_optimizer["state"][name][key], value, rtol=1e-8, atol=1e-12)
    for n in (1, 4):
        for _, _, after in run_ranks(n, full, (alone, optimizer)):
            assert after == pytest.approx(loss, rel=1e-9)


def checkpoints(rank: int, size: int, folder: str, saves: bool) -> float:
    with world(rank, size):
        if saves:
            m, adam = trained()
        else:
            torch.manual_seed(99)
            m = Model()
            adam = torch.optim.AdamW(m.parameters(), lr=0.05)
        state = {"model": tp.sharded_state_dict(m), "optimizer": tp.sharded_optimizer_state_dict(m, adam)}
        assert isinstance(state["model"]["qkv.weight"], WholeTensor)
        if saves and size == 1:
            dcp.save(state, checkpoint_id=folder)
        elif saves:  # what is trained meanwhile is not in it
            saving: Any = dcp.async_save(state, checkpoint_id=folder)
            after = train(m, adam, 2)
            saving.result()
            return after
        else:
            dcp.load(state, checkpoint_id=folder)
            tp.load_sharded_optimizer_state_dict(m, adam, state["optimizer"])
        return train(m, adam, 2)


def test_dcp_saves_at_one_degree_and_loads_at_another(tmp_path: Path) -> None:
    want = {n: run_ranks(n, checkpoints, str(tmp_path / str(n)), True)[0] for n in (1, 3)}
    assert want[3] == pytest.approx(want[1], rel=1e-9)
    for saved, n in ((1, 2), (3, 4), (3, 1)):
        for after in run_ranks(n, checkpoints, str(tmp_path / str(saved)), False):
            assert after == pytest.approx(want[1], rel=1e-9)
    # Nothing of the cut is in the file: torch reads it without pycomm's layers.
    [m] = [model()]
    state: dict[str, Any] = {"model": {name: torch.zeros_like(t) for name, t in m.state_dict().items()}}
    dcp.load(state, checkpoint_id=str(tmp_path / "3"), no_dist=True)
    reference, _ = trained()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(state["model"][name], value, rtol=1e-9, atol=1e-12)


# ---- meta, DDP, FSDP2, compile ---------------------------------------------------------------------------


def meta(rank: int, size: int) -> None:
    with torch.device("meta"):  # before there is a communicator
        by_context = model(device=None)
    assert by_context.norm.weight.is_meta and by_context.head.weight is by_context.embedding.weight
    want = model()
    on_meta = model(device="meta")
    assert on_meta.qkv.weight.is_meta
    assert tp.count_parameters(on_meta) == tp.count_parameters(want)
    on_meta.register_buffer("kept", torch.ones(2))
    torch.manual_seed(4)
    made = tp.materialize(on_meta)
    assert made is on_meta
    assert made.head.weight is made.embedding.weight
    for (name, a), b in zip(made.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(on_meta.kept, torch.ones(2))
    assert id(made.qkv.weight) in shard_index()
    gc.disable()
    weight = weakref.ref(tp.ColumnParallelLinear(2, 3).weight)
    assert weight() is None  # its memory is given back with the layer
    gc.enable()
    # What is no longer the noted shard is not taken for a whole.
    layer = tp.ColumnParallelLinear(2, 3 * size)
    normed = torch.nn.utils.parametrizations.weight_norm(copy.deepcopy(layer))
    layer.weight = nn.Parameter(torch.zeros(4, 2))
    for function in (tp.full_state_dict, tp.sharded_state_dict, tp.count_parameters):
        with pytest.raises(ValueError, match=rf"'weight' cut over {size} ranks, .* but it is parametrized"):
            function(normed)
        with pytest.raises(ValueError, match=r"this one has 3 elements; but it is of the shape \(4, 2\)"):
            function(layer)

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.empty(2, device="meta"))

    with pytest.raises(TypeError, match=r"'0' of Bare has \['p'\] on device meta and no reset_parameters"):
        tp.materialize(nn.Sequential(Bare()))


def test_meta_initialisation_gives_the_values_and_keeps_ties() -> None:
    for n in (1, 3):
        run_ranks(n, meta)


def with_fsdp(rank: int, size: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with world(rank, size):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tp.initialize_model_parallel(2)
        ids = IDS[mesh["dp"].get_local_rank()].unsqueeze(0)
        m = model()
        fully_shard(m.qkv, mesh=mesh["dp"])
        fully_shard(m, mesh=mesh["dp"])
        backward(m, ids)
        state = tp.full_state_dict(m)
        norm = tp.clip_grad_norm_(m, 0.5)
        counted = tp.count_parameters(m)
        dcp.save({"model": tp.sharded_state_dict(m)}, checkpoint_id=folder)
        torch.manual_seed(77)
        other = Model()
        fully_shard(other, mesh=mesh["dp"])
        dcp.load({"model": tp.sharded_state_dict(other)}, checkpoint_id=folder)
        loaded = tp.full_state_dict(other)
        tp.load_full_state_dict(m, state)
        for name, value in tp.full_state_dict(m).items():
            assert torch.equal(value, state[name]), name
        tp.destroy_model_parallel()
        alone = dist.new_group([rank], use_local_synchronization=True)
        tp.initialize_model_parallel(1, group=alone)
        want = model()
        backward(want)
        values = want.state_dict()
        for name, value in values.items():
            assert torch.equal(state[name], value), name
            assert torch.equal(loaded[name], value), name
        wanted = torch.nn.utils.clip_grad_norm_(want.parameters(), 0.5)
        assert float(norm) == pytest.approx(float(wanted), rel=1e-9)
        assert counted == tp.count_parameters(want)
        # Made on meta, cut by FSDP2, and only then given values: those of the model made at once.
        tp.destroy_model_parallel()
        tp.initialize_model_parallel(2)
        late = model(device="meta")
        fully_shard(late.qkv, mesh=mesh["dp"])
        fully_shard(late, mesh=mesh["dp"])
        torch.manual_seed(4)
        tp.materialize(late)
        for name, value in tp.full_state_dict(late).items():
            assert torch.equal(value, values[name]), name
        # What one rank alone has of a gradient is not finite: all know it.
        backward(late, ids)
        assert not tp.has_overflow(late)
        if rank == 0:
            late.qkv.weight.grad.to_local().fill_(math.inf)
        assert tp.has_overflow(late)


def test_fsdp2_over_data_parallel_ranks(tmp_path: Path) -> None:
    run_ranks(4, with_fsdp, str(tmp_path / "c"))


def compiled(rank: int, size: int) -> None:
    for sequence in (False, True):
        want = model(sequence_parallel=sequence)
        loss = backward(want)
        m = model(sequence_parallel=sequence)
        got = backward(torch.compile(m, backend="aot_eager"))  # type: ignore[arg-type]
        assert float(got) == pytest.approx(float(loss), rel=1e-12)
        for (name, a), b in zip(m.named_parameters(), want.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, msg=lambda s, n=name: f"{n}: {s}")


@pytest.mark.slow
def test_torch_compile() -> None:
    assert os.environ.get("TORCHDYNAMO_DISABLE") is None
    run_ranks(2, compiled, timeout=90.0)


def with_nothing(rank: int, size: int) -> None:
    """More ranks than features, under DDP: a rank whose shards are empty takes part as any other."""
    tp.initialize_model_parallel(2)
    data = tp.get_data_parallel_group()
    torch.manual_seed(1)
    layers = [tp.ColumnParallelLinear(2, 1, dtype=F64), tp.RowParallelLinear(1, 2, dtype=F64)]
    ddp = pycomm.DistributedDataParallel(nn.Sequential(*layers), communicator=data)
    torch.manual_seed(1)
    reference = nn.Sequential(nn.Linear(2, 1, dtype=F64), nn.Linear(1, 2, dtype=F64))
    for m in (ddp, reference):
        adam = torch.optim.AdamW(m.parameters(), lr=0.1)
        for _ in range(2):
            adam.zero_grad()
            m(torch.ones(3, 2, dtype=F64)).square().sum().backward()
            norm = tp.clip_grad_norm_(m, 1.0)
            adam.step()
    for name, value in tp.full_state_dict(ddp.module).items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-10, atol=1e-12)
    assert float(norm) > 1.0


def test_ddp_with_ranks_that_have_nothing() -> None:
    run_ranks(4, with_nothing)
