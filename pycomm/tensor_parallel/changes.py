"""What parallelizing does to modules, as data: planned for the whole model first, then done, or undone.

A style (``styles.py``) answers with changes; nothing is touched before all of a plan's are known to be
possible, and when one fails all the same (no memory), those before it are taken back, last first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pycomm.communicator import Communicator
from pycomm.tensor_parallel.parameters import _ATTRIBUTE, mark_sharded
from pycomm.tensor_parallel.shards import Split
from pycomm.tensor_parallel.swapped import How, Swapped, swapped_class

__all__ = ["AddHook", "Change", "ChangeClass", "SetAttribute", "ShardParameter", "Undo"]

Undo = Callable[[], Any]


@dataclass(frozen=True)
class ShardParameter:
    """A module's own parameter becomes this rank's shard of it, everywhere where it is used."""

    module: nn.Module
    name: str
    dim: int
    split: Split
    comm: Communicator

    def do(self, made: dict[int, nn.Parameter]) -> list[Undo]:
        """``made`` has the shard by the id of the whole, so that tied parameters stay tied."""
        whole = self.module._parameters[self.name]
        assert whole is not None
        shard = made.get(id(whole))
        if shard is None:
            shard = made[id(whole)] = self._shard_of(whole)
        notes = self.module.__dict__.pop(_ATTRIBUTE, None)

        def undo() -> None:
            self.module._parameters[self.name] = whole
            self.module.__dict__.pop(_ATTRIBUTE, None)
            if notes is not None:
                self.module.__dict__[_ATTRIBUTE] = notes

        if notes is not None:
            self.module.__dict__[_ATTRIBUTE] = notes
        self.module._parameters[self.name] = shard
        mark_sharded(self.module, self.name, self.dim, self.split, self.comm)
        return [undo]

    @torch.no_grad()
    def _shard_of(self, whole: nn.Parameter) -> nn.Parameter:
        rank = self.comm.rank
        part = self.split.take(whole.detach(), self.dim, rank).clone(memory_format=torch.contiguous_format)
        shard = nn.Parameter(part, requires_grad=whole.requires_grad)
        shard.__dict__.update(whole.__dict__)  # marks of other libraries
        if whole.grad is not None:
            shard.grad = self.split.take(whole.grad, self.dim, rank).clone()
        return shard


@dataclass(frozen=True)
class ChangeClass:
    """A module's class becomes one with ``mixin`` before it."""

    module: nn.Module
    mixin: type[Swapped]
    how: How

    def do(self, made: dict[int, nn.Parameter]) -> list[Undo]:
        own, before = type(self.module), self.module.__dict__.get("_parallel")
        self.module.__class__ = swapped_class(self.mixin, own)
        self.module.__dict__["_parallel"] = self.how

        def undo() -> None:
            self.module.__class__ = own
            self.module.__dict__.pop("_parallel", None)
            if before is not None:
                self.module.__dict__["_parallel"] = before

        return [undo]


@dataclass(frozen=True)
class SetAttribute:
    """A module's attribute gets the value that it has on this rank."""

    module: nn.Module
    name: str
    value: Any

    def do(self, made: dict[int, nn.Parameter]) -> list[Undo]:
        before = getattr(self.module, self.name)
        setattr(self.module, self.name, self.value)
        return [lambda: setattr(self.module, self.name, before)]


@dataclass(frozen=True)
class AddHook:
    """A module's inputs or outputs pass through ``hook``."""

    module: nn.Module
    hook: Callable[..., Any]
    is_input: bool

    def do(self, made: dict[int, nn.Parameter]) -> list[Undo]:
        if self.is_input:
            return [self.module.register_forward_pre_hook(self.hook, with_kwargs=True).remove]
        return [self.module.register_forward_hook(self.hook).remove]


Change = ShardParameter | ChangeClass | SetAttribute | AddHook
