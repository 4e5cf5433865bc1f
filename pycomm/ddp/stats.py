"""Where a step's time goes, and who came last: a few clock readings, and one vector with the status.

Each rank's clock is CLOCK_MONOTONIC, which all processes of a machine share, so the moments at which the
ranks' gradients were ready can be compared. They travel in the status that ends every backward, one int64
for each rank behind the number of problems, and cost no message of their own.

Of a module on CUDA these are times of the host: a backward is over when its last kernel is in the queue, and
communication when it is on its stream.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from pycomm.calling import KINDS
from pycomm.communicator import Communicator
from pycomm.optim import scaling_of
from pycomm.placement import cuda_index

if TYPE_CHECKING:
    from pycomm.ddp.plan import Bucket

__all__ = ["Times", "described_buckets", "described_rates", "described_step"]


class Times:
    """Clock readings of the current and the last step. Seconds, except where a name says ``ns``."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._status = torch.zeros(1 + size, dtype=torch.int64)
        self._words = self._status.numpy()
        self._began_s = 0.0
        self._ended_s = 0.0
        self.forward_began_s = 0.0
        self._exposed_before = 0.0
        #: In communication so far: launching, reducing and waiting, on the thread of backward.
        self.exposed_s = 0.0
        self.n_steps = 0
        #: Of the last step.
        self.forward_s = 0.0
        self.backward_s = 0.0
        self.step_exposed_s = 0.0
        self.arrivals_ns: list[int] = []

    def backward_began(self) -> None:
        """The first gradient of a backward is on its way."""
        self._began_s = time.perf_counter()
        self._exposed_before = self.exposed_s

    def gradients_ready(self) -> None:
        """This rank's backward is over, but for the communication."""
        self._ready_ns = time.monotonic_ns()

    def exchange(self, comm: Communicator, n_problems: int) -> int:
        """The sum of the ranks' problems; the ranks' arrivals are known afterwards. Collective."""
        if comm.size == 1:
            self.arrivals_ns = [self._ready_ns]
            return n_problems
        words = self._words
        words[:] = 0
        words[0] = n_problems
        words[1 + self._rank] = self._ready_ns
        comm.all_reduce(self._status)
        self.arrivals_ns = words[1:].tolist()
        return int(words[0])

    def finished(self, communication_s: float) -> None:
        """All is averaged; the end of backward has spent this long in communication."""
        self.exposed_s += communication_s
        self.step_exposed_s = self.exposed_s - self._exposed_before
        self._ended_s = time.perf_counter()
        self.backward_s = self._ended_s - self._began_s - self.step_exposed_s
        self.n_steps += 1

    def as_logged(self) -> dict[str, int]:
        """Under the names of torch's logger, in nanoseconds; communication is what backward's thread sees."""
        began, ended = int(self._began_s * 1e9), int(self._ended_s * 1e9)
        exposed = int(self.step_exposed_s * 1e9)
        lasting = {
            "forward_compute_time": int(self.forward_s * 1e9),
            "backward_compute_time": ended - began - exposed,
            "backward_comm_time": exposed,
            "backward_compute_comm_overlap_time": 0,
        }
        averages = {f"avg_{name}": value for name, value in lasting.items()}
        return (
            lasting
            | averages
            | {
                "forward_compute_time_start": int(self.forward_began_s * 1e9),
                "backward_compute_time_start": began,
                "backward_compute_time_end": ended - exposed,
                "backward_comm_time_start": ended - exposed,
                "backward_comm_time_end": ended,
            }
        )


def described_step(times: Times) -> dict[str, Any]:
    """The last step in seconds, and by how much each rank came after the first."""
    arrivals = times.arrivals_ns
    first = min(arrivals, default=0)
    late = [(ns - first) * 1e-9 for ns in arrivals]
    return {
        "step": times.n_steps,
        "forward_s": times.forward_s,
        "backward_s": times.backward_s,
        "exposed_s": times.step_exposed_s,
        "arrival_s": late,
        "last_rank": late.index(max(late)) if late else None,
        "skew_s": max(late, default=0.0),
    }


def described_buckets(comm: Communicator, buckets: list[Bucket], is_in_arena: bool) -> list[dict[str, Any]]:
    """Each bucket's size, what travels, and the algorithm that reduces it."""
    is_on_cuda = bool(buckets) and cuda_index(buckets[0].parameters[0]) >= 0
    rows = (
        [(most, name, name) for most, name in comm._c.device_selection(KINDS["all_reduce"])]
        if is_on_cuda
        else comm._c.selection(KINDS["all_reduce"])
    )
    described = []
    for bucket in buckets:
        n_bytes = bucket.n_elems * bucket.wire.wire_dtype(bucket.dtype).itemsize
        row = next(row for row in rows if n_bytes <= row[0])
        described.append(
            {
                "n_parameters": len(bucket.indices),
                "dtype": bucket.dtype,
                "bytes": bucket.n_bytes,
                "wire_bytes": n_bytes,
                "algorithm": bucket.wire.algorithm or (row[2] if is_in_arena else row[1]),
            }
        )
    return described


def described_rates(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's learning rates, and how ``pycomm.optim.scale_lr`` has scaled them, if it has."""
    scaling = scaling_of(optimizer)
    return {
        "learning_rates": [float(group["lr"]) for group in optimizer.param_groups],
        "scaling_rule": scaling.rule if scaling is not None else None,
        "scaling_factor": scaling.factor if scaling is not None else 1.0,
    }
