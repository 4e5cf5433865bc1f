"""What is said of all gradients together, when each rank has shards: their norm, whether one is not finite.

Each logical parameter counts once: a shard by what no lower rank has of it (a key-value head may be on
several ranks), a replicated parameter by the lowest rank's. Which parameters are shards, and over which
ranks, is known from the layers (parameters.py); so tensor-parallel ranks need not be named. Every rank gets
the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pycomm.communicator import Communicator
from pycomm.optim import squares
from pycomm.tensor_parallel.group import Group, communicator_of
from pycomm.tensor_parallel.parameters import ParameterShard, check_notes, shard_index

__all__ = ["GradScaler", "clip_grad_norm_", "count_parameters", "has_overflow"]

Parameters = nn.Module | Tensor | Iterable[Tensor]


def _unique(parameters: Parameters) -> list[Tensor]:
    if isinstance(parameters, nn.Module):
        return list(parameters.parameters())
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return list({id(p): p for p in given}.values())


def _communicators(
    parameters: list[Tensor], index: dict[int, ParameterShard], mesh: Group, who: str
) -> list[Communicator]:
    """Of the shards among the parameters, and the one that is named; in an order that ranks share."""
    found = {id(s.comm): s.comm for p in parameters if (s := index.get(id(p))) is not None}
    if mesh is not None:
        named = communicator_of(_tensor_mesh(mesh, who), who=f"{who}: mesh")
        found.setdefault(id(named), named)
    return list(found.values())


def _tensor_mesh(mesh: Group, who: str) -> Group:
    """Of a mesh with several dimensions the one that is called "tp"."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim == 1:
        return mesh
    names = mesh.mesh_dim_names or ()
    if "tp" not in names:
        raise ValueError(
            f"{who}: mesh has {mesh.ndim} dimensions, {names or 'without names'}, and none is called 'tp'; "
            "give the one of the tensor-parallel ranks, such as mesh['model']"
        )
    return mesh["tp"]


def _counted(parameter: Tensor, shard: ParameterShard | None) -> list[Tensor]:
    """The parts of a parameter's gradient that this rank answers for, without empty ones."""
    gradient: Any = parameter.grad
    if shard is None or not shard.split.is_replicated:
        return [gradient] if gradient.numel() > 0 else []
    if hasattr(gradient, "full_tensor"):  # of FSDP2; rare enough to be gathered
        gradient = gradient.full_tensor()
    owned = shard.split.owned(shard.comm.rank)
    return [gradient.narrow(shard.dim, at, stop - start) for (start, stop), at in owned]


class _Parts:
    """Gradients of which one norm is to be known: the host waits once a device, not once a gradient."""

    def __init__(self, p: float) -> None:
        self._p = p
        self._powers: dict[torch.device, list[Tensor]] = {}
        self._alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}

    def add(self, gradient: Any) -> None:
        """Collective where it is FSDP2's."""
        if self._p == 2.0 and not hasattr(gradient, "full_tensor"):
            self._alike.setdefault((gradient.device, gradient.dtype), []).append(gradient.detach())
            return
        wide = torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else None
        norm: Any = torch.linalg.vector_norm(gradient, self._p, dtype=wide)
        if hasattr(norm, "full_tensor"):  # over the ranks that have parts
            norm = norm.full_tensor()
        norm = norm.double()
        power = norm if math.isinf(self._p) else norm.pow(self._p)
        self._powers.setdefault(norm.device, []).append(power)

    def total(self) -> Tensor:
        """The p-th power of the norm of all, or the norm itself where p is infinite."""
        powers = {device: list(some) for device, some in self._powers.items()}
        for (device, _), gradients in self._alike.items():
            powers.setdefault(device, []).append(squares(gradients)[0])
        each = [self._joined(torch.stack(some)).cpu() for some in powers.values()]
        return self._joined(torch.stack([torch.zeros((), dtype=torch.float64, device="cpu"), *each]))

    def _joined(self, values: Tensor) -> Tensor:
        return values.max() if math.isinf(self._p) else values.sum()


