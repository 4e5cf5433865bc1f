"""Double backward, and modules that return dicts, dataclasses, nested things or nothing."""

import contextlib
from dataclasses import dataclass

import pytest
import torch
from test_ddp_backwards import TINY, Net, data, gradients, loss, make, one, oracle

import pycomm
from ranks import run_ranks

# ---- double backward


def penalty_on_gradients(rank, size):
    """The squared norm of the averaged gradient, differentiated once more."""
    module = make("plain")
    ddp = pycomm.DistributedDataParallel(module, communicator=pycomm.init(), bucket_cap_mb=TINY)
    found = []
    for how in ("backward", "grad"):
        ddp.zero_grad()
        parameters = list(module.parameters())
        if how == "backward":
            loss(ddp, 0, rank).backward(create_graph=True)
            gradient = [p.grad for p in parameters]
            for p in parameters:
                p.grad = None
        else:
            gradient = torch.autograd.grad(loss(ddp, 0, rank), parameters, create_graph=True)
        sum(g.square().sum() for g in gradient).backward()
        found.append(gradients(module))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_double_backward_is_that_of_the_concatenated_batch(size):
    module = make("plain")
    value = sum(loss(module, 0, rank) for rank in range(size)) / size
    gradient = torch.autograd.grad(value, list(module.parameters()), create_graph=True)
    sum(g.square().sum() for g in gradient).backward()
    wanted = gradients(module)
    for found in run_ranks(size, penalty_on_gradients):
        for each in found:
            for name, g in wanted.items():
                torch.testing.assert_close(each[name], g, rtol=1e-10, atol=1e-14)


# ---- what modules return


@dataclass
class Result:
    value: torch.Tensor
    note: str


class Returns(Net):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.kept = None

    def forward(self, x):
        y = super().forward(x)
        if self.how == "nothing":
            self.kept = y
            return None
        return {
            "dict": {"a": [y], "b": 3},
            "dataclass": Result(y, "note"),
            "nested": ((y, {"deep": y * 2}), None),
        }[self.how]


def return_things(rank, size):
    comm = pycomm.init()
    found = []
    for how in ("dict", "dataclass", "nested", "nothing"):
        torch.manual_seed(3)
        module = Returns(how).double()
        ddp = pycomm.DistributedDataParallel(module, communicator=comm, bucket_cap_mb=TINY)
        for synced in (True, False, True):
            with contextlib.nullcontext() if synced else ddp.no_sync():
                out = ddp(data(0, rank))
            y = {
                "dict": lambda out=out: out["a"][0],
                "dataclass": lambda out=out: out.value,
                "nested": lambda out=out: out[0][0],
                "nothing": lambda module=module: module.kept,
            }[how]()
            ddp.zero_grad()
            y.square().mean().backward()
            found.append((how, synced, gradients(module)))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_outputs_of_every_form(size):
    wanted = oracle("plain", one, size)
    for rank, result in enumerate(run_ranks(size, return_things)):
        local = make("plain")
        loss(local, 0, rank).backward()
        for how, synced, found in result:
            for name, g in (wanted if synced else gradients(local)).items():
                torch.testing.assert_close(
                    found[name], g, rtol=1e-10, atol=1e-14, msg=lambda m, h=(how, synced): f"{h} {m}"
                )
