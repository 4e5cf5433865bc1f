"""PipeDream-2BW: a pipeline that never flushes, with two versions of the weights.

A step computes all forwards of its batch, and the backwards of the batch before that are left; so no rank
waits for a batch to drain. With w_t the weights when step t begins and g_t the gradient of batch t,

    g_t = grad f_t(w_t),        w_{t+1} = optimizer(w_t, g_{t-1}),        w_1 = w_0:

the gradient that an update uses is of the weights one update before, never more. A batch's backwards use
the weights of its forwards, which the update must not change; therefore a *version*: parameters of their
own for each batch on its way, which share memory with the module's until the step ends, when the module's
move elsewhere. Two copies of the weights exist, whatever the number of ranks.

Idle time: (p - 1)(F + B) once, not once a step. Activations: as 1F1B, at most p - r on rank r.

Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training (ICML 2021), section 3.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pycomm.pipeline.checks import alone
from pycomm.pipeline.post import Transfer
from pycomm.pipeline.replicas import wrappers_of
from pycomm.pipeline.runtime import Inputs, Loss, Step
from pycomm.pipeline.schedule.action import Action
from pycomm.pipeline.schedule.one_f_one_b import pipedream_2bw, two_bw_steps
from pycomm.pipeline.schedule.order import Order
from pycomm.pipeline.schedule.transfers import with_transfers
from pycomm.pipeline.schedule.verify import verify
from pycomm.pipeline.schedules import PipelineSchedule
from pycomm.pipeline.stage import PipelineStage

__all__ = ["SchedulePipeDream2BW"]

_Place = tuple[nn.Module, str]  # a module, and the name of one of its parameters


class _Versions:
    """The trainable parameters of some modules, once more for each batch on its way."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._places: dict[nn.Parameter, list[_Place]] = {}
        for module in (inner for outer in modules for inner in outer.modules()):
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    self._places.setdefault(parameter, []).append((module, name))
        self._open: dict[int, dict[nn.Parameter, nn.Parameter]] = {}

    def open(self, batch: int) -> None:
        """A version for a batch: the values of now."""
        self._open[batch] = {}
        for parameter in self._places:
            alias = nn.Parameter(parameter.data)  # .data: changes of one are not seen as changes of the other
            alias.__dict__.update(parameter.__dict__)
            self._open[batch][parameter] = alias

    @contextlib.contextmanager
    def use(self, batch: int) -> Iterator[None]:
        """Inside, the modules have a batch's version (also while they compute something again)."""
        version = self._open[batch]
        try:
            for parameter, places in self._places.items():
                for module, name in places:
                    module._parameters[name] = version[parameter]
            yield
        finally:
            for parameter, places in self._places.items():
                for module, name in places:
                    module._parameters[name] = parameter

    def part(self) -> None:
        """The modules' parameters move to memory of their own, so that updates leave versions alone."""
        for parameter in self._places:
            parameter.data = parameter.data.clone()

    def close(self, batch: int) -> None:
        """The gradients of a version are added to the parameters'; the version is gone."""
        with torch.no_grad():
            for parameter, alias in self._open.pop(batch).items():
                if parameter.grad is None:
                    parameter.grad = alias.grad
                elif alias.grad is not None:
                    parameter.grad += alias.grad

    def forget(self) -> None:
        """After a failure."""
        self._open.clear()


