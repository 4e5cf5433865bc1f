"""Checkpoints, initial values on the meta device, norm and counts of a parallelized module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tp_plan_models import Decoder, assert_equal, decoder, ids, loss_of, plan, whole_and_parallel

import pycomm
from pycomm.tensor_parallel.gradients import clip_grad_norm_, count_parameters
from pycomm.tensor_parallel.parallelize import parallelize_module
from pycomm.tensor_parallel.state_dict import full_state_dict, load_full_state_dict, materialize
from ranks import run_ranks


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def of_the_whole_model(rank: int, size: int) -> None:
    comm = pycomm.init()
    for sequence_parallel in (False, True):
        whole, parallel = whole_and_parallel(comm, plan(sequence_parallel))
        assert count_parameters(parallel) == sum(p.numel() for p in whole.parameters())
        assert same(full_state_dict(parallel), whole.state_dict())
        # Other values, loaded from one process's checkpoint.
        other = decoder(seed=7)
        load_full_state_dict(parallel, other.state_dict())
        assert parallel.head.weight is parallel.embed.weight
        loss_of(parallel, ids()).backward()
        loss_of(other, ids()).backward()
        assert_equal(parallel, other)
        want = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
        norm = clip_grad_norm_(parallel, 0.1, mesh=comm)
        torch.testing.assert_close(norm, want)
        assert_equal(parallel, other, "clipped", rtol=1e-8)
    # Made on the meta device, parallelized, and only then given memory: the values of a model made at once.
    with torch.device("meta"):
        model = Decoder()
    parallelize_module(model, comm, plan())
    torch.manual_seed(3)
    materialize(model)
    assert model.head.weight is model.embed.weight
    torch.manual_seed(3)
    assert same(full_state_dict(model), Decoder().state_dict())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_state_of_the_whole_model(degree: int) -> None:
    run_ranks(degree, of_the_whole_model)
