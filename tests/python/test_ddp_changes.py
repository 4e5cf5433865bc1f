"""Parameters that change after wrapping: averaged as they are where all ranks agree, else one error on all.

Expected values: the mean over ranks of what plain float64 modules get after the same change.
"""

import pytest
import torch
from torch import nn

import pycomm
from ranks import run_ranks

TINY = 1e-4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.extra = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x.to(self.first.weight.dtype))))
        return (x if self.extra is None else self.extra(x)).square().mean()


def make() -> Net:
    torch.manual_seed(5)
    return Net().double()


def data(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64)


def seeded_linear() -> nn.Linear:
    torch.manual_seed(9)
    return nn.Linear(5, 5).double()


def freeze(net):
    net.first.bias.requires_grad_(False)


def thaw(net):
    net.first.bias.requires_grad_(True)


def replace(net):
    net.second = seeded_linear()


def replace_parameter(net):
    net.first.weight = nn.Parameter(net.first.weight.detach() * 2)


def add(net):
    net.extra = seeded_linear()


def cast(net):
    net.float()


def there_and_back(net):
    net.float()
    net.double()


def cast_one(net):
    net.second.weight.data = net.second.weight.data.float().double()
    net.second.bias.data = net.second.bias.data * 0 + 1


def reshape(net):
    net.second.weight.data = net.second.weight.data[:3].clone()
    net.second.bias.data = net.second.bias.data[:3].clone()


def only_a_new_head(net):
    """As in fine-tuning: none of the parameters that were wrapped gets a gradient any more."""
    net.requires_grad_(False)
    net.second = seeded_linear()


CHANGES = {
    f.__name__: f
    for f in (
        freeze,
        thaw,
        replace,
        replace_parameter,
        add,
        cast,
        there_and_back,
        cast_one,
        reshape,
        only_a_new_head,
    )
}


def gradients(net):
    return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}


def change_on_all(rank, size, options):
    comm = pycomm.init()
    found = {}
    for name, change in CHANGES.items():
        net = make()
        if change is thaw:
            freeze(net)
        ddp = pycomm.DistributedDataParallel(net, communicator=comm, bucket_cap_mb=TINY, **options)
        steps = []
        for step in range(4):
            if step == 2:
                change(net)
            net.zero_grad()
            ddp(data(step, rank)).backward()
            steps.append(gradients(net))
        # and once more around the wrapper, where no forward of ours could have looked
        net.zero_grad()
        net(data(4, rank)).backward()
        steps.append(gradients(net))
        found[name] = steps
    return found


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1, {}),
        (2, {"overlap": "async"}),
        (2, {"overlap": "inline", "gradient_as_bucket_view": True}),
        (3, {"overlap": "end", "find_unused_parameters": True}),
        (2, {"overlap": "async", "static_graph": True}),
        (4, {"overlap": "async", "find_unused_parameters": True, "gradient_as_bucket_view": True}),
    ],
)
def test_a_change_on_all_ranks_is_followed(size, options):
    by_rank = run_ranks(size, change_on_all, options)
    for name, change in CHANGES.items():
        for step in range(5):
            plain = []
            for rank in range(size):
                net = make()
                if change is thaw and step < 2:
                    freeze(net)
                if step >= 2 and change is not thaw:
                    change(net)
                net(data(step, rank)).backward()
                plain.append(gradients(net))
            for parameter, mine in plain[0].items():
                for result in by_rank:
                    got = result[name][step][parameter]
                    if mine is None:
                        assert got is None, (name, step, parameter)
                        continue
                    wanted = sum(p[parameter].double() for p in plain) / size
                    assert got.dtype == mine.dtype
                    is_float = mine.dtype == torch.float32
                    torch.testing.assert_close(
                        got.double(),
                        wanted,
                        rtol=1e-5 if is_float else 1e-11,
                        atol=1e-7 if is_float else 1e-14,
                        msg=lambda m, c=(name, step, parameter): f"{c}: {m}",
                    )
                    assert torch.equal(got, by_rank[0][name][step][parameter])


ON_ONE_RANK = {
    "freeze": "has frozen parameter 'first.bias'",
    "thaw": "has parameter 'first.bias'",
    "add": "has parameter 'extra.weight'",
    "cast": "has parameter 'first.weight' of torch.float32",
    "reshape": "has parameter 'second.weight' of torch.float64 (3, 5)",
}


def change_on_one(rank, size, options):
    """The last rank changes its module; the others learn of it in backward, and in autograd.grad."""
    comm = pycomm.init()
    messages = {}
    for name in ON_ONE_RANK:
        for how in ("backward", "grad"):
            net = make()
            if name == "thaw":
                freeze(net)
            ddp = pycomm.DistributedDataParallel(net, communicator=comm, bucket_cap_mb=TINY, **options)
            for step in range(2):
                net.zero_grad()
                ddp(data(step, rank)).backward()
            if rank == size - 1:
                CHANGES[name](net)
            net.zero_grad()
            loss = ddp(data(2, rank))
            with pytest.raises(RuntimeError) as error:
                if how == "backward":
                    loss.backward()
                else:
                    torch.autograd.grad(loss, [p for p in net.parameters() if p.requires_grad])
            comm.barrier()  # still usable
            messages[name, how] = str(error.value)
    return messages


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "options", [{"overlap": "async"}, {"overlap": "end", "find_unused_parameters": True}]
)
def test_a_change_on_one_rank_is_the_same_error_on_all(size, options):
    by_rank = run_ranks(size, change_on_one, options)
    for (name, how), message in by_rank[0].items():
        assert {messages[name, how] for messages in by_rank} == {message}
        assert "the module has changed since it was wrapped" in message
        assert f"rank {size - 1} {ON_ONE_RANK[name]}" in message
        assert "wrap the module again" in message


def ask_after_a_change(rank, size):
    comm = pycomm.init()
    found = {}
    for name, change in CHANGES.items():
        net = make()
        ddp = pycomm.DistributedDataParallel(net, communicator=comm, bucket_cap_mb=TINY)
        change(net)
        trained = {n: p for n, p in net.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(ddp(data(0, rank)), list(trained.values()))
        found[name] = dict(zip(trained, gradients, strict=True))
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_that_are_asked_for_after_a_change(size):
    by_rank = run_ranks(size, ask_after_a_change)
    for name, change in CHANGES.items():
        net = make()
        change(net)
        (sum(net(data(0, rank)) for rank in range(size)) / size).backward()
        wanted = {n: p.grad for n, p in net.named_parameters() if p.requires_grad}
        for found in by_rank:
            torch.testing.assert_close(found[name], wanted)


def add_other_values(rank, size):
    comm = pycomm.init()
    messages = []
    for how in ("backward", "grad"):
        net = make()
        ddp = pycomm.DistributedDataParallel(net, communicator=comm)
        ddp(data(0, rank)).backward()
        torch.manual_seed(rank)
        net.extra = nn.Linear(5, 5).double()
        loss = ddp(data(1, rank))
        with pytest.raises(RuntimeError) as error:
            loss.backward() if how == "backward" else torch.autograd.grad(loss, list(net.parameters()))
        messages.append(str(error.value))
    return messages


@pytest.mark.parametrize("size", [2, 3, 4])
def test_new_parameters_must_have_equal_values(size):
    for messages in zip(*run_ranks(size, add_other_values), strict=True):
        assert len(set(messages)) == 1
        assert "'extra.weight' came into the module after it was wrapped" in messages[0]
        assert "rank 1" in messages[0]
