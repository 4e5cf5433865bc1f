"""send, recv, isend and irecv of a communicator: matched by (source, tag), independent of its collectives.

Messages of one sender and tag arrive in the order in which they were sent. Tensors are dense, of the dtypes
of collectives and of any layout; those on a GPU travel through host memory, behind what is on torch's current
stream. A wrong argument raises on its rank alone: no other rank is in this call, so nobody is told, and the
communicator stays usable.

Common errors: ``TypeError`` and ``ValueError`` name the argument, what was expected and what came.
``MismatchError``: the message has another size or dtype than the tensor that receives it. ``PeerLostError``:
the peer died or closed. ``CommTimeoutError``: the timeout passed. ``CommError``: the communicator is closed
or has failed.
"""

from __future__ import annotations

from typing import Any

import torch

from pycomm import _C, arguments
from pycomm.staging import Staged, staged, through_host
from pycomm.work import Keeper, Work

_ANY_SOURCE = -1


def _source(name: str, src: int | None, size: int) -> int:
    return _ANY_SOURCE if src is None else arguments.rank(name, src, size, any_source=True)


class PointToPoint:
    """What a communicator offers between two of its ranks."""

    _c: _C.Communicator
    _works: Keeper
    size: int

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Sends a tensor to one rank; returns when the tensor may be changed.

        Args:
            tensor: any shape and dtype; the receiver's has as many elements and the same dtype.
            dst: the rank that receives, in [0, size); may be this rank (with an irecv before).
            tag: an integer in [0, 2^31) that tells messages of one sender apart.
            timeout: seconds to wait for the receiver; None takes the communicator's.

        Raises:
            TypeError, ValueError, CommError: the common list of :mod:`pycomm.point_to_point`.

        Example:
            >>> import pycomm, torch
            >>> comm, got = pycomm.init(), torch.zeros(2)
            >>> work = comm.irecv(got, src=0)
            >>> comm.send(torch.ones(2), dst=0)
            >>> work.wait(), got
            (True, tensor([1., 1.]))
        """
        peer = arguments.rank("send: dst", dst, self.size)
        self._transfer("send", tensor, peer, tag, timeout, False)

    def recv(
        self, tensor: torch.Tensor, src: int | None = None, tag: int = 0, *, timeout: float | None = None
    ) -> int:
        """Receives a message of one rank, or of any, into a tensor.

        Args:
            tensor: overwritten; any shape, as many elements as the message and its dtype.
            src: the rank that sends, in [0, size); None or -1: any rank.
            tag: an integer in [0, 2^31), the sender's.
            timeout: seconds to wait for the message; None takes the communicator's.

        Returns:
            The rank that sent.

        Raises:
            TypeError, ValueError, CommError: the common list of :mod:`pycomm.point_to_point`.

        Example:
            >>> import pycomm, torch
            >>> comm, got = pycomm.init(), torch.zeros(2)
            >>> work = comm.isend(torch.ones(2), dst=0, tag=7)
            >>> comm.recv(got, tag=7)
            0
        """
        peer = _source("recv: src", src, self.size)
        source: int = self._transfer("recv", tensor, peer, tag, timeout, False)
        return source

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0, *, timeout: float | None = None) -> Work:
        """Like :meth:`send`, returning at once.

        Args:
            tensor: as for send; must not be changed before the work is done.
            dst, tag, timeout: as for send.

        Returns:
            A :class:`pycomm.Work`, done when the tensor may be changed.

        Raises:
            TypeError, ValueError, CommError: the common list of :mod:`pycomm.point_to_point`; what happens
                to the message, ``wait`` raises.

        Example:
            >>> import pycomm, torch
            >>> comm, got = pycomm.init(), torch.zeros(2)
            >>> work = comm.isend(torch.ones(2), dst=0)
            >>> comm.recv(got), work.wait()
            (0, True)
        """
        peer = arguments.rank("isend: dst", dst, self.size)
        work: Work = self._transfer("isend", tensor, peer, tag, timeout, True)
        return work

    def irecv(
        self, tensor: torch.Tensor, src: int | None = None, tag: int = 0, *, timeout: float | None = None
    ) -> Work:
        """Like :meth:`recv`, returning at once.

        Args:
            tensor: as for recv; must be left alone until the work is done.
            src, tag, timeout: as for recv.

        Returns:
            A :class:`pycomm.Work`; ``work.source()`` is the rank that sent.

        Raises:
            TypeError, ValueError, CommError: the common list of :mod:`pycomm.point_to_point`; what happens
                to the message, ``wait`` raises.

        Example:
            >>> import pycomm, torch
            >>> comm, got = pycomm.init(), torch.zeros(2)
            >>> work = comm.irecv(got, src=None)
            >>> comm.send(torch.ones(2), dst=0)
            >>> work.wait(), work.source()
            (True, 0)
        """
        peer = _source("irecv: src", src, self.size)
        work: Work = self._transfer("irecv", tensor, peer, tag, timeout, True)
        return work

    def _transfer(
        self, name: str, tensor: torch.Tensor, peer: int, tag: int, timeout: float | None, async_op: bool
    ) -> Any:
        send = name in ("send", "isend")
        tag = arguments.integer(f"{name}: tag", tag, 0, 2**31)
        limit = 0.0 if timeout is None else arguments.seconds(f"{name}: timeout", timeout)
        done = self._c.point_to_point(send, tensor, peer, tag, limit, async_op)
        held: Staged | None = None
        if done is NotImplemented:
            if tensor.is_cuda:
                held = through_host(name, tensor, send)
            else:
                held = staged(name, tensor, None) if send else staged(name, None, tensor)
            plain = held.inputs if send else held.outputs
            done = self._c.point_to_point(send, plain, peer, tag, limit, async_op)
        if not async_op:
            if held is not None:
                held.write_back()
            return done
        return self._works.add(Work(done, tensor, tensor, held))

    def _start(self, is_send: bool, tensor: torch.Tensor, peer: int, tag: int) -> _C.Work:
        """isend or irecv for the library itself: the caller keeps the dense tensor until the work is done."""
        work: Any = self._c.point_to_point(is_send, tensor, peer, tag, 0.0, True)
        if work is NotImplemented:
            name = "isend" if is_send else "irecv"
            started: Work = self._transfer(name, tensor, peer, tag, None, True)
            return started._work
        started_here: _C.Work = work
        return started_here

    def _keep(self, work: _C.Work, tensor: torch.Tensor) -> None:
        """What :meth:`_start` has begun outlives its caller."""
        self._works.add(Work(work, tensor, tensor, None))
