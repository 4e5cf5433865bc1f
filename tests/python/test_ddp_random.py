"""Random programs: what scripts do with a wrapper, in any order, against a simulation in one process.

A *program* is a list of operations drawn from a seed: forwards and backwards in every arrangement that
docs/ddp.md promises, on parameters that are dense, sparse, both, 0-dim, empty, not contiguous, frozen for a
while, replaced or cast there and back, each rank using its own subset of them in its own order. The
simulation knows one rule. A rank's ``grad`` is what plain autograd accumulates; a synchronised backward
replaces it, for every parameter that got a gradient on any rank since the last one, by the ranks' weighted
mean, where a rank that has none counts as zeros.
"""

import functools
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pycomm
from ranks import run_ranks

N_PROGRAMS = 20
N_OPERATIONS = 14
LETTERS = "abcstTzeuk"
# How much of the largest gradient may be lost over a program: these programs look for what is left out, not
# for the last bit (which test_ddp_compression.py does).
COMPRESSIONS = {"fp16": 2**-8, "bf16": 2**-5, "fp8": 0.1, "int8": 0.05}
MAY_BE_UNUSED = ["find_unused_parameters", "static_graph", "skip_all_reduce_unused_params"]
OPERATIONS = {
    "sync": 4,
    "local": 3,
    "two forwards, one backward": 1,
    "two forwards, each its backward": 1,
    "retained": 1,
    "around the wrapper": 1,
    "local and sync in one backward": 1,
    "finalize": 1,
    "weighted": 2,
    "asked for": 1,
    "zero": 3,
    "halve": 1,
    "freeze or thaw": 1,
    "replace": 1,
    "there and back": 1,
    "update": 2,
}


