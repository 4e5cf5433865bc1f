"""The end of a backward: autograd calls it, or drops it where an exception has ended the backward.

What is given to autograd's ``queue_callback`` is called when a backward is over and all went well; after an
exception it is let go uncalled. So an *ending* that goes uncalled tells that its backward broke, at once: the
next backward must not take the broken one's place, for the other ranks wait for the end of that one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["queue_end"]


def queue_end(end: Callable[[], None], broke: Callable[[], None]) -> None:
    """Has ``end`` called when the outermost backward is over, or ``broke`` when an exception ended it.

    To be called within a backward. ``broke`` may come late, when the graph of a reentrant checkpoint goes.
    """
    torch.autograd.Variable._execution_engine.queue_callback(_Ending(end, broke))


class _Ending:
    def __init__(self, end: Callable[[], None], broke: Callable[[], None]) -> None:
        self._end = end
        self._broke = broke
        self._is_over = False

    def __call__(self) -> None:
        if not _defer(self):
            self._is_over = True
            self._end()

    def __del__(self) -> None:
        if not self._is_over:
            self._broke()


def _defer(end: Callable[[], None]) -> bool:
    """Within another backward (a reentrant checkpoint), ``end`` is put off to that one's end.

    autograd has no list of the backwards under way, but the node that runs this one is still being evaluated
    when it ends; the nodes after that node belong to the outer backward, and the first to run queues ``end``.
    """
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return False
    handles: list[Any] = []

    def queue(*_: Any) -> None:
        if handles:
            torch.autograd.Variable._execution_engine.queue_callback(end)
            for handle in handles:
                handle.remove()
            handles.clear()

    handles.extend(following.register_prehook(queue) for following, _ in node.next_functions if following)
    return bool(handles)
