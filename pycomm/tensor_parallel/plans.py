"""Ready plans for transformer blocks of two common styles, for unmodified models of Hugging Face.

*GPT-2 style*: queries, keys and values in one projection ``c_attn`` of transformers' Conv1D, ``c_proj``,
``c_fc``, learned positions, head tied to the embedding. *Llama style*: ``q_proj``, ``k_proj``, ``v_proj``,
``o_proj``, grouped KV heads, gated MLP (Llama, Mistral, Qwen 2 and 3, and others with these names).

Attention is cut by whole heads, so that each rank runs the model's own attention on its own: the fused
projection is cut at the boundaries of its three parts, KV heads fewer than ranks are held by several, and the
attributes with which ``forward`` splits and repeats heads become local. Sizes and heads need not divide by
the number of ranks; ranks beyond the number of heads compute none.

A plan is a plain dict: print it, change it, pass it to ``parallelize_module``. It does not depend on the
number of ranks. With ``sequence_parallel`` the residual stream is cut along the sequence from the first block
to the last norm. With dropout in training call ``model_parallel_manual_seed`` first; masks of the residual
stream are the same for every number of ranks, those of attention weights each rank draws for its heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from pycomm import arguments
from pycomm.tensor_parallel.layouts import Layout
from pycomm.tensor_parallel.prepare import PrepareModuleInput, PrepareModuleOutput
from pycomm.tensor_parallel.shards import Split, fused, heads
from pycomm.tensor_parallel.styles import (
    ColwiseParallel,
    ForkRandom,
    LocalAttributes,
    ParallelStyle,
    ReplicatedDropout,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = ["gpt2_plan", "llama_plan"]

DictPlan = dict[str, ParallelStyle | list[ParallelStyle]]


@dataclass(frozen=True)
class _Heads:
    """The heads of one attention, and how their features are cut over n ranks."""

    n_heads: int
    n_kv_heads: int
    size: int

    def queries(self, n: int) -> Split:
        return heads(self.n_heads, self.n_kv_heads, n)[0].times(self.size)

    def keys(self, n: int) -> Split:
        return heads(self.n_heads, self.n_kv_heads, n)[1].times(self.size)

    def qkv(self, n: int) -> Split:
        return fused([self.queries(n), self.keys(n), self.keys(n)], n)

    def local_sizes(self, n: int, rank: int) -> list[int]:
        """Features of this rank's queries, keys and values."""
        q, kv = self.queries(n).lengths[rank], self.keys(n).lengths[rank]
        return [q, kv, kv]

    def local_groups(self, n: int, rank: int) -> int:
        """How many of this rank's query heads use each of its KV heads."""
        q, kv, _ = self.local_sizes(n, rank)
        return q // kv if kv else 1


def _config(name: str, model: Any) -> Any:
    arguments.instance(f"{name}: model", model, nn.Module, "an nn.Module")
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "num_attention_heads"):
        raise TypeError(
            f"{name}: {type(model).__name__} has no config with num_attention_heads; expected a model of "
            "transformers. For another, write the plan: it is a dict of names and styles"
        )
    return config


def _blocks(name: str, model: nn.Module, attention: str, needs: tuple[str, ...]) -> str:
    """The name of the list of blocks: of the modules that have an ``attention`` with the parts ``needs``."""
    found: dict[str, None] = {}
    for where, module in model.named_modules():
        inside = getattr(module, attention, None)
        if isinstance(inside, nn.Module) and all(hasattr(inside, part) for part in needs):
            found[where.rpartition(".")[0]] = None
    if len(found) != 1:
        what = "no blocks" if not found else f"blocks in {len(found)} places, {', '.join(found)},"
        raise ValueError(
            f"{name}: {type(model).__name__} has {what} with {attention}.{f', {attention}.'.join(needs)}; "
            "expected one list of them"
        )
    return next(iter(found))


def _embedding_and_head(model: nn.Module, embedding: str) -> DictPlan:
    """The vocabulary cut over the ranks, at both ends; logits are gathered, since losses need all."""
    from torch.distributed.tensor import Replicate

    plan: DictPlan = {embedding: RowwiseParallel()}
    if isinstance(getattr(model, "lm_head", None), nn.Linear):
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return plan


def _gpt2_dropout(attention: Any) -> float:
    return float(attention.attn_dropout.p)


def _llama_dropout(attention: Any) -> float:
    return float(getattr(attention, "attention_dropout", 0.0))


