"""pycomm: collective communication for PyTorch.

    >>> import pycomm, torch
    >>> comm = pycomm.init()
    >>> comm.all_reduce(torch.ones(4))
    tensor([1., 1., 1., 1.])

torch is imported with the first name that needs it, so that the command line stays quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pycomm.errors import CommError, CommTimeoutError, MismatchError, PeerLostError, ScheduleError

if TYPE_CHECKING:
    from pycomm.communicator import Communicator
    from pycomm.ddp import DistributedDataParallel
    from pycomm.initialize import init
    from pycomm.work import Work

_LAZY = {
    "Communicator": "pycomm.communicator",
    "DistributedDataParallel": "pycomm.ddp",
    "init": "pycomm.initialize",
    "Work": "pycomm.work",
}

__all__ = [
    "CommError",
    "CommTimeoutError",
    "Communicator",
    "DistributedDataParallel",
    "MismatchError",
    "PeerLostError",
    "ScheduleError",
    "Work",
    "init",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'pycomm' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
