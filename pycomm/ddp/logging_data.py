"""What torch's logger of DistributedDataParallel tells, under its names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from pycomm.communicator import Communicator

if TYPE_CHECKING:
    from pycomm.ddp.reducer import Reducer

__all__ = ["Logging"]

_TYPES = {torch.float32: "float", torch.float64: "double", torch.float16: "Half", torch.bfloat16: "BFloat16"}
_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")
_GLOO_VARIABLES = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")


class Logging:
    """The part of the wrapper that answers ``_get_ddp_logging_data``."""

    communicator: Communicator
    module: nn.Module
    process_group: Any
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    forward_sync_buffers: bool
    bucket_bytes_cap: int
    _comm_hooks: list[Any]
    _builtin_hook: Any
    _has_joined: bool
    _last_error: str | None
    _reducer: Reducer | None
    device_ids: Any
    output_device: Any

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Times are kept of every step; nothing is to be set."""
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Facts under the names of torch's logger; times are nanoseconds, of the last step. See ``stats``."""
        backend = dist.get_backend(self.process_group) if self.process_group is not None else "pycomm"
        data: dict[str, Any] = {
            "world_size": self.communicator.size,
            "rank": self.communicator.rank,
            "module_name": type(self.module).__name__,
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "output_device": -1 if self.output_device is None else self.output_device,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "backend_name": backend,
            "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in self.module.modules())),
        }
        for name in _VARIABLES + (_GLOO_VARIABLES if backend == "gloo" else ()):
            data[name.lower()] = os.environ.get(name, "N/A")
        if backend == "gloo":
            data["gloo_num_threads"] = 2  # torch's default; there is no way to ask
        hooks = [getattr(h, "__qualname__", repr(h)) for h, _ in self._comm_hooks]
        hooks += [str(self._builtin_hook)] if self._builtin_hook is not None else []
        if self._has_joined:
            data["join_uneven_inputs"] = 1
        if hooks:
            data["comm_hook"] = hooks[0]
        if self._last_error is not None:
            data |= {"has_error": 1, "error": self._last_error}
        return data | self._of_the_reducer()

    def _of_the_reducer(self) -> dict[str, Any]:
        reducer = self._reducer
        if reducer is None:
            trained = [p for p in self.module.parameters() if p.requires_grad]
            return {"iteration": 0, **_of_parameters(trained)}
        buckets, times = reducer.plan.buckets, reducer.times
        sizes = ", ".join(str(bucket.n_bytes) for bucket in buckets)
        is_rebuilt = not reducer.plan.is_learning
        data = _of_parameters(reducer.parameters)
        data |= {
            "iteration": max(0, times.n_steps - 1),  # torch counts at the forward
            "num_buckets_reduced": len(buckets),
            "bucket_sizes": sizes,
            "has_rebuilt_buckets": int(is_rebuilt),
            "can_set_static_graph": int(reducer.is_static),
        }
        if is_rebuilt:
            indices = [" ".join(map(str, bucket.indices)) for bucket in buckets]
            data["rebuilt_bucket_sizes"] = sizes
            data["rebuilt_per_bucket_param_indices"] = ", ".join(indices)
            data["prev_iteration_grad_ready_order_indices"] = ", ".join(
                map(str, dict.fromkeys(reducer.last_order))
            )
        return data | times.as_logged()


def _of_parameters(trained: list[nn.Parameter]) -> dict[str, Any]:
    names = sorted({_TYPES.get(p.dtype, str(p.dtype).removeprefix("torch.")) for p in trained})
    return {
        "dtypes": ", ".join(names),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in trained),
        "num_parameter_tensors": len(trained),
    }
