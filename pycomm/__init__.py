"""pycomm: collective communication for PyTorch.

    >>> import pycomm, torch
    >>> comm = pycomm.init()
    >>> comm.all_reduce(torch.ones(4))
    tensor([1., 1., 1., 1.])

torch is imported with the first name that needs it, so that the command line stays quick.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycomm.errors import CommError, CommTimeoutError, MismatchError, PeerLostError, ScheduleError
from pycomm.torch_backend.autoload import register_when_possible

if TYPE_CHECKING:
    from pycomm import optim as optim
    from pycomm.communicator import Communicator
    from pycomm.ddp import DistributedDataParallel
    from pycomm.error_feedback import ErrorFeedback
    from pycomm.initialize import init
    from pycomm.tensor_parallel.check import check_parallel
    from pycomm.work import Work

# Where nothing was built, Python takes the folder of the extension's stubs for a package without contents.
_spec = importlib.util.find_spec("pycomm._C")
if _spec is None or _spec.origin is None:
    raise ImportError(
        "pycomm's C++ extension was not built for this Python "
        f"({sys.version_info[0]}.{sys.version_info[1]}, in {Path(__file__).parent}): run `make build` or "
        "`pip install -e .` in the source folder, or leave it to import an installed pycomm"
    )

register_when_possible()

_LAZY = {
    "Communicator": "pycomm.communicator",
    "DistributedDataParallel": "pycomm.ddp",
    "ErrorFeedback": "pycomm.error_feedback",
    "init": "pycomm.initialize",
    "Work": "pycomm.work",
    "check_parallel": "pycomm.tensor_parallel.check",
}

__all__ = [
    "CommError",
    "CommTimeoutError",
    "Communicator",
    "DistributedDataParallel",
    "ErrorFeedback",
    "MismatchError",
    "PeerLostError",
    "ScheduleError",
    "Work",
    "check_parallel",
    "init",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("pycomm-collectives")
        except PackageNotFoundError:  # on the path, but not installed
            return "not installed"
    if name == "optim":  # needs torch
        return importlib.import_module("pycomm.optim")
    if name not in _LAZY:
        raise AttributeError(f"module 'pycomm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