class Parts(nn.Module):
    """A sum of terms, each of parameters of its own kind; forward takes the letters of those to use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.s = nn.Embedding(7, 6, sparse=True)
        self.t = nn.Embedding(5, 6, sparse=True)  # "t" uses it sparsely, "T" as a dense weight
        self.z = nn.Parameter(torch.tensor(0.5))
        self.e = nn.Parameter(torch.empty(0, 3))
        self.u = nn.Parameter(torch.randn(6, 4).t())

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        row = (x.abs().sum() * 1e3).long()
        x = x.to(self.z.dtype)
        terms = {
            "a": lambda: torch.tanh(self.a(x)).square().mean(),
            "b": lambda: torch.tanh(self.b(x)).square().mean(),
            "c": lambda: torch.tanh(self.c(x)).square().mean(),
            "s": lambda: (self.s(torch.stack([row % 7, row % 3, row % 3])) * x[0]).square().mean(),
            "t": lambda: (self.t(row % 5) * x[1]).square().mean(),
            "T": lambda: torch.tanh(x @ self.t.weight.t()).square().mean(),
            "z": lambda: (self.z * x).square().mean(),
            "e": lambda: self.e.sum() * x.sum(),
            "u": lambda: torch.tanh(x @ self.u.t()).square().mean(),
            "k": lambda: checkpoint(self.b, x * 0.5, use_reentrant=False).square().mean(),
        }
        return sum((terms[letter]() for letter in use), x.new_zeros(()))


def make(dtype: torch.dtype = torch.float64) -> Parts:
    torch.manual_seed(7)
    return Parts().to(dtype)


class Program:
    """Drawn from a seed, the same on every rank: options, and operations with what each rank does in them."""

    def __init__(self, seed: int, size: int) -> None:
        draw = random.Random(seed)
        self.seed = seed
        may_be_unused = draw.choice(["", *MAY_BE_UNUSED])
        self.options = {
            "overlap": draw.choice(["async", "inline", "end"]),
            "gradient_as_bucket_view": draw.random() < 0.5,
            "bucket_cap_mb": draw.choice([1e-4, 6e-4, 25]),
        }
        if may_be_unused:
            self.options[may_be_unused] = True
        self.is_hooked = draw.random() < 0.2
        self.options["compression"] = None if self.is_hooked else draw.choice([None, None, *COMPRESSIONS])
        self.dtype = torch.float32 if self.options["compression"] else torch.float64
        self.operations = []
        for _ in range(N_OPERATIONS):
            what = draw.choices(list(OPERATIONS), OPERATIONS.values())[0]
            uses = []
            for _ in range(2 * size):
                letters = [letter for letter in LETTERS if not may_be_unused or draw.random() < 0.6]
                draw.shuffle(letters)
                uses.append("".join(letters) or "b")
            self.operations.append((what, uses, draw.random(), [draw.randint(0, 5) for _ in range(size)]))


def batch(seed: int, at: int, rank: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(((seed * 100 + at) * 10 + rank) * 10 + part)
    return torch.randn(3, 6, generator=generator)


def dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient if gradient is None or gradient.layout is torch.strided else gradient.to_dense()


def grads(module: nn.Module) -> dict[str, torch.Tensor | None]:
    found = {name: dense(p.grad) for name, p in module.named_parameters()}
    return {name: None if g is None else g.detach().clone() for name, g in found.items()}


def average_hook(comm, bucket):
    buffer = bucket.buffer()
    average = comm.all_reduce(dense(buffer), op="avg")
    future = torch.futures.Future()
    future.set_result(average.to_sparse(1) if buffer.is_sparse else average)
    return future


# ---- the ranks


def run_programs(rank, size, seeds):
    comm = pycomm.init()
    found = []
    for seed in seeds:
        program = Program(seed, size)
        module = make(program.dtype)
        ddp = pycomm.DistributedDataParallel(module, communicator=comm, **program.options)
        if program.is_hooked:
            ddp.register_comm_hook(comm, average_hook)
        trace = []
        for at, (what, uses, chance, weights) in enumerate(program.operations):
            try:
                trace.append(operate(ddp, program, at, rank, what, uses, chance, weights))
            except Exception as error:
                raise AssertionError(
                    f"program {seed}, operation {at} ({what}) of {program.options}"
                ) from error
            if trace[-1] is None:
                trace[-1] = grads(module)
        found.append(trace)
    return found


def operate(ddp, program, at, rank, what, uses, chance, weights):
    """Runs one operation; its result is the gradients it was asked for, None for those in the parameters."""
    module = ddp.module

    def loss(part, model=ddp):
        return model(batch(program.seed, at, rank, part), uses[2 * rank + part])

    if what == "sync":
        loss(0).backward()
    elif what == "local":
        with ddp.no_sync():
            loss(0).backward()
    elif what == "two forwards, one backward":
        (loss(0) + loss(1)).backward()
    elif what == "two forwards, each its backward":
        first, second = loss(0), loss(1)
        first.backward()
        second.backward()
    elif what == "retained":
        value = loss(0)
        value.backward(retain_graph=True)
        value.backward()
    elif what == "around the wrapper":
        loss(0, module).backward()
    elif what == "local and sync in one backward":
        with ddp.no_sync():
            value = loss(0)
        (value + loss(1)).backward()
    elif what == "finalize":
        with ddp.no_sync():
            loss(0).backward()
            loss(1).backward()
        ddp.finalize_backward()
    elif what == "weighted":
        with ddp.weighted(1 + weights[rank]):
            loss(0).backward()
    elif what == "asked for":
        asked = [p for name, p in module.named_parameters() if name[0] in "bc"]
        return [g.clone() for g in torch.autograd.grad(bc(ddp, program, at, rank), asked)]
    else:
        local(module, what, chance)
    return None


def bc(model, program, at, rank):
    return model(batch(program.seed, at, rank, 0), "bc")


def local(module, what, chance):
    """What a script does to gradients and parameters between backwards."""
    if what == "replace":
        torch.manual_seed(int(1e6 * chance))
        module.c = nn.Linear(6, 6).to(module.z.dtype)
    elif what == "there and back":
        module.zero_grad()
        dtype = module.z.dtype
        module.float().double().to(dtype)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if what == "zero" and p.grad is not None:
                p.grad = None if chance < 0.5 else p.grad.zero_()
            elif what == "halve" and p.grad is not None:
                p.grad.mul_(0.5)
            elif what == "freeze or thaw" and name == "a.bias":
                p.requires_grad_(not p.requires_grad)
            elif what == "update":
                p.mul_(1.0 - 0.1 * chance)


# ---- the simulation


class Simulation:
    def __init__(self, program: Program, size: int) -> None:
        self.program, self.size = program, size
        self.modules = [make() for _ in range(size)]
        self.new: list[set[str]] = [set() for _ in range(size)]

    def accumulate(self, at: int, part: int, times: int = 1) -> None:
        """Every rank's plain backward of one of its batches."""
        uses = self.program.operations[at][1]
        for rank, module in enumerate(self.modules):
            value = module(batch(self.program.seed, at, rank, part), uses[2 * rank + part])
            named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
            if not value.requires_grad:
                continue
            got = torch.autograd.grad(value * times, [p for _, p in named], allow_unused=True)
            for (name, p), g in zip(named, got, strict=True):
                if g is not None:
                    g = dense(g)
                    p.grad = g.clone() if p.grad is None else p.grad + g
                    self.new[rank].add(name)

    def average(self, weights: list[float] | None = None) -> None:
        shares = weights or [1 / self.size] * self.size
        by_rank = [dict(module.named_parameters()) for module in self.modules]
        for name in by_rank[0]:
            # (Frozen since: what it got before is averaged, once.)
            held = [named[name].grad for named in by_rank]
            if not any(name in new and g is not None for new, g in zip(self.new, held, strict=True)):
                continue
            mean = sum(share * g for share, g in zip(shares, held, strict=True) if g is not None)
            for named in by_rank:
                named[name].grad = mean.clone()
        self.new = [set() for _ in range(self.size)]

    def operate(self, at: int):
        what, _, chance, weights = self.program.operations[at]
        if what == "local":
            self.accumulate(at, 0)
        elif what in ("sync", "around the wrapper"):
            self.accumulate(at, 0)
            self.average()
        elif what in ("two forwards, one backward", "local and sync in one backward", "finalize"):
            self.accumulate(at, 0)
            self.accumulate(at, 1)
            self.average()
        elif what == "two forwards, each its backward":
            for part in range(2):
                self.accumulate(at, part)
                self.average()
        elif what == "retained":
            for _ in range(2):
                self.accumulate(at, 0)
                self.average()
        elif what == "weighted":
            self.accumulate(at, 0)
            numbers = [1 + w for w in weights]
            self.average([n / sum(numbers) for n in numbers])
        elif what == "asked for":
            values = []
            for rank, module in enumerate(self.modules):
                asked = [p for name, p in module.named_parameters() if name[0] in "bc"]
                values.append(torch.autograd.grad(bc(module, self.program, at, rank), asked))
            return [sum(each) / self.size for each in zip(*values, strict=True)]
        else:
            for module in self.modules:
                local(module, what, chance)
        return None


