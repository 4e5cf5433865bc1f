"""``torch.distributed._coalescing_manager(device=…)``: the calls made inside have one handle.

torch itself turns the all_reduces, all_gathers and reduce_scatters of a manager into one coalesced call, with
or without a device. With one it also asks the group to begin and to end; what is called in between (also
sends, receives, broadcasts) is made at once here, and the end gives the work of all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pycomm.torch_backend.works import Done, Pending

__all__ = ["Coalescing"]


class Coalescing:
    """A group whose works, all made by ``_make`` and ``_transfer``, can be collected.

    Both are shadowed on the group for as long, so that other calls pay nothing for it.
    """

    def _start_coalescing(self, device: Any) -> None:
        """For torch. One whose end never came, for an error inside of the manager, is forgotten."""
        self.__dict__.pop("_make", None)
        self.__dict__.pop("_transfer", None)
        collected: list[Done | Pending] = []

        def collecting(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                work = method(*arguments)
                collected.append(work)
                return work

            return call

        group: Any = self
        make, transfer = collecting(group._make), collecting(group._transfer)
        self.__dict__.update(_make=make, _transfer=transfer, _collected=collected)

    def _end_coalescing(self, device: Any) -> Done | Pending:
        """For torch: the work of all calls since the start.

        Raises:
            RuntimeError: there was no start.
        """
        collected = self.__dict__.pop("_collected", None)
        if collected is None:
            raise RuntimeError("_end_coalescing: there was no _start_coalescing before it")
        del self.__dict__["_make"], self.__dict__["_transfer"]
        works = [work for each in collected if isinstance(each, Pending) for work in each.works]
        outputs = [tensor for each in collected for tensor in each.result()]
        return Pending(works, outputs) if works else Done(outputs)
