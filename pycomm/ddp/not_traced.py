"""Methods that ``torch.compile`` leaves alone, compiling only what they call."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar, cast

__all__ = ["NotTraced"]


class NotTraced:
    """A method that Dynamo runs as it is, compiling only what it calls; usable as a decorator.

    Dynamo must be told of each code object, and importing it takes a second. So this tells it when the
    method is looked up and somebody else has imported Dynamo: ``torch.compile(ddp)`` does both before the
    first call.
    """

    _waiting: ClassVar[list[Callable[..., Any]]] = []

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        cast(Any, function)._torchdynamo_disable = True
        self._waiting.append(function)
        functools.update_wrapper(cast(Any, self), function)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if self._waiting and "torch._dynamo" in sys.modules:
            from torch._dynamo.decorators import skip

            while self._waiting:
                skip(self._waiting.pop())
        return self._function if instance is None else MethodType(self._function, instance)
