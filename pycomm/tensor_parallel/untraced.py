"""Functions that ``torch.compile`` neither compiles nor follows into what they call: a graph break each.

``torch.compiler.disable`` does that too, but imports Dynamo, which takes a second, where it decorates. This
asks it only once somebody else has imported Dynamo.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

__all__ = ["untraced"]

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that communicates.

    Example:
        >>> untraced(abs)(-1)
        1
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        dynamo = sys.modules.get("torch._dynamo.decorators")
        if dynamo is None:
            return function(*args, **kwargs)
        if not disabled:
            dynamo.skip(call)  # this frame itself, which it would compile anew for each function
            disabled.append(dynamo.disable(function))
        return cast("R", disabled[0](*args, **kwargs))

    cast(Any, call)._torchdynamo_disable = True
    return call
