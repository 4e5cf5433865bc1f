"""The plan of one backward: which gradients form a bucket, in which order they are reduced, what is awaited.

Words: a *bucket* is a list of parameters whose gradients are reduced by one call; the *order* is a
permutation of the parameters in which their gradients are expected (first the reverse of their
registration, then the order in which they came); a parameter is *loose* when its gradient is sparse on some
rank: it is in no bucket, and pycomm/ddp/sparse.py reduces it at the end. The tally (pycomm/ddp/tally.py)
counts down, bucket by bucket, the gradients that are still to come in this backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from pycomm import _C
from pycomm.communicator import Communicator
from pycomm.ddp.agree import in_memory_order, memory_order, views_of
from pycomm.ddp.block_wire import CODED_DTYPES, BlockWire
from pycomm.ddp.coded_wire import CodedWire, suits
from pycomm.ddp.error_feedback import ErrorFeedback
from pycomm.ddp.half_wire import HalfWire
from pycomm.ddp.hooks import GradBucket, HookWire, UsersHook
from pycomm.ddp.structure import Structure
from pycomm.ddp.wire import WIRE_DTYPES, Compression, PlainWire, Wire
from pycomm.placement import bucket_memory

__all__ = ["Bucket", "Overlap", "Plan", "Settings", "assign", "build"]

Overlap = Literal["async", "inline", "end"]

NEVER = -1
"""A count that no decrement brings to 0: the bucket is launched when backward is over."""


@dataclass
class Settings:
    """How gradients are reduced; the words are those of ``DistributedDataParallel``."""

    first_cap: int
    cap: int
    caps: tuple[int, ...]
    may_be_unused: bool
    compression: Compression | None
    feedback: ErrorFeedback | None
    overlap: Overlap
    as_view: bool
    hook: UsersHook | None = None
    skips_unused: bool = False


@dataclass
class Bucket:
    """Parameters that are reduced together, all of one dtype, on the module's device."""

    indices: list[int]
    parameters: list[nn.Parameter]
    orders: list[tuple[int, ...] | None] | None
    """Each parameter's memory order (pycomm/ddp/agree.py); None where all are contiguous."""
    n_elems: int
    dtype: torch.dtype
    device: torch.device
    wire: Wire
    views: list[Tensor] | None
    """Where gradients live when they are views of the bucket's memory; else None."""
    laid_out: list[Tensor] | None
    """The same views as they are given to the wire: in memory order."""

    @property
    def n_bytes(self) -> int:
        """Bytes of gradients, as they lie in the parameters' dtype."""
        return sum(p.numel() * p.element_size() for p in self.parameters)


def assign(
    sizes: Sequence[int], kinds: Sequence[int], first_cap: int, cap: int, caps: Sequence[int] = ()
) -> list[list[int]]:
    """Buckets of places in the order given, in the order of reduction; all sizes are bytes.

    Args:
        sizes, kinds: of each parameter; a bucket has one kind (csrc/bucket/bucket.h has the rules).
        first_cap, cap: of the first bucket of each kind, and of the others.
        caps: when given, of the first, second, … bucket instead, whatever its kind; the last one repeats.

    Example:
        >>> assign([4, 4, 4], [0, 0, 0], 4, 8)
        [[0], [1, 2]]
        >>> assign([4, 4, 4], [0, 0, 0], 4, 8, caps=[8, 4])
        [[0, 1], [2]]
    """
    if not caps:
        return _C.bucket.assign(sizes, kinds, min(first_cap, cap), cap)
    buckets: list[list[int]] = []
    filled: list[int] = []
    open_of_kind: dict[int, int] = {}
    for place, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
        at = open_of_kind.get(kind)
        room = caps[min(at, len(caps) - 1)] if at is not None else 0
        if at is None or (size > 0 and filled[at] > 0 and filled[at] + size > room):
            at = open_of_kind[kind] = len(buckets)
            buckets.append([])
            filled.append(0)
        buckets[at].append(place)
        filled[at] += size
    return sorted(buckets, key=lambda places: places[-1])


