"""Between hosts: send and recv, asynchronous calls, groups, torch's backend, DDP and FSDP2.

Most are the tests of one host, run on several: ``on_hosts`` gives ``pycomm.init()`` the store and the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import test_async
import test_collectives
import test_groups
import test_point_to_point
import torch
import torch.distributed as dist
from torch import nn

import pycomm
from cases import check, values
from hosts_ranks import PLACEMENTS, join, place, store
from ranks import run_ranks

PAIRS = [0, 0, 1, 1]
MIXED = [0, 1, 0, 2, 2]


def on_hosts(rank: int, size: int, placement: list[int], function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function of another test; every ``pycomm.init(…)`` in it joins the ranks of all hosts."""
    place(rank, placement)
    one_host, numbers = pycomm.init, itertools.count()

    def init(**options: Any) -> pycomm.Communicator:
        meeting = store(size, f"store{next(numbers)}")
        return one_host(store=meeting, rank=rank, size=size, **options)

    pycomm.init = init
    return function(rank, size, *args)


Case = tuple[list[int], Callable[..., Any], tuple[Any, ...]]
TRANSFERS = test_point_to_point
REUSED: dict[str, Case] = {
    "send, recv": (MIXED, TRANSFERS.every_dtype_and_size, ()),
    "both directions": ([0, 1], TRANSFERS.both_directions, ()),
    "tags": ([0, 1], TRANSFERS.tags, ()),
    "any source": ([0, 1, 0, 1], TRANSFERS.any_source, ()),
    "any source, apart": ([0, 1, 2, 3], TRANSFERS.any_source, ()),
    "beside collectives": ([0, 1], TRANSFERS.beside_collectives, ()),
    "refused transfers": ([0, 1], TRANSFERS.refused, ()),
    "wrong size": ([0, 1], TRANSFERS.wrong_size, (torch.ones(300_007), torch.ones(2))),
    "sequences": (PAIRS, test_collectives.mixed_sequence, ()),
    "sequences, mixed": (MIXED, test_collectives.mixed_sequence, ()),
    "asynchronous": ([0, 1, 1], test_async.every_collective, ()),
    "many outstanding": ([0, 1], test_async.order_and_many, ()),
    "many outstanding, pairs": (PAIRS, test_async.order_and_many, ()),
    "dropped works": ([0, 1], test_async.dropped, ()),
    "wait with a timeout": ([0, 1], test_async.timeouts, ()),
    "threads": ([0, 1], test_async.threads, ()),
    "closing": ([0, 1], test_async.closing, ()),
    "splits": (PAIRS, test_groups.splits, ()),
    "splits, mixed": (MIXED, test_groups.splits, ()),
    "new groups": ([0, 1, 1], test_groups.new_groups, ()),
    "inherited": ([0, 1], test_groups.inherits, ()),
    "independent": ([0, 1], test_groups.independent, ()),
    "made and dropped": ([0, 1], test_groups.made_and_dropped, ()),
    "failure of a child": ([0, 1, 1], test_groups.failure_of_a_child, ()),
    **{
        f"lists of ranks: {what}": ([0, 1, 1], test_groups.different_lists, (what,))
        for what in test_groups.DIFFERENT
    },
}


@pytest.mark.parametrize("name", REUSED)
def test_as_on_one_host(name: str) -> None:
    placement, function, args = REUSED[name]
    run_ranks(len(placement), on_hosts, placement, function, *args, timeout=100)


# ---- training -------------------------------------------------------------------------------------------


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 2)
    ).double()


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 20, generator=generator, dtype=torch.float64)


def one_process(size: int) -> list[torch.Tensor]:
    """Three steps of SGD on the mean loss of all ranks' batches."""
    single = model()
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        (sum(single(batch(r, step)).square().mean() for r in range(size)) / size).backward()
        optimizer.step()
    return [p.detach() for p in single.parameters()]


def train(rank: int, size: int, placement: list[int], how: str) -> list[torch.Tensor]:
    comm = None
    if how == "ddp":
        comm = join(rank, placement)
        wrapped: Any = pycomm.DistributedDataParallel(model(), communicator=comm, bucket_cap_mb=0.1)
    else:
        place(rank, placement)
        dist.init_process_group("pycomm", store=store(size), rank=rank, world_size=size)
        if how == "backend":
            wrapped = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.1)
        else:
            from torch.distributed.fsdp import fully_shard

            wrapped = model()
            for layer in wrapped[::2]:
                fully_shard(layer)
            fully_shard(wrapped)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        wrapped(batch(rank, step)).square().mean().backward()
        optimizer.step()
    found = [p.full_tensor() if how == "fsdp2" else p for p in wrapped.parameters()]
    found = [p.detach().clone() for p in found]
    if comm is not None:
        comm.close()
    else:
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        assert total.item() == sum(range(size))
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        assert [o["rank"] for o in objects] == list(range(size))
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("how", ["ddp", "backend", "fsdp2"])
@pytest.mark.parametrize("placement", [[0, 1], PAIRS], ids=["2x1", "2x2"])
def test_training_equals_one_process(how: str, placement: list[int]) -> None:
    if how == "fsdp2" and not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("this torch has no FSDP2")
    size = len(placement)
    by_rank = run_ranks(size, train, placement, how, timeout=100)
    for rank, found in enumerate(by_rank):
        for got, want in zip(found, one_process(size), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
        for got, first in zip(found, by_rank[0], strict=True):
            check(got, first, rank, "the same bits on every rank")


def several(rank: int, size: int) -> None:
    """Communicators of one host, across, and of all, with calls in a different order and asynchronous."""
    placement = PAIRS
    with join(rank, placement) as comm:
        inside, across = comm.split(placement[rank]), comm.split(rank % 2)
        turned = comm.split(0, key=-rank)
        assert inside is not None and across is not None and turned is not None
        members = {"inside": [q for q in range(4) if placement[q] == placement[rank]]}
        members["across"] = [q for q in range(4) if q % 2 == rank % 2]
        members["turned"] = [3, 2, 1, 0]
        comms = {"inside": inside, "across": across, "turned": turned}
        for count in (3, 100_003):
            names = list(comms) if rank % 2 else list(comms)[::-1]
            works = {}
            tensors = {name: values(rank, count, torch.float32) for name in names}
            for name in names:  # each rank begins them in its own order
                works[name] = comms[name].all_reduce(tensors[name], async_op=True)
            for name in names:
                works[name].wait()
                want = torch.stack([values(q, count, torch.float32) for q in members[name]]).sum(0)
                check(tensors[name], want, rank, name, count)
            parts = [torch.zeros(count) for _ in range(4)]
            turned.all_gather(parts, values(rank, count, torch.float32))
            for i, part in enumerate(parts):
                check(part, values(3 - i, count, torch.float32), rank, "turned", i)


def test_several_communicators_at_once() -> None:
    run_ranks(4, several)


def one_shot_in_place(rank: int, size: int, placement: list[int]) -> None:
    with join(rank, placement) as comm:
        for n in (50_000, 5_000):  # the first waits for connections: what comes is there before all has left
            x = torch.full((n,), float(rank + 1))
            comm.all_reduce(x, algorithm="one_shot")
            assert x.unique().tolist() == [size * (size + 1) / 2]


@pytest.mark.parametrize("name", ["2x1", "3x1"])
def test_what_is_being_sent_is_not_overwritten_in_place(name: str) -> None:
    for _ in range(3):
        run_ranks(len(PLACEMENTS[name]), one_shot_in_place, PLACEMENTS[name])
