"""pycomm's errors as users of torch.distributed catch them: ``DistBackendError``, and still pycomm's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from pycomm.errors import CommError, CommTimeoutError, MismatchError, PeerLostError

__all__ = ["translated"]


class DistCommError(dist.DistBackendError, CommError):
    """torch's ``DistBackendError`` and pycomm's ``CommError`` at once."""


class DistPeerLostError(DistCommError, PeerLostError):
    """A peer died, closed its group or became unreachable while it was needed."""


class DistCommTimeoutError(DistCommError, CommTimeoutError):
    """A deadline passed."""


class DistMismatchError(DistCommError, MismatchError):
    """Ranks made valid calls that differ."""


_KINDS: tuple[tuple[type[CommError], type[DistCommError]], ...] = (
    (PeerLostError, DistPeerLostError),
    (CommTimeoutError, DistCommTimeoutError),
    (MismatchError, DistMismatchError),
    (CommError, DistCommError),
)


def as_torchs(error: CommError) -> CommError:
    """The same error in torch's family, too."""
    if isinstance(error, DistCommError):
        return error
    return next(theirs for ours, theirs in _KINDS if isinstance(error, ours))(str(error))


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Around calls of the communicator: its errors go on in torch's family."""
    try:
        yield
    except CommError as error:
        raise as_torchs(error) from error
