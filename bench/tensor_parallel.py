"""Tensor parallelism on pycomm: every line that must hold.

    python bench/tensor_parallel.py [--launches 5] [--steps 30] [--json FILE]

1. A GPT block at tp 2, forward and backward: our layers on our communicator, against torch's
   ``parallelize_module`` on gloo. Both ranks hold three blocks with the same local sizes, one of them without
   communication; they take turns, step by step, all ranks starting each step together, one thread each. A
   step's time is the slower rank's; time not spent computing is a step's, less that of the block without
   communication beside it. A figure is the median over steps, the table shows the median over launches.
2. Memory of parameters and gradients at tp 4 of a GPT-2 of 124 million parameters, the largest rank's,
   against a quarter of one process's (counted by sharded and whole sizes; float32).
3. Peak resident memory of the loss of 1,024 tokens over 50,257 ids at tp 2, forward and backward, above what
   the process had before the logits: ours, against gathering the logits. Fresh processes for each.

The machine must otherwise be quiet; takes about three minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from as_ranks import found_by_ranks, peak_bytes

KINDS = ("alone", "pycomm", "torch")
BLOCK_LIMIT, MEMORY_LIMIT, LOSS_LIMIT = 1 / 3, 1.05, 1 / 3
CHANNELS, HEADS, ROWS, POSITIONS = 768, 12, 2, 128
WARMUP = 5


def block(kind: str, size: int) -> Any:
    """One pre-norm block of GPT-2: parallel, or (alone) one rank's part of it without communication."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    import pycomm.tensor_parallel as tp

    d, part = CHANNELS, size if kind == "alone" else 1

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            column: Any = tp.ColumnParallelLinear if kind == "pycomm" else nn.Linear
            row: Any = tp.RowParallelLinear if kind == "pycomm" else nn.Linear
            self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.q, self.k, self.v = (column(d, d // part) for _ in range(3))
            self.out = row(d // part, d)
            self.up, self.down = column(d, 4 * d // part), row(4 * d // part, d)

        def forward(self, x: Any) -> Any:
            h = self.norm1(x)
            q, k, v = (f(h).unflatten(-1, (-1, d // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + self.out(mixed)
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    torch.manual_seed(0)
    return Block()


def step_of(kind: str, rank: int, size: int, gloo: Any) -> Callable[[], None]:
    """One forward and backward of a block."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = block(kind, size)
    if kind == "torch":
        columns: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        plan = {**columns, "out": RowwiseParallel(), "down": RowwiseParallel()}
        model = parallelize_module(model, DeviceMesh.from_group(gloo, "cpu"), plan)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, POSITIONS, CHANNELS, generator=generator).requires_grad_()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        x.grad = None
        model(x).square().mean().backward()

    return step


def block_times(n_steps: int, result: Path) -> None:
    """Rank 0 writes the slower rank's seconds of every step of every kind."""
    import torch
    import torch.distributed as dist

    import pycomm.tensor_parallel as tp

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{os.environ['PYCOMM_RUN_DIR']}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    comm = tp.communicator_of()
    steps = {kind: step_of(kind, rank, size, dist.group.WORLD) for kind in KINDS}
    times = torch.zeros(len(KINDS), n_steps, dtype=torch.float64)
    for i in range(-WARMUP, n_steps):
        for number, kind in enumerate(KINDS):
            comm.barrier()
            began = time.perf_counter()
            steps[kind]()
            if i >= 0:
                times[number, i] = time.perf_counter() - began
    comm.all_reduce(times, op="max")
    if rank == 0:
        result.write_text(json.dumps(dict(zip(KINDS, times.tolist(), strict=True))))
    dist.destroy_process_group()


def model_bytes(result: Path) -> None:
    """Rank 0 writes the largest rank's bytes of parameters and gradients, and one process's."""
    import torch
    from torch import nn

    import pycomm.tensor_parallel as tp

    d, comm = CHANNELS, tp.communicator_of()

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.qkv = tp.FusedColumnParallelLinear.for_attention(d, HEADS, HEADS, d // HEADS)
            self.out = tp.RowParallelLinear(d, d, split=self.qkv.head_split)
            self.up, self.down = tp.ColumnParallelLinear(d, 4 * d), tp.RowParallelLinear(4 * d, d)

        def forward(self, x: Any) -> Any:
            q, _, v = self.qkv(self.norm1(x)).split(self.qkv.local_sizes, -1)
            x = x + self.out(q * v)
            return x + self.down(self.up(self.norm2(x)))

    ids = tp.VocabParallelEmbedding(50257, d)
    positions = nn.Embedding(1024, d)
    model = nn.Sequential(*(Block() for _ in range(12)), nn.LayerNorm(d))
    text = torch.arange(4).view(1, 4)
    logits = tp.parallel_lm_logits(model(ids(text) + positions(text)), ids.weight)
    tp.vocab_parallel_cross_entropy(logits, text).backward()
    whole = nn.ModuleList([ids, positions, model])
    tensors = [t for p in whole.parameters() for t in (p, p.grad) if t is not None]
    assert len(tensors) == 2 * len(list(whole.parameters()))
    mine = torch.tensor([sum(t.untyped_storage().nbytes() for t in tensors)])
    comm.all_reduce(mine, op="max")
    if comm.rank == 0:
        found = {"rank": mine.item(), "one_process": 2 * 4 * tp.count_parameters(whole)}
        result.write_text(json.dumps(found))


def loss_bytes(gathers: bool, result: Path) -> None:
    """Rank 0 writes the largest rank's peak above what it had before the logits."""
    import torch
    from torch.nn import functional as F

    import pycomm.tensor_parallel as tp

    comm = tp.communicator_of()
    n_local = 50257 // comm.size + (comm.rank < 50257 % comm.size)

    def loss(n_tokens: int) -> None:
        logits = torch.randn(n_tokens, n_local, requires_grad=True)
        target = torch.arange(n_tokens) * 47 % 50257
        if gathers:
            whole = tp.gather_from_tensor_model_parallel_region(logits)
            F.cross_entropy(whole, target).backward()
        else:
            tp.vocab_parallel_cross_entropy(logits, target).backward()

    loss(2)  # what is loaded or made once
    peak = torch.tensor([peak_bytes(lambda: loss(1024))])
    comm.all_reduce(peak, op="max")
    if comm.rank == 0:
        result.write_text(json.dumps(peak.item()))


def launch(what: str, n_ranks: int, n_steps: int = 0) -> Any:
    """One run in fresh processes."""
    return found_by_ranks(n_ranks, __file__, what, n_steps)


def as_rank(what: str, n_steps: int, result: Path) -> None:
    """What every rank runs."""
    import torch

    torch.set_num_threads(1)
    if what == "block":
        block_times(n_steps, result)
    elif what == "model":
        model_bytes(result)
    else:
        loss_bytes(what == "gathered", result)


def main() -> int:
    """Measures, prints the table, returns 0 when every line is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write all reports here")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--what", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        as_rank(options.what, options.steps, options.as_rank)
        return 0
    print("| case | ours | against | ratio | at most | |\n|---|---|---|---|---|---|")
    all_met = True

    def row(case: str, ours: str, theirs: str, ratio: float, limit: float) -> None:
        nonlocal all_met
        all_met = all_met and ratio <= limit
        met = "met" if ratio <= limit else "**missed**"
        print(f"| {case} | {ours} | {theirs} | {ratio:.3f} | {limit:.3f} | {met} |", flush=True)

    runs = [launch("block", 2, options.steps) for _ in range(options.launches)]
    exposed = {
        kind: [statistics.median(a - b for a, b in zip(run[kind], run["alone"], strict=True)) for run in runs]
        for kind in ("pycomm", "torch")
    }
    ratio = statistics.median(a / b for a, b in zip(exposed["pycomm"], exposed["torch"], strict=True))
    ours, torchs = (f"{1e3 * statistics.median(exposed[kind]):.2f} ms" for kind in ("pycomm", "torch"))
    case = f"GPT block of {CHANNELS} channels, batch {ROWS} x {POSITIONS}, tp 2: not computing"
    row(case, ours, f"{torchs} (parallelize_module, gloo)", ratio, BLOCK_LIMIT)
    model = launch("model", 4)
    quarter = model["one_process"] / 4
    row(
        "GPT-2 of 124 M parameters, tp 4: parameters and gradients", f"{model['rank'] / 2**20:.1f} MiB",
        f"{quarter / 2**20:.1f} MiB (one process / 4)", model["rank"] / quarter, MEMORY_LIMIT,
    )  # fmt: skip
    loss, gathered = launch("loss", 2), launch("gathered", 2)
    row(
        "cross entropy, 1,024 tokens, 50,257 ids, tp 2: peak memory", f"{loss / 2**20:.0f} MiB",
        f"{gathered / 2**20:.0f} MiB (logits gathered)", loss / gathered, LOSS_LIMIT,
    )  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps({"block": runs, "model": model, "loss": [loss, gathered]}) + "\n")
    return 0 if all_met else 1


if __name__ == "__main__":
    sys.exit(main())
