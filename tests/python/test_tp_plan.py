"""parallelize_module against one process in float64: every gradient, all degrees, layouts, ties, refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from tp_plan_models import assert_equal, decoder, ids, loss_of, plan, whole_and_parallel

import pycomm
from pycomm.tensor_parallel.parallelize import matches, parallelize_module
from pycomm.tensor_parallel.parameters import named_shards
from pycomm.tensor_parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from pycomm.tensor_parallel.shards import Split, even, fused
from pycomm.tensor_parallel.styles import (
    ColwiseParallel,
    LocalAttributes,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)
from ranks import run_ranks


def equals_one_process(rank: int, size: int) -> None:
    comm = pycomm.init()
    batch = ids()
    for sequence_parallel in (False, True):
        whole, parallel = whole_and_parallel(comm, plan(sequence_parallel))
        assert parallel.head.weight is parallel.embed.weight  # still tied
        assert list(parallel.state_dict()) == list(whole.state_dict())
        assert all(isinstance(p, type(w)) for p, w in zip(parallel.modules(), whole.modules(), strict=True))
        again = copy.deepcopy(parallel)
        loss_of(whole, batch).backward()
        for model in (parallel, again):
            loss = loss_of(model, batch)
            torch.testing.assert_close(loss, loss_of(whole, batch), rtol=1e-12, atol=0)
            loss.backward()
            assert_equal(model, whole, sequence_parallel)
    both_layouts(comm)
    shared_features(comm)


def both_layouts(comm: Any) -> None:
    """Every pair of layouts that a Linear and an Embedding can have, forward and backward."""
    layouts = [Replicate(), Shard(0), Shard(1), Shard(-1)]
    torch.manual_seed(3)
    x, weight = torch.randn(3, 5, 7, dtype=torch.float64), torch.randn(3, 5, 6, dtype=torch.float64)
    linear = nn.Linear(7, 6).double()
    want_out = linear(x.requires_grad_())
    want = torch.autograd.grad((want_out * weight).sum(), [x, *linear.parameters()])
    for style in (ColwiseParallel, RowwiseParallel):
        for before in layouts:
            for after in layouts:
                model = parallelize_module(
                    copy.deepcopy(linear), comm, style(input_layouts=before, output_layouts=after)
                )
                mine = local(x, before, comm).requires_grad_()
                out = model(mine)
                torch.testing.assert_close(out, local(want_out, after, comm))
                (out * local(weight, after, comm)).sum().backward()
                # A replicated output's loss is counted once, as its gradient is the same on every rank.
                torch.testing.assert_close(
                    mine.grad, local(want[0], before, comm), msg=f"{style} {before} {after}"
                )
                shards = dict(named_shards(model))
                for (name, p), gradient in zip(model.named_parameters(), want[1:], strict=True):
                    part = shards[name].take(gradient) if name in shards else gradient
                    if style is RowwiseParallel and name == "bias" and after in (Shard(0), Shard(1)):
                        part = gradient  # summed over the ranks' parts
                    torch.testing.assert_close(p.grad, part, msg=f"{style} {before} {after} {name}")
    embedding = nn.Embedding(9, 6, padding_idx=4).double()
    ids = torch.randint(9, (3, 5), generator=torch.Generator().manual_seed(5))
    ids[0, 0] = 4
    want_out = embedding(ids)
    (want_weight,) = torch.autograd.grad((want_out * weight).sum(), [embedding.weight])
    for style in (ColwiseParallel, RowwiseParallel):
        for after in layouts:
            model = parallelize_module(copy.deepcopy(embedding), comm, style(output_layouts=after))
            out = model(ids)
            torch.testing.assert_close(out, local(want_out, after, comm))
            (out * local(weight, after, comm)).sum().backward()
            part = dict(named_shards(model))["weight"].take(want_weight)
            torch.testing.assert_close(model.weight.grad, part, msg=f"{style} {after}")


def local(x: torch.Tensor, layout: Any, comm: Any) -> torch.Tensor:
    """This rank's part of ``x``, cut as ``torch.chunk`` cuts."""
    if layout == Replicate():
        return x.detach().clone()
    return even(x.shape[layout.dim], comm.size).take(x.detach(), layout.dim, comm.rank).clone()


