"""Executes the actions of a rank: computes its stages, passes what they make to the neighbours.

Every action is looked up in :mod:`pycomm.pipeline.schedule`; what is done is exactly that list, in that
order. Sends never wait. A receive is posted where the list has it, and waited for by the computation that
needs it. The gradient of an activation of which nothing requires one is not sent, and both sides know it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from pycomm.communicator import Communicator
from pycomm.pipeline.messages import Spec, leaves, replace_leaves
from pycomm.pipeline.post import Channel, Expected, Post
from pycomm.pipeline.schedule.action import Action
from pycomm.pipeline.schedule.order import Order
from pycomm.pipeline.schedule.simulate import Span
from pycomm.pipeline.schedule.transfers import with_transfers
from pycomm.pipeline.stage import PipelineStage, as_leaves

__all__ = ["Runtime"]

Loss = Callable[[Any, int], Tensor]


class Runtime:
    """Runs orders on one rank.

    Args:
        comm: of the pipeline's ranks.
        stages: of this rank, by their number.
        n_stages: of the pipeline.
    """

    def __init__(self, comm: Communicator, stages: dict[int, PipelineStage], n_stages: int) -> None:
        self._comm = comm
        self._stages = stages
        self._post = Post(comm, n_stages)
        self.spans: list[Span] = []

    def run(
        self,
        order: Order,
        inputs: list[tuple[tuple[Any, ...], dict[str, Any]]],
        loss: Loss | None,
    ) -> tuple[list[Any], list[Tensor | None]]:
        """One step.

        Args:
            order: of all ranks.
            inputs: of each microbatch, positional (of the first stage's rank) and by name (of any).
            loss: on the last stage's rank when training: of an output and a microbatch.

        Returns:
            On the last stage's rank the outputs and losses of the microbatches, elsewhere nothing.

        Raises:
            CommError: a neighbour is lost or does not come.
            TypeError: a stage returned something that cannot travel.
        """
        step = _Step(self, order, inputs, loss)
        self.spans = step.spans
        try:
            for action in with_transfers(order)[self._comm.rank]:
                step.do(action)
            self._post.finish()
        except BaseException:
            for stage in self._stages.values():
                stage.forget()
            raise
        return step.outputs, step.losses


class _Step:
    """What one step has on its way."""

    def __init__(
        self,
        runtime: Runtime,
        order: Order,
        inputs: list[tuple[tuple[Any, ...], dict[str, Any]]],
        loss: Loss | None,
    ) -> None:
        self._order, self._inputs, self._loss = order, inputs, loss
        self._post, self._stages = runtime._post, runtime._stages
        self._rank = runtime._comm.rank
        self._keeps = order.has_backward
        self._coming: dict[Channel, Expected] = {}
        self._here: dict[Channel, Any] = {}  # passed between stages of this rank, or waiting to be sent
        self._specs: dict[Channel, list[Spec]] = {}  # of activations that were sent
        self._late: set[Channel] = set()  # gradients to post when the forward has been made
        self.outputs: list[Any] = [None] * order.n_microbatches
        self.losses: list[Tensor | None] = [None] * order.n_microbatches
        self.spans: list[Span] = []

    def do(self, action: Action) -> None:
        """One action."""
        stage, kind, k = action
        if kind == "RECV_F":
            channel = Channel(stage, k, "activation")
            self._coming[channel] = self._post.expect(channel, self._order.placement[stage - 1])
        elif kind == "RECV_B":
            self._expect_gradient(Channel(stage, k, "gradient"))
        elif kind == "SEND_F":
            channel = Channel(stage + 1, k, "activation")
            self._specs[channel] = self._post.send(
                channel, self._order.placement[stage + 1], self._here.pop(channel)
            )
            gradient = Channel(stage, k, "gradient")
            if gradient in self._late:
                self._expect_gradient(gradient)
        elif kind == "SEND_B":
            channel = Channel(stage - 1, k, "gradient")
            if channel in self._here:
                self._post.send(channel, self._order.placement[stage - 1], self._here.pop(channel))
        else:
            began = time.monotonic()
            waited = self._compute(action)
            self.spans.append(Span(action, began + waited, time.monotonic()))

    def _expect_gradient(self, channel: Channel) -> None:
        """Posts the receive of a gradient, if one will come: known when the activation has been sent."""
        specs = self._specs.get(Channel(channel.stage + 1, channel.microbatch, "activation"))
        if specs is None:
            self._late.add(channel)
        elif any(spec.requires_grad for spec in specs):
            self._coming[channel] = self._post.expect(channel, self._order.placement[channel.stage + 1])

    def _compute(self, action: Action) -> float:
        """F, B, I or W; returns the seconds that it waited for what it needs."""
        number, kind, k = action
        stage = self._stages[number]
        if kind == "W":
            stage.backward_weights(k)
            return 0.0
        began = time.monotonic()
        if kind == "F":
            args = self._args(stage, k)
            waited = time.monotonic() - began
            self._forward(stage, k, args)
            return waited
        gradients = self._gradients(stage, k)
        waited = time.monotonic() - began
        needed = stage.gives_gradient(k)
        found = stage.backward(k, gradients, half=kind == "I")
        if needed:
            self._here[Channel(number - 1, k, "gradient")] = found
        return waited

    def _args(self, stage: PipelineStage, k: int) -> tuple[Any, ...]:
        if stage.is_first:
            return self._inputs[k][0]
        channel = Channel(stage.stage_index, k, "activation")
        if channel in self._coming:
            value, specs = self._coming.pop(channel).take()
            flags = iter(specs)
            value = replace_leaves(
                value, lambda t: t.requires_grad_(next(flags).requires_grad and self._keeps)
            )
        else:
            value = as_leaves(self._here.pop(channel))
        return tuple(value) if isinstance(value, tuple) else (value,)

    def _forward(self, stage: PipelineStage, k: int, args: tuple[Any, ...]) -> None:
        loss = self._loss
        then = (lambda output: loss(output, k)) if stage.is_last and loss is not None else None
        output, made = stage.forward(k, args, self._inputs[k][1], then, self._keeps)
        if stage.is_last:
            self.outputs[k] = replace_leaves(output, lambda t: t.detach())
            self.losses[k] = made.detach() if made is not None else None
            return
        try:
            leaves(output)
        except TypeError as error:
            raise TypeError(f"stage {stage.stage_index}, microbatch {k}: {error}") from error
        self._here[Channel(stage.stage_index + 1, k, "activation")] = output

    def _gradients(self, stage: PipelineStage, k: int) -> list[Tensor | None] | None:
        if stage.is_last:
            return None
        channel = Channel(stage.stage_index, k, "gradient")
        if channel in self._coming:
            value, _ = self._coming.pop(channel).take()
            return list(value)
        if channel in self._here:
            return list(self._here.pop(channel))
        if stage.takes_gradient(k):
            raise RuntimeError(f"stage {stage.stage_index}: the gradient of microbatch {k} was not received")
        return []
