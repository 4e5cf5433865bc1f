"""``check_parallel``: is the parallel model the one-process model? If not, which layer differs first?

Every rank builds the model twice, with the same parameters; one stays whole, the other is parallelized with
the plan. Both get the same batch. What must agree, in float64 to rounding, is the loss and the gradient of
every parameter, of which a rank compares its shard. When something does not, the records of every module's
output and of its gradient (``trace.py``) say where it began: in execution order for the forward, in backward
order where the forward is right.

Cost: the whole model twice on every rank, one forward and backward each; for a small model of the same
structure, before the large one runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pycomm import arguments
from pycomm.communicator import Communicator
from pycomm.tensor_parallel.group import communicator_of
from pycomm.tensor_parallel.parallelize import Plan, parallelize_module, take_from
from pycomm.tensor_parallel.parameters import named_shards
from pycomm.tensor_parallel.trace import Difference, Trace, agreed, differences

__all__ = ["ParallelDifference", "ParallelReport", "check_parallel"]

_ROUNDINGS = 16
"""How many roundings of the model's largest gradient element pass as none, in any gradient."""


class ParallelDifference(AssertionError):
    """The parallel model is not the one-process model; the message names the first layer that differs."""


@dataclass(frozen=True)
class ParallelReport:
    """What agreed.

    Attributes:
        loss: of one process, and how far a rank's is from it.
        worst: the gradient that differs most, relatively to what it is held to.
        n_parameters: how many gradients were compared.
    """

    loss: float
    loss_difference: Difference
    worst: Difference | None
    n_parameters: int

    def __str__(self) -> str:
        text = f"equal: the loss {self.loss:.6g} differs {self.loss_difference}"
        if self.worst is not None:
            text += f"; of {self.n_parameters} gradients that of {self.worst.name} most, {self.worst}"
        return text


def check_parallel(
    model_fn: Callable[[], nn.Module],
    plan: Plan | Callable[[nn.Module], Any],
    batch: Any,
    *,
    mesh: Any = None,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    train: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    rtol: float = 1e-9,
) -> ParallelReport:
    """Runs a model in one process and in parallel, and compares loss and every gradient. Every rank calls it.

    Args:
        model_fn: makes the model; called twice.
        plan: for :func:`parallelize_module`, or a function of the model that returns one (``gpt2_plan``).
        batch: the same on every rank: a dict for ``model(**batch)``, a tuple for ``model(*batch)``, or a
            tensor. Floating tensors are cast to ``dtype``.
        mesh: the tensor-parallel ranks, as for :func:`parallelize_module`.
        loss_fn: ``loss_fn(output, batch)``, a scalar; None: the output's ``loss``, or the output itself.
        train: run in training mode; dropout masks must then not depend on the number of ranks.
        seed: of torch's generator before each run.
        dtype: of parameters and batch.
        rtol: how much a value may differ, as a fraction of its tensor's largest element; 16 roundings of the
            model's largest gradient element may pass in any case.

    Returns:
        What agreed and how well; print it.

    Raises:
        ParallelDifference: on every rank: the first layer that differs, and by how much.
        TypeError, ValueError: a batch that differs between ranks, no scalar loss, or the errors of the plan.

    Example:
        >>> from pycomm.tensor_parallel import ColwiseParallel, RowwiseParallel
        >>> make = lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
        >>> plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        >>> report = check_parallel(make, plan, torch.ones(2, 4), loss_fn=lambda out, batch: out.sum())
        >>> report.worst.absolute
        0.0
    """
    comm = communicator_of(mesh, who="check_parallel: mesh")
    batch = _cast(batch, dtype)
    _check_same(comm, batch)
    models: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(seed)
        models.append(model_fn().to(dtype).train(train))
    whole, parallel = models
    take_from(comm, whole, 0)
    parallel.load_state_dict(whole.state_dict())
    of_model = callable(plan) and not isinstance(plan, Mapping)
    parallelize_module(parallel, comm, plan(parallel) if of_model else plan, src_data_rank=None)  # type: ignore[operator,arg-type]
    traces, losses = [], []
    for model in models:
        torch.manual_seed(seed)
        with Trace(model) as trace:
            loss = _loss(model, batch, loss_fn, comm)
            loss.backward()  # type: ignore[no-untyped-call]
        traces.append(trace)
        losses.append(loss.detach())
    loss_difference = Difference.of("the loss", losses[1], losses[0], losses[0])
    found = agreed(comm, [loss_difference, *_gradients(whole, parallel)])
    # A gradient that is zero by its mathematics, as of a bias of keys, is rounding of larger ones.
    rounding = _ROUNDINGS * torch.finfo(dtype).eps * max((d.scale for d in found[1:]), default=0.0)
    wrong = [d for d in found if not d.absolute <= max(rtol * d.scale, rounding)]
    if wrong:
        raise ParallelDifference(_message(comm, traces, losses, wrong, len(found) - 1, rtol))
    worst = max(found[1:], key=lambda d: d.absolute / (max(rtol * d.scale, rounding) or 1.0), default=None)
    return ParallelReport(float(losses[0]), found[0], worst, len(found) - 1)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {name: _cast(v, dtype) for name, v in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(_cast(v, dtype) for v in value)
    return value


def _check_same(comm: Communicator, batch: Any) -> None:
    """A batch that differs would look like a layer that does."""
    inside = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple) else [batch]
    plain = [t.detach().contiguous().reshape(-1) for t in inside if isinstance(t, Tensor)]
    sums = [zlib.crc32(t.view(torch.uint8).cpu().numpy().tobytes()) for t in plain if t.numel()]
    mine = torch.tensor([zlib.crc32(repr(sums).encode())])
    table = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(table, mine)
    differing = (table != table[0]).nonzero().flatten().tolist()
    if differing:
        raise ValueError(
            f"check_parallel: the batch of ranks {differing} differs from rank 0's; seed it alike"
        )