def shared_features(comm: Any) -> None:
    """Features that all ranks have (KV heads fewer than ranks): the gradient is the sum over the ranks."""

    def everywhere(n: int) -> Split:
        return fused([even(4, n), Split(2, (((0, 2),),) * n)], n)

    torch.manual_seed(4)
    linear, x = nn.Linear(3, 6).double(), torch.randn(2, 3, dtype=torch.float64)
    model = parallelize_module(copy.deepcopy(linear), comm, ColwiseParallel(split=everywhere))
    shard = dict(named_shards(model))["weight"]
    factor = torch.arange(1.0, 7.0, dtype=torch.float64)
    (linear(x) * factor).sum().backward()
    shared = torch.ones(6, dtype=torch.float64)
    shared[4:] /= comm.size  # each rank uses its copy for a part of the loss
    (model(x) * everywhere(comm.size).take(factor * shared, 0, comm.rank)).sum().backward()
    torch.testing.assert_close(model.weight.grad, shard.take(linear.weight.grad))


@pytest.mark.timeout(90)
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_equals_one_process(degree: int) -> None:
    run_ranks(degree, equals_one_process)


def test_keys_are_globs_part_by_part() -> None:
    assert matches("layers.10.mlp.w1", "layers.*.mlp.w[12]")
    assert not matches("layers.10.mlp.w1", "layers.*")
    assert not matches("layers.10.mlp", "layers.*.mlp.w1")
    assert matches("", "") and not matches("a", "")


class Fails(ParallelStyle):
    """A style whose change fails when it is made."""

    def changes(self, module: nn.Module, where: str, comm: Any) -> list[Any]:
        return [self]

    def do(self, made: Any) -> list[Any]:
        raise MemoryError("planted")


