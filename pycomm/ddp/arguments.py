"""The arguments of ``DistributedDataParallel``: what they mean, which are refused, whose ranks they name."""

from __future__ import annotations

import inspect
import math
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _get_device_index
from torch.nn.parallel import DistributedDataParallel as Torchs

from pycomm.communicator import Communicator
from pycomm.ddp.error_feedback import ErrorFeedback
from pycomm.ddp.mixed_precision import fault_of_precision, reduction
from pycomm.ddp.plan import Overlap, Settings
from pycomm.ddp.structure import is_refused
from pycomm.ddp.sync_batch_norm import has_sync_batch_norm
from pycomm.ddp.wire import WIRE_DTYPES
from pycomm.initialize import init
from pycomm.placement import cuda_index

__all__ = ["Arguments", "communicator_for", "first_fault", "group_for", "settings_from"]

OVERLAP_VARIABLE = "PYCOMM_DDP_OVERLAP"
FIRST_BUCKET_BYTES = 1 << 20
_WHO = "DistributedDataParallel"
_MIB = 1 << 20


@dataclass
class Arguments:
    """What the constructor was given and the wrapper does not keep as attributes of its own."""

    bucket_cap_mb: float | None
    bucket_cap_mb_list: list[float] | None
    compression: Any
    error_feedback: bool
    overlap: str
    device_ids: Any
    output_device: Any
    delayed: list[tuple[str, nn.Parameter]]
    param_to_hook_all_reduce: nn.Parameter | None
    mixed_precision: Any
    check_every: int


def group_for(process_group: Any, device_mesh: Any, communicator: Any) -> Any:
    """The torch group that the arguments name, or the default group, or None where torch has none.

    Raises:
        RuntimeError: two of the three are given, or the mesh has several dimensions.
        TypeError: ``communicator`` is something else.
    """
    if process_group is not None and device_mesh is not None:
        raise RuntimeError(f"{_WHO}: Cannot specify both process_group and device_mesh arguments.")
    if communicator is not None:
        if not isinstance(communicator, Communicator):
            raise TypeError(
                f"{_WHO}: communicator must be a Communicator or None, got {type(communicator).__name__}"
            )
        if process_group is not None or device_mesh is not None:
            raise RuntimeError(f"{_WHO}: give either communicator or process_group (device_mesh), not both")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"{_WHO}: Only 1D device mesh is supported, but got {device_mesh}.")
        return device_mesh.get_group(mesh_dim=0)
    if process_group is not None:
        return process_group
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def communicator_for(group: Any) -> Communicator:
    """A communicator of the group's ranks; without a group, of all ranks of the job."""
    return init() if group is None else init(group=group)


def first_fault(named: dict[str, nn.Parameter], given: Arguments) -> tuple[type[Exception], str] | None:
    """What is wrong with this rank's arguments, and the exception to raise for it; None when all is well."""
    if given.compression is not None and given.compression not in WIRE_DTYPES:
        known = ", ".join(map(repr, WIRE_DTYPES))
        return ValueError, f"compression must be one of {known} or None, got {given.compression!r}"
    has_codes = given.compression is not None or reduction(given.mixed_precision) is not None
    if given.error_feedback and not has_codes:
        return ValueError, "error_feedback is of what a compression loses: give compression as well"
    for name, caps in (
        ("bucket_cap_mb", [given.bucket_cap_mb] if given.bucket_cap_mb is not None else []),
        ("bucket_cap_mb_list", given.bucket_cap_mb_list or []),
    ):
        for cap in caps:
            if not 0 < cap < math.inf:
                return ValueError, f"{name} must be above 0 and finite, got {cap!r}"
    if given.check_every < 0:
        return ValueError, f"check_consistency_every must be at least 0, got {given.check_every!r}"
    if given.overlap not in get_args(Overlap):
        known = ", ".join(map(repr, get_args(Overlap)))
        return ValueError, f"overlap (or {OVERLAP_VARIABLE}) must be one of {known}, got {given.overlap!r}"
    if bool(given.delayed) != (given.param_to_hook_all_reduce is not None):
        return (
            ValueError,
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.",
        )
    if not any(parameter.requires_grad for parameter in named.values()):
        return (
            RuntimeError,
            "not needed: no parameter of the module requires a gradient, so there is nothing to average",
        )
    if (refused := is_refused(named)) is not None:
        return (RuntimeError if "no shape yet" in refused else ValueError), refused
    place = next(iter(named.values())).device
    if (misplaced := fault_of_devices(place, given.device_ids, given.output_device)) is not None:
        return ValueError, misplaced
    return fault_of_precision(given.mixed_precision, given.compression is not None)


