"""The gradients' way through one backward: hooks, buckets in order, one status at the end.

A parameter's hook runs when its gradient has been accumulated. The hook that completes a bucket launches it,
after all buckets before it: so every rank launches the same buckets in the same order, whatever order its own
gradients came in. When backward ends, autograd calls ``_end``: what is left is launched and waited for, and
ranks agree on a *status*: how many have a *problem* (a gradient that a rank could not contribute), and when
each came.

A gradient that did not come, or cannot be reduced, does not stop the sequence: a *stand-in* takes its place
(pycomm/ddp/contributions.py), so that every rank makes the same calls in every backward. Where the status is
not zero, and only there, pycomm/ddp/resolve.py settles it on all ranks alike.

**When a backward is one of ours.** A hook on every output of a forward (pycomm/ddp/sinks.py) says so, with
what that forward was told (no_sync, weights); where none is met (``ddp.module(x)``), the first gradient
says so. The *outermost* backward counts: a reentrant checkpoint's own backward ends without a reduction. One
that an exception ends is told to the other ranks by the next backward or forward (pycomm/ddp/ending.py).

The first backward is reduced at its end. It shows in which order and how often gradients come; buckets are
then built again in the order of rank 0. Everything here runs on the thread that calls backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from pycomm.communicator import Communicator
from pycomm.ddp import asleep
from pycomm.ddp import resolve as resolution
from pycomm.ddp.agree import in_memory_order
from pycomm.ddp.contributions import contributions
from pycomm.ddp.ending import queue_end
from pycomm.ddp.hooks import HookWire, LooseHook
from pycomm.ddp.late import note_late
from pycomm.ddp.plan import Plan, Settings, build
from pycomm.ddp.problems import Problem, Whole
from pycomm.ddp.sinks import Forward
from pycomm.ddp.sparse import reduce_loose
from pycomm.ddp.stats import Times
from pycomm.ddp.structure import Structure
from pycomm.ddp.tally import IDLE, LOCAL, REDUCING, make_tally

__all__ = ["Reducer"]


class Reducer:
    """Averages gradients over the ranks of ``comm`` in every backward that is to be synchronised.

    Args:
        comm: whose ranks average.
        look: makes a snapshot of the module's parameters as they are.
        settings: see there.
        default: what a forward without hooks on its outputs was told.
    """

    def __init__(
        self,
        comm: Communicator,
        look: Callable[[], Structure],
        settings: Settings,
        default: Callable[[], Forward],
    ) -> None:
        self.comm = comm
        self.look = look
        self.settings = settings
        self.default = default
        self.structure = look()
        self.times = Times(comm.rank, comm.size)
        self.tally = make_tally(self)
        self.plan = Plan([], self.tally)
        self._everything: frozenset[int] = frozenset()
        self.forced = False
        """The next backward is synchronised whatever its forwards were told (pipelines)."""
        self.pending: Forward | None = None
        """What the last forward was told, when none of its outputs could take a hook."""
        self.after: Callable[[], None] | None = None
        """Called when gradients are averaged (optimizers that step in backward)."""
        self.used: Set[int] | None = None
        """The parameters whose gradients came in the last synchronised backward, None before the first."""
        self.last_order: list[int] = []
        self.n_ranks_used = torch.zeros(0, dtype=torch.int32)
        """By how many ranks each parameter was used in the last backward."""
        self.is_static = True
        """Whether they were the same in every backward so far."""
        self._handles: list[Any] = []
        self._n_resets = 0
        self.new: set[int] = set()  # whose gradients came in a backward within no_sync
        self.weight: float | None = None
        self.adopt(self.structure)

    # ---- the plan ---------------------------------------------------------------------------------------

    def adopt(self, structure: Structure) -> None:
        """Takes another set of parameters: hooks, plan and order begin anew."""
        self.remove_hooks()
        self.structure = structure
        self.names, self.parameters = structure.names, structure.parameters
        self.plan = Plan(self.parameters, self.tally)
        self._everything = frozenset(range(len(self.parameters)))
        if self.settings.hook is not None:  # a hook is given sparse gradients as such, from the first on
            self.plan.loose.update(i for i, is_sparse in enumerate(structure.is_sparse) if is_sparse)
        self.new = set()
        self.rebuild()
        self._reset()
        for index, parameter in enumerate(self.parameters):
            register = cast(Any, parameter).register_post_accumulate_grad_hook  # untyped in torch
            self._handles.append(register(self.tally.hook(index)))

    def __del__(self) -> None:
        self.remove_hooks()

    def remove_hooks(self) -> None:
        """Leaves plain parameters behind."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def rebuild(self) -> None:
        """Builds the buckets from the plan's order and its loose parameters."""
        build(self.plan, self.comm, self.structure, self.settings)

    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters in each bucket, in the order in which buckets are launched."""
        return [[self.names[i] for i in bucket.indices] for bucket in self.plan.buckets]

    # ---- one backward -----------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Nothing has come, and nothing is under way."""
        self.tally.reset()
        self.is_broken = False
        self._n_resets += 1
        if self.settings.hook is not None:
            self.settings.hook.failure = None
        self.problems: dict[int, Problem] = {}
        self.stand_ins: dict[int, Tensor] = {}
        self.whole = Whole.FINE
        self.came: Set[int] = frozenset()  # known at the end of backward
        self._n_launched = 0
        self.n_launched_early = 0

    def begin(self, forward: Forward | None = None) -> None:
        """A backward is under way: through ``forward``, or (None) a gradient came before we knew."""
        if self.is_broken:
            self.close_broken_backward()
        if forward is None:
            forward = self.pending or self.default()
        is_synced = forward.is_synced or self.forced
        if self.tally.mode == REDUCING:
            if forward.is_synced and forward.weight != self.weight:
                self.whole |= Whole.WEIGHTS
            return
        broke = partial(self._broke, self._n_resets)
        if is_synced:
            queue_end(self._end, broke)  # raises outside of a backward
            self.tally.mode = REDUCING
            self.weight = forward.weight
            self.times.backward_began()
        elif self.tally.mode == IDLE:
            queue_end(self._end_local, broke)
            self.tally.mode = LOCAL

    def _end_local(self) -> None:
        if self.tally.mode == LOCAL:
            self.new.update(self.tally.came)
            self._reset()

    def _end(self) -> None:
        if self.tally.mode == REDUCING:
            self.finish()

    def _broke(self, n_resets: int) -> None:
        """An exception has ended a backward: the next one, or the next forward, tells the other ranks."""
        if n_resets != self._n_resets:
            return  # it has been told
        if self.tally.mode == REDUCING:
            self.is_broken = True
            self.tally.mode = IDLE  # so that the next gradient or output calls `begin`
        elif self.tally.mode == LOCAL:
            self._reset()

    def bucket_complete(self) -> None:
        """All gradients of some bucket have come: launches what is complete, in order."""
        if self.tally.mode != REDUCING or self.settings.overlap == "end":
            return
        started = time.perf_counter()
        left = self.tally.left
        while self._n_launched < len(self.plan.buckets) and left(self._n_launched) == 0:
            self._launch(None)
        self.times.exposed_s += time.perf_counter() - started

    def close_broken_backward(self) -> None:
        """Tells the other ranks of a backward that an exception ended here, if there was one. Raises then.

        Raises:
            RuntimeError: on every rank: here from the next forward or backward, on the others from the
                backward that waits.
        """
        if not self.is_broken:
            # Within a reentrant checkpoint it may not be known yet.
            if self.tally.mode == IDLE or torch._C._current_graph_task_id() != -1:
                return
            self.is_broken = self.tally.mode == REDUCING
        if self.is_broken:
            self.finish(Whole.BROKEN)
        self._reset()

    def begin_now(self, weight: float | None, asynchronously: bool = False) -> None:
        """Begins to average what ``grad`` holds, outside of any backward; :meth:`finish` ends it. Collective.

        Args:
            weight: this rank's share of the average.
            asynchronously: launch all buckets now, on the communicator's progress thread.
        """
        self.close_broken_backward()
        self.tally.mode = REDUCING
        self.weight = weight
        self.new.update(i for i, p in enumerate(self.parameters) if p.grad is not None)
        self.times.backward_began()
        while asynchronously and self._n_launched < len(self.plan.buckets):
            self._launch(self.new, True)

    def abandon(self) -> None:
        """What was begun, or should be by now, will not end: the next forward tells the other ranks."""
        self.tally.mode = REDUCING
        self._broke(self._n_resets)

    @torch.no_grad()
    def shadow(self, weight: float | None) -> None:
        """A backward of the others: this rank counts as zeros, and gets the averages. Collective."""
        self.weight = weight
        self.times.backward_began()
        self.times.gradients_ready()
        started = time.perf_counter()
        plan = self.plan
        try:
            self.problems = dict.fromkeys(range(plan.n), Problem.JOINED)
            for bucket in plan.buckets:
                zeros = [torch.zeros_like(p, requires_grad=False) for p in bucket.parameters]
                self.stand_ins.update(zip(bucket.indices, zeros, strict=True))
                orders = bucket.orders or [None] * len(zeros)
                gradients = [in_memory_order(z, o) for z, o in zip(zeros, orders, strict=True)]
                bucket.wire.start(gradients, weight, self.settings.overlap == "async")
            if plan.loose:
                for parameter in self._loose_parameters():
                    parameter.grad = None
                is_new = [False] * len(plan.loose)
                reduce_loose(
                    self.comm, self._loose_parameters(), is_new, weight, self.loose_hook(len(is_new))
                )
            for bucket in plan.buckets:
                bucket.wire.finish()
            has_problems = self._exchange(0) > 0
            has_changed = has_problems and resolution.resolve(self)
            for index, average in () if has_problems else self.stand_ins.items():
                self.parameters[index].grad = average
            if plan.is_learning and not has_changed:
                self._learn()
        finally:
            self._reset()
            self.times.finished(time.perf_counter() - started)

    def _launch(self, known: Set[int] | None, asynchronously: bool = False) -> None:
        bucket = self.plan.buckets[self._n_launched]
        self._n_launched += 1
        with torch.no_grad():  # create_graph=True records in hooks
            gradients = contributions(self, bucket, known)
            if self.weight == 0:  # not times 0: what it has of no input may be NaN
                torch._foreach_zero_(gradients)
            is_async = asynchronously or self.settings.overlap == "async"
            bucket.wire.start(gradients, self.weight, is_async)

    @torch.no_grad()
    def finish(self, whole: Whole = Whole.FINE) -> None:
        """At the end of backward: everything is launched, waited for and agreed upon. Collective."""
        self.times.gradients_ready()
        started = time.perf_counter()
        plan, tally = self.plan, self.tally
        self.n_launched_early = self._n_launched
        try:
            all_came = tally.n_distinct == plan.n
            self.came = self._everything if all_came else frozenset(tally.came)
            known = self.came | self.new if self.new else self.came
            note_late(self)
            asleep.note_woken(self, known)
            all_awake_came = all_came or (plan.asleep and self.came == self._everything - plan.asleep)
            while self._n_launched < len(plan.buckets):
                self._launch(None if all_awake_came else known)
            if plan.loose:
                self._reduce_loose(known)
            for bucket in plan.buckets:
                bucket.wire.finish()
            if not self.structure.is_current(all_came and not self.problems):
                self.whole |= Whole.CHANGED
            self.whole |= whole
            n_problems = self._exchange(len(self.problems))
            if self.used is not self.came:
                self.is_static = self.is_static and self.used in (None, self.came)
            self.used = self.came
            self.last_order = tally.came
            self.n_ranks_used = torch.full((plan.n,), self.comm.size, dtype=torch.int32)
            if plan.asleep:
                self.n_ranks_used[list(plan.asleep)] = 0
            has_changed = n_problems > 0 and resolution.resolve(self)
            if plan.is_learning and not has_changed:
                self._learn()
            self.new = set()
            if self.after is not None:
                self.after()
        finally:
            self._reset()
            self.forced = False
            self.pending = None
            self.times.finished(time.perf_counter() - started)

    def _exchange(self, n_problems: int) -> int:
        """The status: how much is wrong on all ranks. Collective."""
        if self.settings.hook is not None and self.settings.hook.failure is not None:
            self.whole |= Whole.HOOK
        return self.times.exchange(self.comm, n_problems + int(self.whole))

    def _reduce_loose(self, known: Set[int]) -> None:
        loose = sorted(self.plan.loose)
        is_new = [i in known for i in loose]
        reduce_loose(self.comm, self._loose_parameters(), is_new, self.weight, self.loose_hook(len(loose)))
        for index, new in zip(loose, is_new, strict=True):
            if not new:
                self.problems[index] = Problem.UNUSED

    def loose_hook(self, n: int) -> LooseHook | None:
        """Gives ``n`` gradients of no bucket to the hook, after those of all buckets; None without a hook."""
        hook = self.settings.hook
        if hook is None:
            return None
        buckets = self.plan.buckets
        if buckets and isinstance(buckets[-1].wire, HookWire):
            buckets[-1].wire.settle()
        return LooseHook(hook, self.comm.size, len(buckets), n)

    def _loose_parameters(self) -> list[nn.Parameter]:
        return [self.parameters[i] for i in sorted(self.plan.loose)]

    def _learn(self) -> None:
        """Builds the buckets again in the order in which rank 0's gradients came. Collective."""
        plan, times = self.plan, self.tally.times
        first = list(dict.fromkeys(self.tally.came))
        order = torch.tensor([*first, *(i for i in plan.order if not times[i])], dtype=torch.int64)
        self.comm.broadcast(order, src=0)
        if order.tolist() != plan.order:
            plan.order = order.tolist()
            self.rebuild()
        plan.learn(times)
