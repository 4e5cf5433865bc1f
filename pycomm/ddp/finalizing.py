"""Averaging what gradients hold now, outside of any backward: at once, or beside other work.

Pipelines need it: the gradients of a stage come from many backwards, some in halves, and are complete long
before the step is over. What travels, and what ranks agree on at the end, is as at the end of a backward
(pycomm/ddp/reducer.py).
"""

from __future__ import annotations

import torch

from pycomm.ddp.reducer import Reducer

__all__ = ["Finalizing", "Reduction"]


class Reduction:
    """A reduction of all gradients of one wrapper, under way; :meth:`DistributedDataParallel.begin_reduction`
    makes it.
    """

    def __init__(self, reducer: Reducer | None) -> None:
        self._reducer = reducer

    def wait(self) -> None:
        """Returns when every ``p.grad`` holds the average. Collective; at most once.

        Raises:
            RuntimeError: on every rank: a parameter has no gradient, as in ``backward``.
        """
        reducer, self._reducer = self._reducer, None
        if reducer is not None:
            reducer.finish()


class Finalizing:
    """The part of the wrapper that averages on demand."""

    _reducer: Reducer | None
    _share: float | None

    def finalize_backward(self) -> None:
        """Averages what ``p.grad`` holds now, outside of any backward. Collective.

        For pipelines, retained graphs and several losses: run all backwards within :meth:`no_sync`, or set
        the gradients yourself, then call this once. Averaging what is averaged already changes nothing.

        Raises:
            RuntimeError: on every rank: a parameter has no gradient, as in ``backward``.

        Example:
            >>> import pycomm, torch
            >>> comm = pycomm.init()
            >>> model = pycomm.DistributedDataParallel(torch.nn.Linear(8, 2), communicator=comm)
            >>> with model.no_sync():
            ...     model(torch.ones(4, 8)).sum().backward()
            >>> model.finalize_backward()
        """
        self._check_is_outside("finalize_backward")
        if self._reducer is not None:
            self._reducer.begin_now(self._share)
            self._reducer.finish()

    def begin_reduction(self) -> Reduction:
        """As :meth:`finalize_backward`, and returns while gradients travel. Collective, as is its ``wait``.

        Until it has been waited for, gradients must not change and no other backward may be averaged.

        Example:
            >>> import pycomm, torch
            >>> comm = pycomm.init()
            >>> model = pycomm.DistributedDataParallel(torch.nn.Linear(8, 2), communicator=comm)
            >>> with model.no_sync():
            ...     model(torch.ones(4, 8)).sum().backward()
            >>> reduction = model.begin_reduction()
            >>> reduction.wait()  # after other work
        """
        self._check_is_outside("begin_reduction")
        if self._reducer is not None:
            self._reducer.begin_now(self._share, asynchronously=True)
        return Reduction(self._reducer)

    def _abandon_reduction(self) -> None:
        """After an exception in what should have led to a reduction: the next forward tells the others."""
        if self._reducer is not None:
            self._reducer.abandon()

    def _check_is_outside(self, name: str) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"DistributedDataParallel.{name}: call it when backward is over, not within it"
            )
