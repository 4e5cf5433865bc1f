"""``mixed_precision=_MixedPrecision(param_dtype=...)``: the module computes in low precision, trains in full.

*In low precision* is what happens within a forward of the wrapper, and within a backward through its outputs:
there the module's floating parameters appear cast to ``param_dtype``. Everywhere else they are what they
were: ``state_dict``, optimizers, ``named_parameters`` and ``grad`` see full precision only.

torch puts the low-precision numbers into ``parameter.data`` until backward is over: evaluation leaves them
there, and several forwards before one backward, retained graphs and checkpoints clash. Here nothing is put
anywhere. A module looks its parameters up in its dictionary ``_parameters`` (``self.weight`` and
``named_parameters()`` end there), and this file gives it a dictionary whose *look-up casts*. The cast is an
ordinary operation of autograd, so

* gradients of the full-precision parameters arrive in their own dtype; uses of one parameter (tied, repeated)
  share one cast, and several forwards or backwards each have their own;
* whatever recomputes a forward within backward (both kinds of checkpoint) sees casts too, without being told:
  whether a look-up casts is asked at the look-up, and no state must be undone after an exception;
* a copy or a pickle of the module has plain dictionaries with the parameters themselves.

A backward is one "through the outputs" from the time when a hook on an output of the wrapper has run; for
outputs that can take no hook, every backward after it. Casts are kept for one forward, or one backward, by
grad mode: what is cast under ``no_grad`` (a reentrant checkpoint's first pass) has no graph to serve others.

Not seen by a look-up: parameters kept in plain attributes. Recurrent layers do that (``_flat_weights``), and
have hooks here. What a forward writes into its own parameters (``self.weight.data.clamp_()``) goes into the
cast and is lost, as in torch. Cost: one cast of each parameter used, and 0.5 to 2 µs for a look-up.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.utils import _cast_forward_inputs
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from pycomm.ddp.not_traced import NotTraced
from pycomm.ddp.sinks import tensors_in
from pycomm.ddp.wire import Compression

__all__ = ["Casts", "cast_buffers", "fault_of_precision", "reduction"]

PARAM_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What a forward on the CPU can compute in."""
REDUCE_DTYPES: dict[torch.dtype, Compression | None] = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: None,
}
"""What gradients can travel as, as a compression of float32."""

_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


def fault_of_precision(config: Any, has_compression: bool) -> tuple[type[Exception], str] | None:
    """What is wrong with a ``_MixedPrecision``, and the exception to raise for it; None when all is well."""
    if config is None:
        return None
    who = "mixed_precision"
    if config.param_dtype is not None and config.param_dtype not in PARAM_DTYPES:
        known = ", ".join(map(str, PARAM_DTYPES))
        return ValueError, f"{who}: param_dtype must be one of {known} or None, got {config.param_dtype}"
    if config.reduce_dtype is not None and config.reduce_dtype not in REDUCE_DTYPES:
        known = ", ".join(map(str, REDUCE_DTYPES))
        return ValueError, f"{who}: reduce_dtype must be one of {known} or None, got {config.reduce_dtype}"
    if config.buffer_dtype is not None and not config.buffer_dtype.is_floating_point:
        return ValueError, f"{who}: buffer_dtype must be a floating dtype or None, got {config.buffer_dtype}"
    if has_compression and (config.reduce_dtype or config.param_dtype) is not None:
        return (
            ValueError,
            f"give either compression or {who} with a reduce_dtype (or param_dtype, which gradients travel "
            "as where no reduce_dtype is given), not both",
        )
    return None


def reduction(config: Any) -> Compression | None:
    """The compression of float32 gradients that ``config`` means; where it has no ``reduce_dtype``, torch
    reduces in ``param_dtype``.

    Example:
        >>> from torch.nn.parallel.distributed import _MixedPrecision
        >>> reduction(_MixedPrecision(param_dtype=torch.bfloat16))
        'bf16'
    """
    return None if config is None else REDUCE_DTYPES.get(config.reduce_dtype or config.param_dtype)


