"""A work that Python hands over to torch's reducer lives on there.

DDP's ``join(divide_by_initial_world_size=False)`` gives the reducer the handle of an all_reduce that counts
the ranks with inputs left, and forgets it. The reducer, which is C++, keeps the C++ half of the handle only:
of a work written in Python nothing would be left that can wait, and the backward would never end. (Works that
C++ gets as results of our methods, or through ``_register_work``, are kept whole by torch itself.)
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

__all__ = ["keep_works"]

_kept: weakref.WeakKeyDictionary[Any, Any] = (
    weakref.WeakKeyDictionary()
)  #: a reducer's handle, as in the reducer


def keep_works() -> None:
    """Has torch's reducers keep their handles whole; to be called once, when torch.distributed is there."""
    from torch._C import _distributed_c10d as bindings

    reducers: Any = bindings.Reducer
    theirs = getattr(reducers, "_set_forward_pass_work_handle", None)
    if theirs is None:  # another torch
        return

    @functools.wraps(theirs)
    def set_forward_pass_work_handle(reducer: Any, work: Any, use_static_world_size: bool) -> None:
        theirs(reducer, work, use_static_world_size)
        _kept[reducer] = work  # in the place of the last one, as over there

    reducers._set_forward_pass_work_handle = set_forward_pass_work_handle
