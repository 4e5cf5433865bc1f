"""Where a tensor's collectives run: on the host, or on which CUDA device and after which stream's work.

Where CUDA is emulated (tests), host memory stands for a device (csrc/bind/tensor.h), and nothing is put on
streams of torch's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pycomm import _C
from pycomm.errors import CommError

if TYPE_CHECKING:
    from pycomm.communicator import Communicator

__all__ = ["bucket_memory", "cuda_index", "current_stream", "synchronize"]


def cuda_index(tensor: Tensor) -> int:
    """The number of the CUDA device on which collectives of ``tensor`` run; -1: the host.

    Example:
        >>> cuda_index(torch.ones(2))
        -1
    """
    return tensor.get_device() if tensor.is_cuda else _C.cuda.emulated_device()


def current_stream(device: int) -> int:
    """torch's current stream of the device, as an address; what a kernel is put on."""
    if _C.cuda.emulated_device() >= 0:
        return 0
    return int(torch._C._cuda_getCurrentRawStream(device))


def synchronize(tensor: Tensor) -> None:
    """Blocks until torch's current stream of the tensor's device has done all that is on it; to measure.

    On the host there is nothing to wait for.
    """
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def bucket_memory(comm: Communicator, n_elems: int, like: Tensor) -> Tensor:
    """A flat tensor beside ``like``, of its dtype and device, in memory that peers reach where there is room.

    On the host that is the shared arena. On CUDA it is the communicator's symmetric memory of
    ``PYCOMM_DEVICE_ARENA`` bytes; where that is full, or the ranks' GPUs do not reach each other, ordinary
    memory of torch's, through which collectives work as well, with a copy more. Ranks may differ in that.
    Collective where it is the communicator's first call on CUDA.

    Raises:
        CommError: the communicator is closed or has failed, or the host's arena is full.
    """
    device = cuda_index(like)
    if device < 0:
        return comm.empty(n_elems, dtype=like.dtype)
    try:
        return comm.empty(n_elems, dtype=like.dtype, device=f"cuda:{device}")
    except CommError:
        if comm._c.failed or comm._c.closed:
            raise
        return torch.empty(n_elems, dtype=like.dtype, device=like.device)
