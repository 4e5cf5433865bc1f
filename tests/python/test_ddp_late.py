"""Gradients that come after their bucket was launched: averaged once more, or an error.

Reentrant checkpoints that run another number of times than in the backward that was learned from. The
expectation is one process on all ranks' batches, in float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pycomm
from ddp_cases import TINY, batch, gradients, seeded
from ranks import run_ranks

STEPS = 4
CHANGED = 2  # from this step on rank 1 runs `repeated` twice


class Repeating(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.repeated, self.last = (nn.Linear(6, 6, bias=False) for _ in range(3))

    def forward(self, x, n_times, uses_last):
        h = self.first(x)
        for _ in range(n_times):
            h = checkpoint(self.repeated, h, use_reentrant=True)
        return (self.last(h) if uses_last else h).square().mean()


def what(step, rank, skips):
    """Arguments of a forward: the batch, how often, and whether rank 0 leaves out the last layer."""
    x = batch(step, rank).requires_grad_()
    return x, 2 if step >= CHANGED and rank == 1 else 1, not (skips and step >= CHANGED and rank == 0)


def wanted(step, size, skips):
    module = seeded(Repeating)
    sum(module(*what(step, rank, skips)) for rank in range(size)).div(size).backward()
    return gradients(module)


def train(rank, size, overlap, cap, to_none, skips):
    module = seeded(Repeating)
    ddp = pycomm.DistributedDataParallel(
        module,
        communicator=pycomm.init(),
        overlap=overlap,
        bucket_cap_mb=cap,
        find_unused_parameters=skips,
    )
    found = []
    for step in range(STEPS):
        ddp.zero_grad(set_to_none=to_none)
        try:
            ddp(*what(step, rank, skips)).backward()
        except RuntimeError as error:
            found.append(str(error))
        else:
            found.append(gradients(module))
    return found


def check(found, skips, size=2):
    for step, got in enumerate(found):
        for name, gradient in wanted(step, size, skips).items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-10, atol=1e-14, msg=f"{step} {name}")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("overlap", ["inline", "end"])
def test_a_bucket_that_was_complete_too_early(overlap, to_none):
    """`repeated` comes twice and so takes the place of `first` in their common bucket."""
    for found in run_ranks(2, train, overlap, 1, to_none, False):
        check(found, False)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("to_none", [True, False])
def test_a_bucket_that_was_complete_too_early_beside_backward(to_none):
    """The culprit is the gradient that came too late, not the one that came too often before."""
    for found in run_ranks(2, train, "async", 1, to_none, False):
        assert (
            "rank 1: got another gradient in this backward after it had been reduced: first.weight (1 of 3)"
            in (found[CHANGED])
        )
        assert "overlap='end'" in found[CHANGED]
        assert "lost its gradient" not in found[CHANGED]
        assert found[CHANGED + 1].keys() == wanted(0, 2, False).keys()


@pytest.mark.timeout(60)
def test_all_ranks_raise_when_only_one_has_launched_early():
    """Rank 0 leaves out the layer whose gradient comes first, so none of its buckets is launched early."""
    for found in run_ranks(2, train, "async", TINY, True, True):
        assert "rank 1: got another gradient" in found[CHANGED]
        check([*found[:CHANGED]], True)
        for name, gradient in wanted(CHANGED + 1, 2, True).items():
            torch.testing.assert_close(found[CHANGED + 1][name], gradient, rtol=1e-10, atol=1e-14)
