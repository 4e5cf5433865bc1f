"""Hooks that synchronise buffers in a way of the user's, before or after a forward."""

import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHookLocation as Location

import pycomm
from ranks import run_ranks


class Counting(nn.Module):
    """Counts what it has seen; its output tells the count at which it ran."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, n):
        self.seen += n
        return self.weight * self.seen


def count(rank, size, where):
    comm = pycomm.init()
    ddp = pycomm.DistributedDataParallel(Counting(), communicator=comm)
    calls = []

    def average(state, named):
        calls.append((state, list(named)))
        done = torch.futures.Future()
        done.set_result(comm.all_reduce(named["seen"], op="avg"))
        return done if where == Location.PRE_FORWARD else [done]

    ddp._register_buffer_comm_hook("mine", average, where)
    outputs = []
    for step in range(3):
        output = ddp(float(10 * rank + step))
        outputs.append(output.item())
        output.backward()
    with ddp.no_sync():
        ddp(1.0)  # its buffers stay local until the forward after the next
    return outputs, ddp.module.seen.item(), calls


def model(size, where):
    """The same in plain numbers: (what each rank's forwards saw, the buffer at the end)."""
    seen, outputs = [0.0] * size, [[] for _ in range(size)]

    def average():
        seen[:] = [sum(seen) / size] * size

    for step in range(3):
        if where == Location.PRE_FORWARD:
            average()
        for rank in range(size):
            seen[rank] += 10 * rank + step
            outputs[rank].append(seen[rank])
        if where == Location.POST_FORWARD:
            average()
    average()  # the forward within no_sync still follows a synchronised one
    return outputs, seen


@pytest.mark.parametrize("where", [Location.PRE_FORWARD, Location.POST_FORWARD])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_hook_takes_the_place_of_the_broadcast(size, where):
    outputs, seen = model(size, where)
    for rank, (got, last, calls) in enumerate(run_ranks(size, count, where)):
        if where == Location.PRE_FORWARD:
            assert got == outputs[rank]
            assert last == pytest.approx(seen[rank] + 1)
        else:  # a forward's output is this rank's own, whatever the buffer becomes afterwards
            assert got == pytest.approx(outputs[rank])
            assert last == pytest.approx(seen[rank] + 1)
        assert calls == [("mine", ["seen"])] * 4
