"""``import pycomm`` makes "pycomm" a backend of torch.distributed, before or after torch is imported.

pycomm itself does not import torch before it must (the command line is quick without it), and ``import
pycomm`` often stands above ``import torch``. So where torch.distributed is not imported yet, a finder in
``sys.meta_path`` waits for its import, once, and registers then. The process group's own code is imported
when the first group is made.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__all__ = ["register_when_possible"]

_MODULE = "torch.distributed.distributed_c10d"
DEVICES = ["cpu"]


def _make(store: Any, rank: int, size: int, timeout: Any) -> Any:
    from pycomm.torch_backend.group import ProcessGroup
    from pycomm.torch_backend.lasting import check_torch

    check_torch()
    return ProcessGroup(store, rank, size, timeout)


def _register(c10d: ModuleType) -> None:
    if "PYCOMM" not in c10d.Backend._plugins:
        from pycomm.torch_backend.by_name import serve_in
        from pycomm.torch_backend.handed_over import keep_works

        c10d.Backend.register_backend("pycomm", _make, devices=DEVICES)
        serve_in(c10d, sys.modules.get("torch.distributed"))
        keep_works()


class _Waiting(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the module as Python would, and registers the backend when it has been executed."""

    def __init__(self) -> None:
        self._loader: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register(module)


def register_when_possible() -> None:
    """Registers the backend now, or when torch.distributed is imported."""
    module = sys.modules.get(_MODULE)
    if module is None:
        sys.meta_path.insert(0, _Waiting())
    elif hasattr(module, "Backend"):
        _register(module)
