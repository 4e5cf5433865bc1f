"""pycomm: collective communication for PyTorch."""

from pycomm.errors import CommError, CommTimeoutError, MismatchError, PeerLostError, ScheduleError

__all__ = ["CommError", "CommTimeoutError", "MismatchError", "PeerLostError", "ScheduleError"]
