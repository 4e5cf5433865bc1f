"""What crosses between hosts or GPUs as codes, and what these lose: ``compression=``, ``error_feedback=``.

csrc/engine/compressed.h and csrc/engine/cuda/nccl_rounds.h have the steps, docs/numerics.md the bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pycomm import arguments
from pycomm.placement import cuda_index
from pycomm.staging import Tensors

__all__ = ["COMPRESSIONS", "ErrorFeedback", "options"]

COMPRESSIONS = {"fp16": 1, "bf16": 2, "fp8": 3, "int8": 4}
"""Compression of csrc/engine/call.h."""


class ErrorFeedback:
    """What compression has lost of one vector on this rank so far; the next call sends it, too.

    With it, the sum of the results of any number of calls on a slowly changing vector is as exact as one of
    them; without, each call's error may be the same, and add up. Give every vector that is reduced again and
    again (a bucket of gradients) one of its own, and always the same kind of call. Costs 4 bytes an element,
    and those only where this rank carries the vector between hosts, or the vector is on a GPU; nothing for
    CPU tensors on one host. A call that raises may have taken from it what then did not arrive: that is lost,
    at most what one call loses.

    Args:
        residual: where it is kept: a contiguous float32 tensor of as many elements as the vector, on the
            vector's device, the CPU or CUDA; None: memory of its own, with the first call that needs it.

    Raises:
        TypeError: ``residual`` is no such tensor.

    Source: F. Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; S. P. Karimireddy et al. 2019, "Error
    Feedback Fixes SignSGD and other Gradient Compression Schemes".

    Example:
        >>> import pycomm, torch
        >>> comm, feedback = pycomm.init(), pycomm.ErrorFeedback()
        >>> comm.all_reduce(torch.ones(3), "avg", compression="int8", error_feedback=feedback)
        tensor([1., 1., 1.])
    """

    def __init__(self, residual: torch.Tensor | None = None) -> None:
        if residual is not None and not _is_vector(residual):
            raise TypeError(
                "ErrorFeedback: residual must be a contiguous float32 tensor on the CPU or on CUDA, "
                f"got {arguments.short(residual)}"
            )
        #: float32, in the order of the vector; None before the first call that needs it.
        self.residual: torch.Tensor | None = residual

    def vector(self, name: str, n_elems: int, device: torch.device) -> torch.Tensor:
        """The residual of a vector of ``n_elems`` elements on ``device``, zeros at first, for a collective.

        One that is elsewhere (from a checkpoint) is copied there.

        Args:
            name: the collective's.
            n_elems, device: the vector's.

        Raises:
            ValueError: it is already that of another number of elements.
        """
        if self.residual is None:
            self.residual = torch.zeros(n_elems, device=device)
        if self.residual.device != device:  # from a checkpoint, say
            self.residual = self.residual.to(device)
        if self.residual.numel() != n_elems:
            raise ValueError(
                f"{name}: error_feedback keeps the residual of {self.residual.numel()} elements, the vector "
                f"has {n_elems}; give each vector one of its own, or reset() it"
            )
        return self.residual

    def reset(self) -> None:
        """Forgets all that was lost; the next call may be on another number of elements."""
        self.residual = None

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of the residual, for this rank's checkpoint; empty before the first call that needs one."""
        return {} if self.residual is None else {"residual": self.residual.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what :meth:`state_dict` gave on this rank, with the same ranks on the same hosts.

        Raises:
            TypeError: it holds something else than a float32 tensor on the CPU or on CUDA.
        """
        residual = state.get("residual")
        if residual is not None and not (isinstance(residual, torch.Tensor) and _is_vector(residual)):
            raise TypeError(
                "ErrorFeedback.load_state_dict: residual must be a contiguous float32 tensor on the CPU or "
                f"on CUDA, got {arguments.short(residual)}"
            )
        self.residual = None if residual is None else residual.clone()


def _is_vector(t: torch.Tensor) -> bool:
    return t.dtype is torch.float32 and t.device.type in ("cpu", "cuda") and t.is_contiguous()


def options(
    name: str, compression: Any, feedback: Any, vector: Tensors | None, size: int, several_hosts: bool
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """The core's options of a call with one of the two, and the memory that must live as long as the call.

    Args:
        name: the collective's.
        compression, feedback: as the caller gave them.
        vector: the whole vector.
        size: how many ranks there are; with one nothing is lost.
        several_hosts: otherwise nothing is lost on the CPU, and nothing kept.

    Raises:
        TypeError: ``feedback`` is no ErrorFeedback.
        ValueError: an unknown compression; feedback without compression; that of a vector of another size.
    """
    if compression is not None and not (isinstance(compression, str) and compression in COMPRESSIONS):
        known = ", ".join(f"'{known}'" for known in COMPRESSIONS)
        raise ValueError(
            f"{name}: compression must be one of {known} or None, got {arguments.short(compression)}"
        )
    if feedback is not None:
        arguments.instance(f"{name}: error_feedback", feedback, ErrorFeedback, "a pycomm.ErrorFeedback")
        if compression is None:
            raise ValueError(
                f"{name}: error_feedback is of what a compression loses: give compression as well"
            )
    chosen: dict[str, Any] = {"compression": COMPRESSIONS[compression]}
    tensors: Sequence[Any] = vector if isinstance(vector, (list, tuple)) else [vector]
    are_tensors = all(isinstance(t, torch.Tensor) for t in tensors)  # otherwise the core says what is wrong
    if feedback is None or size == 1 or not tensors or not are_tensors:
        return chosen, None
    if not several_hosts and cuda_index(tensors[0]) < 0:
        return chosen, None
    residual: torch.Tensor = feedback.vector(name, sum(t.numel() for t in tensors), tensors[0].device)
    chosen["residual"] = (residual.data_ptr(), residual.numel())
    return chosen, residual