def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    mesh: Group = None,
    pipeline_group: Group = None,
    counted_elsewhere: Iterable[Tensor] = (),
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for a model cut over ranks: the norm is that of one process.

    Collective over the tensor-parallel ranks, which give the same parameters in the same order.

    Args:
        parameters: a module, or its parameters; shards and replicated ones, also FSDP2's.
        max_norm: what the norm is cut down to.
        norm_type: p of the p-norm, above 0; ``math.inf`` is the largest magnitude.
        error_if_nonfinite: raise, on every rank, where the norm is NaN or infinite.
        mesh: the tensor-parallel ranks, where no parameter says them; of a mesh with several dimensions,
            "tp".
        pipeline_group: ranks with other stages of the model, whose norms are part of the total.
        counted_elsewhere: parameters that another stage counts, such as a tied embedding's.

    Returns:
        The norm, float64 without dimensions, the same bits on every rank.

    Raises:
        RuntimeError: the norm is not finite, when asked.
        ValueError: ``norm_type`` is not above 0, or the mesh has no dimension "tp".

    Example:
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([weight], max_norm=1.0)
        tensor(5., dtype=torch.float64)
    """
    p = float(norm_type)
    if not p > 0.0:
        raise ValueError(f"clip_grad_norm_: norm_type must be above 0, got {norm_type!r}")
    if isinstance(parameters, nn.Module):
        check_notes("clip_grad_norm_", parameters)
    given = _unique(parameters)
    index = shard_index()
    skipped = {id(parameter) for parameter in counted_elsewhere}
    parts: dict[int | None, _Parts] = {}
    for parameter in given:
        if parameter.grad is None or id(parameter) in skipped:
            continue
        shard = index.get(id(parameter))
        mine = parts.setdefault(None if shard is None else id(shard.comm), _Parts(p))
        for gradient in _counted(parameter, shard):
            mine.add(gradient)
    none = _Parts(p)
    total = parts.get(None, none).total()
    for comm in _communicators(given, index, mesh, "clip_grad_norm_"):
        table = torch.empty(comm.size, 2, dtype=torch.float64, device="cpu")
        comm.all_gather(table, torch.stack([parts.get(id(comm), none).total(), total]))
        shards = table[:, 0].max() if math.isinf(p) else table[:, 0].sum()
        total = _joined(table[0, 1], shards, p)
    if pipeline_group is not None:
        stages = communicator_of(pipeline_group, who="clip_grad_norm_: pipeline_group")
        everyones = torch.empty(stages.size, dtype=torch.float64, device="cpu")
        stages.all_gather(everyones, total.view(1))
        total = everyones.max() if math.isinf(p) else everyones.sum()
    norm = total if math.isinf(p) else total.pow(1.0 / p)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"clip_grad_norm_: the total norm of order {norm_type} is {float(norm)} and cannot be clipped; "
            "find the gradient with torch.autograd.detect_anomaly, or pass error_if_nonfinite=False"
        )
    factor = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
    for parameter in given:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
    return norm


def _joined(a: Tensor, b: Tensor, p: float) -> Tensor:
    return torch.maximum(a, b) if math.isinf(p) else a + b


def has_overflow(parameters: Parameters, *, mesh: Group = None, pipeline_group: Group = None) -> bool:
    """Whether some gradient has an element that is not finite, on some rank; the same on every rank.

    Collective over the tensor-parallel ranks, FSDP2's and the pipeline's. A rank that skips a step
    alone would leave the others' model.

    Args:
        parameters, mesh, pipeline_group: as for :func:`clip_grad_norm_`.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, float("inf")])
        >>> has_overflow([weight])
        True
    """
    given = _unique(parameters)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    meshes: dict[DeviceMesh, None] = {}  # of FSDP2, whose ranks have other parts of the same gradient
    for parameter in given:
        gradient: Any = parameter.grad
        if gradient is None:
            continue
        if hasattr(gradient, "to_local"):
            meshes[gradient.device_mesh] = None
            gradient = gradient.to_local()
        if gradient.numel() > 0:
            alike.setdefault((gradient.device, gradient.dtype), []).append(gradient.detach())
    odd: dict[torch.device, Tensor] = {}  # the host waits once for each device
    for (device, _), gradients in alike.items():
        n_odd = squares(gradients)[1]
        odd[device] = odd[device] + n_odd if device in odd else n_odd
    found = torch.tensor([int(any(int(n) > 0 for n in odd.values()))], dtype=torch.int32, device="cpu")
    for over in meshes:
        for dim in range(over.ndim):
            communicator_of(over.get_group(dim), who="has_overflow").all_reduce(found, op="max")
    for comm in _communicators(given, shard_index(), mesh, "has_overflow"):
        comm.all_reduce(found, op="max")
    if pipeline_group is not None:
        communicator_of(pipeline_group, who="has_overflow: pipeline_group").all_reduce(found, op="max")
    return bool(found)


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` whose ranks agree on which steps are skipped, and so on the scale.

    Args:
        group: the ranks that must agree: see :mod:`pycomm.tensor_parallel.group`; a list of groups, or a mesh
            of several dimensions, whose ranks agree over each in turn (the tensor-parallel ranks, then the
            pipeline's). A pipeline's losses are scaled by its last stage; the others follow.
        device, options: as for torch's.

    Example:
        >>> scaler = GradScaler(init_scale=4.0)
        >>> scaler.get_scale()
        4.0
    """

    def __init__(self, group: Group = None, device: str = "cpu", **options: Any) -> None:
        super().__init__(device, **options)
        if isinstance(group, DeviceMesh):
            group = [group.get_group(dim) for dim in range(group.ndim)]
        groups = group if isinstance(group, Sequence) else [group]
        self._groups = [communicator_of(each, who="GradScaler: group") for each in groups]

    def _agree(self, optimizer: torch.optim.Optimizer) -> None:
        state: Any = self._per_optimizer_states[id(optimizer)]
        found = list(state["found_inf_per_device"].values())
        mine = sum((f.detach().to("cpu") for f in found), torch.zeros((), device="cpu")).view(1).clone()
        for comm in self._groups:
            comm.all_reduce(mine, op="max")
        for f in found:
            f.fill_(float(mine))
        if not found:  # no gradients here: torch would refuse the step, and this rank's scale would stay
            state["found_inf_per_device"][torch.device("cpu")] = mine.view(())

    def _begin(self) -> None:
        """A rank that has no loss has scaled nothing, and has torch's initial scale not made yet."""
        if self.is_enabled() and self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's; all ranks step, or none does. Collective."""
        self._begin()
        return super().step(optimizer, *args, **kwargs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """As torch's; then all ranks know of every rank's overflow. Collective."""
        self._begin()
        super().unscale_(optimizer)
        if self.is_enabled():
            self._agree(optimizer)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        # What step() calls instead for optimizers that unscale by themselves (``fused=True``).
        found: dict[str, Any] = super()._check_inf_per_device(optimizer)
        self._agree(optimizer)
        return found


def count_parameters(module: nn.Module, *, trainable_only: bool = False) -> int:
    """How many elements one process's model would have: shards count as their whole, tied parameters once.

    Not collective.

    Example:
        >>> from pycomm.tensor_parallel import ColumnParallelLinear
        >>> count_parameters(ColumnParallelLinear(3, 5))
        20
    """
    check_notes("count_parameters", module)
    index = shard_index()
    total = 0
    for parameter in module.parameters():
        if trainable_only and not parameter.requires_grad:
            continue
        shard = index.get(id(parameter))
        shape = parameter.shape if shard is None else shard.whole_shape(parameter.shape)
        total += math.prod(shape)
    return total
