"""The proof: a GPT trained 50 steps at every degree has the loss curve of torch's layers in one process."""

from __future__ import annotations

import functools

import pytest
import torch

import pycomm
import pycomm.tensor_parallel as tp
from ranks import run_ranks
from tp_gpt import ParallelGPT, PlainGPT, Sizes, batch

pytestmark = pytest.mark.timeout(300)
STEPS = 50
SIZES = Sizes()


@functools.cache
def alone() -> list[tuple[float, float]]:
    """Loss and norm of the gradient of each step, in one process, with torch's layers."""
    torch.manual_seed(5)
    model = PlainGPT(SIZES)
    tp.model_parallel_manual_seed(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch(step, SIZES))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def parallel(rank: int, size: int, degree: int, sequence: bool, recompute: bool) -> list[tuple[float, float]]:
    tp.initialize_model_parallel(degree)
    data = tp.get_data_parallel_group()
    torch.manual_seed(5)
    model = ParallelGPT(SIZES, sequence=sequence, data=data, recompute=recompute)
    tp.model_parallel_manual_seed(6)
    assert tp.count_parameters(model) == sum(p.numel() for p in PlainGPT(SIZES).parameters())
    tp.model_parallel_manual_seed(6)
    ddp = pycomm.DistributedDataParallel(model, communicator=data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    found = []
    for step in range(STEPS):
        ids, targets = (t.chunk(data.size)[data.rank] for t in batch(step, SIZES))
        n_tokens = int((targets != -100).sum())
        optimizer.zero_grad()
        # Ranks ignore different numbers of tokens: the mean of their means is not the mean.
        with ddp.weighted(n_tokens):
            loss = ddp(ids, targets)
            loss.backward()
        norm = tp.clip_grad_norm_(model, 0.5)
        optimizer.step()
        sums = torch.tensor([loss.item() * n_tokens, n_tokens], dtype=torch.float64)
        data.all_reduce(sums)
        found.append(((sums[0] / sums[1]).item(), norm.item()))
    # Replicated parameters have the same bits on every rank, after 50 steps.
    comm = tp.get_tensor_model_parallel_group()
    replicated = torch.cat([model.positions.weight.flatten(), model.norm.weight, model.blocks[0].out.bias])
    everyones = torch.empty(comm.size, replicated.numel(), dtype=torch.float64)
    comm.all_gather(everyones, replicated.detach())
    assert (everyones == everyones[0]).all()
    return found


@pytest.mark.parametrize(
    ("n", "degree", "sequence", "recompute"),
    [
        (1, 1, True, False),
        (2, 2, False, True),
        (3, 3, True, False),
        (4, 4, True, False),
        (4, 2, True, False),
    ],
    ids=["tp1", "tp2-recomputed", "tp3", "tp4", "tp2-dp2"],
)
def test_a_gpt_trains_as_in_one_process(n: int, degree: int, sequence: bool, recompute: bool) -> None:
    want = alone()
    assert want[-1][0] < want[0][0]
    for found in run_ranks(n, parallel, degree, sequence, recompute, timeout=280.0):
        assert found[0] == pytest.approx(want[0], rel=1e-12)
        for step, (a, b) in enumerate(zip(found, want, strict=True)):
            assert a == pytest.approx(b, rel=1e-8), f"step {step}"
