"""torch's functions that ask for the backend's name or class, and would leave pycomm's groups out.

``monitored_barrier`` refuses every backend but gloo, ``_set_pg_timeout`` (torchtitan calls it) knows gloo and
NCCL, ``split_group`` wants an accelerator. In their place pycomm puts functions that serve pycomm's groups
and hand all others on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["serve_in"]


def _serve(
    c10d: ModuleType,
    package: ModuleType | None,
    name: str,
    ours: Callable[..., Any],
    place: int = 0,
    word: str = "group",
) -> None:
    """Has ``ours(group, *arguments)`` called for pycomm's groups.

    Args:
        c10d, package: torch's module and package.
        name: of torch's function.
        ours: in its place.
        place, word: of the group among its arguments, and its name.
    """
    theirs: Callable[..., Any] | None = getattr(c10d, name, None)
    if theirs is None:  # another torch
        return

    @functools.wraps(theirs)
    def either(*arguments: Any, **named: Any) -> Any:
        group = arguments[place] if len(arguments) > place else named.get(word)
        used = c10d.GroupMember.WORLD if group is None else group
        if getattr(used, "_is_pycomms", False):
            c10d.get_backend(used)  # raises torch's error for a group that was destroyed
            rest = [a for i, a in enumerate(arguments) if i != place]
            named.pop(word, None)
            return ours(used, *rest, **named)
        return theirs(*arguments, **named)

    setattr(c10d, name, either)
    if package is not None and getattr(package, name, None) is theirs:
        setattr(package, name, either)


def serve_in(c10d: ModuleType, package: ModuleType | None) -> None:
    """Puts the functions into torch's module, and into its package where that has them already."""

    def monitored_barrier(group: Any, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        group.monitored_barrier(timeout, wait_all_ranks)

    _serve(c10d, package, "monitored_barrier", monitored_barrier)
    _serve(c10d, package, "_set_pg_timeout", lambda group, timeout: group.set_timeout(timeout), place=1)

    def split(group: Any, *arguments: Any, **named: Any) -> Any:
        from pycomm.torch_backend.split import split_group

        return split_group(group, *arguments, **named)

    _serve(c10d, package, "split_group", split, word="parent_pg")
