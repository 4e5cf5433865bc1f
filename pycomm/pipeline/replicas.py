"""Stages that have data-parallel replicas: their gradients are averaged once a step, beside what follows.

A stage has replicas when its module is, or holds, a ``DistributedDataParallel``: pycomm's, with its
communication hooks, compression and weights, or torch's own on any backend, without hooks. All forwards and
backwards of a step run as within ``no_sync``, since the weights' gradients of a microbatch may come in
another order than its inputs' or not through autograd's accumulation at all; the schedule's ``REDUCE_GRAD``
then averages what ``grad`` holds. A step that the user encloses in the wrapper's ``no_sync`` is not
averaged, and the next one averages the sum, as with DDP itself.

Every replica runs the same order, so reductions begin in the same order everywhere; a reduction is an action
that replicas do together, and cannot add a deadlock to an order that has none.

Threads: one; the communicators' progress threads move the bytes meanwhile.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pycomm.communicator import Communicator
from pycomm.ddp.wrapper import DistributedDataParallel
from pycomm.pipeline.schedule.action import Action
from pycomm.pipeline.schedule.order import Order
from pycomm.pipeline.schedule.reductions import reduced, with_reductions
from pycomm.pipeline.schedule.simulate import Span
from pycomm.pipeline.schedule.verify import verify
from pycomm.pipeline.stage import PipelineStage
from pycomm.tensor_parallel.group import communicator_of
from pycomm.tensor_parallel.regions import lengths_of
from pycomm.work import Work

__all__ = ["Replicas", "with_replicas"]

_PROVED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # wrappers whose ranks all have the same stage
_TorchsOwn = nn.parallel.DistributedDataParallel


class _UnderWay(Protocol):
    def wait(self) -> object: ...


def wrappers_of(module: nn.Module) -> list[Any]:
    """The data-parallel wrappers in a stage's module, itself first."""
    return [m for m in module.modules() if isinstance(m, _TorchsOwn)]


def _sharing(stages: Mapping[int, PipelineStage]) -> list[set[int]]:
    """The stages of this rank that have a trainable parameter in common, in groups."""
    groups: list[tuple[set[int], set[int]]] = []  # (stages, ids of their parameters)
    for number, stage in stages.items():
        numbers, ids = {number}, {id(p) for p in stage.submod.parameters() if p.requires_grad}
        for group in [group for group in groups if group[1] & ids]:
            groups.remove(group)
            numbers, ids = numbers | group[0], ids | group[1]
        groups.append((numbers, ids))
    return [numbers for numbers, _ in groups if len(numbers) > 1]


def with_replicas(
    order: Order, stages: Mapping[int, PipelineStage], comm: Communicator | None = None
) -> Order:
    """An order with a reduction of each stage that has replicas.

    Args:
        order: of computations, perhaps with reductions.
        stages: of this rank.
        comm: of the pipeline: its other ranks' stages count, too (collective). None: only this rank's.

    Raises:
        ValueError: the order reduces a stage of this rank that has no replicas, or too early.
    """
    replicas = Replicas(stages)
    for stage in reduced(order):
        if stage in stages and stage not in replicas.stages:
            raise ValueError(
                f"{order.name}: the schedule reduces the gradients of stage {stage}, whose module is in no "
                "DistributedDataParallel"
            )
    labels = replicas.labels(order.n_stages)
    if comm is not None:
        comm.all_reduce(labels)
    groups: dict[int, list[int]] = {}
    for stage, label in enumerate(labels.tolist()):
        if label > 0:
            groups.setdefault(label, []).append(stage)
    made = with_reductions(order, [s for group in groups.values() for s in group], list(groups.values()))
    verify(made)
    return made


