"""DDP with join on the backend: unequal numbers of batches, divided by all ranks or by those left."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranks import run_ranks
from torch_backend_ranks import world

pytestmark = pytest.mark.timeout(60)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def in_one_process(size: int, by_all: bool) -> list[torch.Tensor]:
    """Rank r has 1 + r batches: in step s ranks s and up take part."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(size):
        optimizer.zero_grad()
        active = range(step, size)
        losses = [model(batch(rank, step)).square().mean() for rank in active]
        sum(losses).div(size if by_all else len(active)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def joined(rank: int, size: int) -> None:
    with world(rank, size):
        for by_all in (False, True):
            model = DistributedDataParallel(network())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with model.join(divide_by_initial_world_size=by_all):
                for step in range(1 + rank):
                    optimizer.zero_grad()
                    loss = model(batch(rank, step)).square().mean()
                    gc.collect()  # the reducer has a handle that nobody else has
                    loss.backward()
                    optimizer.step()
            if rank == size - 1:  # the only one that made all steps
                want = in_one_process(size, by_all)
                for got, right in zip(model.parameters(), want, strict=True):
                    torch.testing.assert_close(got.detach(), right, rtol=1e-12, atol=1e-14)


def test_join_divides_by_all_ranks_or_by_those_left():
    run_ranks(3, joined, timeout=50)
