"""What the wrapper tells: statistics that fit what was done, and replicas that are compared."""

import time

import pytest
import torch
from torch import nn

import pycomm
import pycomm.optim
from ranks import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(self.norm(x)))).square().mean()


def make():
    torch.manual_seed(8)
    return Net()


def data(rank):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))


def keep_statistics(rank, size):
    net = make()
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init(), bucket_cap_mb=64 / (1 << 20))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    pycomm.optim.scale_lr(optimizer, world_size=size, rule="linear")
    for _ in range(3):
        ddp.zero_grad()
        with ddp.weighted(10 * (rank + 1)):
            loss = ddp(data(rank))
        if rank == size - 1:
            time.sleep(0.5)  # the last rank comes last, by far more than a busy machine delays the others
        loss.backward()
        optimizer.step()
    return ddp.stats(optimizer), ddp.exposed_s, ddp._get_ddp_logging_data()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_statistics(size):
    for rank, (facts, exposed_s, logged) in enumerate(run_ranks(size, keep_statistics)):
        assert (facts["world_size"], facts["rank"]) == (size, rank)
        assert facts["global_batch"] == sum(10 * (r + 1) for r in range(size))
        assert facts["optimizers"] == [
            {"learning_rates": [pytest.approx(0.1 * size)], "scaling_rule": "linear", "scaling_factor": size}
        ]
        assert logged["num_parameter_tensors"] == 6
        if size == 1:
            assert facts["step"] == 0
            continue
        assert facts["step"] == 3
        assert facts["last_rank"] == size - 1
        assert 0.3 < facts["skew_s"] < 10
        assert facts["arrival_s"][size - 1] == facts["skew_s"]
        assert min(facts["arrival_s"]) == 0
        assert 0 < facts["exposed_s"] <= exposed_s
        assert (facts["exposed_s"] > 0.3) == (rank < size - 1)  # the others wait
        assert facts["backward_s"] > 0
        assert facts["forward_s"] > 0
        assert sum(b["n_parameters"] for b in facts["buckets"]) == 6
        assert sum(b["bytes"] for b in facts["buckets"]) == 4 * (4 + 4 + 16 + 4 + 8 + 2)
        assert all(isinstance(b["algorithm"], str) for b in facts["buckets"])


def train(net, ddp, optimizer, rank):
    for _ in range(2):
        optimizer.zero_grad()
        ddp(data(rank)).backward()
        optimizer.step()


def drift(rank, size, how, culprit):
    net = make()
    comm = pycomm.init()
    ddp = pycomm.DistributedDataParallel(net, communicator=comm)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    train(net, ddp, optimizer, rank)
    ddp.check_consistency(optimizer)
    if rank == culprit:
        if how == "parameter":
            with torch.no_grad():
                net.second.weight[1, 2] += 1e-6
        elif how == "buffer":
            net.table[0] = -0.0
        elif how == "state":
            optimizer.state[net.first.bias]["exp_avg"][0] *= 1.0001
        elif how == "rate":
            optimizer.param_groups[0]["lr"] = 0.2
        elif how == "missing":
            del optimizer.state[net.first.weight]
    with pytest.raises(RuntimeError) as error:
        ddp.check_consistency(optimizer)
    comm.barrier()
    return str(error.value)


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("parameter", "first in second.weight: it has other values"),
        ("buffer", "first in table: it has other values"),
        ("state", "first in optimizer 0: exp_avg of 'first.bias': it has other values"),
        ("rate", "first in optimizer 0: settings of group 0: it has other values"),
        ("missing", "first in optimizer 0: exp_avg of 'first.weight': it is another tensor"),
    ],
)
def test_the_first_tensor_that_differs_is_named(how, words, culprit):
    messages = run_ranks(3, drift, how, culprit)
    assert len(set(messages)) == 1
    assert words in messages[0]
    assert f"on rank {culprit} of 3" in messages[0]


def drift_in_training(rank, size):
    net = make()
    ddp = pycomm.DistributedDataParallel(net, communicator=pycomm.init(), check_consistency_every=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train(net, ddp, optimizer, rank)
    if rank == 1:
        with torch.no_grad():
            net.first.bias[0] += 1
    ddp(data(rank)).backward()  # the third
    with pytest.raises(RuntimeError, match=r"first in first\.bias: it has other values on rank 1 of "):
        ddp(data(rank))
    return True


@pytest.mark.parametrize("size", [2, 3, 4])
def test_consistency_every_so_many_steps(size):
    assert run_ranks(size, drift_in_training) == [True] * size


def test_consistency_of_one_rank():
    ddp = pycomm.DistributedDataParallel(make(), check_consistency_every=1)
    ddp(data(0)).backward()
    with pytest.raises(ValueError, match="check_consistency_every must be at least 0"):
        pycomm.DistributedDataParallel(make(), check_consistency_every=-1)
