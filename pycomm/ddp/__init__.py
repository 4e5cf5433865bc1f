"""Data parallelism: every rank trains the same module on its share of the batch, gradients are averaged.

In reading order: wrapper (the module's wrapper), arguments (what it may be given), agree (same start on all
ranks), structure (what is wrapped, and whether it still is), reducer, tally, contributions and ending (one
backward), sinks (when a backward begins), bucket_size and plan (buckets), wire, half_wire, block_wire and
error_feedback (how they travel), averaging, comm_hooks and hooks, sparse, problems, resolve, late and asleep
(what is not as planned), join (uneven inputs), weights, buffers, sync_batch_norm, mixed_precision, stats,
facts and consistency (what it tells), not_traced, torch_names and logging_data (names that other libraries
look for).
"""

from pycomm.ddp.wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
