"""Layers, DDP and a process group where nobody has imported Dynamo yet, and then where torch.compile does.

Ranks of the harness have it imported when they start (ranks.PRELOADED); most programs do not.
"""

from pathlib import Path

from interpreters import run_interpreters

PROGRAM = """
import copy, os, sys
import torch
import torch.distributed as dist
import pycomm, pycomm.torch_backend
import pycomm.tensor_parallel as tp

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.FileStore(os.path.join(os.environ["PYCOMM_RUN_DIR"], "store"), size)
dist.init_process_group("pycomm", store=store, rank=rank, world_size=size)
torch.manual_seed(0)
one = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2)).double()
replica, parts = copy.deepcopy(one), copy.deepcopy(one)
ddp = pycomm.DistributedDataParallel(replica)
tp.parallelize_module(parts, None, {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()})
x = torch.randn(3, 4, dtype=torch.float64)
mean = sum(one(x * (r + 1)).sum() for r in range(size)) / size
gradients = torch.autograd.grad(mean, list(one.parameters()))

def check(ddp, parts):
    total = torch.full((5,), rank + 1.0)
    dist.all_reduce(total)
    assert total.tolist() == [size * (size + 1) / 2] * 5, total
    replica.zero_grad()
    ddp(x * (rank + 1)).sum().backward()
    for p, gradient in zip(replica.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient)
    y = parts(x)
    torch.testing.assert_close(y, one(x))
    y.sum().backward()

check(ddp, parts)
assert "torch._dynamo" not in sys.modules
check(torch.compile(ddp, backend="eager"), torch.compile(parts, backend="eager"))
assert "torch._dynamo" in sys.modules
check(ddp, parts)
dist.destroy_process_group()
print("all three are right")
"""


def test_before_dynamo_is_imported_and_after(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "PYCOMM_RUN_DIR": str(run_dir)}
    ended = run_interpreters(
        PROGRAM,
        [[], []],
        env=lambda rank: job | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        timeout=90,
    )
    for rank, (status, output) in enumerate(ended):
        assert status == 0 and "all three are right" in output, f"rank {rank}:\n{output}"