class Replicas:
    """The data-parallel side of the stages of one rank, for one step.

    Args:
        stages: of this rank, by their number.

    Raises:
        ValueError: torch's own wrapper with what only its backward can do.
    """

    def __init__(self, stages: Mapping[int, PipelineStage]) -> None:
        self._wrappers = {
            number: found for number, stage in stages.items() if (found := wrappers_of(stage.submod))
        }
        for number, wrappers in self._wrappers.items():
            for wrapper in wrappers:
                _check_torchs_own(number, wrapper)
        self._sharing = _sharing(stages) if self._wrappers else []
        self._under_way: list[tuple[int, Any, _UnderWay]] = []
        self.spans: list[Span] = []  # of the reductions: from their begin to when they were seen to be over
        self._began: dict[int, float] = {}  # by stage
        self._waiting: list[Any] = []  # wrappers that this step is to average and has not begun to

    @property
    def stages(self) -> list[int]:
        """Those that have replicas."""
        return sorted(self._wrappers)

    def labels(self, n_stages: int) -> Tensor:
        """For each stage 0, or where it has replicas here 1 + the first that it is together with.

        Stages that share a parameter are together: none's gradients are complete before all are. The sum of
        all ranks' labels says it of the whole pipeline.
        """
        found = torch.zeros(n_stages, dtype=torch.int32)
        for stage in self.stages:
            found[stage] = 1 + min({stage}.union(*(group for group in self._sharing if stage in group)))
        return found

    @contextlib.contextmanager
    def step(self, trains: bool = True) -> Iterator[None]:
        """What is computed inside stays on this rank, but for what :meth:`reduce` averages.

        Raises:
            RuntimeError: a stage's module was wrapped after the order was made, which does not reduce it.
        """
        wrappers = [w for found in self._wrappers.values() for w in found]
        self._waiting = [w for w in wrappers if w.require_backward_grad_sync] if trains else []
        try:
            with contextlib.ExitStack() as stack:
                for wrapper in wrappers:
                    stack.enter_context(wrapper.no_sync())
                yield
            if self._waiting:
                raise RuntimeError(
                    f"of the stages {self.stages}, whose modules are in DistributedDataParallel, not all are "
                    "in the schedule's reductions: wrap modules before the schedule's first step"
                )
            self.finish()
        except BaseException:
            for wrapper in [*(w for _, w, _ in self._under_way), *self._waiting]:
                if isinstance(wrapper, DistributedDataParallel):
                    wrapper._abandon_reduction()
            raise
        finally:
            self._under_way, self._waiting = [], []

    def reduce(self, stage: int) -> None:
        """Begins to average a stage's gradients. Collective over its replicas.

        Raises:
            ValueError: the first time, that the wrapper's ranks are not the stage's replicas.
        """
        relatives = {s for group in self._sharing if stage in group for s in group}
        if any(number in relatives for number, _, _ in self._under_way):
            self.finish()  # the same memory
        self._began[stage] = time.monotonic()
        for wrapper in self._wrappers[stage]:
            if wrapper not in self._waiting:
                continue
            _prove_replicas(stage, wrapper)
            self._waiting.remove(wrapper)
            began = (
                wrapper.begin_reduction()
                if isinstance(wrapper, DistributedDataParallel)
                else _reduce_torchs_own(wrapper)
            )
            self._under_way.append((stage, wrapper, began))

    def finish(self) -> None:
        """Waits for all that was begun.

        Raises:
            RuntimeError: of the first reduction that failed, on every replica; the others have ended, too.
        """
        first: RuntimeError | None = None
        while self._under_way:
            number, wrapper, under_way = self._under_way[0]
            try:
                under_way.wait()
            except RuntimeError as error:
                if first is None:
                    first = type(error)(f"stage {number}: {error}")
            del self._under_way[0]
            if all(other != number for other, _, _ in self._under_way):
                self.spans.append(Span(Action.reduce(number), self._began[number], time.monotonic()))
            wrapper.require_forward_param_sync = True  # the next step's first forward gives buffers to all
        if first is not None:
            raise first


def _prove_replicas(stage: int, wrapper: Any) -> None:
    """Once for each wrapper: stages of equal shapes would be averaged with each other without a word."""
    if wrapper in _PROVED:
        return
    stages = lengths_of(stage, _communicator_of(wrapper))
    if any(other != stage for other in stages):
        raise ValueError(
            f"stage {stage}: its DistributedDataParallel would average it with other stages: its ranks have "
            f"stages {stages}. Wrap a stage with its replicas' group: process_group=mesh.get_group('dp')"
        )
    _PROVED.add(wrapper)


def _communicator_of(wrapper: Any) -> Communicator:
    if isinstance(wrapper, DistributedDataParallel):
        return wrapper.communicator
    return communicator_of(wrapper.process_group, who="a stage's DistributedDataParallel: process_group")


# ---- torch's own wrapper -----------------------------------------------------------------------------------


def _check_torchs_own(stage: int, wrapper: Any) -> None:
    if isinstance(wrapper, DistributedDataParallel):
        return
    has = {
        "a communication hook": wrapper.__dict__.get("_comm_hooks") or _has_builtin_hook(wrapper),
        "mixed_precision": wrapper.mixed_precision is not None,
        "static_graph=True": wrapper.static_graph,
        "gradient_as_bucket_view=True": wrapper.gradient_as_bucket_view,
    }
    for what, there in has.items():
        if there:
            raise ValueError(
                f"stage {stage}: torch's DistributedDataParallel with {what} works within its own backward "
                "only, which a pipeline's step is not; use pycomm.DistributedDataParallel, which takes the "
                "same arguments, or leave that out"
            )


def _has_builtin_hook(wrapper: Any) -> bool:
    data = wrapper._get_ddp_logging_data() if hasattr(wrapper, "_get_ddp_logging_data") else {}
    return bool(data.get("comm_hook"))


class _Works:
    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _reduce_torchs_own(wrapper: Any) -> _UnderWay:
    """Averages the gradients of torch's own wrapper over its group's ranks, by a communicator of ours."""
    comm = _communicator_of(wrapper)
    ignored = wrapper.parameters_to_ignore
    named = {n: p for n, p in wrapper.module.named_parameters() if p.requires_grad and n not in ignored}
    users = torch.tensor([p.grad is not None for p in named.values()], dtype=torch.int32)
    comm.all_reduce(users)
    if not wrapper.find_unused_parameters and bool((users < comm.size).any()):
        unused = [n for n, count in zip(named, users.tolist(), strict=True) if count < comm.size]
        raise RuntimeError(
            f"DistributedDataParallel: {', '.join(map(repr, unused[:4]))}{' …' if len(unused) > 4 else ''} "
            f"had no gradient on some of {comm.size} replicas in this step; pass "
            "find_unused_parameters=True, or freeze what is not used"
        )
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter, count in zip(named.values(), users.tolist(), strict=True):
        if count == 0:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    return _Works([comm.all_reduce(some, op="avg", async_op=True) for some in by_dtype.values()])
