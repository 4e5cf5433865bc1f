"""Tensor parallelism: one model's layers shared by several ranks, with Megatron's names.

group.py says which ranks share a model, shards.py who holds what of a dimension, regions.py how activations
pass between replicated and sharded; linear.py, embedding.py, cross_entropy.py and norms.py are the layers,
overlap.py their matrix products beside communication. parallelize.py applies a plan of styles.py to a model,
plans.py has ready ones, check.py compares a parallel model with one process; context/ splits long
sequences. docs/tensor-parallel.md is for users.
"""

from pycomm.tensor_parallel.check import ParallelDifference, ParallelReport, check_parallel
from pycomm.tensor_parallel.context import (
    context_parallel_positions,
    context_parallel_shard,
    context_parallel_unshard,
    ring_attention,
    ulysses_attention,
)
from pycomm.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from pycomm.tensor_parallel.embedding import VocabParallelEmbedding, parallel_lm_logits
from pycomm.tensor_parallel.gradients import (
    GradScaler,
    clip_grad_norm_,
    count_parameters,
    has_overflow,
)
from pycomm.tensor_parallel.group import (
    communicator_of,
    destroy_model_parallel,
    get_context_parallel_group,
    get_context_parallel_rank,
    get_context_parallel_world_size,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_pipeline_model_parallel_group,
    get_pipeline_model_parallel_rank,
    get_pipeline_model_parallel_world_size,
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from pycomm.tensor_parallel.linear import (
    ColumnParallelLinear,
    FusedColumnParallelLinear,
    RowParallelLinear,
)
from pycomm.tensor_parallel.norms import LayerNorm, RMSNorm
from pycomm.tensor_parallel.parallelize import parallelize_module
from pycomm.tensor_parallel.parameters import mark_sharded
from pycomm.tensor_parallel.plans import gpt2_plan, llama_plan
from pycomm.tensor_parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from pycomm.tensor_parallel.random import (
    ParallelDropout,
    RngTracker,
    dropout,
    get_rng_tracker,
    model_parallel_manual_seed,
)
from pycomm.tensor_parallel.regions import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from pycomm.tensor_parallel.shards import Split
from pycomm.tensor_parallel.state_dict import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    load_sharded_optimizer_state_dict,
    materialize,
    sharded_optimizer_state_dict,
    sharded_state_dict,
)
from pycomm.tensor_parallel.styles import (
    ColwiseParallel,
    ForkRandom,
    LocalAttributes,
    ParallelStyle,
    ReplicatedDropout,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "ForkRandom",
    "FusedColumnParallelLinear",
    "GradScaler",
    "LayerNorm",
    "LocalAttributes",
    "ParallelDifference",
    "ParallelDropout",
    "ParallelReport",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RMSNorm",
    "ReplicatedDropout",
    "RngTracker",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "Split",
    "VocabParallelEmbedding",
    "check_parallel",
    "clip_grad_norm_",
    "communicator_of",
    "context_parallel_positions",
    "context_parallel_shard",
    "context_parallel_unshard",
    "copy_to_tensor_model_parallel_region",
    "count_parameters",
    "destroy_model_parallel",
    "dropout",
    "full_optimizer_state_dict",
    "full_state_dict",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "get_rng_tracker",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "gpt2_plan",
    "has_overflow",
    "initialize_model_parallel",
    "llama_plan",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "load_sharded_optimizer_state_dict",
    "mark_sharded",
    "materialize",
    "model_parallel_is_initialized",
    "model_parallel_manual_seed",
    "parallel_lm_logits",
    "parallelize_module",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "ring_attention",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "sharded_optimizer_state_dict",
    "sharded_state_dict",
    "ulysses_attention",
    "vocab_parallel_cross_entropy",
]
