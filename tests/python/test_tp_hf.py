"""Unmodified GPT-2 and Llama models of transformers with the ready plans, against one process in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from tp_plan_models import assert_equal

import pycomm
from pycomm.tensor_parallel.check import ParallelDifference, check_parallel
from pycomm.tensor_parallel.context import (
    context_parallel_positions,
    context_parallel_shard,
    ring_attention,
    ulysses_attention,
)
from pycomm.tensor_parallel.parallelize import parallelize_module
from pycomm.tensor_parallel.plans import gpt2_plan, llama_plan
from pycomm.tensor_parallel.random import get_rng_tracker, model_parallel_manual_seed
from pycomm.tensor_parallel.styles import ColwiseParallel
from ranks import run_ranks

pytest.importorskip(
    "transformers", reason="pip install transformers (requirements-dev.txt) to test the plans"
)

VOCABULARY = 17  # no degree divides it; nor 15 = 3 × 5 features, 11 and 19 inside of the MLPs


def gpt2(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    no_dropout = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    sizes = {"n_layer": 2, "n_embd": 15, "n_head": 3, "n_inner": 11, "n_positions": 16}
    config = GPT2Config(
        **{**sizes, **no_dropout, **options}, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config).double()


def llama(heads: int, kv_heads: int, **options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=4 * heads, intermediate_size=19, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=VOCABULARY, max_position_embeddings=16, **options,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        num_hidden_layers=1, hidden_size=12, intermediate_size=7, num_attention_heads=4, head_dim=6,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=16,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).double()


def models() -> Iterator[tuple[str, nn.Module, Any]]:
    yield "gpt2", gpt2(), gpt2_plan
    yield (
        "gpt2 eager, upcast",
        gpt2(attn_implementation="eager", scale_attn_by_inverse_layer_idx=True),
        gpt2_plan,
    )
    yield "llama, tied, 4 heads, 2 KV heads", llama(4, 2, tie_word_embeddings=True), llama_plan
    yield "llama, biases, 3 heads, 1 KV head", llama(3, 1, attention_bias=True, mlp_bias=True), llama_plan
    yield "llama, eager, 6 heads, 3 KV heads", llama(6, 3, attn_implementation="eager"), llama_plan
    yield "llama, head size of its own", llama(2, 2, head_dim=6), llama_plan
    yield "qwen 3, norms of heads", qwen3(), llama_plan


def equals_one_process(rank: int, size: int) -> list[str]:
    comm = pycomm.init()
    torch.manual_seed(0)
    batch = torch.randint(VOCABULARY, (2, 9))
    seen = []
    for name, model, plan_of in models():
        whole = copy.deepcopy(model)
        loss = whole(input_ids=batch, labels=batch).loss
        loss.backward()
        for sequence_parallel in (False, True):
            parallel = copy.deepcopy(model)
            plan = plan_of(parallel, sequence_parallel=sequence_parallel)
            parallelize_module(parallel, comm, plan)
            mine = parallel(input_ids=batch, labels=batch).loss
            torch.testing.assert_close(mine, loss, rtol=1e-12, atol=0, msg=name)
            mine.backward()
            # Qwen's norms compute in float32 whatever their input: where ranks share a KV head, each rounds
            # its part of the gradient (2^-24 of it) before the parts are summed. All else is float64.
            shares_norm = "qwen" in name and size > 2
            largest = max(float(p.grad.abs().max()) for p in whole.parameters())
            tolerance = {"rtol": 2.0**-20, "atol": 2.0**-22 * largest} if shares_norm else {}
            assert_equal(parallel, whole, (name, sequence_parallel), **tolerance)
            assert list(parallel.state_dict()) == list(whole.state_dict())
        ties_and_generation(parallelize_module(copy.deepcopy(model), comm, plan_of(model)), model, batch)
        seen.append(name)
    if size == 2:
        long_sequences(comm)
        recomputed(comm)
    in_training(comm)
    if size == 3:
        planted(comm)
        on_meta(comm)
    return seen


def ties_and_generation(parallel: Any, model: Any, batch: torch.Tensor) -> None:
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == (parallel.get_output_embeddings().weight is parallel.get_input_embeddings().weight)
    # The key-value cache holds this rank's heads; greedy decoding gives the same tokens.
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    prompt = batch[:, :3]
    assert torch.equal(parallel.eval().generate(prompt, **options), model.eval().generate(prompt, **options))


def planted(comm: Any) -> None:
    """Queries, keys and values cut as one matrix, which everything else takes without a word."""
    batch = {"input_ids": torch.arange(12).view(2, 6), "labels": torch.arange(12).view(2, 6)}

    def wrong(model: nn.Module) -> Any:
        plan = gpt2_plan(model)
        return {**plan, "transformer.h.*.attn.c_attn": ColwiseParallel()}

    assert check_parallel(gpt2, gpt2_plan, batch, mesh=comm).worst.relative < 1e-10
    with pytest.raises(
        ParallelDifference, match=r"differs is transformer\.h\.0\.attn\.c_proj, .* agrees is .*c_attn"
    ):
        check_parallel(gpt2, wrong, batch, mesh=comm)


def on_meta(comm: Any) -> None:
    """A model that no rank could hold is parallelized before it has memory; weights come by state dict."""
    torch.manual_seed(1)
    model = gpt2()
    with torch.device("meta"):
        parallel = gpt2()
    parallelize_module(parallel, comm, gpt2_plan(parallel))
    assert parallel.lm_head.weight is parallel.transformer.wte.weight and parallel.lm_head.weight.is_meta
    whole = model.state_dict()
    from pycomm.tensor_parallel.parameters import named_shards

    mine = {name: shard.take(whole[name]) for name, shard in named_shards(parallel)}
    parallel.load_state_dict({**whole, **mine}, assign=True)
    parallel.tie_weights()
    batch = torch.arange(12).view(2, 6)
    torch.testing.assert_close(parallel(batch).logits, model(batch).logits)


def in_training(comm: Any) -> None:
    """Dropout on: the residual stream's masks do not depend on the ranks, attention's are each rank's."""
    batch = torch.arange(12).view(2, 6)
    on = {"resid_pdrop": 0.3, "embd_pdrop": 0.3}
    torch.manual_seed(2)
    alone = comm.split(comm.rank)
    whole = parallelize_module(gpt2(**on), alone, gpt2_plan(gpt2(**on)))
    torch.manual_seed(3)
    want = whole(batch).logits
    for sequence_parallel in (False, True):
        torch.manual_seed(2)
        model = gpt2(**on)
        parallelize_module(model, comm, gpt2_plan(model, sequence_parallel=sequence_parallel))
        torch.manual_seed(3)
        torch.testing.assert_close(model(batch).logits, want)  # the masks of one rank
    for sequence_parallel in (False, True):
        torch.manual_seed(2)
        models: list[tuple[Any, Any]] = [
            (gpt2(**on, attn_pdrop=0.5), gpt2_plan), (llama(3, 1, attention_dropout=0.5), llama_plan)
        ]  # fmt: skip
        for model, plan_of in models:
            parallelize_module(model, comm, plan_of(model, sequence_parallel=sequence_parallel))
            get_rng_tracker().reset()
            with pytest.raises(ValueError, match="call model_parallel_manual_seed"):
                model(batch)
            model_parallel_manual_seed(5, comm)
            first, second = model(batch).logits, model(batch).logits
            assert not torch.equal(first, second)
            # Three heads on two or four ranks: yet all have the same activations and generator afterwards.
            for mine in (first, second, torch.get_rng_state().double(), torch.rand(3)):
                theirs = mine.detach().clone()
                comm.broadcast(theirs, src=0)
                assert torch.equal(mine, theirs)
            first.sum().backward()