def cast_buffers(module: nn.Module, dtype: torch.dtype | None, ignored: Collection[str]) -> None:
    """Casts the module's floating buffers, once and for all as torch does; not those that are ignored."""
    if dtype is None:
        return
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and name not in ignored and not _is_ignored(buffer):
            buffer.data = buffer.data.to(dtype)


def _is_ignored(tensor: Any) -> bool:
    """torch's mark of ``_set_params_and_buffers_to_ignore_for_model``."""
    return bool(getattr(tensor, "_ddp_ignored", False))


class _Here(threading.local):
    """What a thread is doing: nothing, unless its forward says so."""

    n_forwards = 0
    is_paused = False


class Casts:
    """The casts of one wrapper's parameters, and whether they are to be seen.

    Args:
        dtype: what parameters and inputs are cast to.
        ignored: names of parameters that stay as they are.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, ignored: Collection[str]) -> None:
        self.dtype = dtype
        self._ignored = frozenset(ignored)
        self._here = _Here()
        self._n_forwards = 0  # in all threads, for Dynamo, which cannot look into a thread's own
        self._backwards: set[int] = set()  # those under way that come through an output of the wrapper
        self._is_any_backward = False
        self._kept: dict[tuple[int, int], tuple[int, Tensor]] = {}
        self._kept_of = -1  # the backward that they belong to
        self.install(module)

    @NotTraced
    def install(self, module: nn.Module) -> None:
        """Lets all of the module's look-ups ask here; those that do already stay as they are."""
        modules = [
            m for m in module.modules() if getattr(m.__dict__.get("_parameters"), "casts", None) is not self
        ]
        if not modules:
            return
        named = dict(module.named_parameters(remove_duplicate=False))
        exempt = {id(p) for name, p in named.items() if name in self._ignored or _is_ignored(p)}
        sparse = {
            id(p) for m in module.modules() if getattr(m, "sparse", False) for p in m._parameters.values()
        }
        for submodule in modules:
            if isinstance(submodule, torch.jit.ScriptModule):
                raise ValueError(
                    "DistributedDataParallel: mixed_precision with a param_dtype cannot cast the parameters "
                    f"of a TorchScript module ({submodule.original_name}); wrap the module before scripting, "
                    "or cast it"
                )
            own = submodule._parameters
            submodule.__dict__["_parameters"] = _CastParameters(
                own,
                self,
                exempt=frozenset(name for name, p in own.items() if id(p) in exempt),
                sparse=frozenset(name for name, p in own.items() if id(p) in sparse),
            )
            if isinstance(submodule, nn.RNNBase) and _lay_out not in submodule._forward_pre_hooks.values():
                submodule.register_forward_pre_hook(_lay_out)
                submodule.register_forward_hook(_put_back, always_call=True)

    def is_on(self) -> bool:
        """Whether look-ups cast now, in this thread."""
        if torch.compiler.is_compiling():
            return self._n_forwards > 0
        here = self._here
        if here.is_paused:
            return False
        if here.n_forwards > 0:
            return True
        if not self._backwards and not self._is_any_backward:
            return False
        return torch._C._current_graph_task_id() != -1

    @NotTraced
    def call(self, module: nn.Module, inputs: Any, kwargs: Any) -> Any:
        """A forward of the wrapper: the module's, in low precision."""
        self.install(module)
        inputs, kwargs = _cast_forward_inputs(self.dtype, *inputs, **kwargs)
        here = self._here
        if here.n_forwards == 0 and torch._C._current_graph_task_id() == -1:
            self._backwards.clear()  # what is left there ended in an exception
            self._is_any_backward = False
            self._kept.clear()
        here.n_forwards += 1
        self._n_forwards += 1
        try:
            output = module(*inputs, **kwargs)
        finally:
            here.n_forwards -= 1
            self._n_forwards -= 1
            if here.n_forwards == 0:
                self._kept.clear()
        if torch.is_grad_enabled():
            self._watch(output)
        return output

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within it, look-ups give the parameters themselves."""
        before, self._here.is_paused = self._here.is_paused, True
        try:
            yield
        finally:
            self._here.is_paused = before

    @NotTraced
    def _watch(self, output: Any) -> None:
        """Has the backwards through ``output`` announced."""
        hooked = False
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                cast(Any, tensor).register_hook(self._backward_began)
                hooked = True
        self._is_any_backward = self._is_any_backward or not hooked

    def _backward_began(self, _: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task in self._backwards:
            return
        self._backwards.add(task)

        def end() -> None:
            self._backwards.discard(task)
            self._kept.clear()

        torch.autograd.Variable._execution_engine.queue_callback(end)

    def of(self, parameter: Tensor, is_sparse: bool) -> Tensor:
        """``parameter`` as it is seen now: cast, or itself. ``is_sparse``: its gradient may be."""
        if parameter.dtype is self.dtype or not parameter.is_floating_point():
            return parameter
        if torch.compiler.is_compiling():
            return parameter.to(self.dtype)  # the compiler shares equal casts itself
        if self._here.n_forwards == 0:  # a backward
            task = torch._C._current_graph_task_id()
            if task != self._kept_of:
                self._kept.clear()
                self._kept_of = task
        mode = 2 if torch.is_inference_mode_enabled() else int(torch.is_grad_enabled())
        key, version = (id(parameter), mode), 0 if parameter.is_inference() else parameter._version
        kept = self._kept.get(key)
        if kept is not None and kept[0] == version:
            return kept[1]
        apply: Any = _SparseCast.apply
        with _unseen_by_selective_checkpoints():
            made: Tensor = apply(parameter, self.dtype) if is_sparse else parameter.to(self.dtype)
        cast(Any, made)._full_precision = parameter
        if not torch._C._functorch.is_functorch_wrapped_tensor(made):  # it ends with its transform
            self._kept[key] = version, made
        return made


def _unseen_by_selective_checkpoints() -> contextlib.AbstractContextManager[Any]:
    """A selective checkpoint records each operation and wants the same from recomputation; casts are not the
    same, since a region may use one that was made before it."""
    if torch._C._len_torch_dispatch_stack() > 0 and any(
        isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack()
    ):
        return _disable_current_modes()
    return contextlib.nullcontext()


class _SparseCast(torch.autograd.Function):
    """``parameter.to(dtype)`` whose gradient may be sparse: torch's own casts back strided ones only."""

    generate_vmap_rule = True

    @staticmethod
    def forward(parameter: Tensor, dtype: torch.dtype) -> Tensor:
        return parameter.to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


