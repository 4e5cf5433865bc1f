"""Cuts of a list of layers: the best there is, by brute force; and a model that is made from them."""

import itertools
import random

import pytest
import torch
from torch import nn

from pycomm.pipeline import PipelineStage, get_schedule_class
from pycomm.pipeline.layers import LayerSpec, TiedLayerSpec, measure, plan
from pycomm.pipeline.partition import partition
from ranks import run_ranks

pytestmark = pytest.mark.timeout(60)


def brute_force(costs, n_parts, speeds) -> float:
    cuts = itertools.combinations(range(1, len(costs)), n_parts - 1)
    return min(
        max(sum(costs[a:b]) / s for a, b, s in zip((0, *cut), (*cut, len(costs)), speeds, strict=True))
        for cut in cuts
    )


def test_the_best_contiguous_cut():
    rng = random.Random(1)
    for _ in range(200):
        n, k = rng.randint(1, 12), rng.randint(1, 5)
        if k > n:
            continue
        costs = [rng.choice([0.0, 1.0, rng.random() * 10]) for _ in range(n)]
        speeds = [1.0] * k if rng.random() < 0.5 else [rng.uniform(0.5, 2) for _ in range(k)]
        parts = partition(costs, k, speeds)
        assert [i for part in parts for i in part] == list(range(n)) and all(parts)
        worst = max(sum(costs[i] for i in part) / s for part, s in zip(parts, speeds, strict=True))
        assert worst == pytest.approx(brute_force(costs, k, speeds))


class Slow(nn.Module):
    """Spins, so that its share of the time is known; keeps nothing for the backward."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def forward(self, x):
        for _ in range(self.n):
            x = x + 1.0
        return x


def test_methods():
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), LayerSpec(nn.Linear, 8, 64), nn.ReLU()]
    assert plan(layers, 3, "uniform").parts == (range(0, 2), range(2, 4), range(4, 6))
    by_parameters = plan(layers, 2, "parameters")
    assert by_parameters.parts == (range(0, 3), range(3, 6)) and by_parameters.costs == (144, 576)
    assert plan(layers, 3, "type:linear").costs == (1, 1, 1)
    assert str(by_parameters).splitlines()[-1] == "balance 62% by parameters"
    for wrong, said in (
        ("type:conv", "no layer's class matches 'conv'; there are Linear, ReLU"),
        ("time", "is measured: give a sample"),
        ("type:(", r"'\(' is no regular expression"),
        ("magic", "must be uniform, parameters, type:REGEX, time or memory, got 'magic'"),
    ):
        with pytest.raises(ValueError, match=said):
            plan(layers, 2, wrong)
    with pytest.raises(ValueError, match="6 layers cannot make 7 parts"):
        plan(layers, 7)


def test_what_is_no_layer_is_told():
    for wrong, said in (
        (
            [nn.ReLU(), nn.Linear],
            "layer 1: expected a module, a LayerSpec or a function, got the class Linear",
        ),
        ([nn.ReLU(), 3], "layer 1: expected a module, a LayerSpec or a function, got int"),
        (nn.Linear(2, 2), "expected a list of layers or an nn.Sequential, got Linear"),
    ):
        with pytest.raises(TypeError, match=said):
            plan(wrong, 2, "uniform")
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    found = plan(layers, 2)
    for given, index, said in (
        (layers, 2, "stage 2 is none of the 2"),
        (layers[:1], 0, "of 2 layers, got 1"),
    ):
        with pytest.raises(ValueError, match=said):
            found.stage(given, index)
    with pytest.raises(
        ValueError, match=r"layer 0 \(Linear\) cannot compute the sample, \(1, 5\): RuntimeError"
    ):
        plan(layers, 2, "time", sample=torch.ones(1, 5))
    layers.insert(1, nn.Linear(4, 3))
    with pytest.raises(
        ValueError, match=r"layer 2 .* what layer 1 made of the sample, \(1, 3\): RuntimeError"
    ):
        plan(layers, 2, "memory", sample=torch.ones(1, 4))


def test_functions_stand_between_layers():
    def double(x):
        return 2 * x

    layers = [nn.Linear(2, 2), double, LayerSpec(nn.Linear, 2, 2), lambda x: x + 1]
    found = plan(layers, 2, "uniform")
    assert plan(layers, 1, "type:double").costs == (1,)
    stages = [found.stage(layers, index) for index in (0, 1)]
    assert [name for stage in stages for name, _ in stage.named_parameters()] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]
    x = torch.ones(3, 2)
    last = stages[1][0]
    torch.testing.assert_close(stages[1](stages[0](x)), last(2 * layers[0](x)) + 1)
    assert len(measure(layers, x, "memory")) == 4


def test_time_and_memory_are_measured():
    sizes = [1, 40, 1, 1, 1, 20, 20, 1, 1]
    times = measure([Slow(20 * n) for n in sizes], torch.ones(64, 64), "time")
    assert times[1] > 5 * times[0] and times[5] > 3 * times[4]
    x = torch.ones(16, 8)
    bytes_of = measure([nn.Linear(8, 8), nn.Tanh(), nn.Identity()], x, "memory")
    assert bytes_of == [2 * (64 + 8) * 4 + 16 * 8 * 4, 16 * 8 * 4, 0]  # the input; the output; nothing


def specs():
    return [
        TiedLayerSpec("e", nn.Embedding, 7, 4),
        *[LayerSpec(nn.Linear, 4, 4) for _ in range(3)],
        LayerSpec(nn.Tanh),
        TiedLayerSpec("e", nn.Embedding, 7, 4, forward_fn=lambda module, x: x @ module.weight.T),
    ]


def training(rank, size):
    layers = specs()
    cut = plan(layers, size, "uniform")
    assert cut.ties == (((0, "0.weight"), (size - 1, "5.module.weight")),)
    torch.manual_seed(rank)
    module = cut.stage(layers, rank).double()
    schedule = get_schedule_class("1F1B")(
        PipelineStage(module, rank, size), 2, loss_fn=nn.functional.cross_entropy, tied=cut.ties
    )
    ids = torch.arange(7)
    schedule.step(ids, target=ids)
    return {name: (p.detach(), p.grad) for name, p in module.named_parameters()}


@pytest.mark.parametrize("size", [2, 3])
def test_a_model_of_specs_trains_as_in_one_process(size):
    stages = run_ranks(size, training)
    whole = plan(specs(), 1, "uniform").stage(specs(), 0).double()
    names = [name for name, _ in whole.named_parameters()]
    flat = [found for stage in stages for name, found in stage.items() if not name.endswith("module.weight")]
    assert len(flat) == len(names)
    with torch.no_grad():
        for p, (value, _) in zip(whole.parameters(), flat, strict=True):
            p.copy_(value)
    ids = torch.arange(7)
    nn.functional.cross_entropy(whole(ids), ids).backward()
    for p, (_, gradient) in zip(whole.parameters(), flat, strict=True):
        torch.testing.assert_close(gradient, p.grad, atol=1e-12, rtol=0)
