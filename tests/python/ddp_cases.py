"""What the tests of DistributedDataParallel share: toy modules, batches, and the reference of one process.

Ranks build the same module from the same seed (or on purpose not); ``one_process`` computes what the average
must be without pycomm: the mean over the ranks of the losses, differentiated by torch. In float64 where that
is defined.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pycomm import _C

Gradients = Mapping[str, torch.Tensor | None]

OVERLAPS = ("async", "inline", "end")
TINY = 1e-4  # MiB: about a hundred bytes, so that toy modules have several buckets


ON_DEVICE = _C.cuda.build() == "emulated" and "PYCOMM_EMULATED_DEVICE" in os.environ
"""Whether the host's tensors stand for those of an emulated CUDA device, and so take the ways of CUDA."""


class Net(nn.Module):
    """Linear layers in a row; more than one bucket with a cap of TINY."""

    def __init__(self, width: int = 6, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def seeded(
    make: Callable[..., nn.Module], *args: Any, seed: int = 1, dtype: torch.dtype = torch.float64
) -> nn.Module:
    torch.manual_seed(seed)
    return make(*args).to(dtype)


def batch(step: int, rank: int, rows: int = 5, width: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64)


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def one_process(module: nn.Module, size: int, step: int = 0) -> dict[str, torch.Tensor | None]:
    """Gradients of the mean loss of all ranks' batches."""
    torch.autograd.backward(sum(module(batch(step, rank)) for rank in range(size)) / size)
    return gradients(module)


def assert_close(found: Gradients, wanted: Gradients, rtol: float = 1e-12, atol: float = 1e-15) -> None:
    """The same names, values within the tolerance, and None in the same places."""
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(
                found[name], gradient, rtol=rtol, atol=atol, msg=functools.partial("{}: {}".format, name)
            )


def assert_same_bits(by_rank: Sequence[Gradients]) -> None:
    """Every rank has rank 0's gradients, bit for bit and with the same strides."""
    for other in by_rank[1:]:
        for name, gradient in by_rank[0].items():
            assert (gradient is None) == (other[name] is None), name
            theirs = other[name]
            if gradient is not None and theirs is not None:
                assert gradient.stride() == theirs.stride(), name
                assert torch.equal(gradient, theirs), name


def start_gloo(rank: int, size: int) -> None:
    """torch's default group, over gloo; whoever calls it destroys the group."""
    path = os.path.join(os.environ["PYCOMM_RUN_DIR"], "store")
    dist.init_process_group("gloo", store=dist.FileStore(path, size), rank=rank, world_size=size)


class Branches(nn.Module):
    """Three branches; forward uses those named."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        return torch.stack([torch.tanh(getattr(self, name)(x)).square().mean() for name in use]).sum()