def refusals(rank: int, size: int) -> None:
    comm = pycomm.init()
    model = decoder()
    before = [(type(m), dict(m._parameters), len(m._forward_pre_hooks), len(m._forward_hooks))
              for m in model.modules()]  # fmt: skip
    right = plan()
    without_head = {k: v for k, v in right.items() if k != "head"}
    cases: list[tuple[Any, type[BaseException], str]] = [
        # A mistyped key names its neighbours, as patterns.
        ({**right, "blocks.*.attn.qvk": ColwiseParallel()}, ValueError,
         r"'blocks\.\*\.attn\.qvk' matches no submodule of Decoder; nearest are 'blocks\.\*\.attn\.qkv'"),
        ({**right, "transformer.head": ColwiseParallel()}, ValueError, "nearest are 'head'"),
        ({**right, "blocks.0.up": ColwiseParallel()}, ValueError, r"two keys .* 'blocks\.0\.up'"),
        # A tie that the plan would tear apart.
        (without_head, ValueError, r"embed\.weight and head\.weight are one parameter.*left whole"),
        ({**right, "head": RowwiseParallel(input_layouts=Replicate())}, ValueError, "cut along dimension 1"),
        # Splits of another layer.
        ({**right, "blocks.*.attn.qkv": ColwiseParallel(split=lambda n: even(44, n))}, ValueError,
         r"blocks\.0\.attn\.qkv: the plan's split is of 44 features .* the module has 45"),
        ({**right, "blocks.*.up": ColwiseParallel(split=lambda n: even(11, 3))}, ValueError, "over 3 ranks"),
        ({**right, "norm": ColwiseParallel()}, TypeError, "norm: ColwiseParallel cuts nn.Linear.*LayerNorm"),
        ({**right, "blocks.*.ln_1": [SequenceParallel(), SequenceParallel()]}, ValueError, "two styles"),
        ({**right, "blocks.0": SequenceParallel()}, TypeError, "parameters of its own only"),
        ({**right, "blocks.*.down": RowwiseParallel(output_layouts=Partial())}, ValueError, "got Partial"),
        ({**right, "blocks.*.attn": LocalAttributes(sizes=lambda n, r: 1)}, ValueError, "no attribute"),
        ({"head": "colwise"}, TypeError, "must have a style of pycomm"),
        ({"head": TorchColwise()}, TypeError, "got ColwiseParallel, which is a style of torch's: import"),
        (None, TypeError, "parallelize_plan must be a style"),
        # All is planned, then one change fails: the model is as before.
        ({**right, "norm": Fails()}, MemoryError, "planted"),
    ]  # fmt: skip
    for bad, kind, text in cases:
        with pytest.raises(kind, match=text):
            parallelize_module(model, comm, bad)
        after = [(type(m), dict(m._parameters), len(m._forward_pre_hooks), len(m._forward_hooks))
                 for m in model.modules()]  # fmt: skip
        for (kind_a, params_a, *hooks_a), (kind_b, params_b, *hooks_b) in zip(before, after, strict=True):
            assert kind_a is kind_b and hooks_a == hooks_b
            assert all(params_b[name] is p for name, p in params_a.items())
        assert not list(named_shards(model)) and model.blocks[0].attn.size == 15
    # Ranks that disagree: all raise.
    mine = right if rank == 0 else {k: v for k, v in right.items() if not k.endswith("down")}
    with pytest.raises(ValueError, match="plan of rank 1 differs from rank 0's"):
        parallelize_module(model, comm, mine)
    with pytest.raises(ValueError if rank == 0 else pycomm.CommError, match="matches no submodule"):
        parallelize_module(model, comm, {"heat": ColwiseParallel()} if rank == 0 else right)
    for option in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        with pytest.raises(ValueError, match="cannot be cut"):
            parallelize_module(nn.Embedding(4, 4, **option), comm, RowwiseParallel())
    for norm in (nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4)):
        with pytest.raises(TypeError, match="takes its statistics over positions"):
            parallelize_module(norm, comm, SequenceParallel())
    with pytest.raises(TypeError, match="mask of a AlphaDropout would depend on the number of ranks"):
        parallelize_module(nn.AlphaDropout(0.5), comm, SequenceParallel())
    parallelize_module(model, comm, right)
    with pytest.raises(ValueError, match="parallel already"):
        parallelize_module(model, comm, right)
    # An id that no rank has is an error and not a row of zeros; a feature too few as well.
    with pytest.raises(IndexError, match=r"embed: id 17 at position \(0, 2\)"):
        model(torch.tensor([[0, 1, 17]]))
    with pytest.raises(ValueError, match=r"blocks\.0\.down: rank . of 2 expects . features"):
        model.blocks[0].down(torch.ones(2, 11, dtype=torch.float64))


@pytest.mark.timeout(60)
def test_refusals_leave_the_model_as_it_was() -> None:
    run_ranks(2, refusals)


def test_arguments_of_styles() -> None:
    for style in (ColwiseParallel, RowwiseParallel, SequenceParallel):
        with pytest.raises(ValueError, match="use_local_output must be True"):
            style(use_local_output=False)
    with pytest.raises(ValueError, match="got Partial"):
        ColwiseParallel(output_layouts=Partial())
    with pytest.raises(TypeError, match=r"must be Replicate\(\), Shard"):
        RowwiseParallel(input_layouts=1)
    with pytest.raises(TypeError, match="function of the number of ranks"):
        ColwiseParallel(split=[4, 4])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 layouts and 0 desired"):
        PrepareModuleInput(input_layouts=Shard(1))
    with pytest.raises(ValueError, match=r"layouts of \['x'\], but desired layouts of \[\]"):
        PrepareModuleInput(input_kwarg_layouts={"x": Shard(1)})
    with pytest.raises(ValueError, match=r"cannot go from Replicate\(\) to Partial"):
        PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Partial())
    assert (
        repr(
            PrepareModuleInputOutput(
                input_layouts=(Shard(1), None),
                desired_input_layouts=(Replicate(), None),
                output_layouts=Partial(),
                desired_output_layouts=Shard(1),
            )
        )
        == "PrepareModuleInputOutput(Shard(1) -> Replicate(), as it comes, Partial() -> Shard(1))"
    )


class Adds(nn.Module):
    def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x + y, 7


