"""Methods that ``torch.compile`` neither compiles nor follows into what they call.

Dynamo compiles every Python frame that runs inside a compiled one, also where torch calls a process group
from C++ (the reducer, in the backward of a compiled model), and stumbles over a group's attributes.
``NotTraced`` leaves out the method itself; this one, while Dynamo is at work, all that it calls as well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from pycomm.ddp.not_traced import NotTraced

_eval_frame = torch._C._dynamo.eval_frame

__all__ = ["Untraced"]


class Untraced(NotTraced):
    """A method that Dynamo runs as it is, with all that it calls; usable as a decorator."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._disabled: Callable[..., Any] | None = None

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is not None and "torch._dynamo" not in sys.modules:
            return MethodType(self._function, instance)
        method = super().__get__(instance, owner)
        dynamo = sys.modules.get("torch._dynamo.decorators")
        if instance is None or dynamo is None or _eval_frame.get_eval_frame_callback() is None:
            return method
        if self._disabled is None:
            self._disabled = dynamo.disable(self._function)
        return MethodType(self._disabled, instance)