class SchedulePipeDream2BW(PipelineSchedule):
    """1F1B without a flush between steps, for updates that are one batch late.

    The loop is the usual one, with a :meth:`flush` at its end::

        for x, y in data:
            schedule.step(x, target=y)      # forwards of this batch; .grad gets the batch before's
            optimizer.step()
            optimizer.zero_grad()
        schedule.flush()                    # the last batch's backwards
        optimizer.step()

    * ``step`` returns this batch's output and loss; what it adds to ``.grad`` is the gradient of the batch
      before, of the weights that that one was computed with. After the first step (since the schedule was
      made, or flushed) there is none: ``.grad`` stays None and optimizers leave such parameters alone, so
      there are as many updates as batches. With ``zero_grad(set_to_none=False)`` they would make an update
      with zeros there: skip it.
    * ``flush`` ends the backwards of the last batch. Afterwards nothing is on its way, and the next step is
      a first one again. Call it before a checkpoint: then continuing and resuming are the same. A
      ``state_dict`` without it has the newest weights, and the last batch is lost.
    * ``eval`` computes with the newest weights, at any time.
    * A ``state_dict`` refers to the weights of now; they move in the next step: save or copy it at once.
    * A stage in DistributedDataParallel: what ``step`` adds to ``.grad`` is averaged over the replicas. Other
      hooks of parameters are refused.
    * ``loss_on_all_ranks`` makes all ranks wait for the last one's loss in every step.

    Args:
        stages, n_microbatches, others: as of PipelineSchedule, without ``order``; one stage on a rank, and
            at least p - 1 microbatches for p ranks.

    Raises:
        ValueError: as PipelineSchedule; too few microbatches; an ``order``; parameters with hooks.

    Example:
        >>> stage = PipelineStage(nn.Linear(2, 1), 0, 1)
        >>> schedule = SchedulePipeDream2BW(stage, 2, loss_fn=nn.functional.mse_loss)
        >>> output = schedule.step(torch.ones(4, 2), target=torch.zeros(4, 1))
        >>> stage.submod.weight.grad is None
        True
        >>> schedule.flush()
        >>> stage.submod.weight.grad.shape
        torch.Size([1, 2])
    """

    schedule_name = "PipeDream2BW"
    _begins = staticmethod(alone)  # ranks must not wait for each other between two steps

    def __init__(
        self, stages: PipelineStage | Sequence[PipelineStage], n_microbatches: int, *args: Any, **kwargs: Any
    ) -> None:
        if kwargs.get("order") is not None:
            raise ValueError("PipeDream2BW takes no order: what a step does depends on the step before")
        super().__init__(stages, n_microbatches, *args, **kwargs)
        p, m = self._comm.size, n_microbatches
        verify(pipedream_2bw(p, m, 3), p)
        # The first step, then those of odd and of even batches; the flush after an even and an odd batch.
        self._steps = two_bw_steps(p, m, 3)[:3]
        self._drains = [two_bw_steps(p, m, n)[-1] for n in (1, 2)]
        self._listed: dict[int, list[Action]] = {}  # this rank's, by id of a step's order
        for number, stage in self._stages.items():
            for name, parameter in stage.submod.named_parameters():
                hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
                if hooks and not wrappers_of(stage.submod):
                    raise ValueError(
                        f"PipeDream2BW: parameter {name!r} of stage {number} has hooks, which would not be "
                        "called: a step's gradients are of copies; change .grad after step instead"
                    )
        self._versions = _Versions([stage.submod for stage in self._stages.values()])
        self._begin()

    def _build(self, n_stages: int, n_microbatches: int) -> Order:
        p = self._comm.size
        if n_stages != p:
            raise ValueError(f"{self.schedule_name} has 1 stage on a rank: {p} ranks, {n_stages} stages")
        if n_microbatches < 1:
            raise ValueError(
                f"{self.schedule_name}: the number of microbatches must be at least 1, got {n_microbatches}"
            )
        two_bw_steps(p, n_microbatches, 1)  # raises where there are too few microbatches
        return pipedream_2bw(p, n_microbatches, 1)

    def _begin(self) -> None:
        """Nothing is on its way."""
        n = 2 * self._n_microbatches
        self._n_batches = 0  # since then
        self._late: list[Transfer] = []  # sent in the step before
        self._under_way = Step(self._runtime, self._steps[0], [((), {})] * n, None)

    def _train(self, inputs: Inputs, loss: Loss | None) -> tuple[list[Any], list[Tensor | None]]:
        m, batch = self._n_microbatches, self._n_batches
        now = batch % 2
        here = slice(now * m, (now + 1) * m)
        under_way = self._under_way
        under_way.inputs[here] = inputs
        under_way.loss = None if loss is None else lambda output, k: loss(output, k % m)
        self._versions.open(now)
        order = self._steps[0 if batch == 0 else 2 - now]
        self._perform(order, closes=None if batch == 0 else 1 - now)
        self._n_batches += 1
        made = under_way.outputs[here], under_way.losses[here]
        under_way.inputs[here], under_way.outputs[here] = [((), {})] * m, [None] * m  # backwards need neither
        return made

    def flush(self) -> None:
        """The backwards of the last batch; adds its gradient to ``.grad``. Collective; else nothing.

        Raises:
            CommError: another rank is lost, or does not come.
        """
        if self._n_batches == 0:
            return
        last = (self._n_batches - 1) % 2
        self._perform(self._drains[last], closes=last)
        for work in self._late:
            work.wait()
        self._begin()

    def _perform(self, order: Order, closes: int | None) -> None:
        """Does a step's actions, each with the weights of its batch; then one version may be complete."""
        actions = self._listed.setdefault(id(order), [])
        if not actions:
            actions += with_transfers(order)[self._comm.rank]
        step = self._under_way
        step.spans, step.replicas.spans = [], []
        try:
            with step.replicas.step(closes is not None):
                self._runtime.perform(step, actions, self._under)
                self._runtime.order = order
                late, self._late = self._late, self._runtime.post.sent()
                for work in late:
                    work.wait()
                if closes is not None:
                    self._close(closes, step)
        except BaseException:
            for tie in self._ties:
                tie.undo()
            self._versions.forget()
            self._begin()
            raise
        for tie in self._ties if closes is not None else ():
            tie.end()
        self._versions.part()

    def _under(self, action: Action) -> contextlib.AbstractContextManager[None]:
        return self._versions.use(action.microbatch // self._n_microbatches)

    def _close(self, batch: int, step: Step) -> None:
        """A batch's gradients are complete: they become the parameters', and are averaged over replicas."""
        for tie in self._ties:
            tie.begin()
        self._versions.close(batch)
        for number in step.replicas.stages:
            step.replicas.reduce(number)