def prepared(rank: int, size: int) -> None:
    comm = pycomm.init()
    x, y = (torch.arange(15.0, dtype=torch.float64).view(3, 5) * k for k in (1, 2))
    model = parallelize_module(
        Adds(),
        comm,
        PrepareModuleInputOutput(
            input_layouts=Shard(0),
            desired_input_layouts=Shard(1),
            input_kwarg_layouts={"y": Replicate()},
            desired_input_kwarg_layouts={"y": Shard(1)},
            output_layouts=(Shard(1), None),
            desired_output_layouts=(Replicate(), None),
        ),
    )
    mine = local(x, Shard(0), comm).requires_grad_()
    y.requires_grad_()
    out, seven = model(mine, y=y)
    assert seven == 7 and torch.equal(out, x + y)
    weight = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (out * weight).sum().backward()
    assert torch.equal(mine.grad, local(weight, Shard(0), comm)) and torch.equal(y.grad, weight)
    with pytest.raises(ValueError, match="keyword 'y'"):
        model(mine)
    # Partial sums: to all, and a part to each.
    for there in (Replicate(), Shard(1)):
        style = PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=there)
        summed = parallelize_module(nn.Identity(), comm, style)
        part = (x * (rank + 1)).detach().requires_grad_()
        total = summed(part)
        torch.testing.assert_close(total, local(x * sum(range(1, size + 1)), there, comm))
        (total * local(weight, there, comm)).sum().backward()
        torch.testing.assert_close(part.grad, weight)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("degree", [2, 3])
def test_prepare_inputs_and_outputs(degree: int) -> None:
    run_ranks(degree, prepared)


def seeds_and_meta(rank: int, size: int) -> None:
    comm = pycomm.init()
    batch = ids()
    # Ranks that were seeded differently get rank 0's parameters, also those that no style cuts.
    whole = decoder()
    parallel = parallelize_module(decoder(seed=rank), comm, plan())
    loss_of(whole, batch).backward()
    loss_of(parallel, batch).backward()
    assert_equal(parallel, whole)
    # On the meta device: shards are meta, ties stay, and reset_parameters gives the whole layer's values.
    with torch.device("meta"):
        model = decoder()
    parallelize_module(model, comm, plan())
    assert model.head.weight is model.embed.weight and model.head.weight.is_meta
    for make in (
        lambda: (nn.Linear(6, 7), ColwiseParallel()),
        lambda: (nn.Linear(6, 7), RowwiseParallel()),
        lambda: (nn.Embedding(7, 6, padding_idx=2), RowwiseParallel()),
        lambda: (nn.Embedding(7, 6), ColwiseParallel()),
    ):
        torch.manual_seed(5)
        made, style = make()
        with torch.device("meta"):
            layer = make()[0]
        parallelize_module(layer, comm, style)
        layer.to_empty(device="cpu")
        torch.manual_seed(5)
        layer.reset_parameters()
        shards = dict(named_shards(layer))
        for name, p in layer.named_parameters():
            want = dict(made.named_parameters())[name]
            assert torch.equal(p, shards[name].take(want) if name in shards else want), (style, name)


def inputs_that_differ(rank: int, size: int) -> None:
    """On request, what must be the same on all ranks is compared before it is used."""
    comm = pycomm.init()
    model = parallelize_module(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4)), comm,
                               {"0": RowwiseParallel(), "1": ColwiseParallel()})  # fmt: skip
    with pytest.raises(ValueError, match="0: the input must be the same on all 2 ranks"):
        model(torch.tensor([rank]))
    with pytest.raises(ValueError, match="1: the input must be the same on all 2 ranks"):
        model[1](torch.ones(1, 4) + rank)
    assert model(torch.tensor([3])).shape == (1, 2)


@pytest.mark.timeout(60)
def test_inputs_that_differ_are_told_on_request() -> None:
    run_ranks(2, inputs_that_differ, env={"PYCOMM_TP_CHECK": "1"})


@pytest.mark.timeout(60)
def test_seeds_and_meta() -> None:
    run_ranks(3, seeds_and_meta)
