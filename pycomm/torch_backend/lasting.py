"""Works for torches that do not keep the Python half of a work that a group's method gives to C++.

torch before 2.8 keeps the C++ half alone: the constructor of DDP, the reducer and functional collectives
would wait for a work that nobody completes. There the work of a collective is one of C++, around the Future
of ours: it lasts, but an error of the call comes out of ``wait()`` as a RuntimeError with the same text.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

__all__ = ["torch_keeps_works", "work_of_cpp"]


class _Over(dist.Work):
    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([])
        return future


class _Group(dist.ProcessGroup):
    def barrier(self, opts: Any = None) -> Any:
        return _Over()


def torch_keeps_works() -> bool:
    """Whether a work that goes to C++ and back is still ours."""
    make: Any = _Group
    try:
        dist.ProcessGroup.barrier(make(0, 1), c10d.BarrierOptions()).get_future()
    except RuntimeError:  # what is left of it has no future
        return False
    return True


def work_of_cpp(work: Any) -> Any:
    """A work that C++ may keep."""
    made: Any = c10d
    return made._create_work_from_future(work.get_future())
