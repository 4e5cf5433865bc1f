"""What the tests of the torch.distributed backend share: a process group in every rank of ranks.py."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pycomm
from pycomm.ops import NAMES
from pycomm.torch_backend.lasting import torch_keeps_works

if not torch_keeps_works():
    pytest.skip("torch before 2.7 cannot have the backend", allow_module_level=True)

KIND = dist.ReduceOp.RedOpType
OPS: dict[str, Any] = {name: getattr(dist.ReduceOp, name.upper()) for name in NAMES if name != "premul_sum"}


def start(
    rank: int, size: int, *, backend: str = "pycomm", timeout: float = 30.0, name: str = "store"
) -> None:
    """Initialises torch.distributed; ``name`` tells several worlds of one test apart."""
    assert pycomm  # it registers the backend
    store = dist.FileStore(f"{os.environ['PYCOMM_RUN_DIR']}/{name}", size)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )


@contextlib.contextmanager
def world(rank: int, size: int, **options: Any) -> Iterator[None]:
    """:func:`start`, and the end of it when all went well."""
    start(rank, size, **options)
    yield
    dist.destroy_process_group()


def is_float8(dtype: torch.dtype) -> bool:
    return "float8" in str(dtype)
