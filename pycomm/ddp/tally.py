"""What the parameters' hooks do: count. This is the only code of ours that runs for every gradient.

The counting itself is in C (csrc/bind/tally.cc): which gradients came, in which order and how often, and how
many each bucket still awaits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from pycomm import _C

if TYPE_CHECKING:
    from pycomm.ddp.reducer import Reducer

__all__ = ["IDLE", "LOCAL", "REDUCING", "make_tally"]

IDLE, REDUCING, LOCAL = 0, 1, 2
"""No backward is under way; one that averages; one within no_sync."""


def make_tally(owner: Reducer) -> _C.Tally:
    """A tally that calls ``owner.begin`` and ``owner.bucket_complete``, and does not keep it alive."""
    alive = weakref.ref(owner)

    def tells(what: Callable[[Reducer], None]) -> Callable[[], None]:
        def tell() -> None:
            reducer = alive()
            if reducer is not None:
                what(reducer)

        return tell

    return _C.Tally(tells(lambda reducer: reducer.begin()), tells(lambda reducer: reducer.bucket_complete()))
