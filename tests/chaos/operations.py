"""The calls of the matrix, each with values that show any mistake: call i of rank r differs from all others.

A step makes one call and says whether its result is right, by a closed form. Whole numbers, so float32 is
exact; 300,000 elements, so the calls are large ones and data move most of the time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import pycomm

N = 300_000

Step = Callable[[int], bool]


def _value(i: int, rank: int) -> float:
    return float(i % 97 + 10 * (rank + 1))


def all_reduce(comm: pycomm.Communicator) -> Step:
    tensor = torch.empty(N)

    def step(i: int) -> bool:
        tensor.fill_(_value(i, comm.rank))
        comm.all_reduce(tensor)
        return bool((tensor == sum(_value(i, r) for r in range(comm.size))).all())

    return step


def broadcast(comm: pycomm.Communicator) -> Step:
    tensor = torch.empty(N)

    def step(i: int) -> bool:
        tensor.fill_(_value(i, comm.rank))
        comm.broadcast(tensor, 0)
        return bool((tensor == _value(i, 0)).all())

    return step


def all_to_all(comm: pycomm.Communicator) -> Step:
    n = N // comm.size
    mine, theirs = torch.empty(comm.size, n), torch.empty(comm.size, n)
    columns = torch.arange(comm.size, dtype=torch.float32).unsqueeze(1)

    def step(i: int) -> bool:
        mine.copy_((columns + 1000 * _value(i, comm.rank)).expand(-1, n))  # to rank c: … + c
        theirs.zero_()
        comm.all_to_all(theirs, mine)
        want = torch.tensor([1000 * _value(i, r) + comm.rank for r in range(comm.size)])
        return bool((theirs == want.unsqueeze(1)).all())

    return step


def barrier(comm: pycomm.Communicator) -> Step:
    def step(i: int) -> bool:
        comm.barrier()
        return True

    return step


def ddp_step(comm: pycomm.Communicator) -> Step:
    net = torch.nn.Linear(600, 500, bias=False)
    ddp = pycomm.DistributedDataParallel(net, communicator=comm)

    def step(i: int) -> bool:
        net.weight.grad = None
        ddp(torch.full((1, 600), _value(i, comm.rank))).sum().backward()
        # d(sum of W x)/dW: x in every row; averaged over the ranks.
        want = sum(_value(i, r) for r in range(comm.size)) / comm.size
        grad = net.weight.grad
        return grad is not None and torch.allclose(grad, torch.full_like(grad, want), rtol=1e-6, atol=0.0)

    return step


OPERATIONS: dict[str, Callable[[pycomm.Communicator], Step]] = {
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "all_to_all": all_to_all,
    "barrier": barrier,
    "DDP step": ddp_step,
}


def warm_up() -> None:
    """What a process starts and opens once: threads of autograd, files of modules; no leak, and no fault."""
    assert pycomm.DistributedDataParallel is not None  # imported when it is first asked for
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
