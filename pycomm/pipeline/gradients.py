"""What is said of all gradients of a pipeline together: their norm, whether one is not finite.

A norm over one stage's gradients says nothing of the model's: clipped by it, stages would be scaled
differently, and the step would point elsewhere. Here each parameter of the model counts once: a weight that
is tied between stages in its first place, a tensor-parallel shard and a replicated parameter as
:mod:`pycomm.tensor_parallel.gradients` has them. Data-parallel replicas hold the same gradients and need not
be asked. Every rank gets the same norm, so that all scale alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from pycomm.tensor_parallel import gradients
from pycomm.tensor_parallel.parameters import check_notes

if TYPE_CHECKING:
    from pycomm.pipeline.schedules import PipelineSchedule

__all__ = ["clip_grad_norm_", "has_overflow"]


def _parameters(schedule: PipelineSchedule, who: str) -> list[Tensor]:
    for stage in schedule.stages:
        check_notes(who, stage.submod)
    return [parameter for stage in schedule.stages for parameter in stage.submod.parameters()]


def clip_grad_norm_(
    schedule: PipelineSchedule,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    mesh: Any = None,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` of the whole model, after ``schedule.step``.

    Collective over the pipeline's ranks, and over the tensor-parallel ones.

    Args:
        schedule: whose stages' gradients.
        max_norm: what the norm is cut down to.
        norm_type: p of the p-norm, above 0; ``math.inf`` is the largest magnitude.
        error_if_nonfinite: raise, on every rank, where the norm is NaN or infinite.
        mesh: the tensor-parallel ranks, where some stage has no shards that would say them.

    Returns:
        The norm, float64 without dimensions, the same on every rank.

    Raises:
        RuntimeError: the norm is not finite, when asked.
        ValueError: ``norm_type`` is not above 0.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pycomm.pipeline import PipelineStage, ScheduleGPipe
        >>> stage = PipelineStage(nn.Linear(1, 1, bias=False), 0, 1)
        >>> schedule = ScheduleGPipe(stage, 1, loss_fn=lambda y, t: 5 * y.sum() / y.numel())
        >>> output = schedule.step(torch.ones(4, 1), target=torch.zeros(4, 1))
        >>> float(clip_grad_norm_(schedule, max_norm=1.0))
        5.0
    """
    return gradients.clip_grad_norm_(
        _parameters(schedule, "clip_grad_norm_"),
        max_norm,
        norm_type,
        error_if_nonfinite,
        mesh=mesh,
        pipeline_group=schedule.communicator,
        counted_elsewhere=[parameter for tie in schedule.ties for parameter in tie.repeated],
    )


def has_overflow(schedule: PipelineSchedule, *, mesh: Any = None) -> bool:
    """Whether some gradient of the model has an element that is not finite; the same on every rank.

    Collective over the pipeline's ranks, and over the tensor-parallel ones.

    Args:
        schedule, mesh: as for :func:`clip_grad_norm_`.
    """
    given = _parameters(schedule, "has_overflow")
    return gradients.has_overflow(given, mesh=mesh, pipeline_group=schedule.communicator)
