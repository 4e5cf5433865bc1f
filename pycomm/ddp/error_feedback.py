"""What compression lost of each parameter's gradient on this rank, and how it gets into checkpoints.

A residual has its parameter's shape and memory order, is float32, and belongs to one rank: a checkpoint keeps
one set for each.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pycomm.ddp.agree import views_of

if TYPE_CHECKING:
    from pycomm.ddp.structure import Structure

__all__ = ["ErrorFeedback", "Feedback"]


class ErrorFeedback:
    """This rank's residuals, float32, by parameter."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[nn.Parameter], Tensor]] = {}
        self._scratch = torch.empty(0)  # of the host: what travels between GPUs needs none

    def vector(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """A flat vector of the residuals of these parameters, from now on the place where they live.

        Each lies in its parameter's memory order; those that are not known yet are zeros. On the device of
        the parameters, which is one.
        """
        # An entry is a view of the vector of its bucket, and would keep all of that.
        self._of = {key: entry for key, entry in self._of.items() if entry[0]() is not None}
        flat = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
        for parameter, view in zip(parameters, views_of(flat, parameters, in_memory_order=True), strict=True):
            before = self._residual_of(parameter)
            if before is not None and before.shape == view.shape:
                view.copy_(before)
            self._of[id(parameter)] = (weakref.ref(parameter), view)
        return flat

    def scratch(self, n_elems: int) -> Tensor:
        """Memory that is shared by all wires, one at a time."""
        if self._scratch.numel() < n_elems:
            self._scratch = torch.empty(n_elems)
        return self._scratch[:n_elems]

    def _residual_of(self, parameter: nn.Parameter) -> Tensor | None:
        found = self._of.get(id(parameter))
        return found[1] if found is not None and found[0]() is parameter else None

    def state_dict(self, named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Copies of the residuals, in the parameters' shapes, by name."""
        found = {name: self._residual_of(parameter) for name, parameter in named.items()}
        return {name: residual.clone() for name, residual in found.items() if residual is not None}

    def load_state_dict(self, state: Mapping[str, Tensor], named: Mapping[str, nn.Parameter]) -> None:
        """Takes residuals; those that ``state`` does not have become zeros. Nothing changes on an error.

        Raises:
            ValueError: a name is unknown, or a residual has another shape than its parameter.
        """
        for name, residual in state.items():
            if name not in named:
                raise ValueError(f"error feedback: no parameter is named '{name}'")
            if residual.shape != named[name].shape:
                raise ValueError(
                    f"error feedback: the residual of '{name}' has the shape {tuple(residual.shape)}, the "
                    f"parameter {tuple(named[name].shape)}"
                )
        for name, parameter in named.items():
            mine = self._residual_of(parameter)
            if mine is None:
                if not parameter.requires_grad and name not in state:
                    continue  # frozen: it has none, unless it is thawed
                mine = torch.zeros(parameter.shape, device=parameter.device)
                self._of[id(parameter)] = (weakref.ref(parameter), mine)
            if name in state:
                mine.copy_(state[name])
            else:
                mine.zero_()


class Feedback:
    """The part of the wrapper that keeps residuals."""

    _given: Any
    _feedback: ErrorFeedback | None
    _residuals: dict[str, Tensor]
    """To be taken up by the next set-up, after a copy."""

    def _look(self) -> Structure:
        raise NotImplementedError  # in pycomm/ddp/wrapper.py

    def _take_up_feedback(self) -> ErrorFeedback | None:
        """What keeps the residuals; also before the first forward after unpickling."""
        if self._given.error_feedback and self._feedback is None:
            self._feedback = ErrorFeedback()
            self._feedback.load_state_dict(self._residuals, self._look().named)
        self._residuals = {}
        return self._feedback

    def error_feedback_state_dict(self) -> dict[str, Tensor]:
        """What compression has lost on this rank so far and the next step will send, by parameter name.

        Save it on every rank beside ``state_dict()``, which is the same on all; empty without
        ``error_feedback``.

        Returns:
            float32 copies in the parameters' shapes; names as in ``module.named_parameters()``.

        Example:
            >>> import pycomm, torch
            >>> model = pycomm.DistributedDataParallel(
            ...     torch.nn.Linear(8, 2), communicator=pycomm.init(), compression="int8", error_feedback=True
            ... )
            >>> saved = model.error_feedback_state_dict()
            >>> model.load_error_feedback_state_dict(saved)
        """
        feedback = self._take_up_feedback()
        return {} if feedback is None else feedback.state_dict(self._look().named)

    def load_error_feedback_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes what :meth:`error_feedback_state_dict` gave on this rank.

        Args:
            state: residuals by name; parameters that it does not have begin anew, with zeros.

        Raises:
            RuntimeError: the wrapper has no ``error_feedback``.
            ValueError: a name is unknown, or a residual has another shape than its parameter; nothing is
                changed.

        Example: see :meth:`error_feedback_state_dict`.
        """
        feedback = self._take_up_feedback()
        if feedback is None:
            raise RuntimeError(
                "DistributedDataParallel.load_error_feedback_state_dict: the wrapper keeps no residuals; "
                "give it error_feedback=True"
            )
        feedback.load_state_dict(state, self._look().named)
