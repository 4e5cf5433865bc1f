"""check_parallel: what is right passes, and each silent fault of others, planted, is found and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn import functional as F
from tp_plan_models import VOCABULARY, Decoder, ids, plan, qkv

import pycomm
from pycomm.tensor_parallel.changes import AddHook, ChangeClass
from pycomm.tensor_parallel.check import ParallelDifference, check_parallel
from pycomm.tensor_parallel.layouts import Layout, converted
from pycomm.tensor_parallel.prepare import PrepareModuleInput, PrepareModuleOutput
from pycomm.tensor_parallel.shards import Split, even
from pycomm.tensor_parallel.styles import ColwiseParallel, ParallelStyle, RowwiseParallel
from pycomm.tensor_parallel.swapped import ColwiseLinear, RowwiseLinear
from ranks import run_ranks


def loss_fn(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def contiguous(n: int) -> Split:
    """The right sizes, but of the fused features as they lie: one rank has queries, another values."""
    at, pieces = 0, []
    for length in qkv(n).lengths:
        pieces.append(((at, at + length),))
        at += length
    return Split(at, tuple(pieces))


class WithMixin(ParallelStyle):
    """A style whose module computes with another mixin: a fault to plant."""

    def __init__(self, style: ParallelStyle, mixin: Any) -> None:
        self.style, self.mixin = style, mixin

    def changes(self, module: nn.Module, where: str, comm: Any) -> list[Any]:
        return [
            ChangeClass(c.module, self.mixin, c.how) if isinstance(c, ChangeClass) else c
            for c in self.style.changes(module, where, comm)
        ]


class NotCopied(ColwiseLinear):
    """Column parallel without the sum of the input's gradients."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight, self.bias)


class BiasOnEachRank(RowwiseLinear):
    """Row parallel whose bias is added before the sum."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = F.linear(input, self.weight, self.bias)
        return converted(out, Layout("partial"), Layout("replicate"), self._parallel.comm)


def untied(model: Any) -> dict[str, Any]:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return plan()


def without(keys: str, sequence_parallel: bool = False) -> dict[str, Any]:
    return {k: v for k, v in plan(sequence_parallel).items() if k != keys}


def sequence_without_norms() -> dict[str, Any]:
    whole = plan(True)
    return {**without("blocks.*.ln_?", True), "norm": whole["norm"][1]}


#: (the fault, the plan, what the message must say)
FAULTS: list[tuple[str, Any, str]] = [
    ("fused QKV, wrong boundary", {**plan(), "blocks.*.attn.qkv": ColwiseParallel(split=contiguous)},
     r"layer whose output differs is blocks\.0\.attn\.proj, .*that agrees is blocks\.0\.attn\.qkv"),
    ("bias added by every rank",
     {**plan(), "blocks.*.down": WithMixin(RowwiseParallel(), BiasOnEachRank)},
     r"first layer whose output differs is blocks\.0\.down, .*that agrees is blocks\.0\.act"),
    ("no sum of the input's gradients",
     {**without("blocks.*.up"), "blocks.0.up": ColwiseParallel(),
      "blocks.1.up": WithMixin(ColwiseParallel(), NotCopied)},
     r"layer to whose output a wrong gradient comes is blocks\.1\.ln_2, .*agrees is blocks\.1\.up"),
    ("norm gradients under sequence parallelism", sequence_without_norms(),
     r"every layer's output gets the right gradient; the first parameter with a wrong one is norm\."),
    ("ties lost", untied, r"the first parameter with a wrong one is (head|embed)\.weight"),
]  # fmt: skip


class LocalMeans(nn.Module):
    """A loss over labels of which some are ignored."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


