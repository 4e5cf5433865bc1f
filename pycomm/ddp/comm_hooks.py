"""Registering what reduces buckets in place of the wrapper: a communication hook, or a built-in one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pycomm.ddp.wire import Compression

__all__ = ["CommHooks"]

_WHO = "DistributedDataParallel"


class CommHooks:
    """The part of the wrapper that takes communication hooks; pycomm/ddp/hooks.py runs them."""

    _comm_hooks: list[tuple[Callable[..., Any], object]]
    _builtin_compression: Compression | None
    _builtin_hook: Any
    _last_error: str | None
    _given: Any

    def _set_up(self) -> None:
        raise NotImplementedError  # in pycomm/ddp/wrapper.py

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """``hook(state, bucket)`` reduces each bucket from now on; see pycomm/ddp/hooks.py.

        Args:
            state: given to the hook; for torch's hooks a process group, None for the default one, or theirs.
            hook: takes a ``GradBucket`` of undivided gradients and returns a ``torch.futures.Future`` of one
                tensor of the bucket's size, the new gradients.

        Raises:
            RuntimeError: there is a hook, or built-in one, already; or the wrapper has a ``compression`` or
                ``error_feedback``, which a hook would take the place of.
            TypeError: ``hook`` is not callable.
            ValueError: its annotations say something else.

        Example:
            >>> import pycomm, torch
            >>> comm = pycomm.init()
            >>> model = pycomm.DistributedDataParallel(torch.nn.Linear(8, 2), communicator=comm)
            >>> def keep_local(state, bucket):
            ...     future = torch.futures.Future()
            ...     future.set_result(bucket.buffer())
            ...     return future
            >>> model.register_comm_hook(None, keep_local)
        """
        self._check_comm_hook(hook)
        self._refuse_second_hook()
        self._refuse_beside_compression()
        self._comm_hooks.append((hook, state))
        self._set_up()

    def _logged(self, error: Exception) -> Exception:
        """Keeps the error for ``_get_ddp_logging_data``, as torch's logger does."""
        self._last_error = f"{type(error).__name__}: {error}"
        return error

    def _refuse_second_hook(self) -> None:
        if self._comm_hooks or self._builtin_hook is not None:
            raise RuntimeError(
                f"{_WHO}: register_comm_hook or register_builtin_comm_hook can only be called once."
            )

    def _refuse_beside_compression(self) -> None:
        if self._given.compression is not None or self._given.error_feedback:
            raise RuntimeError(
                f"{_WHO}: with compression={self._given.compression!r} and error_feedback="
                f"{self._given.error_feedback} the wrapper decides how buckets travel, and no hook would be "
                "asked; wrap without them to register one"
            )

    def _check_comm_hook(self, hook: Any) -> None:
        if not callable(hook):
            raise self._logged(TypeError("Communication hook must be callable."))
        signature = inspect.signature(hook)
        wanted: Any = getattr(dist, "GradBucket", None)
        bucket = signature.parameters.get("bucket")
        nothing = inspect.Parameter.empty
        if bucket is not None and bucket.annotation not in (nothing, wanted, "dist.GradBucket"):
            raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
        returned = signature.return_annotation
        if returned not in (
            inspect.Signature.empty,
            torch.futures.Future[Tensor],
            "torch.futures.Future[torch.Tensor]",
        ):
            raise ValueError(
                "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]."
            )

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """ALLREDUCE: what is done anyway. FP16_COMPRESS: ``compression="fp16"``."""
        self._refuse_second_hook()
        self._refuse_beside_compression()
        name = str(comm_hook_type).rpartition(".")[2]
        if name not in ("ALLREDUCE", "FP16_COMPRESS"):
            raise ValueError(f"{_WHO}: unknown built-in hook {comm_hook_type}")
        self._builtin_hook = comm_hook_type
        if name == "FP16_COMPRESS":
            self._builtin_compression = "fp16"
        self._set_up()
