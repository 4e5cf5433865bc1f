"""Parallelized modules with torch.compile, activation checkpointing, our DDP and FSDP2 on a 2-D mesh."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from tp_plan_models import assert_equal, decoder, ids, loss_of, plan, whole_and_parallel

import pycomm
from pycomm.tensor_parallel.parallelize import parallelize_module
from pycomm.tensor_parallel.parameters import named_shards
from ranks import run_ranks
from torch_backend_ranks import world


def compiled(rank: int, size: int) -> None:
    comm = pycomm.init()
    for sequence_parallel in (False, True):
        whole, parallel = whole_and_parallel(comm, plan(sequence_parallel))
        for model in (whole, parallel):
            del model.blocks[1]  # each takes seconds to compile
        loss_of(whole, ids()).backward()
        torch._dynamo.reset()
        model = torch.compile(parallel, backend="aot_eager")
        for _ in range(2):
            parallel.zero_grad()
            loss = loss_of(model, ids())
            loss.backward()
            torch.testing.assert_close(loss, loss_of(whole, ids()), rtol=1e-12, atol=0)
            assert_equal(parallel, whole, sequence_parallel)
    # Recomputation of a block, which communicates again.
    whole, parallel = whole_and_parallel(comm, plan())
    loss_of(whole, ids()).backward()
    for block in parallel.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    loss_of(parallel, ids()).backward()
    assert_equal(parallel, whole, "checkpoint")


@pytest.mark.timeout(120)
def test_compile_and_checkpoint() -> None:
    run_ranks(2, compiled, timeout=110)


def data_and_tensor_parallel(rank: int, size: int, kind: str) -> None:
    """tp 2 × dp 2: each pair of tensor-parallel ranks has half of the batch, gradients are averaged."""
    with world(rank, size):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        whole = decoder()
        model: Any = copy.deepcopy(whole)
        with pytest.raises(ValueError, match=r"needs one dimension of the mesh.*mesh\['tp'\]"):
            parallelize_module(model, mesh, plan())
        parallelize_module(model, mesh["tp"], plan())
        everything = ids(batch=4)
        loss_of(whole, everything).backward()
        if kind == "ddp":
            model = pycomm.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
        else:
            from torch.distributed.fsdp import fully_shard

            for block in model.blocks:
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        mine = everything.chunk(2)[mesh["dp"].get_local_rank()]
        loss_of(model, mine).backward()
        inner = model.module if kind == "ddp" else model
        if kind == "ddp":
            assert_equal(inner, whole, kind)
        else:
            shards = dict(named_shards(inner))
            theirs = dict(whole.named_parameters())
            assert list(theirs) == [name for name, _ in inner.named_parameters()]
            for name, p in inner.named_parameters():
                want = theirs[name].grad
                want = shards[name].take(want) if name in shards else want
                torch.testing.assert_close(p.grad.full_tensor(), want, rtol=1e-9, atol=1e-12, msg=name)
            assert isinstance(inner.blocks[0].up, nn.Linear)
        dist.barrier()


@pytest.mark.timeout(90)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_tensor_parallel_times_data_parallel(kind: str) -> None:
    run_ranks(4, data_and_tensor_parallel, kind, timeout=80)
