"""Executes the actions of a rank: computes its stages, passes what they make to other stages.

What is done is the list of actions that :mod:`pycomm.pipeline.schedule` has made, in that order. Sends
never wait. A receive is posted where the list has it, and waited for by the computation that needs it. The
gradient of an activation of which nothing requires one is not sent, and both sides know it.

Words: a *link* is a way for values from one stage to another: the one to the next stage (its name is
empty), or a skip.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from pycomm.communicator import Communicator
from pycomm.errors import CommError
from pycomm.pipeline.checks import check
from pycomm.pipeline.messages import Spec, leaves, replace_leaves
from pycomm.pipeline.post import Channel, Expected, Post
from pycomm.pipeline.replicas import Replicas
from pycomm.pipeline.schedule.action import REDUCE, Action
from pycomm.pipeline.schedule.order import Order
from pycomm.pipeline.schedule.simulate import Span
from pycomm.pipeline.schedule.transfers import with_transfers
from pycomm.pipeline.schedule.verify_transfers import verify_transfers
from pycomm.pipeline.skips import Skips
from pycomm.pipeline.stage import PipelineStage, as_leaves
from pycomm.pipeline.wire import Wire

__all__ = ["Runtime", "Step"]

Inputs = list[tuple[tuple[Any, ...], dict[str, Any]]]
Loss = Callable[[Any, int], Tensor]
Under = Callable[[Action], contextlib.AbstractContextManager[None]]


class Runtime:
    """Runs orders on one rank.

    Args:
        comm: of the pipeline's ranks.
        stages: of this rank, by their number.
        n_stages: of the pipeline.
        skips: name: (from stage, to stage).
        wire: how tensors travel to other ranks; None: as they are.
    """

    def __init__(
        self,
        comm: Communicator,
        stages: dict[int, PipelineStage],
        n_stages: int,
        skips: Mapping[str, tuple[int, int]],
        wire: Wire | None = None,
    ) -> None:
        self.comm = comm
        self.stages = stages
        self.skips = skips
        self.post = Post(comm, n_stages, sorted(skips), wire)
        self.spans: list[Span] = []  # of the last step
        self.reductions: list[Span] = []  # likewise, beside these
        self.order: Order | None = None  # of it
        self._actions: dict[int, tuple[Order, list[Action]]] = {}  # by id; the order keeps its id taken

    def _actions_of(self, order: Order) -> list[Action]:
        """This rank's, made once for each order."""
        if id(order) not in self._actions:
            lists = with_transfers(order)
            verify_transfers(order, lists)
            self._actions[id(order)] = order, lists[self.comm.rank]
        return self._actions[id(order)][1]

    def run(self, order: Order, inputs: Inputs, loss: Loss | None) -> tuple[list[Any], list[Tensor | None]]:
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
        step = Step(self, order, inputs, loss)
        with step.replicas.step(order.has_backward):
            self.perform(step, self._actions_of(order))
        return step.outputs, step.losses

    def perform(self, step: Step, actions: Sequence[Action], under: Under | None = None) -> None:
        """Does some of a step's actions, and waits until what they sent has come (see :meth:`run`).

        Args:
            step: what is on its way.
            actions: in order.
            under: makes the context in which an action is done; who gives one waits for the sends itself.
        """
        self.spans, self.reductions, self.order = step.spans, step.replicas.spans, step._order
        action: Action | None = None
        try:
            for action in actions:
                self.post.watch.begin(action)
                with under(action) if under is not None else contextlib.nullcontext():
                    step.do(action)
            if under is None:
                self.post.finish()
            self.post.watch.end()
        except BaseException as error:
            self.post.abandon()
            self._tell(error, action)
            for stage in self.stages.values():
                stage.forget()
            raise

    def _tell(self, error: BaseException, action: Action | None) -> None:
        """The peers of a rank whose step has ended with an error of its own wait for what never comes.

        So it is after Ctrl-C; and what they would get of a next step is not what they wait for.
        """
        if isinstance(error, CommError):
            return
        if action is not None and hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"in {action} of the pipeline's step, on rank {self.comm.rank}")
        if self.comm.size > 1:
            what = f"{type(error).__name__} in {action}{f': {error}' if str(error) else ''}"
            self.comm._c.abort(f"the pipeline's step ended on rank {self.comm.rank} with {what}")