class _CastParameters(dict[str, Any]):
    """A module's dictionary of parameters that gives casts while ``casts`` is on.

    ``values()``, ``copy()`` and C code see what is stored.
    """

    def __init__(
        self, own: dict[str, Any], casts: Casts, exempt: frozenset[str], sparse: frozenset[str]
    ) -> None:
        super().__init__(own)
        self.casts = casts
        self.exempt = exempt
        self.sparse = sparse
        self.flat_weights: list[Any] | None = None

    def __getitem__(self, name: str) -> Any:
        stored = super().__getitem__(name)
        if stored is None or not self.casts.is_on() or name in self.exempt:
            return stored
        return self.casts.of(stored, name in self.sparse)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401

    def items(self) -> Any:
        return {name: self[name] for name in self}.items() if self.casts.is_on() else super().items()

    def __setitem__(self, name: str, value: Any) -> None:
        # torch.func.functional_call takes a parameter out and puts it back: not its cast.
        super().__setitem__(name, getattr(value, "_full_precision", value))

    def __reduce_ex__(self, _: Any) -> Any:
        return dict, (), None, None, iter(super().items())


def _lay_out(module: nn.Module, *_: Any) -> None:
    """A recurrent layer's list of its parameters, looked up anew; does nothing in a plain copy of it."""
    own, layer = module._parameters, cast(Any, module)
    if isinstance(own, _CastParameters) and own.casts.is_on():
        own.flat_weights = layer._flat_weights
        layer._flat_weights = [getattr(layer, name, None) for name in layer._flat_weights_names]


def _put_back(module: nn.Module, *_: Any) -> None:
    own = module._parameters
    if isinstance(own, _CastParameters) and own.flat_weights is not None:
        cast(Any, module)._flat_weights, own.flat_weights = own.flat_weights, None
