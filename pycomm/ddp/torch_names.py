"""The names of torch's ``DistributedDataParallel`` that users and other libraries touch, with our meaning.

Accelerate, Lightning, torch's DCP, pipelining and Dynamo test with ``isinstance`` for torch's class, read
attributes, and call private methods (``reducer.prepare_for_backward``, ``_set_static_graph``, …). The class
here is a subclass of torch's that never runs torch's constructor; what torch's methods would need (a C++
reducer, a logger) does not exist, so each is overridden, or answers with what to do instead.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pycomm.communicator import Communicator
from pycomm.ddp.arguments import Arguments, communicator_for, index_of
from pycomm.ddp.bucket_size import DEFAULT_BYTES
from pycomm.ddp.buffers import Buffers
from pycomm.ddp.comm_hooks import CommHooks
from pycomm.ddp.error_feedback import Feedback
from pycomm.ddp.facts import Facts
from pycomm.ddp.finalizing import Finalizing
from pycomm.ddp.join import Joining
from pycomm.ddp.logging_data import Logging
from pycomm.ddp.mixed_precision import Casts
from pycomm.ddp.reducer import Reducer
from pycomm.ddp.sinks import Forward, Sinks
from pycomm.ddp.sync_batch_norm import has_sync_batch_norm
from pycomm.ddp.tally import IDLE
from pycomm.ddp.weights import Weighing
from pycomm.ddp.wire import Compression

__all__ = ["ReducerNames", "TorchNames"]

_WHO = "DistributedDataParallel"
_OF_THIS_PROCESS = frozenset(
    (
        "communicator",
        "_feedback",
        "process_group",
        "device_mesh",
        "_reducer",
        "_sinks",
        "reducer",
        "_norms_communicator",
        "_casts",
    )
)


class ReducerNames:
    """What other libraries call on ``ddp.reducer``."""

    def __init__(self, ddp: TorchNames) -> None:
        self._of = weakref.ref(ddp)  # a wrapper that is dropped must go at once, and its hooks with it

    @property
    def _ddp(self) -> TorchNames:
        ddp = self._of()
        if ddp is None:
            raise RuntimeError(f"{_WHO}: the wrapper of this reducer is gone")
        return ddp

    def prepare_for_backward(self, outputs: list[Tensor]) -> None:
        """The next backward is synchronised, also where its forwards ran within no_sync (pipelines)."""
        if self._ddp._reducer is not None and self._ddp._sinks is not None:
            self._ddp._reducer.forced = True
            self._ddp._sinks.attach(outputs, Forward(True, self._ddp._share))

    def prepare_for_forward(self) -> None:
        """Nothing is to be prepared."""

    def _rebuild_buckets(self) -> bool:
        """False: buckets are rebuilt at the end of the first backward."""
        return False

    def _delay_all_reduce(self) -> None:
        """Nothing is to be delayed."""

    def _set_static_graph(self) -> None:
        self._ddp._set_static_graph()

    def _get_local_used_map(self) -> Tensor:
        """How many ranks used each parameter in the last backward; this rank's use is all it knows of one."""
        reducer = self._ddp._reducer
        return torch.zeros(0, dtype=torch.int32) if reducer is None else reducer.n_ranks_used

    def _ddp_graph_static(self) -> bool:
        """Whether every backward so far used the same parameters."""
        return self._ddp._reducer is None or self._ddp._reducer.is_static

    def _set_optimizer_in_backward(self) -> None:
        self._ddp._take_over_optimizers()

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        """Join is told by the wrapper itself."""

    def _remove_autograd_hooks(self) -> None:
        self._ddp._remove_autograd_hooks()

    def _check_reducer_finalized(self) -> None:
        self._ddp._check_reducer_finalized()