def recomputed(comm: Any) -> None:
    """Activation checkpointing of every block, dropout on: the masks, and so the gradients, repeat."""
    batch = torch.arange(12).view(2, 6)
    torch.manual_seed(2)
    model: Any = gpt2(resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    parallelize_module(model, comm, gpt2_plan(model, sequence_parallel=True))
    gradients = []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train().zero_grad()
        model_parallel_manual_seed(7, comm)
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)


def long_sequences(comm: Any) -> None:
    """docs/context-parallel.md: the models' own attention replaced by ours, each rank with its positions."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for attend in (ring_attention, ulysses_attention):

        def attention(
            module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Any = None,
            dropout: float = 0.0, *, attend: Any = attend, **_: Any,
        ) -> tuple[torch.Tensor, None]:  # fmt: skip
            assert attention_mask is None and dropout == 0.0
            out = attend(query, key, value, is_causal=module.is_causal, scale=scaling, group=comm)
            return out.transpose(1, 2), None

        name = f"pycomm_{attend.__name__}"
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
        for model in (gpt2(), llama(4, 2)):
            tokens = torch.randint(VOCABULARY, (2, 12))
            inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
            labels[0, :4] = -100  # so that the ranks' counts differ
            shards = [context_parallel_shard(t, 1, comm) for t in (inputs, labels)]
            positions = context_parallel_positions(11, comm)[None]
            losses = []
            whole = copy.deepcopy(model)
            model.config._attn_implementation = name
            for of, ids, wanted, more in (
                (whole, inputs, labels, {}),
                (model, *shards, {"position_ids": positions}),
            ):
                logits = of(input_ids=ids, use_cache=False, **more).logits
                loss = F.cross_entropy(
                    logits.flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum"
                )
                loss = loss / (labels != -100).sum()
                loss.backward()
                losses.append(loss.detach())
            comm.all_reduce(losses[1])
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
            for p in model.parameters():
                comm.all_reduce(p.grad)
            assert_equal(model, whole, name)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_equals_one_process(degree: int) -> None:
    assert all(len(seen) == 7 for seen in run_ranks(degree, equals_one_process, timeout=110))


def refusals(rank: int, size: int) -> None:
    with pytest.raises(TypeError, match="no config with num_attention_heads"):
        gpt2_plan(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"no blocks with self_attn\.q_proj"):
        llama_plan(gpt2())
    with pytest.raises(ValueError, match="cross-attention"):
        gpt2_plan(gpt2(add_cross_attention=True))
    model: Any = llama(2, 1)
    for layer in model.model.layers:
        layer.self_attn.sinks = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"attention of LlamaForCausalLM has parameters .* know, sinks"):
        llama_plan(model)


@pytest.mark.timeout(60)
def test_what_a_plan_does_not_cover_is_refused() -> None:
    run_ranks(1, refusals)
