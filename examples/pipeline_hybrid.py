"""Pipeline, data and tensor parallelism on one mesh, and a checkpoint that loads at another.

    torchrun --nproc-per-node 8 examples/pipeline_hybrid.py --pp 2 --dp 2 --tp 2 --save checkpoint
    torchrun --nproc-per-node 4 examples/pipeline_hybrid.py --pp 4 --load checkpoint

A small language model learns to name the next of 29 tokens in a fixed sequence. Every rank is at one place of
the mesh: it has one stage of the layers, a shard of each of these, and a part of the batch.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import pycomm
import pycomm.tensor_parallel as tp
from pycomm.pipeline import (
    PipelineStage,
    Schedule1F1B,
    clip_grad_norm_,
    load_sharded_optimizer_state_dict,
    plan,
    sharded_optimizer_state_dict,
    sharded_state_dict,
)

VOCABULARY, WIDTH, LENGTH = 29, 32, 16


class Block(nn.Module):
    """A residual block; its two matrices are cut over the tensor-parallel ranks."""

    def __init__(self, group: object) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = tp.ColumnParallelLinear(WIDTH, 4 * WIDTH, group=group)
        self.down = tp.RowParallelLinear(4 * WIDTH, WIDTH, group=group)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, WIDTH) to the same."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main() -> None:
    """See the file's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for size in ("pp", "dp", "tp"):
        parser.add_argument(f"--{size}", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save", help="a folder")
    parser.add_argument("--load", help="a folder")
    options = parser.parse_args()

    dist.init_process_group("pycomm")
    mesh = dist.init_device_mesh(
        "cpu", (options.pp, options.dp, options.tp), mesh_dim_names=("pp", "dp", "tp")
    )
    torch.manual_seed(0)  # the same on every rank, so that replicas and shards are of one model
    layers = [
        nn.Embedding(VOCABULARY, WIDTH),
        *(Block(mesh["tp"]) for _ in range(4)),
        nn.Linear(WIDTH, VOCABULARY),
    ]
    index = mesh.get_local_rank("pp")
    cut = plan(layers, options.pp, "uniform")
    module: nn.Module = cut.stage(layers, index)
    if options.dp > 1:
        module = pycomm.DistributedDataParallel(module, process_group=mesh.get_group("dp"))
    schedule = Schedule1F1B(
        PipelineStage(module, index, options.pp, group=mesh["pp"]),
        n_microbatches=4,
        loss_fn=lambda logits, target: nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()),
        loss_on_all_ranks=True,
    )
    adam = torch.optim.AdamW(module.parameters(), lr=3e-3)

    def state() -> dict[str, object]:
        return {"model": sharded_state_dict(schedule), "optim": sharded_optimizer_state_dict(schedule, adam)}

    if options.load:
        read = state()
        dcp.load(read, checkpoint_id=options.load)
        load_sharded_optimizer_state_dict(schedule, adam, read["optim"])  # type: ignore[arg-type]
    for step in range(options.steps):
        start = torch.randint(VOCABULARY, (32, 1), generator=torch.Generator().manual_seed(step))
        tokens = (start + 7 * torch.arange(LENGTH + 1)) % VOCABULARY
        mine = tokens.chunk(options.dp)[mesh.get_local_rank("dp")]
        schedule.step(mine[:, :-1], target=mine[:, 1:])
        norm = clip_grad_norm_(schedule, 1.0, mesh=mesh)
        adam.step()
        adam.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {float(schedule.loss):.4f}, gradient norm {float(norm):.4f}")
    if options.save:
        dcp.save(state(), checkpoint_id=options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
