"""The exceptions that pycomm raises; every one names the ranks, the operation and what to do.

``CommError`` is their base. A *refused* call (bad argument on some rank) leaves the communicator usable;
after any other ``CommError`` the communicator has failed and every later call raises the same error.
"""

__all__ = ["CommError", "CommTimeoutError", "MismatchError", "PeerLostError", "ScheduleError"]


class CommError(RuntimeError):
    """A collective could not be carried out."""


class PeerLostError(CommError):
    """A peer died, closed its communicator or became unreachable while it was needed."""


class CommTimeoutError(CommError):
    """A deadline passed; the message says who was awaited and what that rank was doing."""


class MismatchError(CommError):
    """Ranks made valid calls that differ (operation, dtype, count, root or order)."""


class ScheduleError(CommError, ValueError):
    """A schedule breaks a rule, or cannot be built for these arguments."""
