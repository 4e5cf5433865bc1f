"""A pipeline as torch's users know it: made of stages, ``step`` trains one batch, ``eval`` computes it.

What a rank does is an order of :mod:`pycomm.pipeline.schedule`, run by
:class:`pycomm.pipeline.runtime.Runtime`; named.py has a class for each name of the catalog.

The loss of a step is that of the whole batch, whatever the sizes of the microbatches (losses.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.microbatch import merge_chunks

from pycomm.communicator import Communicator
from pycomm.ddp.agree import check_agreement
from pycomm.pipeline import microbatches, timeline
from pycomm.pipeline.batch_norm import deferred_norms, deferring
from pycomm.pipeline.checks import between_stages, coming, together
from pycomm.pipeline.group import pipeline_communicator
from pycomm.pipeline.losses import Losses, shared
from pycomm.pipeline.replicas import with_replicas
from pycomm.pipeline.runtime import Inputs, Loss, Runtime
from pycomm.pipeline.schedule.catalog import build
from pycomm.pipeline.schedule.gpipe import forward_only
from pycomm.pipeline.schedule.measured import Measured
from pycomm.pipeline.schedule.order import Order
from pycomm.pipeline.schedule.simulate import Timeline
from pycomm.pipeline.schedule.verify import verify
from pycomm.pipeline.stage import PipelineStage
from pycomm.pipeline.ties import Tie
from pycomm.pipeline.wire import Wire
from pycomm.tensor_parallel.group import communicator_of

__all__ = ["PipelineSchedule"]


class PipelineSchedule:
    """A pipeline of stages under a schedule.

    Args:
        stages: of this rank: one, or a list of them in the order of their numbers.
        n_microbatches: in which a batch is cut.
        loss_fn: of the last stage's output and target, of one microbatch; a mean over what it counts. Needed
            by ``step`` on the rank of the last stage.
        args_chunk_spec, kwargs_chunk_spec: torch's ``TensorChunkSpec`` and ``_Replicate``; None cuts every
            tensor along dimension 0.
        output_merge_spec: likewise for the outputs, as torch's ``merge_chunks`` takes it.
        scale_grads: True: ``loss_fn`` is a mean, as above. False: it is a sum; losses are added.
        count: of a microbatch's target, what its loss is a mean over; None: its samples.
        count_group: the data-parallel ranks whose batches are one batch, too (their gradients are averaged
            by DDP); None: no others.
        loss_on_all_ranks: whether ``loss`` is set on every rank, which costs one broadcast a step.
        skips: connections between stages that are no neighbours: the name given to
            :func:`pycomm.pipeline.stash` and :func:`pycomm.pipeline.pop`, and (from stage, to stage).
        tied: for each weight that several stages have, its places: (stage, parameter's name) of each; they
            begin with the first one's values.
        order: actions of a user's own in place of the class's schedule (see :class:`Order`).
        wire: "fp16", "bf16" or "int8": large float32 activations and their gradients travel so between ranks
            (:mod:`pycomm.pipeline.wire` has the bounds); None: as they are.
        wire_error_feedback: with "int8": what encoding lost is added to the next microbatch's.

    Attributes:
        loss: of the last step, or eval with a target: a tensor without dimensions, of the dtype that
            ``loss_fn`` gives, on the rank of the last stage, or on all ranks; None elsewhere.

    Raises:
        ValueError: stages that do not fit the schedule or each other, no microbatches, an order that cannot
            be; on every rank where it is about the schedule.
        TypeError: a stage that is none; ``n_microbatches`` is no int (ValueError on the other ranks).

    Example:
        >>> from torch import nn
        >>> from pycomm.pipeline import ScheduleGPipe
        >>> stage = PipelineStage(nn.Linear(2, 1), 0, 1)
        >>> schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
        >>> output = schedule.step(torch.ones(4, 2), target=torch.zeros(4, 1))
        >>> output.shape, schedule.loss.requires_grad
        (torch.Size([4, 1]), False)
    """

    schedule_name = ""  #: in the catalog
    _begins = staticmethod(together)  # how a step looks at its arguments

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: Any = None,
        *,
        scale_grads: bool = True,
        count: Callable[[Any], float] | None = None,
        count_group: Any = None,
        loss_on_all_ranks: bool = False,
        skips: Mapping[str, tuple[int, int]] | None = None,
        tied: Sequence[Sequence[tuple[int, str]]] = (),
        order: Order | None = None,
        wire: str | None = None,
        wire_error_feedback: bool = False,
    ) -> None:
        mine: list[Any] = [stages] if isinstance(stages, (PipelineStage, nn.Module)) else list(stages)
        if not mine:
            raise ValueError("a rank needs at least one stage")
        for one in mine:
            if not isinstance(one, PipelineStage):
                raise TypeError(
                    f"{type(self).__name__}: expected a PipelineStage or a list of them, got "
                    f"{type(one).__name__}: write PipelineStage(module, stage_index, num_stages)"
                )
        n_stages = mine[0].num_stages
        self._comm = pipeline_communicator(mine[0].group)
        self._stages = {stage.stage_index: stage for stage in mine}
        self._n_microbatches = n_microbatches
        with together(self._comm, self.schedule_name or type(self).__name__):
            self._norms = deferred_norms(stage.submod for stage in mine)
            if isinstance(n_microbatches, bool) or not isinstance(n_microbatches, int):
                raise TypeError(f"n_microbatches must be an int, got {n_microbatches!r}")
            for stage in mine:
                stage.n_microbatches = n_microbatches
            self._order = self._build(n_stages, n_microbatches) if order is None else order
            verify(self._order)
            self._check_stages(mine, n_stages)
            self._given = self._order
            self._order = with_replicas(self._given, self._stages)
            self._specs, self._merge_spec = (args_chunk_spec, kwargs_chunk_spec), output_merge_spec
            count_comm = None if count_group is None else communicator_of(count_group)
            self._losses = Losses(self._order.name, loss_fn, n_microbatches, scale_grads, count, count_comm)
            self._shares_loss = loss_on_all_ranks
            skips, tied = {**mine[0].skips, **(skips or {})}, [*mine[0].tied, *tied]
            for name, (source, to) in skips.items():
                if not name or not 0 <= source < to < n_stages:
                    raise ValueError(
                        f"{self._order.name}: skip {name!r} must go from a stage to a later one of "
                        f"{n_stages}, got {source} to {to}"
                    )
            travels = Wire(wire, wire_error_feedback)
            self._runtime = Runtime(self._comm, self._stages, n_stages, skips, travels)
        self._ties = [Tie(places, self._comm, self._stages, self._order.placement) for places in tied]
        self._forwards = forward_only(self._order.placement, self._order.n_ranks, n_microbatches)
        self._has_agreed = False
        self.loss: Tensor | None = None

    def _build(self, n_stages: int, n_microbatches: int) -> Order:
        if not self.schedule_name:
            raise ValueError("PipelineSchedule needs an order; or use one of the schedules' classes")
        p = self._comm.size
        if n_stages % p != 0:
            raise ValueError(
                f"{self.schedule_name}: {n_stages} stages cannot be spread evenly over {p} ranks: "
                f"num_stages must be a multiple of {p}, the same on every rank"
            )
        return build(self.schedule_name, p, n_microbatches, n_stages // p)

    def _check_stages(self, mine: list[PipelineStage], n_stages: int) -> None:
        order, rank = self._order, self._comm.rank
        if order.n_ranks != self._comm.size or order.n_stages != n_stages:
            raise ValueError(
                f"{order.name}: the schedule is of {order.n_ranks} ranks and {order.n_stages} stages, the "
                f"group has {self._comm.size} ranks and the stages say num_stages={n_stages}"
            )
        expected, given = order.stages_of(rank), sorted(self._stages)
        if expected != given or len(given) != len(mine):
            raise ValueError(
                f"{order.name}: rank {rank} of {order.n_ranks} holds stages {expected}, got {given}; every "
                f"stage's rank is {list(order.placement)}"
            )
        if not order.has_backward:
            raise ValueError(
                f"{order.name}: the schedule has forwards only and would train nothing: give one with "
                "backwards; eval makes its own"
            )
        if order.n_microbatches != self._n_microbatches:
            raise ValueError(
                f"{order.name}: the schedule is of {order.n_microbatches} microbatches, n_microbatches is "
                f"{self._n_microbatches}"
            )

    @property
    def communicator(self) -> Communicator:
        """Of the pipeline's ranks."""
        return self._comm

    @property
    def stages(self) -> list[PipelineStage]:
        """Those of this rank."""
        return list(self._stages.values())

    @property
    def ties(self) -> list[Tie]:
        """The weights that several stages have."""
        return self._ties

    @property
    def order(self) -> Order:
        """What every rank computes, and which gradients it averages over a stage's replicas.

        Reductions of other ranks' stages are known after the first step.
        """
        return self._order

    def timeline(self) -> Timeline:
        """What every rank computed when in the last step or eval, in seconds. Collective.

        Returns:
            The same on every rank; :func:`pycomm.pipeline.schedule.picture.draw` draws it.

        Raises:
            RuntimeError: nothing has run yet.
        """
        if self._runtime.order is None:
            raise RuntimeError(
                f"{self._order.name}: timeline() is of the last step: call step or eval before"
            )
        return timeline.gather(self._comm, self._runtime.order, self._runtime.spans, self._runtime.reductions)

    def save_measured(self, path: str | Path) -> Measured:
        """Writes what the last step's actions took, for ``pycomm pipeline simulate --measured``. Collective.

        Args:
            path: of the JSON file, which rank 0 writes.

        Raises:
            RuntimeError: nothing has run yet.
            OSError: on every rank, that rank 0 could not write.
        """
        measured = Measured.of(self.timeline())
        timeline.save(measured, path, self._comm)
        return measured

    @property
    def _has_first(self) -> bool:
        return 0 in self._stages

    @property
    def _has_last(self) -> bool:
        return self._order.n_stages - 1 in self._stages

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward of one batch; gradients are added to ``.grad``.

        Args:
            args: the batch, on the rank of the first stage.
            target: its targets, on the rank of the last stage.
            losses: filled with the microbatches' losses there.
            return_outputs: whether to put the outputs together.
            loss_kwargs: further arguments of ``loss_fn``, the same for each microbatch.
            kwargs: further arguments of this rank's stages, cut likewise.

        Returns:
            The output on the rank of the last stage, without autograd's graph; None elsewhere.

        Raises:
            ValueError: on every rank, before anything is sent: no batch, one of fewer samples than
                microbatches, no ``loss_fn`` or target on the last stage, schedules or microbatches that
                differ. In the step: a tensor that is not as ``input_args`` or ``output_args`` of a stage say.
            CommError: another rank is lost, or does not come.
        """
        self._agree()
        loss, inputs = self._arguments("step", args, kwargs, target, loss_kwargs, self._has_last)
        with deferring(self._norms):
            outputs, made = self._train(inputs, loss)
        self._set_loss(made, losses)
        return self._merge(outputs) if self._has_last and return_outputs else None

    def _arguments(
        self,
        what: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        loss_kwargs: Mapping[str, Any] | None,
        has_loss: bool,
    ) -> tuple[Loss | None, Inputs]:
        """What makes losses, and the microbatches' inputs; what is wrong with them is told on every rank."""
        who, n = f"{self._order.name}.{what}", self._n_microbatches
        args = args if self._has_first else ()
        specs = self._specs[0] if self._has_first else None, self._specs[1]
        with self._begins(self._comm, who) as mine:
            if self._has_first and not args and not kwargs:
                raise ValueError(
                    f"{self._order.name}: rank {self._comm.rank} has the first stage and got no batch: give "
                    "it the whole batch's arguments"
                )
            inputs = microbatches.split(args, kwargs, n, *specs)
            sizes = [
                *microbatches.cut_sizes(args, specs[0], "args"),
                *microbatches.cut_sizes(kwargs, specs[1], "kwargs"),
                *(microbatches.cut_sizes(target, None, "target") if has_loss else ()),
            ]
            microbatches.check_alike(sizes, n)
            mine.n_rows = sizes[0][1] if sizes else 0
            loss = None
            if has_loss:
                loss = self._losses.of(target, loss_kwargs, f"rank {self._comm.rank}")
        rows = [(f"rank {r}'s part of the batch", size) for r, size in enumerate(mine.everyones) if size]
        microbatches.check_alike(rows, n, f"{who}: ")
        return loss, inputs

    def _merge(self, outputs: list[Any]) -> Any:
        return (
            microbatches.merge(outputs)
            if self._merge_spec is None
            else merge_chunks(outputs, self._merge_spec)
        )

    def _train(self, inputs: Inputs, loss: Loss | None) -> tuple[list[Any], list[Tensor | None]]:
        """Forward and backward of every microbatch, then the sums of tied weights; as Runtime.run."""
        for tie in self._ties:
            tie.begin()
        try:
            made = self._runtime.run(self._order, inputs, loss)
        except BaseException:
            for tie in self._ties:
                tie.undo()
            raise
        for tie in self._ties:
            tie.end()
        return made

    def eval(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        """Forward of one batch, of any size that can be cut.

        Args:
            args, losses, kwargs: as of :meth:`step`.
            target: None: no loss is computed, and ``loss`` stays as it is.

        Returns:
            As :meth:`step`.

        Raises:
            ValueError, CommError: as :meth:`step`.
        """
        self._agree()
        has_loss = self._has_last and self._losses.loss_fn is not None and target is not None
        loss, inputs = self._arguments("eval", args, kwargs, target, None, has_loss)
        with deferring(self._norms):
            outputs, made = self._runtime.run(self._forwards, inputs, loss)
        before = self.loss
        self._set_loss(made, losses)
        if self.loss is None:
            self.loss = before
        return self._merge(outputs) if self._has_last else None

    def _set_loss(self, made: list[Tensor | None], losses: list[Tensor] | None) -> None:
        """``loss``, and the user's list of the microbatches', after a step or eval."""
        found = [weighed for weighed in made if weighed is not None]
        self.loss = torch.stack(found).sum() if found else None
        if found and losses is not None:
            losses[:] = self._losses.plain
        if self._shares_loss:
            self.loss = shared(self.loss, self._comm, self._order.placement[-1])

    def _agree(self) -> None:
        """Once, before anything is sent: do all ranks run the same schedule?

        Raises:
            ValueError: on every rank, naming what differs.
        """
        if self._has_agreed:
            return
        actions = hashlib.blake2b(self._given.to_csv().encode(), digest_size=8).hexdigest()
        with coming(self._comm, f"the first step of {self._order.name}"):
            lines = [
                f"schedule {self._order.name}",
                f"n_microbatches {self._n_microbatches}",
                f"actions {actions}",
                f"skips {sorted(self._runtime.skips.items())}",
                f"loss_on_all_ranks {self._shares_loss}",
                f"wire {self._runtime.post.wire.wire}",
            ]
            check_agreement(
                self._comm,
                "pipeline schedule",
                lines,
                "Every rank must make the same schedule class with the same arguments",
            )
            between_stages(self._comm, self._stages, self._order.placement)
            self._order = with_replicas(self._given, self._stages, self._comm)
        self._has_agreed = True
