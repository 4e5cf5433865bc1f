"""torch's ways to make several calls one, with values: _coalescing_manager and the coalesced entries."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager

from ranks import run_ranks
from torch_backend_ranks import world

pytestmark = pytest.mark.timeout(60)
CPU = torch.device("cpu")
LENGTHS = (1, 5, 0, 130)


def mine(rank: int) -> list[torch.Tensor]:
    """Tensors of several lengths; element j of tensor i on rank r is 100 r + 10 i + j."""
    return [100.0 * rank + 10.0 * i + torch.arange(float(n)) for i, n in enumerate(LENGTHS)]


def total(size: int) -> list[torch.Tensor]:
    return [sum(mine(r)[i] for r in range(size)) for i in range(len(LENGTHS))]


def same(got, want, what) -> None:
    for index, (g, w) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(g, w), (what, index, g, w)


def managers(rank: int, size: int) -> None:
    """The manager: with and without a device, waiting by itself or by its handle."""
    with world(rank, size):
        group = dist.new_group(list(range(size)))
        for device in (None, CPU):
            for async_ops in (False, True):
                for where in (None, group):
                    every_kind(rank, size, where, device=device, async_ops=async_ops)
        if hasattr(dist, "all_gather_single"):  # older ones make all of them what the first one is
            refusals()


def every_kind(rank: int, size: int, group, **how) -> None:
    sums, whole = total(size), mine(rank)
    with _coalescing_manager(group=group, **how) as handle:
        for tensor in whole:
            dist.all_reduce(tensor, group=group)
    handle.wait()
    same(whole, sums, ("all_reduce", how))

    largest = mine(rank)
    with _coalescing_manager(group=group, **how) as handle:
        for tensor in largest:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    handle.wait()
    same(largest, mine(size - 1), ("all_reduce max", how))

    gathered = [torch.full((size * n,), -1.0) for n in LENGTHS]
    with _coalescing_manager(group=group, **how) as handle:
        for output, tensor in zip(gathered, mine(rank), strict=True):
            dist.all_gather_into_tensor(output, tensor, group=group)
    handle.wait()
    ranks = [mine(r) for r in range(size)]
    same(gathered, [torch.cat([ranks[r][i] for r in range(size)]) for i in range(len(LENGTHS))], how)

    scattered = [torch.full((n,), -1.0) for n in LENGTHS]
    inputs = [tensor.repeat(size) + rank for tensor in mine(0)]
    with _coalescing_manager(group=group, **how) as handle:
        for output, tensor in zip(scattered, inputs, strict=True):
            dist.reduce_scatter_tensor(output, tensor, op=dist.ReduceOp.AVG, group=group)
    handle.wait()
    same(scattered, [tensor + (size - 1) / 2 for tensor in mine(0)], ("reduce_scatter", how))

    with _coalescing_manager(group=group, **how) as handle:
        pass
    handle.wait()


def refusals() -> None:
    with (
        pytest.raises(RuntimeError, match="same type"),
        _coalescing_manager(),
    ):
        dist.all_reduce(torch.ones(1))
        dist.all_gather_into_tensor(torch.ones(dist.get_world_size()), torch.ones(1))
    dist.barrier()  # the group is still good


def test_the_coalescing_manager():
    run_ranks(3, managers, timeout=50)


def calls_of_other_kinds(rank: int, size: int) -> None:
    """With a device, calls that have no coalesced form of their own are made one by one, inside."""
    right, left = (rank + 1) % size, (rank - 1) % size
    with world(rank, size):
        for async_ops in (False, True):
            values = mine(rank)
            came = [torch.empty(n) for n in LENGTHS]
            with _coalescing_manager(device=CPU, async_ops=async_ops) as handle:
                works = [dist.isend(value, right, tag=i) for i, value in enumerate(values)]
                works += [dist.irecv(tensor, left, tag=i) for i, tensor in enumerate(came)]
            handle.wait()
            for work in works:
                if work is not None:
                    work.wait()
            same(came, mine(left), ("isend, irecv", async_ops))

            got = [torch.empty(n) for n in LENGTHS]
            for tensor, value in zip(got, mine(rank), strict=True):
                tensor.copy_(value)
            with _coalescing_manager(device=CPU, async_ops=async_ops) as handle:
                for tensor in got:
                    dist.broadcast(tensor, 1)
            handle.wait()
            same(got, mine(1), ("broadcast", async_ops))

        for tags in (False, True):
            came = [torch.empty(n) for n in LENGTHS]
            ops = [dist.P2POp(dist.irecv, t, left, tag=i * tags) for i, t in enumerate(came)]
            ops += [dist.P2POp(dist.isend, t, right, tag=i * tags) for i, t in enumerate(mine(rank))]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            same(came, mine(left), ("batch_isend_irecv", tags))


def test_other_calls_inside_of_the_manager_and_batches():
    run_ranks(3, calls_of_other_kinds, timeout=50)


def entries(rank: int, size: int) -> None:
    """The coalesced calls with names of their own: c10d's, the group's and the functional ones."""
    with world(rank, size):
        warnings.simplefilter("ignore")  # c10d's two are deprecated
        group, ranks = dist.group.WORLD, [mine(r) for r in range(size)]
        for async_op in (False, True):
            whole = mine(rank)
            work = dist.all_reduce_coalesced(whole, async_op=async_op)
            if async_op:
                same(work.wait(), total(size), "all_reduce_coalesced's future")
            same(whole, total(size), "all_reduce_coalesced")
            lists = [[torch.empty(n) for n in LENGTHS] for _ in range(size)]
            work = dist.all_gather_coalesced(lists, mine(rank), async_op=async_op)
            if async_op:
                work.wait()
            for r in range(size):
                same(lists[r], ranks[r], "all_gather_coalesced")

        mixed = [torch.ones(3), torch.full((2,), rank, dtype=torch.int64), torch.ones(1)]
        group.allreduce_coalesced(mixed).wait()
        same(
            mixed,
            [torch.full((3,), float(size)), torch.tensor([sum(range(size))] * 2), torch.tensor([size])],
            0,
        )

        got = functional.all_reduce_coalesced(mine(rank), "sum", group)
        same([t + 0 for t in got], total(size), "functional all_reduce_coalesced")
        joined = [torch.cat([ranks[r][i] for r in range(size)]) for i in range(len(LENGTHS))]
        got = functional.all_gather_into_tensor_coalesced(mine(rank), group)
        same([t + 0 for t in got], joined, "functional all_gather_into_tensor_coalesced")
        inputs = [tensor.repeat(size) + rank for tensor in mine(0)]
        got = functional.reduce_scatter_tensor_coalesced(inputs, "sum", [0] * len(inputs), group)
        want = [size * tensor + sum(range(size)) for tensor in mine(0)]
        same([t + 0 for t in got], want, "functional reduce_scatter_tensor_coalesced")


def test_the_coalesced_entries():
    run_ranks(3, entries, timeout=50)
