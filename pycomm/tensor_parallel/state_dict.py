"""Checkpoints of a model cut over ranks: whole tensors to its shards and back, at any degree.

    full_state_dict, load_full_state_dict    whole tensors, as one process's model has them
    sharded_state_dict                       for torch.distributed.checkpoint: each rank writes and reads its
                                             own shards, under the whole's names and places
    (the same for optimizers)
    materialize                              values for a model made on device "meta"

A plain ``module.state_dict()`` has this rank's shards as they lie, and fits the same degree only. Nothing is
padded, so a checkpoint never knows how it was cut. What is sharded, the layers know (parameters.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pycomm.tensor_parallel.parameters import ParameterShard, check_notes, named_shards, shard_index
from pycomm.tensor_parallel.whole import WholeTensor, is_dtensor, undistributed

__all__ = [
    "full_optimizer_state_dict",
    "full_state_dict",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "load_sharded_optimizer_state_dict",
    "materialize",
    "sharded_optimizer_state_dict",
    "sharded_state_dict",
]

State = dict[str, Any]


def _whole_of(local: Any, shard: ParameterShard, rank0_only: bool) -> Tensor | None:
    """The whole of which every rank has a shard; None where only rank 0 wants it. Collective."""
    comm, split = shard.comm, shard.split
    local = local.detach().contiguous()
    sizes = [[n if d == shard.dim else m for d, m in enumerate(local.shape)] for n in split.lengths]
    wants = comm.rank == 0 or not rank0_only
    parts = [local.new_empty(size) for size in sizes] if wants else None
    if rank0_only:
        comm.gather(local, parts, 0, counts=[torch.Size(size).numel() for size in sizes])
    elif parts is not None:
        comm.all_gather(parts, local)
    if parts is None:
        return None
    whole: Tensor = local.new_empty(shard.whole_shape(local.shape))
    for rank, part in enumerate(parts):
        split.put(whole, shard.dim, rank, part)
    return whole


@torch.no_grad()
def full_state_dict(module: nn.Module, *, rank0_only: bool = False) -> State:
    """``state_dict()`` of the model of one process. Collective.

    Args:
        module: with parallel layers anywhere below.
        rank0_only: only rank 0 of each group gathers, and the others get an empty dictionary. Each of several
            data-parallel replicas has such a rank 0; save on one of them.

    Returns:
        By name, whole tensors; replicated ones are copies too.

    Example:
        >>> from pycomm.tensor_parallel import ColumnParallelLinear
        >>> full_state_dict(ColumnParallelLinear(3, 5))["weight"].shape
        torch.Size([5, 3])
    """
    check_notes("full_state_dict", module)
    index = shard_index()
    found: State = {}
    is_first = True
    for name, value in module.state_dict(keep_vars=True).items():
        shard = index.get(id(value))
        if isinstance(value, Tensor):
            value = undistributed(value)
            if shard is not None:
                is_first = is_first and shard.comm.rank == 0
                value = _whole_of(value, shard, rank0_only)
            else:
                value = value.detach().clone()
        found[name] = value
    return found if is_first or not rank0_only else {}


def _shard_of_whole(name: str, whole: Any, like: Tensor, shard: ParameterShard | None) -> Any:
    """What this rank keeps of a whole tensor; distributed further where ``like`` is."""
    if not isinstance(whole, Tensor):
        return whole
    want = like.shape if shard is None else shard.whole_shape(like.shape)
    if whole.shape != want:
        raise ValueError(
            f"{name!r}: the whole has the shape {tuple(whole.shape)}, the model's is {tuple(want)}"
            + ("" if shard is None else f" (dimension {shard.dim} cut over {shard.comm.size} ranks)")
        )
    part = whole if shard is None else shard.take(whole)
    if is_dtensor(like):
        from torch.distributed.tensor import distribute_tensor

        target: Any = like
        return distribute_tensor(part.to(like.device), target.device_mesh, target.placements)
    return part


def load_full_state_dict(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
    """``load_state_dict`` from the state of one process's model: each rank takes its shards.

    Args:
        module: with parallel layers anywhere below, at any degree.
        state: whole tensors, on every rank; they may be memory-mapped (``torch.load(mmap=True)``).
        strict: names must be the same.

    Returns:
        What ``load_state_dict`` returns.

    Raises:
        ValueError: a whole tensor has another shape than the model's.
        RuntimeError: names differ, where strict.

    Example:
        >>> from pycomm.tensor_parallel import ColumnParallelLinear
        >>> load_full_state_dict(ColumnParallelLinear(3, 5), nn.Linear(3, 5).state_dict())
        <All keys matched successfully>
    """
    check_notes("load_full_state_dict", module)
    index = shard_index()
    own = module.state_dict(keep_vars=True)
    local = {
        name: _shard_of_whole(name, value, own[name], index.get(id(own[name]))) if name in own else value
        for name, value in state.items()
    }
    return module.load_state_dict(local, strict=strict)


def sharded_state_dict(module: nn.Module) -> State:
    """For ``torch.distributed.checkpoint``: saves and loads in place, at any degree. Not collective.

    ``dcp.save({"model": sharded_state_dict(model)}, …)`` writes each shard once, also where data-parallel
    ranks have the same; ``dcp.load`` of the same reads this rank's shards into the model's parameters,
    whatever the degree was when it was saved.

    Returns:
        By name, tensors that have the whole's shape and this rank's shards; others as they are.

    Example:
        >>> from pycomm.tensor_parallel import ColumnParallelLinear
        >>> sharded_state_dict(ColumnParallelLinear(3, 5))["weight"].shape
        torch.Size([5, 3])
    """
    check_notes("sharded_state_dict", module)
    index = shard_index()
    found: State = {}
    for name, value in module.state_dict(keep_vars=True).items():
        shard = index.get(id(value))
        value = value.detach() if isinstance(value, Tensor) else value
        found[name] = value if shard is None else WholeTensor(value, shard)
    return found


# ---- optimizers ------------------------------------------------------------------------------------------


def _each_state(module: nn.Module, state: State, change: Any) -> State:
    """The state with ``change(name, tensor, shard)`` for what is shaped as a sharded parameter."""
    shards = dict(named_shards(module))
    shapes = {name: p.shape for name, p in module.named_parameters(remove_duplicate=False)}
    return {
        **state,
        "state": {
            name: {
                key: change(f"{name}.{key}", value, shards.get(name), shapes.get(name))
                for key, value in of_parameter.items()
            }
            for name, of_parameter in state["state"].items()
        },
    }


def _is_shard(name: str, value: Any, shard: ParameterShard | None, shape: torch.Size | None) -> bool:
    """Whether a state is one value for each element of a sharded parameter; what is for all is none.

    Raises:
        ValueError: neither, such as Adafactor's means of rows: of a shard they are no part of the whole's.
    """
    if shard is None or not isinstance(value, Tensor):
        return False
    if value.shape != shape and value.numel() > 1 and shard.comm.size > 1:
        raise ValueError(
            f"{name!r}: an optimizer's state of shape {tuple(value.shape)} for a parameter of shape "
            f"{tuple(shape or ())}, which is dimension {shard.dim} cut over {shard.comm.size} ranks, is no "
            "part of the whole's; use an optimizer that works by element"
        )
    return value.shape == shape


def _optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """By parameter's name; makes the state where there is none yet."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    # torch makes none where a gradient is there, and what is loaded afterwards would be dropped in silence.
    gradients = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        state: State = get_optimizer_state_dict(module, optimizer)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return state


