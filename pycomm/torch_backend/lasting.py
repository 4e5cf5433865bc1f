"""Whether torch keeps a work that is written in Python when a group's method gives it to C++.

torch before 2.7 keeps the C++ half alone: the constructor of DDP, the reducer and functional collectives
would wait forever for a work that nobody completes, so there is no backend for those. (A C++ work around our
Future is no way out: there its ``wait()`` hides the errors of the call.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

__all__ = ["check_torch", "torch_keeps_works"]


class _Over(dist.Work):
    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([])
        return future


class _Group(dist.ProcessGroup):
    def barrier(self, opts: Any = None) -> Any:
        return _Over()


def torch_keeps_works() -> bool:
    """Whether a work that went to C++ and came back is still ours."""
    make: Any = _Group
    try:
        dist.ProcessGroup.barrier(make(0, 1), c10d.BarrierOptions()).get_future()
    except RuntimeError:  # what is left of it has no future
        return False
    return True


def check_torch() -> None:
    """
    Raises:
        RuntimeError: this torch cannot have the backend.
    """
    if not torch_keeps_works():
        raise RuntimeError(
            'the backend "pycomm" of torch.distributed needs torch 2.7 or newer, this is '
            f"{torch.__version__}, which lets go of works that are written in Python, so that DDP would wait "
            "forever: update torch, or use pycomm.init() and pycomm.DistributedDataParallel, which need no "
            "process group"
        )
