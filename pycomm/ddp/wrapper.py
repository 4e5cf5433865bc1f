"""The wrapper of a module; pycomm/ddp/__init__.py has the map of this folder."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.utils import _to_kwargs

from pycomm.communicator import Communicator
from pycomm.ddp.agree import broadcast_tensors, check_agreement, describe
from pycomm.ddp.arguments import (
    Arguments,
    agreed_overlap,
    chosen_overlap,
    communicator_for,
    described,
    first_fault,
    group_for,
    settings_from,
    synced_buffers,
)
from pycomm.ddp.bucket_size import measured_bytes
from pycomm.ddp.hooks import UsersHook
from pycomm.ddp.mixed_precision import Casts, cast_buffers
from pycomm.ddp.not_traced import NotTraced
from pycomm.ddp.plan import Overlap
from pycomm.ddp.reducer import Reducer
from pycomm.ddp.sinks import Sinks
from pycomm.ddp.structure import Structure
from pycomm.ddp.sync_batch_norm import adopt_sync_batch_norms, has_sync_batch_norm
from pycomm.ddp.torch_names import TorchNames
from pycomm.ddp.wire import Compression

__all__ = ["DistributedDataParallel"]

_WHO = "DistributedDataParallel"
_T = TypeVar("_T")


class DistributedDataParallel(TorchNames):
    """Averages the gradients of ``module`` over the ranks while backward computes them.

    After each backward every rank's ``p.grad`` holds the average over the ranks, with the same bits, as if
    one process had computed the mean of the ranks' losses. A drop-in for
    ``torch.nn.parallel.DistributedDataParallel``: its arguments, methods and attributes, and an instance of
    it.

    At the start all ranks must have the same parameters and buffers (names, order, shapes, dtypes, memory
    layout); rank 0's values are given to all. With one rank nothing is done and no hook is set.

    **Every backward averages**, through the wrapper or ``.module``, as often as it runs; gradients that
    ``torch.autograd.grad`` returns for parameters are averages as well. Only what :meth:`no_sync` encloses
    stays local. Where ranks cannot mean the same, all raise the same error in that backward, and it names
    the parameter.

    Args:
        module: on the CPU, or on one CUDA device (docs/cuda.md); at least one parameter requires a gradient.
            A parameter may be shared. Names in ``module._ddp_params_and_buffers_to_ignore`` are left alone,
            as torch does.
        device_ids: of a module on CUDA its device, as the only element: inputs are moved there. None (or
            empty): inputs are taken as they are; so always on the CPU.
        output_device: of a module on CUDA its device or None, which are the same; None on the CPU.
        dim: kept as an attribute; nothing is scattered here.
        broadcast_buffers: False: buffers are given to other ranks neither at the start nor later. None: True.
        init_sync: False: the start is neither checked nor synchronised; you vouch for equal ranks.
        process_group: a torch group of any backend, whose ranks are the replicas. None: torch's default
            group, or without one ``pycomm.init()``.
        bucket_cap_mb: MiB of gradients in one reduction; None: chosen from latency and bandwidth, which are
            measured here (pycomm/ddp/bucket_size.py), 25 with ``PYCOMM_TUNE=off`` or without ``init_sync``.
            Where buckets are reduced during backward, the first has at most 1 MiB so that it starts early (a
            larger parameter is a bucket of its own).
        find_unused_parameters: a parameter without a gradient counts as zeros where another rank has one, and
            keeps its ``grad`` (None, or what was there) where no rank has. False: it is an error on every
            rank in that same backward. Nothing is searched in the graph, so it costs nothing where all have
            one.
        check_reduction: ignored, as by torch.
        gradient_as_bucket_view: gradients are views of the buckets, which lie in shared memory: nothing is
            copied for a reduction when they stay there (``zero_grad(set_to_none=False)``).
        static_graph: parameters may be unused, and may get gradients several times in one backward.
        delay_all_reduce_named_params: (name, parameter) pairs that are reduced together, last, and may lie
            outside of ``module``.
        param_to_hook_all_reduce: given together with them, as torch demands; here the end of backward
            decides.
        mixed_precision: torch's ``_MixedPrecision``. Forwards of the wrapper, and backwards through their
            outputs, see inputs and floating parameters in its ``param_dtype``; outside, and in ``grad``, all
            is in full precision (pycomm/ddp/mixed_precision.py). float32 gradients travel in ``reduce_dtype``
            (float16, bfloat16: see ``compression``), where it is None in ``param_dtype``. Floating buffers
            are cast to ``buffer_dtype`` here, for good.
        device_mesh: of one dimension, in place of ``process_group``.
        skip_all_reduce_unused_params: as ``find_unused_parameters``, and parameters that no rank used in a
            backward do not travel, until one does (pycomm/ddp/asleep.py; they need not stay the same).
        bucket_cap_mb_list: MiB of the first, second, … bucket; the last one repeats.
        batched_grad_copy: gradients are copied in batches wherever they are copied; accepted.
        forward_sync_buffers: False: buffers are synchronised at the start only. True: rank 0's go to all
            ranks before a forward in training mode with gradients, unless the last such forward was in
            ``no_sync``.
        communicator: its ranks are the replicas; instead of ``process_group``. Not closed by this class.
        compression: "fp16" or "bf16": float32 gradients travel with 16 bits (other dtypes as they are). The
            error is at most 2^-10 ("fp16") or 2^-7 ("bf16") of the mean magnitude over the ranks, plus for
            "fp16" 2^-33 of the bucket's largest; finite gradients do not overflow in "fp16", infinities and
            NaN arrive on all ranks (pycomm/ddp/half_wire.py has the exact bound). "int8" or "fp8":
            float32, float16 and bfloat16 gradients travel with 8 bits and a scale for each 256 elements; the
            error is at most 1/121 ("int8") of the largest magnitude among these on any rank, or ("fp8")
            2^-2.9 of the element's mean magnitude plus 2^-15 of the largest
            (pycomm/ddp/block_wire.py has the exact bound); infinities and NaN become NaN, for all 256. With
            ranks on several hosts only what crosses between these is compressed (docs/numerics.md has the
            bounds), unless ``communicator`` is deterministic.
        error_feedback: what a compression loses is kept and added to the next gradient (see
            :meth:`error_feedback_state_dict`); also for "fp16" and "bf16", which then have a scale for each
            256 elements, too. With torch's GradScaler, what is kept has the scale of its step.
        overlap: "async": buckets are reduced by a thread while backward goes on; "inline": in backward's
            thread as soon as they are complete; "end": when backward is over. The last of these that any rank
            has. None: PYCOMM_DDP_OVERLAP, else "async" on a GPU (but "end" with SyncBatchNorm) and with two
            cores a rank, else "end". Same results.
        check_consistency_every: :meth:`check_consistency` before every so many synced forwards; 0: never.

    Attributes:
        module: the wrapped module; ``state_dict`` keys begin with ``module.``, as torch's.
        require_backward_grad_sync: False within ``no_sync``; may be set.
        communicator: whose ranks average.

    Raises:
        ValueError: an argument is out of range, or the ranks' modules or arguments differ (the first
            difference is named on every rank).
        TypeError: ``module`` or ``communicator`` is something else.
        RuntimeError: no parameter requires a gradient, or one has no shape yet. From ``backward``, on every
            rank: parameters without a gradient, or with one that cannot be reduced, by name and rank; or
            another rank's backward ended in an exception.

    Source: S. Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
    VLDB 2020.

    Example:
        >>> import pycomm, torch
        >>> comm = pycomm.init()
        >>> model = pycomm.DistributedDataParallel(torch.nn.Linear(8, 2), communicator=comm)
        >>> model(torch.ones(4, 8)).sum().backward()
        >>> model.module.weight.grad.shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        communicator: Communicator | None = None,
        compression: Compression | None = None,
        error_feedback: bool = False,
        overlap: Overlap | None = None,
        check_consistency_every: int = 0,
    ) -> None:
        # Not torch's constructor, which would make a reducer of torch's.
        nn.Module.__init__(self)
        Joinable.__init__(self)
        if not isinstance(module, nn.Module):
            raise TypeError(f"{_WHO}: module must be a torch.nn.Module, got {type(module).__name__}")
        self.process_group = group_for(process_group, device_mesh, communicator)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.communicator = communicator_for(self.process_group) if communicator is None else communicator
        init_sync_buffers, self.forward_sync_buffers = synced_buffers(broadcast_buffers, forward_sync_buffers)
        self.module = module
        self._casts: Casts | None = None
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        self.static_graph = static_graph
        delayed = list(delay_all_reduce_named_params or ())
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.parameters_to_ignore.update(name for name, _ in delayed)
        self._given = Arguments(
            bucket_cap_mb,
            bucket_cap_mb_list,
            compression,
            error_feedback,
            chosen_overlap(overlap, self.communicator, module),
            device_ids,
            output_device,
            delayed,
            param_to_hook_all_reduce,
            mixed_precision,
            check_consistency_every,
        )
        self._check(init_sync)
        self._start()
        if init_sync and self.communicator.size > 1:
            self._given.overlap = agreed_overlap(self.communicator, self._given.overlap)
            tensors = list(self._look().named.values())
            broadcast_tensors(
                self.communicator, [*tensors, *(self._buffers_now() if init_sync_buffers else ())]
            )
        if mixed_precision is not None:
            cast_buffers(module, mixed_precision.buffer_dtype, self._kept_precise())
        if has_sync_batch_norm(module) and self.communicator.size > 1:
            self._norms_communicator = self.communicator.split(0)
        if init_sync and bucket_cap_mb is None and not bucket_cap_mb_list:
            self.bucket_bytes_cap = measured_bytes(
                self.communicator, self._look().parameters, self._given.overlap
            )
        self._set_up()

    # ---- the start --------------------------------------------------------------------------------------

    def _kept_precise(self) -> set[str]:
        """Names of parameters and buffers that are not cast; unlike torch's set, without delayed ones."""
        return set(getattr(self.module, "_ddp_params_and_buffers_to_ignore", ()))

    def _look(self) -> Structure:
        if self._casts is not None:
            with self._casts.paused():  # a backward may be under way
                return Structure(self.module, self.parameters_to_ignore, self._given.delayed)
        return Structure(self.module, self.parameters_to_ignore, self._given.delayed)

    def _check(self, init_sync: bool) -> None:
        """Raises what is wrong with this rank's arguments, on all ranks where they may talk already."""
        structure = self._look()
        fault = first_fault(structure.named, self._given)
        if self.communicator.size > 1 and init_sync:
            settings = described(
                self._given,
                find_unused_parameters=self.find_unused_parameters,
                static_graph=self.static_graph,
                skip_all_reduce_unused_params=self.skip_all_reduce_unused_params,
                gradient_as_bucket_view=self.gradient_as_bucket_view,
                forward_sync_buffers=self.forward_sync_buffers,
            )
            lines = [f"the error that {fault[1]}"] if fault else [settings, *structure.lines()]
            if not fault:
                self._assign_modules_buffers()
                lines += [describe("buffer", name, b) for name, b in self.named_module_buffers.items()]
            try:
                check_agreement(self.communicator, _WHO, lines)
            except ValueError as error:
                raise (fault[0] if fault else ValueError)(str(error)) from None
        if fault:
            raise fault[0](f"{_WHO}: {fault[1]}")

    def _set_up(self) -> None:
        """The reducer, where there is somebody to average with or a hook to call. Not collective."""
        self._must_set_up = False
        self._sinks: Sinks | None = None
        self._reducer: Reducer | None = None
        config = self.mixed_precision
        if config is not None and config.param_dtype is not None:
            self._casts = Casts(self.module, config.param_dtype, self._kept_precise())
        if self._norms_communicator is not None:
            adopt_sync_batch_norms(self.module, self._norms_communicator)
        feedback = self._take_up_feedback()
        if self.communicator.size == 1 and not self._comm_hooks:
            return
        may_be_unused = self.find_unused_parameters or self.static_graph or self.skip_all_reduce_unused_params
        as_view = self.gradient_as_bucket_view
        settings = settings_from(self._given, may_be_unused, as_view, self.bucket_bytes_cap, feedback)
        settings.skips_unused = self.skip_all_reduce_unused_params
        for hook, state in self._comm_hooks:
            settings.hook = UsersHook(hook, state)
        if self._builtin_compression is not None:
            settings.compression = self._builtin_compression
        # Weakly: a wrapper that is dropped must go at once, and its hooks with it.
        look, told = weakref.WeakMethod(self._look), weakref.WeakMethod(self._told)
        self._reducer = Reducer(self.communicator, _call(look), settings, _call(told))
        self._sinks = Sinks(self._reducer)
        self._lazy_init_ran = False

    # ---- forward ----------------------------------------------------------------------------------------

    @NotTraced
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the module. Backward will average its gradients unless this runs within :meth:`no_sync`.

        Without gradients (``torch.no_grad``) no rank waits for another, so one rank may evaluate alone.

        Raises:
            RuntimeError: this rank's last backward ended in an exception, and the others wait in theirs.
        """
        if self._must_set_up:
            self._connect()
        is_alone = self._reducer is None and "buffer_hook" not in self.__dict__
        if is_alone and not self._join_config.enable:
            return self._call_module(*self._on_device(inputs, kwargs))
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        started = time.perf_counter()
        with self._inside_ddp_forward():
            output = self._call_module(inputs, kwargs)
        if self._reducer is not None:
            times = self._reducer.times
            times.forward_began_s, times.forward_s = started, time.perf_counter() - started
        return self._post_forward(output)

    @NotTraced
    def _call_module(self, inputs: Any, kwargs: Any) -> Any:
        if self._casts is None:
            return self.module(*inputs, **kwargs)
        return self._casts.call(self.module, inputs, kwargs)

    def _on_device(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        """With ``device_ids``: the tensors in them, on the module's device."""
        if not self.device_ids or not (inputs or kwargs):
            return inputs, kwargs
        moved = _to_kwargs(inputs, kwargs, self.device, use_side_stream_for_tensor_copies=False)
        return moved[0][0], moved[1][0]

    @NotTraced
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = self._on_device(inputs, kwargs)
        if not torch.is_grad_enabled():
            return inputs, kwargs
        if not self._lazy_init_ran:
            self._lazy_init()
        if self._reducer is not None:
            self._reducer.close_broken_backward()
        if self._join_config.enable:
            self._before_joined_forward()
        if self._sync_before_forward():
            self._sync_buffers()
        if self._join_config.enable:
            self._tell_joined_ranks(self.require_backward_grad_sync)
        elif self._given.check_every > 0 and self.training and self.require_backward_grad_sync:
            self._n_forwards += 1
            if self._n_forwards % self._given.check_every == 0:
                self.check_consistency()
        return inputs, kwargs

    @NotTraced
    def _post_forward(self, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        if self._sync_after_forward():
            self._sync_buffers()
        self.require_forward_param_sync = self.require_backward_grad_sync
        if self._sinks is not None:
            self._sinks.attach(output, self._told())
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward accumulates gradients locally; the next one outside averages their sum.

        As with torch, the forward must be inside as well: it decides about its backward.

        Example:
            >>> import pycomm, torch
            >>> comm = pycomm.init()
            >>> model = pycomm.DistributedDataParallel(torch.nn.Linear(8, 2), communicator=comm)
            >>> with model.no_sync():
            ...     model(torch.ones(4, 8)).sum().backward()
            >>> model(torch.ones(4, 8)).sum().backward()  # averages the sum of both
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


def _call(method: weakref.WeakMethod[Callable[[], _T]]) -> Callable[[], _T]:
    """The method of a wrapper that is alive while it is called."""

    def call() -> _T:
        alive = method()
        assert alive is not None
        return alive()

    return call
