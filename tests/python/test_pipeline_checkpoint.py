"""Activations computed again: the same gradients, once, and the memory that was promised."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import pycomm
from pycomm.pipeline import (
    PipelineStage,
    SchedulePipeDream2BW,
    get_schedule_class,
    is_recomputing,
    pop,
    stash,
)
from pycomm.pipeline.schedule.catalog import CATALOG, build
from ranks import run_ranks

pytestmark = pytest.mark.timeout(120)
ATOL = 1e-12


class Layer(nn.Module):
    """Dropout, a normalisation, a buffer that the output depends on, and counted calls."""

    def __init__(self, width, takes="", gives=""):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width)
        self.register_buffer("decay", torch.ones(()))
        self.register_buffer("table", torch.arange(width) / width)
        self.takes, self.gives = takes, gives
        self.n_first = self.n_again = 0

    def forward(self, x):
        if is_recomputing():
            self.n_again += 1
        else:
            self.n_first += 1
        self.decay = self.decay * 0.9  # another tensor each time
        if self.takes:
            x = x + pop(self.takes)
        y = nn.functional.dropout(torch.tanh(self.norm(self.a(x))), 0.3) * self.decay + self.table
        if self.gives:
            stash(self.gives, torch.sin(y))
        return x + self.b(torch.tanh(y))


def stages_of(n_stages):
    torch.manual_seed(3)
    return [
        nn.Sequential(
            Layer(4, takes="s" if s == n_stages - 1 and s else ""),
            Layer(4, gives="s" if s == 0 and n_stages > 1 else ""),
        ).double()
        for s in range(n_stages)
    ]


def loss_fn(output, target):
    return nn.functional.mse_loss(nn.functional.dropout(output, 0.1), target)


CASES = {
    "never": {},
    "always": {"checkpoint": "always"},
    "except_last": {"checkpoint": "except_last"},
    "regex": {"checkpoint_modules": r"^1$"},
    "predicate": {
        "checkpoint_modules": lambda name, module: isinstance(module, Layer),
        "checkpoint": "except_last",
    },
    "policy": {"checkpoint_policy": [torch.ops.aten.addmm.default]},
}
#: how often each of the two layers runs again for four microbatches
AGAIN = {"never": (0, 0), "always": (4, 4), "except_last": (3, 3), "regex": (0, 4), "predicate": (3, 3)}
AGAIN["policy"] = (4, 4)


def same(rank, size, names):
    for name in names:
        v = CATALOG[name].stages_per_rank or 2
        n_stages = size * v
        order = build(name, size, 4, v)
        held = order.stages_of(rank)
        found = {}
        for case, options in CASES.items():
            parts = stages_of(n_stages)
            mine = [PipelineStage(parts[s], s, n_stages, **options) for s in held]
            schedule = get_schedule_class(name)(
                mine, 4, loss_fn=loss_fn, skips={"s": (0, n_stages - 1)} if n_stages > 1 else None
            )
            torch.manual_seed(rank)
            for step in range(2):
                x = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
                schedule.step(x, target=x)
            found[case] = [
                *(p.grad for s in held for p in parts[s].parameters()),
                *(b for s in held for b in parts[s].buffers()),
                schedule.loss if schedule.loss is not None else torch.zeros(()),
                torch.get_rng_state(),
            ]
            for s in held:
                for layer, n in zip(parts[s], AGAIN[case], strict=True):
                    assert layer.n_first == 8, (name, case)
                    assert layer.n_again == 2 * n, (name, case, s, layer.n_again)  # once, also for I and W
                assert parts[s][0].norm.num_batches_tracked == 8
        for case, values in found.items():
            for value, want in zip(values, found["never"], strict=True):
                assert torch.allclose(value, want, atol=ATOL, rtol=0), (name, case)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_same_step_under_every_schedule(size):
    names = [name for name in CATALOG if size < 3 or name in ("1F1B", "ZeroBubbleH2", "DualPipeV")]
    run_ranks(size, same, names, timeout=100)


def replicated(rank, size):
    """Two replicas of two stages: what is computed again is not reduced again."""
    comm = pycomm.init()
    pipe, replicas = comm.split(rank % 2), comm.split(rank // 2)
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank % 2))
    found = []
    for options in CASES.values():
        module = pycomm.DistributedDataParallel(stages_of(2)[rank // 2], communicator=replicas)
        if "checkpoint_modules" in options and isinstance(options["checkpoint_modules"], str):
            options = {"checkpoint_modules": r"module.1$"}
        stage = PipelineStage(module, rank // 2, 2, group=pipe, **options)
        schedule = get_schedule_class("ZeroBubbleH1")(stage, 4, loss_fn=loss_fn, skips={"s": (0, 1)})
        torch.manual_seed(rank)
        for _ in range(2):
            schedule.step(x, target=x)
        found.append([*(p.grad for p in module.parameters()), *module.buffers()])
    for values in found:
        for value, want in zip(values, found[0], strict=True):
            torch.testing.assert_close(value, want, atol=ATOL, rtol=0)


def two_versions(rank, size):
    """The weights of the forward, which have been updated since, are those of the second one."""
    found = []
    for options in CASES.values():
        module = stages_of(size)[rank]
        stage = PipelineStage(module, rank, size, **options)
        schedule = SchedulePipeDream2BW(stage, 4, loss_fn=loss_fn, skips={"s": (0, size - 1)})
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        torch.manual_seed(rank)
        for step in range(4):
            x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            schedule.step(x, target=x)
            optimizer.step()
            optimizer.zero_grad()
        schedule.flush()
        optimizer.step()
        found.append([*(p.detach() for p in module.parameters()), *module.buffers()])
    for values in found:
        for value, want in zip(values, found[0], strict=True):
            torch.testing.assert_close(value, want, atol=ATOL, rtol=0)


def test_with_replicas_and_with_two_versions():
    run_ranks(4, replicated)
    run_ranks(2, two_versions)


class Wide(nn.Module):
    """Keeps 8 tensors of the size of its input."""

    def forward(self, x):
        for _ in range(8):
            x = torch.exp(x * 1e-3)  # each saves its result
        return x


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.wide = nn.Parameter(torch.ones((), dtype=torch.float64)), Wide()

    def forward(self, x):
        return self.wide(x * self.scale)


def peak_bytes(call):
    """The most that torch's CPU allocator had given out during a call, beyond what it had before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        call()
    now = most = 0
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def memory(rank, size):
    n_bytes = 2**20
    x = torch.randn(8, n_bytes // 8, dtype=torch.float64)  # 8 microbatches of 1 MiB

    def peak(name, **options):
        stage = PipelineStage(Scaled(), 0, 1, **options)
        schedule = get_schedule_class(name)(stage, 8, loss_fn=lambda y, t: y.mean())
        return peak_bytes(lambda: schedule.step(x, target=x)) / n_bytes

    # GPipe: all 8 microbatches at once, each keeps 8 results (and its input, which is there anyway).
    whole, again = peak("GPipe"), peak("GPipe", checkpoint="always")
    assert 64 <= whole <= 64 + 16, whole
    assert 8 <= again <= 8 + 8 + 8, again  # 8 outputs; one microbatch's results, and its backward
    inner = peak("GPipe", checkpoint_modules="wide")
    assert inner <= 8 + 8 + 8 + 8, inner  # and what the module got
    last = peak("GPipe", checkpoint="except_last")
    assert last <= again + 8, last


def flowing(rank, size):
    """1F1B keeps one microbatch for each rank from here on, and nothing that was sent and received."""
    n_bytes, n = 2**20, 12
    x = torch.randn(n, n_bytes // 8, dtype=torch.float64)
    stage = PipelineStage(Scaled(), rank, size)
    schedule = get_schedule_class("1F1B")(stage, n, loss_fn=lambda y, t: y.mean())
    peak = peak_bytes(lambda: schedule.step(x, target=x)) / n_bytes
    kept = (size - rank) * 8
    outputs = n if rank == size - 1 else 0  # which step returns
    assert kept <= peak <= kept + outputs + 8, (rank, peak, kept)
    return peak


def test_the_peak_of_what_is_kept():
    run_ranks(1, memory)
    run_ranks(2, flowing)


def test_the_example_of_the_documentation():
    """8 MiB of gradients, and 1 MiB for each microbatch that is kept: 16, or 2, or 1/8 of it a microbatch."""
    root = Path(__file__).parents[2]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [sys.executable, *launch, str(root / "examples" / "pipeline_memory.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 0, ended.stderr
    found = re.findall(r"(\w+) +checkpoint=(\w+) +peak ([\d.]+) MiB", ended.stdout)
    peaks = {(name, which): float(mib) for name, which, mib in found}
    assert len(peaks) == 6, ended.stdout
    kept = {"GPipe": {"never": 16, "except_last": 3, "always": 2}, "1F1B": {"never": 2, "always": 1}}
    for name, expected in kept.items():
        for which, mib in expected.items():
            assert 8 + mib <= peaks[name, which] <= 8 + mib + 3, (name, which, peaks)


class InPlace(nn.Module):
    def forward(self, x):
        y = x * 2
        x.mul_(3)
        return torch.tanh(y)


class Differing(nn.Module):
    def forward(self, x):
        y = torch.exp(x)
        return y if is_recomputing() else torch.exp(y[:1] * torch.ones(2, 1))


def wrong(rank, size):
    for options, said in (
        ({"checkpoint": "sometimes"}, "stage 0: checkpoint must be always, except_last or never, got 'some"),
        ({"checkpoint_modules": "b"}, r"stage 0: no module's name matches checkpoint_modules='b': \['0'\]"),
    ):
        with pytest.raises(ValueError, match=said):
            PipelineStage(nn.Sequential(nn.Linear(2, 2)), 0, 1, **options)
    for module, said in (
        (InPlace(), r"stage 0, microbatch 0, module '1': an argument of shape \(1, 2\) was changed in place"),
        (Differing(), "module '1': computed again for the backward, it did something else"),
    ):
        net = nn.Sequential(nn.Linear(2, 2), module)
        stage = PipelineStage(net, 0, 1, checkpoint_modules="1")
        schedule = get_schedule_class("1F1B")(stage, 2, loss_fn=lambda y, t: y.sum())
        with pytest.raises(RuntimeError, match=said):
            schedule.step(torch.ones(2, 2), target=torch.ones(2, 2))
        assert "forward" not in vars(module)
        assert not is_recomputing()


def test_what_is_wrong_is_said():
    run_ranks(1, wrong)