def sharded_optimizer_state_dict(module: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """As :func:`sharded_state_dict`, of an optimizer; after ``dcp.load`` give it to the function below.

    Example:
        >>> from pycomm.tensor_parallel import ColumnParallelLinear
        >>> layer = ColumnParallelLinear(3, 5)
        >>> adam = torch.optim.Adam(layer.parameters())
        >>> sharded_optimizer_state_dict(layer, adam)["state"]["weight"]["exp_avg"].shape
        torch.Size([5, 3])
    """

    def wrap(name: str, value: Any, shard: ParameterShard | None, shape: torch.Size | None) -> Any:
        return (
            WholeTensor(value, shard) if shard is not None and _is_shard(name, value, shard, shape) else value
        )

    return _each_state(module, _optimizer_state(module, optimizer), wrap)


def load_sharded_optimizer_state_dict(
    module: nn.Module, optimizer: torch.optim.Optimizer, state: State
) -> None:
    """Gives the optimizer a state made by :func:`sharded_optimizer_state_dict` and filled by ``dcp.load``."""
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    def unwrap(name: str, value: Any, *_: Any) -> Any:
        return value.local if isinstance(value, WholeTensor) else value

    set_optimizer_state_dict(module, optimizer, _each_state(module, state, unwrap))


@torch.no_grad()
def full_optimizer_state_dict(module: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The optimizer's state of one process's model, by parameter's name. Collective.

    Example:
        >>> from pycomm.tensor_parallel import ColumnParallelLinear
        >>> layer = ColumnParallelLinear(3, 5)
        >>> adam = torch.optim.Adam(layer.parameters())
        >>> full_optimizer_state_dict(layer, adam)["state"]["bias"]["exp_avg"].shape
        torch.Size([5])
    """

    def gather(name: str, value: Any, shard: ParameterShard | None, shape: torch.Size | None) -> Any:
        is_shard = _is_shard(name, value, shard, shape)
        value = undistributed(value)
        if is_shard and shard is not None:
            return _whole_of(value, shard, False)
        return value.detach().clone() if isinstance(value, Tensor) else value

    return _each_state(module, _optimizer_state(module, optimizer), gather)


def load_full_optimizer_state_dict(module: nn.Module, optimizer: torch.optim.Optimizer, state: State) -> None:
    """Gives the optimizer this rank's shards of what :func:`full_optimizer_state_dict` gave, at any degree.

    Example:
        >>> from pycomm.tensor_parallel import ColumnParallelLinear
        >>> layer = ColumnParallelLinear(3, 5)
        >>> adam = torch.optim.Adam(layer.parameters())
        >>> load_full_optimizer_state_dict(layer, adam, full_optimizer_state_dict(layer, adam))
    """
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    parameters = dict(module.named_parameters(remove_duplicate=False))

    def cut(name: str, value: Any, shard: ParameterShard | None, shape: torch.Size | None) -> Any:
        like = parameters.get(name.rpartition(".")[0])
        if shard is None or like is None or not isinstance(value, Tensor) or value.dim() != like.dim():
            return value
        return _shard_of_whole(name, value, like, shard)

    set_optimizer_state_dict(module, optimizer, _each_state(module, state, cut))


# ---- meta ------------------------------------------------------------------------------------------------


@torch.no_grad()
def materialize(module: nn.Module, device: Any = "cpu") -> nn.Module:
    """Gives a module made on device "meta" memory and the initial values it would have had.

    Calls ``reset_parameters`` of each module that has something on "meta", in the order of ``modules()``, so
    that from the same seed the values are those of a module made at once (where its parts were made in that
    order). Tied parameters stay tied, with the first holder's values.

    Args:
        module: with or without parallel layers; what is not on "meta" stays as it is.
        device: where to.

    Returns:
        ``module``.

    Raises:
        TypeError: a module with parameters or buffers on "meta" has no ``reset_parameters``.

    Example:
        >>> from pycomm.tensor_parallel import ColumnParallelLinear
        >>> materialize(ColumnParallelLinear(3, 5, device="meta")).weight.device
        device(type='cpu')
    """
    waiting = []
    for name, each in module.named_modules():
        own = [*each._parameters.items(), *each._buffers.items()]
        on_meta = [n for n, t in own if t is not None and t.is_meta]
        if on_meta and not callable(getattr(each, "reset_parameters", None)):
            raise TypeError(
                f"materialize: {name or 'the module'!r} of {type(each).__name__} has {on_meta} on device "
                "meta and no reset_parameters() that would give them values"
            )
        if on_meta:
            waiting.append(each)
    made: dict[int, Any] = {}  # by the id of what was on meta, so that ties stay
    kept = []
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    new = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                    made[id(parameter)] = new
                    kept.append(parameter)  # its id must not be used again
                each._parameters[name] = made[id(parameter)]
        for name, buffer in each._buffers.items():
            if buffer is not None and buffer.is_meta:
                each._buffers[name] = torch.empty_like(buffer, device=device)
    first_values: dict[int, tuple[nn.Parameter, Tensor]] = {}
    for each in waiting:
        before = {
            name: first_values[id(p)][1] for name, p in each._parameters.items() if id(p) in first_values
        }
        reset: Any = each.reset_parameters
        reset()
        for name, p in each._parameters.items():
            if p is None:
                continue
            if name in before:
                p.copy_(before[name])
            elif _is_shared(module, p):
                first_values[id(p)] = p, p.detach().clone()
    return module


def _is_shared(module: nn.Module, parameter: nn.Parameter) -> bool:
    return sum(p is parameter for each in module.modules() for p in each._parameters.values()) > 1
