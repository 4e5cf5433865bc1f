"""Messages between the stages of a pipeline: received early, sent without waiting, of any shape.

A message is a header of ``_HEADER`` bytes (longer ones: its length, then the rest) and its tensors, with
one tag for a stage, microbatch and direction. Small tensors lie in the header, behind its text. The sizes of
others are in the header; so that a receive can be posted before the header has come, sender and receiver
both expect what the same message was in the step before. When it is something else (a batch of another
shape), the sender says so in the header, fills what was expected with anything, and sends the tensors
behind; that costs the size of a message, once.

Words: a *channel* is (stage, microbatch, direction). Threads: one; the engine moves the bytes meanwhile, so
tensors are kept here until their transfers are done.
"""

from __future__ import annotations

import ctypes
import struct
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pycomm import _C
from pycomm.communicator import Communicator
from pycomm.errors import CommError
from pycomm.pipeline.messages import Spec, decode, encode, specs
from pycomm.pipeline.watch import LATE_S, Watch
from pycomm.pipeline.wire import Wire, empty, unpack

__all__ = ["Channel", "Expected", "Post", "Transfer"]

_HEADER = 1024
_FIRST = struct.Struct("<IB")  # bytes of the header's text, flags
_AS_EXPECTED, _INSIDE = 1, 2  # tensors come as in the step before; they lie in the header
_ALIGNMENT = 16  # of tensors in the header


class Channel(NamedTuple):
    """What a message is: for which stage, of which microbatch, and which way; ``skip`` names a connection."""

    stage: int
    microbatch: int
    direction: str  # "activation", or "gradient"
    skip: str = ""

    def __str__(self) -> str:
        what = f"{self.direction} of skip {self.skip!r}" if self.skip else self.direction
        return f"the {what} of microbatch {self.microbatch}"


