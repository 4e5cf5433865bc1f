"""Pipeline parallelism: a deep model in stages on ranks, all of them busy.

schedule/ holds what a rank does and when, as data; runtime.py executes it with stage.py (one stage's
forwards and backwards, backward.py in halves) and post.py (messages of any shape, messages.py their
contents); schedules.py is what users call, microbatches.py cuts a batch, losses.py weighs the parts'
losses, named.py has torch's classes, two_versions.py the one that never flushes.
checks.py refuses, watch.py says who waits for whom, wire.py makes messages smaller,
timeline.py tells what a step took.
layers.py cuts a list of layers into stages, as partition.py finds best; split.py any model, which tracing.py
traces around the cuts. checkpoint.py computes activations again, batch_norm.py keeps running statistics.
With other kinds of parallelism: group.py, replicas.py (data parallelism around stages), gradients.py
(clipping), state_dict.py (checkpoints that load at any cut).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pycomm.pipeline.batch_norm import convert_deferred_batch_norm
    from pycomm.pipeline.checkpoint import is_recomputing
    from pycomm.pipeline.gradients import clip_grad_norm_, has_overflow
    from pycomm.pipeline.layers import LayerSpec, Plan, TiedLayerSpec, plan
    from pycomm.pipeline.named import (
        Schedule1F1B,
        ScheduleDualPipeV,
        ScheduleEager1F1B,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleLoopedBFS,
        ScheduleZBVZeroBubble,
        ScheduleZeroBubbleH1,
        ScheduleZeroBubbleH2,
        get_schedule_class,
    )
    from pycomm.pipeline.schedule.order import Order
    from pycomm.pipeline.schedules import PipelineSchedule
    from pycomm.pipeline.skips import pop, stash
    from pycomm.pipeline.split import Pipe, pipeline
    from pycomm.pipeline.stage import PipelineStage
    from pycomm.pipeline.state_dict import (
        load_sharded_optimizer_state_dict,
        sharded_optimizer_state_dict,
        sharded_state_dict,
    )
    from pycomm.pipeline.tracing import SplitPoint, pipe_split
    from pycomm.pipeline.two_versions import SchedulePipeDream2BW
    from pycomm.pipeline.watch import LateWarning

__all__ = [
    "LateWarning",
    "LayerSpec",
    "Order",
    "Pipe",
    "Plan",
    "PipelineSchedule",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleEager1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "SchedulePipeDream2BW",
    "ScheduleZBVZeroBubble",
    "ScheduleZeroBubbleH1",
    "ScheduleZeroBubbleH2",
    "SplitPoint",
    "TiedLayerSpec",
    "convert_deferred_batch_norm",
    "clip_grad_norm_",
    "get_schedule_class",
    "is_recomputing",
    "has_overflow",
    "load_sharded_optimizer_state_dict",
    "pipe_split",
    "pipeline",
    "plan",
    "pop",
    "sharded_optimizer_state_dict",
    "sharded_state_dict",
    "stash",
]

# torch is imported with the first name that needs it: the command line has schedules without it.
_LATER = {
    "convert_deferred_batch_norm": "pycomm.pipeline.batch_norm",
    "is_recomputing": "pycomm.pipeline.checkpoint",
    "LayerSpec": "pycomm.pipeline.layers",
    "Plan": "pycomm.pipeline.layers",
    "TiedLayerSpec": "pycomm.pipeline.layers",
    "plan": "pycomm.pipeline.layers",
    "clip_grad_norm_": "pycomm.pipeline.gradients",
    "has_overflow": "pycomm.pipeline.gradients",
    "load_sharded_optimizer_state_dict": "pycomm.pipeline.state_dict",
    "sharded_optimizer_state_dict": "pycomm.pipeline.state_dict",
    "sharded_state_dict": "pycomm.pipeline.state_dict",
    "Pipe": "pycomm.pipeline.split",
    "LateWarning": "pycomm.pipeline.watch",
    "Order": "pycomm.pipeline.schedule.order",
    "PipelineSchedule": "pycomm.pipeline.schedules",
    "PipelineStage": "pycomm.pipeline.stage",
    "SchedulePipeDream2BW": "pycomm.pipeline.two_versions",
    "SplitPoint": "pycomm.pipeline.tracing",
    "pipe_split": "pycomm.pipeline.tracing",
    "pipeline": "pycomm.pipeline.split",
    "pop": "pycomm.pipeline.skips",
    "stash": "pycomm.pipeline.skips",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pycomm.pipeline' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER.get(name, "pycomm.pipeline.named")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
