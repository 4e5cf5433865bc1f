"""A class for each schedule of the catalog (schedule/catalog.py), with torch's name where torch has it."""

from __future__ import annotations

from pycomm.pipeline.schedule.catalog import CATALOG
from pycomm.pipeline.schedules import PipelineSchedule

__all__ = [
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleEager1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "ScheduleZeroBubbleH1",
    "ScheduleZeroBubbleH2",
    "get_schedule_class",
]


class ScheduleGPipe(PipelineSchedule):
    """All forwards, all backwards."""

    schedule_name = "GPipe"


class Schedule1F1B(PipelineSchedule):
    """A forward, a backward: PipeDream-flush."""

    schedule_name = "1F1B"


class ScheduleEager1F1B(PipelineSchedule):
    """1F1B further ahead, for slow links."""

    schedule_name = "Eager1F1B"


class ScheduleInterleaved1F1B(PipelineSchedule):
    """1F1B with several stages on a rank, in a loop."""

    schedule_name = "Interleaved1F1B"


class ScheduleLoopedBFS(PipelineSchedule):
    """GPipe with several stages on a rank, in a loop."""

    schedule_name = "LoopedBFS"


class ScheduleZeroBubbleH1(PipelineSchedule):
    """Weight gradients fill the gaps of 1F1B, in its memory."""

    schedule_name = "ZeroBubbleH1"


class ScheduleZeroBubbleH2(PipelineSchedule):
    """No gaps, for twice the memory."""

    schedule_name = "ZeroBubbleH2"


class ScheduleInterleavedZeroBubble(PipelineSchedule):
    """H1 with several stages on a rank, in a loop."""

    schedule_name = "InterleavedZeroBubble"


class ScheduleZBVZeroBubble(PipelineSchedule):
    """Two stages on a rank in a V: rank r of p holds stages r and 2 p - 1 - r."""

    schedule_name = "ZBVZeroBubble"


class ScheduleDualPipeV(PipelineSchedule):
    """Stages as in ZBV, forwards beside backwards."""

    schedule_name = "DualPipeV"


_CLASSES = {
    made.schedule_name.lower(): made
    for made in (
        ScheduleGPipe,
        Schedule1F1B,
        ScheduleEager1F1B,
        ScheduleInterleaved1F1B,
        ScheduleLoopedBFS,
        ScheduleZeroBubbleH1,
        ScheduleZeroBubbleH2,
        ScheduleInterleavedZeroBubble,
        ScheduleZBVZeroBubble,
        ScheduleDualPipeV,
    )
}


def get_schedule_class(schedule_name: str) -> type[PipelineSchedule]:
    """The class of a schedule by its name, in upper or lower case.

    Raises:
        ValueError: there is none of that name.

    Example:
        >>> get_schedule_class("1f1b").__name__
        'Schedule1F1B'
    """
    if schedule_name.lower() == "pipedream2bw":
        from pycomm.pipeline.two_versions import SchedulePipeDream2BW  # which is made of this file's

        return SchedulePipeDream2BW
    found = _CLASSES.get(schedule_name.lower())
    if found is None:
        names = ", ".join([*CATALOG, "PipeDream2BW"])
        raise ValueError(f"there is no pipeline schedule {schedule_name!r}; there are {names}")
    return found
