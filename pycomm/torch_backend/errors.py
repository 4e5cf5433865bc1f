"""pycomm's errors as users of torch.distributed catch them: ``DistBackendError``, and still pycomm's own."""

from __future__ import annotations

import torch.distributed as dist

from pycomm.errors import CommError, CommTimeoutError, MismatchError, PeerLostError

__all__ = ["as_torchs"]


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


def as_torchs(error: CommError, more: str = "") -> CommError:
    """The same error in torch's family, too, with ``more`` behind its text.

    One of a deadline says "Timed out", as gloo's do: people's scripts look for these words.
    """
    if isinstance(error, DistCommError):
        return error
    text = str(error)
    if isinstance(error, CommTimeoutError) and ": waited " in text:
        text = text.replace(": waited ", ": Timed out after waiting ", 1)
    return next(theirs for ours, theirs in _KINDS if isinstance(error, ours))(text + more)
