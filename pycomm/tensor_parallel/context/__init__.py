"""Context parallelism: one long sequence, its positions split between ranks; attention is exact.

``ring_attention`` sends keys and values round the ranks, ``ulysses_attention`` exchanges positions for heads;
both equal attention over the whole sequence. ``context_parallel_shard`` splits a sequence,
``context_parallel_positions`` says which positions a rank holds, ``context_parallel_unshard`` brings the
sequence back. See docs/context-parallel.md.
"""

from pycomm.tensor_parallel.context.order import (
    context_parallel_positions,
    context_parallel_shard,
    context_parallel_unshard,
)
from pycomm.tensor_parallel.context.ring import ring_attention
from pycomm.tensor_parallel.context.ulysses import ulysses_attention

__all__ = [
    "context_parallel_positions",
    "context_parallel_shard",
    "context_parallel_unshard",
    "ring_attention",
    "ulysses_attention",
]
