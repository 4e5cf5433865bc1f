"""How large a bucket should be: from the latency and bandwidth of this communicator, measured.

Buckets that are reduced while backward goes on cost a latency each, and the last one is waited for: with M
bytes of gradients in buckets of B, a latency of a seconds and b seconds for a byte, what is exposed at worst
is a M / B + b B, least for B = sqrt(a M / b). Nothing is gained by several buckets where they are reduced
after backward (``overlap="end"``): then B is M. B is rounded to a power of two, so that noise seldom shows.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from pycomm.communicator import Communicator
from pycomm.measuring import median_s
from pycomm.placement import synchronize

__all__ = ["DEFAULT_BYTES", "measured_bytes", "wanted_bytes"]

DEFAULT_BYTES = 25 << 20
"""Where nothing is measured: torch's."""
LEAST, MOST = 1 << 20, 256 << 20
_SMALL, _LARGE = 4 << 10, 4 << 20
_REPEATS = 5

#: (latency in seconds, seconds for a byte), by kind of device, of communicators that have been measured.
_known: weakref.WeakKeyDictionary[Communicator, dict[str, tuple[float, float]]] = weakref.WeakKeyDictionary()


def wanted_bytes(latency_s: float, s_per_byte: float, n_bytes: int, overlap: str) -> int:
    """The size of a bucket, a power of two, for ``n_bytes`` of gradients.

    Example:
        >>> wanted_bytes(10e-6, 1e-9, 64 << 20, "async") >> 20
        1
        >>> wanted_bytes(1e-3, 10e-9, 64 << 20, "async") >> 20
        2
        >>> wanted_bytes(10e-6, 1e-9, 60 << 20, "end") >> 20
        64
    """
    if overlap == "end":
        return max(LEAST, 1 << max(0, n_bytes - 1).bit_length())
    best = math.sqrt(latency_s * n_bytes / max(s_per_byte, 1e-15))
    return min(MOST, max(LEAST, 1 << round(math.log2(max(best, 1.0)))))


def measured_bytes(comm: Communicator, parameters: Sequence[nn.Parameter], overlap: str) -> int:
    """What suits this communicator; 25 MiB with ``PYCOMM_TUNE=off``. Collective at a communicator's first."""
    if comm.size == 1 or os.environ.get("PYCOMM_TUNE") == "off":
        return DEFAULT_BYTES
    known, device = _known.setdefault(comm, {}), parameters[0].device
    if device.type not in known:
        known[device.type] = _measure(comm, device)
    n_bytes = sum(p.numel() * p.element_size() for p in parameters)
    return wanted_bytes(*known[device.type], n_bytes, overlap)


def _measure(comm: Communicator, device: torch.device) -> tuple[float, float]:
    """Medians of the slowest rank, the same on all."""

    def reduce(tensor: Tensor) -> None:
        comm.all_reduce(tensor)
        synchronize(tensor)

    tensors = [torch.zeros(n_bytes // 4, device=device) for n_bytes in (_SMALL, _LARGE)]
    found = torch.tensor(
        [median_s(comm, partial(reduce, tensor), _REPEATS) for tensor in tensors], dtype=torch.float64
    )
    comm.all_reduce(found, op="max")
    small, large = found.tolist()
    s_per_byte = max(0.0, large - small) / (_LARGE - _SMALL)
    return max(0.0, small - _SMALL * s_per_byte), s_per_byte