class Plan:
    """Buckets over the trained parameters of a structure, and what each awaits in one backward.

    Args:
        parameters: the trained ones; only their shapes are kept.
        tally: counts their gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], tally: _C.Tally) -> None:
        self._tally = tally
        self.n = n = len(parameters)
        self.shapes = [p.shape for p in parameters]
        self.order = list(reversed(range(n)))
        self.buckets: list[Bucket] = []
        self.loose: set[int] = set()
        #: Those that take part in nothing, and those that have woken (pycomm/ddp/asleep.py).
        self.asleep: set[int] = set()
        self.restless: set[int] = set()
        self.bucket_of = [0] * n
        #: How often each gradient comes in one backward.
        self.times = [1] * n
        self.is_learning = True

    def take(self, buckets: list[Bucket]) -> None:
        """Takes other buckets; gradients in none of them count into a last entry that never completes."""
        self.buckets = buckets
        for at, bucket in enumerate(buckets):
            for index in bucket.indices:
                self.bucket_of[index] = at
        for index in self.loose | self.asleep:
            self.bucket_of[index] = len(buckets)
        self._count()

    def _count(self) -> None:
        if self.is_learning:
            awaited = [NEVER] * len(self.buckets)
        else:
            awaited = [sum(self.times[i] for i in b.indices) for b in self.buckets]
        self._tally.arm([*awaited, NEVER], self.bucket_of)

    def learn(self, times: Sequence[int]) -> None:
        """From now on a bucket is complete when each gradient has come as often as it did (at least once).

        A gradient comes more than once where a reentrant checkpoint runs a backward of its own.
        """
        self.times = [max(1, count) for count in times]
        self.is_learning = False
        self._count()

    def forget(self) -> None:
        """Buckets wait for the end of the next backward, which is learned from again."""
        self.is_learning = True
        self._count()


def build(plan: Plan, comm: Communicator, structure: Structure, settings: Settings) -> None:
    """Fills ``plan`` with buckets and their wires, from its order and its loose parameters."""
    is_delayed = structure.is_delayed
    apart = plan.loose | plan.asleep
    order = [i for i in plan.order if i not in apart]
    order.sort(key=is_delayed.__getitem__)  # stable: the delayed ones last
    kind_of: dict[tuple[torch.dtype, bool], int] = {}
    kinds = []
    sizes = []
    for index in order:
        parameter = structure.parameters[index]
        kinds.append(kind_of.setdefault((parameter.dtype, is_delayed[index]), len(kind_of)))
        sizes.append(parameter.numel() * parameter.element_size())
    places = assign(sizes, kinds, settings.first_cap, settings.cap, settings.caps)
    buckets: list[Bucket] = []
    before: Wire | None = None
    for bucket in places:
        indices = [order[at] for at in bucket]
        parameters = [structure.parameters[i] for i in indices]
        made = _make(
            comm, settings, indices, parameters, (len(buckets), len(places) + len(plan.loose)), before
        )
        if not isinstance(made.wire, PlainWire):
            before = made.wire
        buckets.append(made)
    plan.take(buckets)


def _make(
    comm: Communicator,
    settings: Settings,
    indices: list[int],
    parameters: list[nn.Parameter],
    number: tuple[int, int],
    before: Wire | None,
) -> Bucket:
    """One bucket; ``number`` is (its number, how many there are), ``before`` the last wire of the kind."""
    first = parameters[0]
    n_elems, dtype = sum(p.numel() for p in parameters), first.dtype
    buffer: Tensor | None = None
    if settings.hook is not None:
        buffer = torch.empty(n_elems, dtype=dtype, device=first.device)  # torch's own: some hooks resize it
    elif settings.as_view:
        buffer = bucket_memory(comm, n_elems, first)
    is_view = settings.as_view and buffer is not None
    views = None if buffer is None else views_of(buffer, parameters, in_memory_order=is_view)
    orders = [memory_order(p) for p in parameters]
    laid_out = views
    if views is not None and settings.hook is None:
        laid_out = [in_memory_order(view, order) for view, order in zip(views, orders, strict=True)]
    wire: Wire
    if settings.hook is not None and buffer is not None and views is not None:
        bucket = GradBucket(number[0], number[0] == number[1] - 1, buffer, views, parameters)
        hooks_before = before if isinstance(before, HookWire) else None
        wire = HookWire(bucket, settings.hook, comm.size, hooks_before)
        orders = []
    elif settings.compression is None or not _is_compressed(settings.compression, dtype):
        wire = PlainWire(comm, buffer, laid_out)
    elif suits(comm, first):
        wire = CodedWire(comm, settings.compression, parameters, settings.feedback, buffer, laid_out)
    elif settings.compression in ("fp16", "bf16") and settings.feedback is None:
        wire = HalfWire(comm, settings.compression, n_elems)
    else:
        coded_before = before if isinstance(before, BlockWire) else None
        wire = BlockWire(comm, settings.compression, parameters, settings.feedback, coded_before)
    if not is_view:
        views = laid_out = None
    is_reordered = any(order is not None for order in orders)
    return Bucket(
        indices,
        parameters,
        orders if is_reordered else None,
        n_elems,
        dtype,
        first.device,
        wire,
        views,
        laid_out,
    )


def _is_compressed(compression: Compression, dtype: torch.dtype) -> bool:
    """Whether gradients of ``dtype`` travel as something smaller."""
    return dtype in CODED_DTYPES and WIRE_DTYPES[compression].itemsize < dtype.itemsize
