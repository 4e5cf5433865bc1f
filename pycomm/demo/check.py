"""Do the runs agree? Pure functions on what the ranks saw.

Two runs on the same data differ only by the order in which float32 numbers are added: a rank's gradient is a
mean over half of the rows. Each step adds relative errors of some 1e-7 (float32's 2^-24 = 6e-8, a few times),
and training carries them on. Over the demo's steps the loss was seen to differ by 1e-6 and the gradient's
norm by 5e-6 of itself; the tolerances are a hundred times that, for other processors and other matrix
libraries. A mistake is far outside: a sum in place of the average doubles the norm, and a gradient bucket
left out, or weights that start different, move the loss by more than 1e-2 (tests/python/test_demo.py does
these things).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pycomm.demo.train import RankResult

__all__ = ["Summary", "differences", "faults", "summarise"]

LOSS_TOLERANCE = 1e-4  # nats per byte
NORM_TOLERANCE = 5e-4  # of the norm
LEAST_LEARNED = 1.0  # nats per byte; a run that learns nothing agrees with anything
N_UNTIMED = 5  # the first steps are slower


@dataclass(frozen=True)
class Summary:
    """One way of training, all ranks together."""

    way: str
    n_ranks: int
    n_parameters: int
    losses: list[float]
    norms: list[float]
    step_s: float  # median
    exposed_share: float  # of the step time, mean over ranks and timed steps
    is_replicated: bool  # do all ranks end with the same bits in every weight?


@dataclass(frozen=True)
class Differences:
    """The largest over all steps."""

    loss: float
    norm: float


def summarise(results: Sequence[RankResult]) -> Summary:
    """Puts the ranks of one run together. The ranks' shares are equal, so losses are averaged."""
    first = results[0]
    timed = slice(min(N_UNTIMED, len(first.step_s) - 1), None)
    steps = [max(times) for times in zip(*(r.step_s[timed] for r in results), strict=True)]
    shares = [sum(r.exposed_s[timed]) / sum(r.step_s[timed]) for r in results]
    return Summary(
        first.way,
        first.size,
        first.n_parameters,
        [statistics.fmean(losses) for losses in zip(*(r.losses for r in results), strict=True)],
        first.norms,
        statistics.median(steps),
        statistics.fmean(shares),
        all(r.weights == first.weights and r.norms == first.norms for r in results),
    )


def differences(run: Summary, reference: Summary) -> Differences:
    """How far ``run`` is from ``reference``; NaN where one of them has a NaN."""
    loss = [abs(a - b) for a, b in zip(run.losses, reference.losses, strict=True)]
    norm = [abs(a - b) / b for a, b in zip(run.norms, reference.norms, strict=True)]
    return Differences(_largest(loss), _largest(norm))


def _largest(values: list[float]) -> float:
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def faults(run: Summary, reference: Summary) -> list[str]:
    """What is wrong with ``run``, a training by several ranks, beside one process; empty when all is well."""
    found = []
    largest = differences(run, reference)
    # "not <=" and not ">": a NaN must be a fault
    if not largest.loss <= LOSS_TOLERANCE:
        found.append(f"losses differ by {largest.loss:.2e} nats per byte, more than {LOSS_TOLERANCE:.0e}")
    if not largest.norm <= NORM_TOLERANCE:
        found.append(
            f"gradient norms differ by {largest.norm:.2e} of the norm, more than {NORM_TOLERANCE:.0e}"
        )
    if not run.is_replicated:
        found.append("the ranks do not end with the same bits in every weight")
    learned = run.losses[0] - statistics.fmean(run.losses[-5:])
    if not learned >= LEAST_LEARNED:
        found.append(f"the loss fell by {learned:.2f} nats per byte only, less than {LEAST_LEARNED}")
    return [f"{run.way}: {fault}" for fault in found]