def assert_close(found, wanted, compression, where):
    if isinstance(wanted, list):
        found, wanted = dict(enumerate(found)), dict(enumerate(wanted))
    assert found.keys() == wanted.keys()
    largest = max((float(w.abs().max()) for w in wanted.values() if w is not None and w.numel()), default=0.0)
    atol = 1e-14 if compression is None else COMPRESSIONS[compression] * (1 + largest)
    for key, w in wanted.items():
        g = found[key]
        assert (g is None) == (w is None), (*where, key)
        if w is not None:
            say = "{}: {}".format
            torch.testing.assert_close(
                g.double(), w, rtol=1e-11, atol=atol, msg=functools.partial(say, (*where, key))
            )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_random_programs(size):
    seeds = range(1000 * size, 1000 * size + N_PROGRAMS)
    by_rank = run_ranks(size, run_programs, seeds, timeout=100)
    for seed, traces in zip(seeds, zip(*by_rank, strict=True), strict=True):
        program = Program(seed, size)
        simulation = Simulation(program, size)
        for at, (what, *_) in enumerate(program.operations):
            asked = simulation.operate(at)
            for rank, trace in enumerate(traces):
                wanted = asked if asked is not None else grads(simulation.modules[rank])
                where = (seed, at, what, rank, program.options)
                assert_close(trace[at], wanted, program.options["compression"], where)
