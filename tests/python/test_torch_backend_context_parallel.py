"""torch's context parallelism on the backend, on the CPU, against attention over the whole sequence.

``context_parallel`` itself runs on a CPU, with gloo as with pycomm, for the "math" kernel without a causal
mask only: torch has no rule to shard the CPU's flash attention, and none for the mask of "math". What it
replaces attention by on a GPU, the ring of keys and values, is called here with the CPU's kernel.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ranks import run_ranks
from torch_backend_ranks import world

pytestmark = pytest.mark.timeout(60)
ring = pytest.importorskip(
    "torch.distributed.tensor.experimental._context_parallel._attention", reason="torch before 2.10"
)
SEQUENCE = 2  #: the dimension of the tensors (batch, heads, sequence, width)
ROTATIONS = ("allgather", "alltoall")


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(2, 3, 24, 8, generator=generator, dtype=torch.float64) for _ in range(4)]


def in_one_process(causal: bool) -> list[torch.Tensor]:
    """The output, and the gradients of query, key and value, for the fourth of the inputs as its gradient."""
    *leaves, gradient = inputs()
    leaves = [leaf.requires_grad_() for leaf in leaves]
    scores = leaves[0] @ leaves[1].transpose(-1, -2) / leaves[0].size(-1) ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    out = scores.softmax(-1) @ leaves[2]
    out.backward(gradient)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def mine(tensor: torch.Tensor, rank: int, size: int, balanced: bool) -> torch.Tensor:
    """This rank's part of the sequence: a stretch of it, or one from its front and one from its back."""
    if not balanced:
        return tensor.chunk(size, SEQUENCE)[rank].contiguous()
    parts = tensor.chunk(2 * size, SEQUENCE)
    return torch.cat([parts[rank], parts[2 * size - 1 - rank]], SEQUENCE)


def public(rank: int, size: int) -> None:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    warnings.simplefilter("ignore")  # torch says that it is experimental
    with sdpa_kernel(SDPBackend.MATH):
        mesh = dist.init_device_mesh("cpu", (size,))
        for rotation in ROTATIONS:
            ring.set_rotate_method(rotation)
            buffers = inputs()
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[SEQUENCE] * 4):
                leaves = [b.detach().requires_grad_() for b in buffers[:3]]
                out = F.scaled_dot_product_attention(*leaves)
                out.backward(buffers[3])
                got = [out.detach(), *(leaf.grad for leaf in leaves)]
                got = ring.context_parallel_unshard(mesh, got, [SEQUENCE] * 4)
            for g, want in zip(got, in_one_process(False), strict=True):
                torch.testing.assert_close(g, want, rtol=1e-12, atol=1e-14)


def rings(rank: int, size: int) -> None:
    forward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for rotation in ROTATIONS:
        ring.set_rotate_method(rotation)
        for causal, balanced in ((False, False), (True, False), (True, True)):
            ring._cp_options.enable_load_balance = balanced
            ring._cp_options.convert_to_f32 = False  # these are float64
            q, k, v, gradient = (mine(t, rank, size, balanced) for t in inputs())
            group = dist.group.WORLD
            how = {"is_causal": causal, "dropout_p": 0.0}
            out, lse = ring._templated_ring_attention(group, SEQUENCE, forward, q, k, v, **how)
            grads = ring._templated_ring_attention_backward(
                group, SEQUENCE, backward, gradient, "grad_out", q, k, v, out, lse.squeeze(-1), **how
            )
            for got, want in zip((out, *grads[:3]), in_one_process(causal), strict=True):
                torch.testing.assert_close(
                    got,
                    mine(want, rank, size, balanced),
                    rtol=1e-11,
                    atol=1e-12,
                    msg=lambda m, case=(rotation, causal, balanced): f"{case}: {m}",
                )


def both(rank: int, size: int) -> None:
    with world(rank, size):
        public(rank, size)
        rings(rank, size)


def test_context_parallel_and_the_ring_of_keys_and_values():
    run_ranks(3, both, timeout=50)
