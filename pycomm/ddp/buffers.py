"""Buffers: rank 0's are given to all ranks before a forward, or a hook of the user's does something else.

Only a forward in training mode with gradients gives them, unless the last such forward was within no_sync; so
any rank may evaluate alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pycomm.communicator import Communicator
from pycomm.ddp.agree import broadcast_tensors

__all__ = ["Buffers"]


class Buffers:
    """The part of the wrapper that synchronises buffers."""

    communicator: Communicator
    module: nn.Module
    parameters_to_ignore: set[str]
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    training: bool
    modules_buffers: list[Tensor]
    named_module_buffers: Any

    def _authoritative(self) -> int:
        raise NotImplementedError  # in pycomm/ddp/join.py

    def _assign_modules_buffers(self) -> None:
        self.named_module_buffers = {
            name: buffer
            for name, buffer in self.module.named_buffers()
            if name not in self.parameters_to_ignore
        }
        self.modules_buffers = list(self.named_module_buffers.values())

    def _buffers_now(self) -> list[Tensor]:
        """The buffers, looked up anew: users reassign them."""
        self._assign_modules_buffers()
        return self.modules_buffers

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward in training mode gives rank 0's buffers to all ranks."""
        return bool(self.require_forward_param_sync and self.forward_sync_buffers and self.modules_buffers)

    def _sync_before_forward(self) -> bool:
        if not self.forward_sync_buffers or not self.training or not self.require_forward_param_sync:
            return False
        hook = self.__dict__.get("buffer_hook")
        return hook is None or hook.buffer_comm_hook_location.name == "PRE_FORWARD"

    def _sync_after_forward(self) -> bool:
        hook = self.__dict__.get("buffer_hook")
        is_after = hook is not None and hook.buffer_comm_hook_location.name == "POST_FORWARD"
        return bool(
            is_after and self.forward_sync_buffers and self.training and self.require_forward_param_sync
        )

    def _sync_buffers(self) -> None:
        self._sync_module_buffers(self._authoritative())

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        buffers = self._buffers_now()
        if not buffers:
            return
        hook = self.__dict__.get("buffer_hook")
        if hook is not None:
            futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, self.named_module_buffers)
            if futures is not None:
                for future in futures if isinstance(futures, list) else [futures]:
                    future.wait()
        elif self.communicator.size > 1:
            # BatchNorm's backward in training does not read its running statistics, though it saves them:
            # two forwards before one backward are no mistake there.
            batch_norm = nn.modules.batchnorm._NormBase
            norms = (m for m in self.module.modules() if isinstance(m, batch_norm))
            harmless = {id(buffer) for norm in norms for buffer in norm.buffers()}
            broadcast_tensors(self.communicator, buffers, authoritative_rank, harmless)

    def _distributed_broadcast_coalesced(
        self, tensors: list[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        broadcast_tensors(self.communicator, tensors, authoritative_rank)
