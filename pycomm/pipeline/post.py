"""Messages between the stages of a pipeline: received early, sent without waiting, of any shape.

A message is a header of ``_HEADER`` bytes (longer ones: its length, then the rest) and its tensors, with
one tag for a stage, microbatch and direction. The tensors' sizes are in the header; so that a receive can
be posted before the header has come, sender and receiver both expect what the same message was in the step
before. When it is something else (a batch of another shape), the sender says so in the header, fills what
was expected with anything, and sends the tensors behind; that costs the size of a message, once.

Words: a *channel* is (stage, microbatch, direction). Threads: one; the engine moves the bytes meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pycomm.communicator import Communicator
from pycomm.errors import CommError
from pycomm.pipeline.messages import Spec, decode, encode, specs
from pycomm.work import Work

__all__ = ["Channel", "Expected", "Post"]

_HEADER = 1024


class Channel(NamedTuple):
    """What a message is: for which stage, of which microbatch, and which way; ``skip`` names a connection."""

    stage: int
    microbatch: int
    direction: str  # "activation", or "gradient"
    skip: str = ""

    def __str__(self) -> str:
        what = "activation" if self.direction == "activation" else "gradient of the output"
        if self.skip:
            what = f"{self.direction} of skip {self.skip!r}"
        return f"the {what} of microbatch {self.microbatch} for stage {self.stage}"


class Expected:
    """A receive that has been posted."""

    def __init__(self, post: Post, channel: Channel, src: int, known: list[Spec] | None) -> None:
        self._post, self._channel, self._src, self._known = post, channel, src, known
        self._head = torch.empty(_HEADER, dtype=torch.uint8)
        self._works: list[Work] = [post._recv(self._head, src, channel)]
        self._tensors: list[Tensor] = []
        if known is not None:
            self._post_tensors(known)

    def _post_tensors(self, expected: list[Spec]) -> None:
        self._tensors = [spec.empty() for spec in expected]
        self._works += [self._post._recv(tensor, self._src, self._channel) for tensor in self._tensors]

    def take(self) -> tuple[Any, list[Spec]]:
        """Waits for the message; the value, and what its tensors are.

        Raises:
            CommError: it does not come; the text says what was waited for and from whom.
        """
        try:
            return self._take()
        except CommError as error:
            where = f"stage {self._channel.stage} waited for {self._channel} from rank {self._src}"
            raise type(error)(f"{where}: {error}") from None  # which has its whole text

    def _take(self) -> tuple[Any, list[Spec]]:
        self._works[0].wait()
        length, as_expected = int(self._head[:8].view(torch.int64)), bool(self._head[8])
        header = bytes(self._head[9 : 9 + min(length, _HEADER - 9)].numpy())
        for work in self._works[1:]:
            work.wait()
        if length > _HEADER - 9:
            rest = torch.empty(length - (_HEADER - 9), dtype=torch.uint8)
            self._post._recv(rest, self._src, self._channel).wait()
            header += bytes(rest.numpy())
        found = specs(header)
        if not as_expected:
            n_before = len(self._works)
            self._post_tensors(found)
            for work in self._works[n_before:]:
                work.wait()
        self._post._known[self._channel] = found
        return decode(header, self._tensors), found


class Post:
    """The messages of one rank.

    Args:
        comm: of the ranks of the pipeline.
        n_stages: of the pipeline.
        skips: names of the connections between stages that are no neighbours.
    """

    def __init__(self, comm: Communicator, n_stages: int, skips: Sequence[str] = ()) -> None:
        self.comm = comm
        self._kinds = {
            kind: i for i, kind in enumerate((d, s) for s in ("", *skips) for d in ("activation", "gradient"))
        }
        self._n_stages = n_stages
        self._known: dict[Channel, list[Spec]] = {}  # received in the step before
        self._sent: dict[Channel, list[Spec]] = {}  # sent in the step before
        self._sending: list[Work] = []

    def _tag(self, channel: Channel) -> int:
        place = channel.microbatch * self._n_stages + channel.stage
        return len(self._kinds) * place + self._kinds[channel.direction, channel.skip]

    def _recv(self, tensor: Tensor, src: int, channel: Channel) -> Work:
        return self.comm.irecv(tensor, src, self._tag(channel))

    def expect(self, channel: Channel, src: int) -> Expected:
        """Posts the receive of a message."""
        return Expected(self, channel, src, self._known.get(channel))

    def send(self, channel: Channel, dst: int, value: Any) -> list[Spec]:
        """Sends a message, without waiting for its receiver; its tensors must not be changed in this step.

        Raises:
            TypeError: the value has something that cannot travel.
        """
        header, tensors = encode(value)
        now, before = [Spec.of(tensor) for tensor in tensors], self._sent.get(channel)
        as_expected = before is not None and _sizes(before) == _sizes(now)
        head = torch.zeros(_HEADER, dtype=torch.uint8)
        head[:8].view(torch.int64)[0] = len(header)
        head[8] = as_expected
        first = header[: _HEADER - 9]
        head[9 : 9 + len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
        parts = [head]
        if not as_expected and before is not None:
            parts += [spec.empty() for spec in before]
        rest = header[_HEADER - 9 :]
        held = [tensor.detach() for tensor in tensors]
        if as_expected:
            parts += held
        if rest:
            parts.append(torch.frombuffer(bytearray(rest), dtype=torch.uint8))
        if not as_expected:
            parts += held
        tag = self._tag(channel)
        self._sending += [self.comm.isend(part, dst, tag) for part in parts]
        self._sent[channel] = now
        return now

    def finish(self) -> None:
        """Waits until all that was sent has been received.

        Raises:
            CommError: a receiver is lost, or does not come.
        """
        for work in self.sent():
            work.wait()

    def sent(self) -> list[Work]:
        """What was sent and not yet waited for; it is the caller's to wait for from here on."""
        sending, self._sending = self._sending, []
        return sending


def _sizes(found: list[Spec]) -> list[tuple[str, tuple[int, ...]]]:
    return [(spec.dtype, spec.shape) for spec in found]