class WithLoss(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.loss = LocalMeans()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(super().forward(ids), labels)


class Average(ParallelStyle):
    """Averages what the ranks put out."""

    def changes(self, module: nn.Module, where: str, comm: Any) -> list[Any]:
        def average(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return converted(output / comm.size, Layout("partial"), Layout("replicate"), comm)

        return [AddHook(module, average, False)]


def mean_of_local_means(comm: Any) -> None:
    """Each rank takes the mean of its part of the sequence, in which unevenly many labels are ignored."""
    labels = torch.full((2, 7), -1)
    labels[:, :5] = torch.randint(VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(3))
    local = {"input_layouts": (Replicate(), Replicate()), "desired_input_layouts": (Shard(1), Shard(1))}
    bad = {**plan(), "loss": [PrepareModuleInput(**local), Average()]}
    with pytest.raises(ParallelDifference, match="first layer whose output differs is loss, by"):
        check_parallel(WithLoss, bad, (ids(), labels), mesh=comm)
    assert check_parallel(WithLoss, plan(), (ids(), labels), mesh=comm).n_parameters == 27


def found_and_named(rank: int, size: int) -> list[str]:
    comm = pycomm.init()
    said = []
    for sequence_parallel in (False, True):
        report = check_parallel(Decoder, plan(sequence_parallel), ids(), mesh=comm, loss_fn=loss_fn)
        assert report.loss_difference.relative < 1e-12 and report.worst.relative < 1e-11
        assert report.n_parameters == 27
        said.append(str(report))
    for fault, bad, text in FAULTS:
        with pytest.raises(ParallelDifference, match=text) as raised:
            check_parallel(Decoder, bad, ids(), mesh=comm, loss_fn=loss_fn)
        assert f"with {size} ranks" in str(raised.value), fault
    mean_of_local_means(comm)

    def local_loss(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        # Each rank smooths over its own part of the vocabulary: log(n) too little, as logits are whole.
        logits = even(VOCABULARY, size).take(logits, 2, rank) if logits.requires_grad and calls() else logits
        return torch.logsumexp(logits, -1).mean()

    count = iter(range(100))

    def calls() -> bool:
        return next(count) % 2 == 1  # the second run is the parallel one

    with pytest.raises(ParallelDifference, match="output agrees: the difference is in the loss"):
        check_parallel(Decoder, plan(), ids(), mesh=comm, loss_fn=local_loss)
    refused(comm, rank)
    return said


def refused(comm: Any, rank: int) -> None:
    with pytest.raises(ValueError, match=r"batch of ranks \[1.* differs from rank 0's"):
        check_parallel(Decoder, plan(), ids(length=7 + rank), mesh=comm, loss_fn=loss_fn)
    with pytest.raises(TypeError, match="must be a tensor of one element"):
        check_parallel(Decoder, plan(), ids(), mesh=comm)
    kept: list[Any] = []

    class Broken(Decoder):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            kept.append(self)
            super().forward(ids)
            raise FloatingPointError("planted")

    with pytest.raises(FloatingPointError, match="planted"):
        check_parallel(Broken, plan(), ids(), mesh=comm, loss_fn=loss_fn)
    # The trace's hooks are gone although forward raised.
    assert all(not m._forward_hooks and not m._forward_pre_hooks for model in kept for m in model.modules())
    whole = PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate())
    with pytest.raises(ParallelDifference, match="first layer whose output differs is norm"):
        check_parallel(Decoder, {**plan(), "norm": whole}, ids(), mesh=comm, loss_fn=loss_fn)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("degree", [2, 3])
def test_faults_are_found_and_named(degree: int) -> None:
    said = run_ranks(degree, found_and_named)
    assert all(text == said[0] for text in said) and "of 27 gradients" in said[0][0]  # all ranks say the same


class Attention(nn.Module):
    """A bias of the keys shifts all scores of a query alike: its gradient is zero, but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out(mixed).square().sum()


def gradients_that_are_zero(rank: int, size: int) -> None:
    comm = pycomm.init()
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    cut: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v")}
    assert check_parallel(Attention, {**cut, "out": RowwiseParallel()}, x, mesh=comm).n_parameters == 8
    # A batch of any dtype is compared.
    low = {"dtype": torch.bfloat16, "rtol": 0.1}
    check_parallel(Attention, {"out": RowwiseParallel(input_layouts=Replicate())}, x, mesh=comm, **low)
    # A loss that one rank alone has not: the other is told.
    with pytest.raises(TypeError if rank == 0 else pycomm.CommError, match="must be a tensor of one element"):
        check_parallel(Attention, {}, x, mesh=comm, loss_fn=lambda out, batch: out if rank else None)


@pytest.mark.timeout(60)
def test_gradients_that_are_zero_by_mathematics() -> None:
    run_ranks(2, gradients_that_are_zero)


def alone(rank: int, size: int) -> str:
    return str(check_parallel(Decoder, plan(), ids(), mesh=pycomm.init(), loss_fn=loss_fn))


def test_one_rank() -> None:
    [text] = run_ranks(1, alone)
    assert text.startswith("equal: the loss")