def _loss(
    model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], Tensor] | None, comm: Communicator
) -> Tensor:
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
    loss: Any
    if loss_fn is not None:
        loss = loss_fn(output, batch)
    elif isinstance(output, Mapping) and "loss" in output:
        loss = output["loss"]
    else:
        loss = getattr(output, "loss", output)
    with comm._refusing:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(
                f"check_parallel: the loss must be a tensor of one element, got {arguments.short(loss)}; "
                "give loss_fn(output, batch)"
            )
    return loss.reshape(())


def _gradients(whole: nn.Module, parallel: nn.Module) -> list[Difference]:
    """Of every parameter of either model; this rank's shard is compared with its part."""
    ours, theirs = dict(parallel.named_parameters()), dict(whole.named_parameters())
    shards = dict(named_shards(parallel))
    found = []
    for name in [*theirs, *(name for name in ours if name not in theirs)]:
        a, b = ours.get(name), theirs.get(name)
        local, expected = None if a is None else a.grad, None if b is None else b.grad
        part = shards[name].take(expected) if name in shards and expected is not None else expected
        found.append(Difference.of(name, local, part, expected))
    return found


def _message(
    comm: Communicator,
    traces: list[Trace],
    losses: list[Tensor],
    wrong: list[Difference],
    n_parameters: int,
    rtol: float,
) -> str:
    outputs, gradients = differences(comm, *traces)
    parameters = {d.name: d for d in wrong if d.name != "the loss"}
    everyones = torch.empty(comm.size, dtype=torch.float64)
    comm.all_gather(everyones, losses[1].double().reshape(1))
    head = (
        f"check_parallel: with {comm.size} ranks the model is not that of one process: "
        f"the loss is {float(losses[0]):.9g} in one process and {everyones.tolist()} on the ranks; "
        f"{len(parameters)} of {n_parameters} gradients differ by more than {rtol:g}."
    )
    at = _first(outputs, rtol)
    if at is not None:
        return f"{head} Forward: the first layer whose output differs is {_named(outputs, at)}"
    if len(parameters) < len(wrong):
        return f"{head} Every layer's output agrees: the difference is in the loss itself"
    back = [d for d in reversed(gradients) if d is not None]
    order = [d.name for d in outputs]
    named = sorted(parameters, key=lambda n: _place(n, order), reverse=True)
    text = f"{head} Every layer's output and the loss agree. Backward: "
    at = _first(back, rtol)
    if at is not None:
        text += f"the first layer to whose output a wrong gradient comes is {_named(back, at)}; "
    else:
        text += "every layer's output gets the right gradient; "
    return text + f"the first parameter with a wrong one is {named[0]}, {parameters[named[0]]}"


def _first(found: list[Difference], rtol: float) -> int | None:
    return next((i for i, d in enumerate(found) if not d.absolute <= rtol * d.scale), None)


def _named(found: list[Difference], at: int) -> str:
    before = (
        f"the last before it that agrees is {found[at - 1].name}" if at else "none before it was compared"
    )
    return f"{found[at].name}, {found[at]}; {before}"


def _place(parameter: str, order: list[str]) -> int:
    """Where in execution order the module of a parameter is."""
    module = parameter.rpartition(".")[0] or "the model"
    return order.index(module) if module in order else -1