def _aligned(n: int) -> int:
    return -(-n // _ALIGNMENT) * _ALIGNMENT


class Transfer:
    """A tensor on its way, and what keeps it.

    Args:
        post: whose it is.
        tensor: to send, or to receive into.
        what: it is part of.
        rank: the other one.
        stage: where it comes from; None: it is sent.
    """

    __slots__ = ("_post", "_rank", "_stage", "_what", "tensor", "work")

    def __init__(self, post: Post, tensor: Tensor, what: Channel, rank: int, stage: int | None) -> None:
        self._post, self.tensor, self._what, self._rank, self._stage = post, tensor, what, rank, stage
        self.work: _C.Work | None = None

    def wait(self) -> None:
        """Until it has come, or been taken; warns when that takes long.

        Raises:
            CommError: it does not, or is not; the text says what was waited for and what that rank does.
        """
        work, watch = self.work, self._post.watch
        if work is None:
            return
        try:
            if not work.done():
                watch.wait()
                if not work.wait(LATE_S):
                    watch.warn(self._waits(), self._rank)
                    work.wait(-1.0)
                watch.go_on()
            work.raise_if_failed()
        except CommError as error:
            raise type(error)(f"{self._waits()}: {error}") from None  # which has its whole text

    def _waits(self) -> str:
        me, it = f"rank {self._post.comm.rank}", f"rank {self._rank}"
        doing = self._post.watch.doing(self._rank)
        if self._stage is None:
            return (
                f"{me} waits until {it}, which {doing}, has taken {self._what} for stage {self._what.stage}"
            )
        return f"{me} waits for {self._what} from stage {self._stage} ({it}, which {doing})"


class Expected:
    """A receive that has been posted."""

    def __init__(self, post: Post, channel: Channel, src: int, stage: int, known: list[Spec] | None) -> None:
        self._post, self._channel, self._src, self._stage = post, channel, src, stage
        self._head = bytearray(_HEADER)
        self.transfers: list[Transfer] = []
        post.receiving.add(self)
        self._receive(torch.frombuffer(self._head, dtype=torch.uint8))
        for spec in known or ():
            self._receive(empty(spec))

    def _receive(self, tensor: Tensor) -> Transfer:
        transfer = Transfer(self._post, tensor, self._channel, self._src, self._stage)
        self.transfers.append(transfer)
        transfer.work = self._post.comm._start(False, tensor, self._src, self._post.tag(self._channel))
        return transfer

    def take(self) -> tuple[Any, list[Spec]]:
        """Waits for the message; the value, and what its tensors are.

        Raises:
            CommError: it does not come; the text says what was waited for and from whom.
        """
        for transfer in self.transfers:
            transfer.wait()
        length, flags = _FIRST.unpack_from(self._head)
        header = bytes(self._head[_FIRST.size : _FIRST.size + length])
        if length > len(header):
            rest = bytearray(length - len(header))
            self._receive(torch.frombuffer(rest, dtype=torch.uint8)).wait()
            header += rest
        self._post.receiving.discard(self)
        found = specs(header)
        if flags & _INSIDE:
            return decode(header, self._inside(found, _FIRST.size + length)), found
        if not flags & _AS_EXPECTED:
            self._post.receiving.add(self)
            coming = [self._receive(empty(spec)) for spec in found]
            for transfer in coming:
                transfer.wait()
            self._post.receiving.discard(self)
        else:
            coming = self.transfers[1 : 1 + len(found)]
        self._post.known[self._channel] = found
        tensors = [unpack(spec, transfer.tensor) for spec, transfer in zip(found, coming, strict=True)]
        return decode(header, tensors), found

    def _inside(self, found: list[Spec], at: int) -> list[Tensor]:
        """The tensors that lie in the header: they are its memory, which nobody else has."""
        self._post.known.pop(self._channel, None)
        tensors = []
        for spec in found:
            at = _aligned(at)
            dtype, n = spec.torch_dtype, 1
            for size in spec.shape:
                n *= size
            if n == 0:
                tensors.append(torch.empty(spec.shape, dtype=dtype))
                continue
            flat = torch.frombuffer(self._head, dtype=dtype, count=n, offset=at)
            tensors.append(flat.view(spec.shape))
            at += n * dtype.itemsize
        return tensors


class Post:
    """The messages of one rank.

    Args:
        comm: of the ranks of the pipeline.
        n_stages: of the pipeline.
        skips: names of the connections between stages that are no neighbours.
        wire: how tensors travel; None: as they are.
    """

    def __init__(
        self, comm: Communicator, n_stages: int, skips: Sequence[str] = (), wire: Wire | None = None
    ) -> None:
        self.comm = comm
        self.watch = Watch(comm)
        self.wire = Wire() if wire is None else wire
        self._kinds = {
            kind: i for i, kind in enumerate((d, s) for s in ("", *skips) for d in ("activation", "gradient"))
        }
        self._n_stages = n_stages
        self.known: dict[Channel, list[Spec]] = {}  # received in the step before, outside of the header
        self._sent: dict[Channel, list[Spec]] = {}  # sent likewise
        self._sending: deque[Transfer] = deque()
        self._handed_out: list[Transfer] = []  # by sent(), and not done when looked at last
        self.receiving: set[Expected] = set()
        self.n_messages: Counter[str] = Counter()  # sent since the beginning, by direction

    def tag(self, channel: Channel) -> int:
        """Of its messages."""
        place = channel.microbatch * self._n_stages + channel.stage
        return len(self._kinds) * place + self._kinds[channel.direction, channel.skip]

    def expect(self, channel: Channel, src: int, stage: int) -> Expected:
        """Posts the receive of a message from a stage of rank ``src``."""
        return Expected(self, channel, src, stage, self.known.get(channel))

    def send(self, channel: Channel, dst: int, value: Any) -> None:
        """Sends a message, without waiting for its receiver; its tensors must not be changed in this step.

        Raises:
            TypeError: the value has something that cannot travel.
        """
        header, tensors, now = encode(value, self.wire.of)
        place = (channel.stage, channel.direction, channel.skip)
        held = [
            self.wire.pack(tensor, spec, (place, i))
            for i, (tensor, spec) in enumerate(zip(tensors, now, strict=True))
        ]
        before = self._sent.pop(channel, None)
        head = bytearray(_HEADER)
        is_inside = self._put_inside(head, _FIRST.size + len(header), held)
        as_expected = not is_inside and before is not None and _sizes(before) == _sizes(now)
        _FIRST.pack_into(head, 0, len(header), as_expected * _AS_EXPECTED + is_inside * _INSIDE)
        first = header[: _HEADER - _FIRST.size]
        head[_FIRST.size : _FIRST.size + len(first)] = first
        parts = [torch.frombuffer(head, dtype=torch.uint8)]
        if not as_expected and before is not None:
            parts += [empty(spec) for spec in before]
        if as_expected:
            parts += held
        if len(header) > len(first):
            parts.append(torch.frombuffer(bytearray(header[len(first) :]), dtype=torch.uint8))
        if not is_inside:
            self._sent[channel] = now
            if not as_expected:
                parts += held
        self.n_messages[channel.direction] += 1
        tag = self.tag(channel)
        while self._sending and (work := self._sending[0].work) is not None and work.done():
            self._sending.popleft()  # what has been taken needs its memory no longer
        for part in parts:
            transfer = Transfer(self, part, channel, dst, None)
            self._sending.append(transfer)
            transfer.work = self.comm._start(True, part, dst, tag)

    @staticmethod
    def _put_inside(head: bytearray, at: int, tensors: Sequence[Tensor]) -> bool:
        """Copies tensors behind the header's text, if they all fit."""
        end = at
        for tensor in tensors:
            end = _aligned(end) + tensor.nbytes
        if end > _HEADER:
            return False
        for tensor in tensors:
            at = _aligned(at)
            dense = tensor.resolve_conj().resolve_neg().contiguous()
            head[at : at + dense.nbytes] = ctypes.string_at(dense.data_ptr(), dense.nbytes)
            at += dense.nbytes
        return True

    def finish(self) -> None:
        """Waits until all that was sent has been received.

        Raises:
            CommError: a receiver is lost, or does not come.
        """
        for transfer in self.sent():
            transfer.wait()

    def sent(self) -> list[Transfer]:
        """What was sent and not yet waited for; it is the caller's to wait for from here on."""
        sending, self._sending = list(self._sending), deque()
        self._handed_out = [t for t in self._handed_out if t.work is None or not t.work.done()] + sending
        return sending

    def abandon(self) -> None:
        """After a failure: what is on its way keeps its memory until it is done."""
        self.sent()
        open_ = [
            *self._handed_out,
            *(transfer for expected in self.receiving for transfer in expected.transfers),
        ]
        self.receiving.clear()
        self._handed_out = []
        for transfer in open_:
            if transfer.work is not None:
                self.comm._keep(transfer.work, transfer.tensor)


def _sizes(found: list[Spec]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(spec.dtype, spec.shape, spec.wire) for spec in found]
