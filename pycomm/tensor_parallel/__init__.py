"""Tensor parallelism: one model's layers shared by several ranks, with Megatron's names.

group.py says which ranks share a model, shards.py who holds what of a dimension, regions.py how activations
pass between replicated and sharded; linear.py, embedding.py, cross_entropy.py and norms.py are the layers,
overlap.py their matrix products beside communication. docs/tensor-parallel.md is for users.
"""

from pycomm.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from pycomm.tensor_parallel.embedding import VocabParallelEmbedding, parallel_lm_logits
from pycomm.tensor_parallel.group import (
    communicator_of,
    destroy_model_parallel,
    get_context_parallel_group,
    get_context_parallel_rank,
    get_context_parallel_world_size,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
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
from pycomm.tensor_parallel.parameters import mark_sharded
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

__all__ = [
    "ColumnParallelLinear",
    "FusedColumnParallelLinear",
    "LayerNorm",
    "RMSNorm",
    "RowParallelLinear",
    "Split",
    "VocabParallelEmbedding",
    "communicator_of",
    "copy_to_tensor_model_parallel_region",
    "destroy_model_parallel",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "initialize_model_parallel",
    "mark_sharded",
    "model_parallel_is_initialized",
    "parallel_lm_logits",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "vocab_parallel_cross_entropy",
]
