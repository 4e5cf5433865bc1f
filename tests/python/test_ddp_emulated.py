"""DistributedDataParallel on emulated CUDA devices beside the same training on the CPU engine.

Both in the build that has the emulation: with PYCOMM_EMULATED_DEVICE=rank the host's tensors stand for those
of device number RANK, so that gradients go through the CUDA engine; without it, through shared memory.
"""

from __future__ import annotations

import pytest
import torch
from test_optim import check_clipping

import ddp_models
import pycomm
from ddp_cases import seeded
from pycomm import _C
from ranks import run_ranks

if _C.cuda.build() != "emulated":
    pytest.skip(f"PYCOMM_CUDA={_C.cuda.build()}: needs the CUDA emulation", allow_module_level=True)

ON_DEVICE = {"PYCOMM_EMULATED_DEVICE": "rank", "CUDA_ON_CPU_DEVICES": "8"}
ON_HOST = {"PYCOMM_EMULATED_DEVICE": "-1"}
N_STEPS = 5


def train(rank: int, size: int, deterministic: bool, options: dict) -> tuple[list, list, int, int]:
    """A small GPT after five steps of SGD: gradients, parameters, the device asked for, the device used."""
    model = seeded(ddp_models.small_gpt, dtype=torch.float32)
    comm = pycomm.init()
    comm.deterministic = deterministic
    ddp = pycomm.DistributedDataParallel(model, communicator=comm, bucket_cap_mb=0.05, **options)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(17 + rank)
    for _ in range(N_STEPS):
        sgd.zero_grad()
        ddp(*ddp_models.text(generator)).backward()
        sgd.step()
    ddp.check_consistency(sgd)
    assert len(ddp.buckets) > 2
    gradients = [p.grad.clone() for p in model.parameters()]
    return (
        gradients,
        [p.detach().clone() for p in model.parameters()],
        _C.cuda.emulated_device(),
        comm._c.device,
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True, "overlap": "async"}])
def test_a_gpt_has_the_bits_of_the_cpu_engine(size: int, options: dict) -> None:
    on_host = run_ranks(size, train, True, options, env=ON_HOST, timeout=100)
    on_device = run_ranks(size, train, True, options, env=ON_DEVICE, timeout=100)
    assert [(emulated, used) for _, _, emulated, used in on_host] == [(-1, -1)] * size
    assert [(emulated, used) for _, _, emulated, used in on_device] == [(r, r) for r in range(size)]
    for mine, theirs in zip(on_device, on_host, strict=True):
        for found, wanted in zip(mine[0] + mine[1], theirs[0] + theirs[1], strict=True):
            assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.timeout(240)
def test_a_gpt_learns_alike_with_compression() -> None:
    """With 16 bits on the wire and error feedback, parameters stay within a hundredth of the steps taken."""
    coded = {"compression": "bf16", "error_feedback": True}
    [exact, *_] = run_ranks(2, train, False, {}, env=ON_HOST, timeout=100)
    found = run_ranks(2, train, False, coded, env=ON_DEVICE, timeout=100)
    start = [p.detach() for p in seeded(ddp_models.small_gpt, dtype=torch.float32).parameters()]
    way = sum(float((b - a).square().sum()) for a, b in zip(start, exact[1], strict=True)) ** 0.5
    off = sum(float((b - a).square().sum()) for a, b in zip(found[0][1], exact[1], strict=True)) ** 0.5
    assert 0 < off < 0.01 * way
    for mine, theirs in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(mine, theirs)


def test_clipping_on_a_device_is_torchs_in_float64() -> None:
    assert run_ranks(2, check_clipping, env=ON_DEVICE) == [0, 1]
    assert run_ranks(1, check_clipping, env=ON_HOST) == [-1]