class Step:
    """What one step has on its way."""

    def __init__(self, runtime: Runtime, order: Order, inputs: Inputs, loss: Loss | None) -> None:
        self._order, self.inputs, self.loss = order, inputs, loss
        self._post, self._stages, self._skips = runtime.post, runtime.stages, runtime.skips
        self.replicas = Replicas(runtime.stages)
        self._keeps = order.has_backward
        self._rank = runtime.comm.rank
        self._coming: dict[Channel, Expected] = {}  # receives that are posted
        self._here: dict[Channel, Any] = {}  # made on this rank: for another of its stages, or to be sent
        self._given: dict[Channel, list[Spec]] = {}  # what each activation that left a stage here was
        self._taken: dict[Channel, int] = {}  # how many of its tensors require a gradient, of each that came
        self._late: set[Channel] = set()  # gradients whose receive waits for the forward
        self.outputs: list[Any] = [None] * order.n_microbatches
        self.losses: list[Tensor | None] = [None] * order.n_microbatches
        self.spans: list[Span] = []

    def do(self, action: Action) -> None:
        """One action."""
        stage, kind, k = action
        if kind == "RECV_F":
            self._expect(Channel(stage, k, "activation"), stage - 1)
        elif kind == "RECV_B":
            self._expect_gradient(Channel(stage, k, "gradient"), stage + 1)
        elif kind == "SEND_F":
            self._send_activation(stage, stage + 1, k, "")
        elif kind == "SEND_B":
            self._send_gradient(stage, stage - 1, k, "")
        elif kind == REDUCE:
            self.replicas.reduce(stage)
        else:
            began = time.monotonic()
            ready = self._compute(action)
            self.spans.append(Span(action, ready if ready is not None else began, time.monotonic()))

    # ---- links ------------------------------------------------------------------------------------------

    def _far(self, stage: int) -> bool:
        return self._order.placement[stage] != self._rank

    def _expect(self, channel: Channel, source: int) -> None:
        self._coming[channel] = self._post.expect(channel, self._order.placement[source], source)

    def _expect_gradient(self, channel: Channel, source: int) -> None:
        """Posts the receive of a gradient, if one will come: known when the activation has left."""
        given = self._given.get(Channel(source, channel.microbatch, "activation", channel.skip))
        if given is None:
            self._late.add(channel)
        elif any(spec.requires_grad for spec in given):
            self._expect(channel, source)

    def _send_activation(self, stage: int, to: int, k: int, skip: str) -> None:
        channel = Channel(to, k, "activation", skip)
        self._post.send(channel, self._order.placement[to], self._here.pop(channel))
        gradient = Channel(stage, k, "gradient", skip)
        if gradient in self._late:
            self._late.discard(gradient)
            self._expect_gradient(gradient, to)

    def _send_gradient(self, stage: int, to: int, k: int, skip: str) -> None:
        channel = Channel(to, k, "gradient", skip)
        if channel in self._here:  # else nothing requires one
            self._post.send(channel, self._order.placement[to], self._here.pop(channel))

    def _take_activation(self, channel: Channel, source: int) -> Any:
        if channel in self._here:
            value = as_leaves(self._here.pop(channel))
        else:
            if channel not in self._coming:
                self._expect(channel, source)
            value, specs = self._coming.pop(channel).take()
            flags = iter(specs)
            value = replace_leaves(
                value, lambda t: t.requires_grad_(next(flags).requires_grad and self._keeps)
            )
        self._taken[channel] = sum(t.requires_grad for t in leaves(value))
        return value

    def _take_gradients(self, stage: int, to: int, k: int, skip: str) -> list[Tensor | None]:
        """Of what a stage gave over a link: for each tensor that requires a gradient, it or None."""
        given = self._given.pop(Channel(to, k, "activation", skip))
        if not any(spec.requires_grad for spec in given):
            return []
        channel = Channel(stage, k, "gradient", skip)
        if channel in self._here:
            return list(self._here.pop(channel))
        if channel not in self._coming:
            self._expect(channel, to)
        value, _ = self._coming.pop(channel).take()
        return list(value)

    # ---- computations -----------------------------------------------------------------------------------

    def _compute(self, action: Action) -> float | None:
        """F, B, I or W; returns when what it needs was there."""
        number, kind, k = action
        stage = self._stages[number]
        if kind == "W":
            stage.backward_weights(k)
            return None
        if kind == "F":
            args = self._args(stage, k)
            skips = Skips(
                f"in stage {number}, microbatch {k}",
                {
                    name: self._take_activation(Channel(number, k, "activation", name), source)
                    for name, source in self._links_to(number)
                },
            )
            ready = time.monotonic()
            self._forward(stage, k, args, skips)
            return ready
        began = time.monotonic()
        stage.recompute(k)
        again = time.monotonic() - began
        gradients: list[Tensor | None] = []
        if not stage.is_last:
            gradients += self._take_gradients(number, number + 1, k, "")
        for name, to in self._links_from(number):
            gradients += self._take_gradients(number, to, k, name)
        ready = time.monotonic()
        self._pass_back(number, k, stage.backward(k, gradients, half=kind == "I"))
        return ready - again

    def _links_to(self, stage: int) -> list[tuple[str, int]]:
        return [(name, source) for name, (source, to) in sorted(self._skips.items()) if to == stage]

    def _links_from(self, stage: int) -> list[tuple[str, int]]:
        return [(name, to) for name, (source, to) in sorted(self._skips.items()) if source == stage]

    def _args(self, stage: PipelineStage, k: int) -> tuple[Any, ...]:
        number = stage.stage_index
        if stage.is_first:
            check(stage, k, self.inputs[k][0], self._rank)
            return self.inputs[k][0]
        value = self._take_activation(Channel(number, k, "activation"), number - 1)
        check(stage, k, value, self._order.placement[number - 1])
        return tuple(value) if isinstance(value, tuple) else (value,)

    def _forward(self, stage: PipelineStage, k: int, args: tuple[Any, ...], skips: Skips) -> None:
        loss, number = self.loss, stage.stage_index
        then = (lambda output: loss(output, k)) if stage.is_last and loss is not None else None
        output, made = stage.forward(k, args, self.inputs[k][1], then, self._keeps, skips)
        check(stage, k, output, None)
        if stage.is_last:
            self.outputs[k] = replace_leaves(output, lambda t: t.detach())
            self.losses[k] = made.detach() if made is not None else None
        else:
            self._give(number, number + 1, k, "", output)
        links = self._links_from(number)
        if sorted(skips.outgoing) != [name for name, _ in links] or skips.incoming:
            raise RuntimeError(f"stage {number}, microbatch {k}: {skips.differ([name for name, _ in links])}")
        for name, to in links:
            self._give(number, to, k, name, skips.outgoing[name])
            if self._far(to):
                self._send_activation(number, to, k, name)

    def _give(self, stage: int, to: int, k: int, skip: str, value: Any) -> None:
        channel = Channel(to, k, "activation", skip)
        try:
            self._given[channel] = [Spec.of(t) for t in leaves(value)]
        except TypeError as error:
            raise TypeError(f"stage {stage}, microbatch {k}: {error}") from error
        self._here[channel] = value

    def _pass_back(self, number: int, k: int, found: list[Tensor | None]) -> None:
        """Gradients of a stage's inputs to where these came from, the neighbour first, then the skips."""
        links = [] if number == 0 else [("", number - 1)]
        for name, source in [*links, *self._links_to(number)]:
            n = self._taken.pop(Channel(number, k, "activation", name))
            mine, found = found[:n], found[n:]
            if n > 0:
                self._here[Channel(source, k, "gradient", name)] = mine
                if name and self._far(source):
                    self._send_gradient(number, source, k, name)
