"""Which ranks have a model's stages: what the ``group`` of a PipelineStage may be."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from pycomm.communicator import Communicator
from pycomm.tensor_parallel.group import (
    communicator_of,
    get_pipeline_model_parallel_group,
    model_parallel_is_initialized,
)

__all__ = ["pipeline_communicator"]


def pipeline_communicator(group: Any = None) -> Communicator:
    """The communicator that a stage's ``group`` means; collective where it is the first use of a torch group.

    Args:
        group: a Communicator, a torch process group, a DeviceMesh of one dimension or with one that is called
            "pp", or None: the pipeline-parallel ranks of ``initialize_model_parallel``, else all ranks.

    Raises:
        ValueError: a mesh of several dimensions, none of which is called "pp".
        TypeError: it is none of these.

    Example:
        >>> pipeline_communicator().size
        1
    """
    if group is None and model_parallel_is_initialized():
        return get_pipeline_model_parallel_group()
    if isinstance(group, DeviceMesh) and group.ndim > 1:
        names = group.mesh_dim_names or ()
        if "pp" not in names:
            raise ValueError(
                f"PipelineStage: group: the mesh has {group.ndim} dimensions, {names or 'without names'}, "
                "and none is called 'pp'; give the one of the pipeline's ranks, such as mesh['stages']"
            )
        group = group["pp"]
    return communicator_of(group, who="PipelineStage: group")