class TorchNames(
    Joining,
    Weighing,
    Buffers,
    Facts,
    Finalizing,
    Logging,
    Feedback,
    CommHooks,
    nn.parallel.DistributedDataParallel,
):
    """Attributes and methods under torch's names; the wrapper itself is in pycomm/ddp/wrapper.py."""

    communicator: Communicator
    _reducer: Reducer | None
    _sinks: Sinks | None
    _casts: Casts | None
    _given: Arguments
    process_group: Any

    def _start(self) -> None:
        """Attributes that every wrapper has."""
        #: False within ``no_sync``; decides about the backward through a forward.
        self.require_backward_grad_sync = True
        #: Whether the last forward lets the next one give buffers to all ranks.
        self.require_forward_param_sync = True
        self.device = next(iter(self._look().named.values())).device
        self.device_type = self.device.type
        ids = self._given.device_ids
        self.device_ids = [index_of(ids[0])] if ids else None
        output = self._given.output_device
        self.output_device = self.device.index if ids and output is None else index_of(output)
        self.is_multi_device_module = False
        self.logger = None
        self.broadcast_bucket_size = 250 << 20
        cap = self._given.bucket_cap_mb
        self.bucket_bytes_cap = DEFAULT_BYTES if cap is None else int(cap * (1 << 20))
        self._feedback = None
        self._residuals = {}
        self.bucket_bytes_cap_default = self._given.bucket_cap_mb is None
        self.bucket_bytes_cap_list = [int(c * (1 << 20)) for c in self._given.bucket_cap_mb_list or ()]
        self._use_python_reducer = False
        self._lazy_init_ran = True
        self._accum_grad_hooks: list[Any] = []
        self._ddp_sink_clone = True
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []
        self._builtin_compression: Compression | None = None
        self._builtin_hook: Any = None
        self._share: float | None = None
        self._divide_by_initial_world_size = True
        self._has_joined = False  # whether it has ever been within join()
        self._n_active = self.communicator.size
        self._n_forwards = 0
        self._last_error: str | None = None
        self._authoritative_rank = 0
        self._global_batch: float | None = None
        self._must_set_up = False
        self._norms_communicator: Communicator | None = None
        self._reducer = None
        self._sinks = None
        self.reducer = cast(Any, ReducerNames(self))
        self._assign_modules_buffers()

    def _connect(self) -> None:
        """After unpickling: the communicator is made by the first forward. Collective."""
        self.process_group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        self.communicator = communicator_for(self.process_group)
        if has_sync_batch_norm(self.module) and self.communicator.size > 1:
            self._norms_communicator = self.communicator.split(0)
        self._set_up()

    def _set_up(self) -> None:
        raise NotImplementedError  # in pycomm/ddp/wrapper.py

    @property
    def broadcast_buffers(self) -> bool:
        """The old name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def _module_parameters(self) -> list[nn.Parameter]:  # type: ignore[override]
        return [p for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore]

    @property
    def _delay_all_reduce_params(self) -> list[nn.Parameter]:  # type: ignore[override]
        return [parameter for _, parameter in self._given.delayed]

    @property
    def _has_rebuilt_buckets(self) -> bool:  # type: ignore[override]
        return self._reducer is not None and not self._reducer.plan.is_learning

    @property
    def _distributed_rank(self) -> int:
        return self.communicator.rank

    @contextlib.contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        """Dynamo asks torch's class which wrapper is active, and splits graphs at its buckets."""
        torchs: Any = nn.parallel.DistributedDataParallel
        before, torchs._active_ddp_module = torchs._active_ddp_module, self
        try:
            yield
        finally:
            torchs._active_ddp_module = before

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self._reducer is not None and self._reducer.times.n_steps > 0:
            raise self._logged(
                RuntimeError(f"{_WHO}: _set_static_graph() should be called before training loop starts")
            )
        self.static_graph = True
        if self._reducer is not None:
            self._reducer.settings.may_be_unused = True

    def _remove_autograd_hooks(self) -> None:
        """Gradients stay local from now on."""
        if self._reducer is not None:
            self._reducer.remove_hooks()
            self._reducer = None
            self._sinks = None

    def _check_reducer_finalized(self) -> None:
        """Raises when the last backward ended in an exception and the other ranks wait in theirs."""
        if self._reducer is not None and (self._reducer.is_broken or self._reducer.tally.mode != IDLE):
            raise RuntimeError(f"{_WHO}: the last backward did not end, so its gradients are not averaged")

    def _set_sparse_metadata(self, global_unique_ids: Any) -> None:
        """Sparse gradients are gathered by what they hold; nothing is to be told."""

    def _take_over_optimizers(self) -> None:
        """Optimizers that step in backward (apply_optimizer_in_backward) step when gradients are averaged."""
        self._lazy_init_ran = True
        parameters = [p for p in self._module_parameters if hasattr(p, "_in_backward_optimizers")]
        if not parameters or self._reducer is None:
            return
        from torch.distributed.optim import apply_optimizer_in_backward as module

        handles: Any = module.param_to_optim_hook_handle_map
        for parameter in parameters:
            for handle in handles.get(parameter, []):
                handle.remove()

        def step() -> None:
            for parameter in parameters:
                if parameter.grad is not None:
                    for optimizer in cast(Any, parameter)._in_backward_optimizers:
                        optimizer.step()
                    parameter.grad = None

        self._reducer.after = step

    def _lazy_init(self) -> None:
        self._take_over_optimizers()

    def _update_process_group(self, new_process_group: Any) -> None:
        """From now on these ranks are the replicas. Collective over the new group."""
        self.process_group = new_process_group
        if dist.get_rank(new_process_group) < 0:
            return
        self.communicator = communicator_for(new_process_group)
        if self._reducer is not None:
            self._reducer.remove_hooks()
        self._set_up()

    # ---- copies -----------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None and self.process_group != dist.group.WORLD:
            raise RuntimeError(
                f"{_WHO}: DDP Pickling/Unpickling are only supported when using DDP with the default process "
                "group; pickle .module, or save the state_dict()"
            )
        return self._kept()

    def _kept(self) -> dict[str, Any]:
        """What a copy has in common with this wrapper."""
        kept = {k: v for k, v in self.__dict__.items() if k not in _OF_THIS_PROCESS}
        return kept | {"_residuals": self.error_feedback_state_dict()}

    def __getattr__(self, name: str) -> Any:
        if name == "communicator" and self.__dict__.get("_must_set_up"):
            raise AttributeError(
                f"{_WHO}: a wrapper that comes from a pickle has no communicator before its first forward; "
                "run one on every rank"
            )
        return super().__getattr__(name)

    def __setstate__(self, state: dict[str, Any]) -> None:
        cast(Any, nn.Module).__setstate__(self, state)
        self.reducer = cast(Any, ReducerNames(self))
        self.process_group = None
        self._reducer = None
        self._sinks = None
        self._casts = None
        self._feedback = None
        self._norms_communicator = None
        self._must_set_up = True

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchNames:
        """A wrapper of a copy of the module, on the same communicator, with its hooks. Not collective."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        for shared in (self.__dict__.get("communicator"), self.process_group):
            memo[id(shared)] = shared
        for _, state in self._comm_hooks:
            if isinstance(state, (Communicator, dist.ProcessGroup)):  # not copied: it is a connection
                memo[id(state)] = state
        kept = self._kept()
        made.__dict__.update(copy.deepcopy(kept, memo))
        made.process_group = self.process_group
        made._norms_communicator = self._norms_communicator
        made.reducer = cast(Any, ReducerNames(made))
        made._reducer = None
        made._sinks = None
        made._casts = None
        made._feedback = None
        if not self._must_set_up:  # unpickled, and not connected yet
            made.communicator = self.communicator
            made._set_up()
        return made
