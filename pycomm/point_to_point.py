"""send, recv, isend and irecv of a communicator: matched by (source, tag), independent of its collectives."""

from __future__ import annotations

from typing import Any

import torch

from pycomm import _C
from pycomm.ops import positive_seconds
from pycomm.staging import Staged, staged
from pycomm.work import Keeper, Work


class PointToPoint:
    """What a communicator offers between two ranks; tensors as for collectives, ``tag`` 32 bits."""

    _c: _C.Communicator
    _works: Keeper

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Sends to rank ``dst``; returns when the tensor may be changed. Independent of collectives."""
        self._transfer(True, tensor, dst, tag, timeout, False)

    def recv(
        self, tensor: torch.Tensor, src: int | None = None, tag: int = 0, *, timeout: float | None = None
    ) -> int:
        """Receives a tensor of this size and dtype from ``src`` (None: any rank); returns the source rank.

        Messages match by (source, tag), in the order in which they were sent.

        Raises:
            MismatchError: the message has another size or dtype.
        """
        source: int = self._transfer(False, tensor, -1 if src is None else src, tag, timeout, False)
        return source

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0, *, timeout: float | None = None) -> Work:
        """Like :meth:`send`, returning at once."""
        work: Work = self._transfer(True, tensor, dst, tag, timeout, True)
        return work

    def irecv(
        self, tensor: torch.Tensor, src: int | None = None, tag: int = 0, *, timeout: float | None = None
    ) -> Work:
        """Like :meth:`recv`, returning at once; ``work.source()`` tells the sender."""
        work: Work = self._transfer(False, tensor, -1 if src is None else src, tag, timeout, True)
        return work

    def _transfer(
        self, send: bool, tensor: torch.Tensor, peer: int, tag: int, timeout: float | None, async_op: bool
    ) -> Any:
        seconds = 0.0 if timeout is None else positive_seconds(timeout)
        done = self._c.point_to_point(send, tensor, peer, tag, seconds, async_op)
        held: Staged | None = None
        if done is NotImplemented:
            held = staged("send", tensor, None) if send else staged("recv", None, tensor)
            plain = held.inputs if send else held.outputs
            done = self._c.point_to_point(send, plain, peer, tag, seconds, async_op)
        finish = held.write_back if held is not None and not send else None
        if not async_op:
            if finish is not None:
                finish()
            return done
        return self._works.add(Work(done, (tensor, held), tensor, finish))