def gpt2_plan(model: nn.Module, *, sequence_parallel: bool = False) -> DictPlan:
    """The plan for a GPT-2 of transformers (GPT2Model, GPT2LMHeadModel, …), unmodified.

    Args:
        model: of any size; also on the meta device.
        sequence_parallel: cut the residual stream along the sequence between the products.

    Returns:
        For ``parallelize_module(model, mesh, plan)``.

    Raises:
        TypeError: no model of transformers. ValueError: blocks of another style, or with cross-attention.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=12, n_head=3, vocab_size=17))
        >>> gpt2_plan(model)["transformer.h.*.mlp.c_proj"]
        RowwiseParallel()
    """
    from torch.distributed.tensor import Replicate, Shard

    config = _config("gpt2_plan", model)
    blocks = _blocks("gpt2_plan", model, "attn", ("c_attn", "c_proj", "split_size"))
    if getattr(config, "add_cross_attention", False):
        raise ValueError("gpt2_plan: a model with cross-attention is not covered; write its plan")
    of = _Heads(config.num_attention_heads, config.num_attention_heads,
                config.hidden_size // config.num_attention_heads)  # fmt: skip
    base = blocks.rpartition(".")[0]
    base = f"{base}." if base else ""
    rows, cols = (Shard(1), Shard(1)) if sequence_parallel else (None, None)
    plan: DictPlan = {
        f"{blocks}.*.attn": [LocalAttributes(split_size=of.local_sizes), ForkRandom(_gpt2_dropout)],
        f"{blocks}.*.attn.resid_dropout": ReplicatedDropout(),
        f"{blocks}.*.mlp.dropout": ReplicatedDropout(),
        f"{base}drop": ReplicatedDropout(),
        f"{blocks}.*.attn.c_attn": ColwiseParallel(split=of.qkv, input_layouts=cols),
        f"{blocks}.*.attn.c_proj": RowwiseParallel(split=of.queries, output_layouts=rows),
        f"{blocks}.*.mlp.c_fc": ColwiseParallel(input_layouts=cols),
        f"{blocks}.*.mlp.c_proj": RowwiseParallel(output_layouts=rows),
        **_embedding_and_head(model, f"{base}wte"),
    }
    if sequence_parallel:
        plan |= {
            f"{blocks}.*.ln_1": SequenceParallel(),
            f"{blocks}.*.ln_2": SequenceParallel(),
            f"{blocks}.*.attn.resid_dropout": SequenceParallel(),
            f"{blocks}.*.mlp.dropout": SequenceParallel(),
            f"{blocks}.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
            f"{base}ln_f": [
                SequenceParallel(),
                PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
            ],
        }
    return plan


def llama_plan(model: nn.Module, *, sequence_parallel: bool = False) -> DictPlan:
    """The plan for a Llama of transformers (LlamaModel, LlamaForCausalLM, …), or one like it, unmodified.

    Args:
        model: of any size; also on the meta device.
        sequence_parallel: cut the residual stream along the sequence between the products.

    Returns:
        For ``parallelize_module(model, mesh, plan)``.

    Raises:
        TypeError: no model of transformers. ValueError: blocks of another style, or with parameters in their
            attention that this plan does not know.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, hidden_size=12, intermediate_size=20,
        ...     num_attention_heads=3, num_key_value_heads=1, vocab_size=17))
        >>> llama_plan(model)["lm_head"]
        ColwiseParallel(output=Replicate())
    """
    from torch.distributed.tensor import Replicate, Shard

    config = _config("llama_plan", model)
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    blocks = _blocks("llama_plan", model, "self_attn", (*projections, "num_key_value_groups"))
    attention: Any = model.get_submodule(f"{blocks}.0.self_attn")
    of = _Heads(config.num_attention_heads, config.num_key_value_heads, attention.head_dim)
    base = blocks.rpartition(".")[0]
    base = f"{base}." if base else ""
    # Projections with one input share the sum of its gradients: the module around them asks for it.
    rows, used = Shard(1) if sequence_parallel else None, Layout("used")
    here = Shard(1) if sequence_parallel else Replicate()
    attention_input = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": here}, desired_input_kwarg_layouts={"hidden_states": used}
    )
    plan: DictPlan = {
        f"{blocks}.*.self_attn": [
            LocalAttributes(num_key_value_groups=of.local_groups),
            attention_input,
            ForkRandom(_llama_dropout),
        ],
        f"{blocks}.*.mlp": PrepareModuleInput(input_layouts=here, desired_input_layouts=used),
        f"{blocks}.*.self_attn.q_proj": ColwiseParallel(split=of.queries, input_layouts=used),
        f"{blocks}.*.self_attn.k_proj": ColwiseParallel(split=of.keys, input_layouts=used),
        f"{blocks}.*.self_attn.v_proj": ColwiseParallel(split=of.keys, input_layouts=used),
        f"{blocks}.*.self_attn.o_proj": RowwiseParallel(split=of.queries, output_layouts=rows),
        f"{blocks}.*.mlp.gate_proj": ColwiseParallel(input_layouts=used),
        f"{blocks}.*.mlp.up_proj": ColwiseParallel(input_layouts=used),
        f"{blocks}.*.mlp.down_proj": RowwiseParallel(output_layouts=rows),
        **_embedding_and_head(model, f"{base}embed_tokens"),
    }
    known = set(projections)
    for norm in ("q_norm", "k_norm"):  # of each head: a rank has the gradient from its own heads
        if isinstance(getattr(attention, norm, None), nn.Module):
            plan[f"{blocks}.*.self_attn.{norm}"] = SequenceParallel()
            known.add(norm)
    strange = [name for name, _ in attention.named_parameters() if name.split(".")[0] not in known]
    if strange:
        raise ValueError(
            f"llama_plan: the attention of {type(model).__name__} has parameters that this plan does not "
            f"know, {', '.join(strange)}; write its plan"
        )
    if sequence_parallel:
        plan |= {
            f"{blocks}.*.input_layernorm": SequenceParallel(),
            f"{blocks}.*.post_attention_layernorm": SequenceParallel(),
            f"{blocks}.0": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
            f"{base}norm": [
                SequenceParallel(),
                PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
            ],
        }
    return plan