def fault_of_devices(place: torch.device, device_ids: Any, output_device: Any) -> str | None:
    """What is wrong with ``device_ids`` and ``output_device`` for a module on ``place``; None: nothing.

    Example:
        >>> fault_of_devices(torch.device("cuda:0"), [0, 1], None)
        'device_ids can only be None or contain a single element, got [0, 1]'
        >>> fault_of_devices(torch.device("cuda:0"), [0], None) is None
        True
    """
    if not device_ids and output_device is None:
        return None
    if place.type != "cuda":
        return (
            f"device_ids and output_device must be None for a module on the CPU, got {device_ids!r} and "
            f"{output_device!r}"
        )
    if not device_ids or len(device_ids) != 1:
        return f"device_ids can only be None or contain a single element, got {device_ids!r}"
    try:
        inputs, outputs = (index_of(d) for d in (device_ids[0], output_device))
    except (RuntimeError, TypeError, ValueError) as error:
        return f"device_ids and output_device must be CUDA devices: {error}"
    if inputs != place.index:
        return f"device_ids is {device_ids!r}, but the module's parameters are on {place}"
    if outputs is not None and outputs != inputs:
        return f"output_device is {output_device!r}, but the module's outputs are on {place}"
    return None


def index_of(device: Any) -> int | None:
    """The number of a CUDA device, given as torch's wrapper takes it; None stays None."""
    return None if device is None else int(_get_device_index(device, True))


def settings_from(
    given: Arguments, may_be_unused: bool, as_view: bool, default_cap: int, feedback: ErrorFeedback | None
) -> Settings:
    """The reducer's settings; the arguments have no fault. ``default_cap``: bytes where none are given."""
    cap = default_cap if given.bucket_cap_mb is None else int(given.bucket_cap_mb * _MIB)
    compression = given.compression or reduction(given.mixed_precision)
    return Settings(
        first_cap=cap if given.overlap == "end" else min(FIRST_BUCKET_BYTES, cap),
        cap=cap,
        caps=tuple(int(c * _MIB) for c in given.bucket_cap_mb_list or ()),
        may_be_unused=may_be_unused,
        compression=compression,
        feedback=feedback,
        overlap=cast(Overlap, given.overlap),
        as_view=as_view,
    )


def described(given: Arguments, **more: Any) -> str:
    """A line that is equal on ranks that were given the same."""
    fields: dict[str, Any] = {
        "bucket_cap_mb": given.bucket_cap_mb,
        "bucket_cap_mb_list": given.bucket_cap_mb_list,
        **more,
        "compression": given.compression,
        "error_feedback": given.error_feedback,
        "mixed_precision": given.mixed_precision,
        "check_consistency_every": given.check_every,
    }
    return "arguments " + ", ".join(f"{name}={value}" for name, value in fields.items())


def synced_buffers(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether buffers are given to all ranks at the start, and before forwards."""
    if forward_sync_buffers is not None:
        if broadcast_buffers is not None:
            warnings.warn(
                "both broadcast_buffers and forward_sync_buffers are given; broadcast_buffers is ignored",
                FutureWarning,
                stacklevel=3,
            )
        return True, bool(forward_sync_buffers)
    if broadcast_buffers is not None and _torch_deprecates_it():
        warnings.warn(
            "broadcast_buffers is deprecated by torch: use forward_sync_buffers (the start is always synced)",
            FutureWarning,
            stacklevel=3,
        )
    both = True if broadcast_buffers is None else bool(broadcast_buffers)
    return both, both


def _torch_deprecates_it() -> bool:
    return "forward_sync_buffers" in inspect.signature(Torchs.__init__).parameters


def chosen_overlap(overlap: str | None, comm: Communicator, module: nn.Module) -> str:
    """The argument, the environment, or what suits the network, the machine's cores, or the GPU."""
    return overlap or os.environ.get(OVERLAP_VARIABLE) or _default_overlap(comm, module)


def agreed_overlap(comm: Communicator, overlap: str) -> str:
    """The least eager of what the ranks chose: cores, and the environment, may differ. Collective.

    Ranks that differ would have other buckets, and other collectives for the same bucket.
    """
    by_eagerness = get_args(Overlap)
    mine = torch.tensor([by_eagerness.index(overlap)], dtype=torch.int64)
    comm.all_reduce(mine, op="max")
    return str(by_eagerness[int(mine)])


def _default_overlap(comm: Communicator, module: nn.Module) -> Overlap:
    """Inside a host a thread that reduces beside backward pays only where it has a core to itself.

    Between hosts it mostly waits for the network, which needs none; and of gradients on a GPU it only puts
    the reduction on a stream. But a GPU's calls have one order over all communicators, and SyncBatchNorm's in
    backward come before a bucket's on one rank and after it on another, where the ranks' graphs differ.
    """
    if any(cuda_index(p) >= 0 for p in module.parameters()):
        return "end" if has_sync_batch_norm(module) else "async"
    several_hosts = len(set(comm._c.hosts)) > 1
    return "async" if several_hosts or has_a_core_each(comm.size) else "end"


def has_a_core_each(n_local_ranks: int) -> bool:
    """Whether every rank of this host has a second core, for what goes on beside it."""
    return _usable_cores() >= 2 * n_local_ranks


def _usable_cores() -> float:
    """The cores that this process may use: its affinity, or the control group's quota where that is less."""
    cores = float(len(os.sched_getaffinity(0)))
    quota_file = Path("/sys/fs/cgroup/cpu.max")
    if quota_file.is_file():
        quota, _, period = quota_file.read_text().partition(" ")
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    return cores
