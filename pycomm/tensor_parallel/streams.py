"""Random numbers inside a parallelized module: which must differ between ranks, and which must not.

An unmodified attention draws its dropout inside, for the heads of this rank. Drawn from torch's generator it
would be the same mask on all ranks, and ranks with other numbers of heads would leave the generator in other
states, after which every mask of replicated activations differs and the model falls apart without a word. So
the attention runs inside a *fork* (``random.py``): torch's generator is another on each rank there, and
outside the same on all when it ends. What is replicated inside of a fork, such as a residual dropout, is
*common*: it draws from a seed that was drawn outside.

Masks of replicated and of sequence-sharded activations do not depend on the degree; those inside a fork do.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pycomm.tensor_parallel.random import dropout, get_rng_tracker
from pycomm.tensor_parallel.swapped import Swapped
from pycomm.tensor_parallel.untraced import untraced

__all__ = ["CommonDropout", "Forked"]

_open: list[Iterator[int]] = []
"""Seeds for what is common, of each fork that is open."""


def _seeds(base: int) -> Iterator[int]:
    number = 0
    while True:
        yield int.from_bytes(hashlib.sha256(f"{base} {number}".encode()).digest()[:8], "little")
        number += 1


@contextlib.contextmanager
def _fork() -> Iterator[None]:
    base = int(torch.empty((), dtype=torch.int64).random_())
    with get_rng_tracker().fork():
        _open.append(_seeds(base))
        try:
            yield
        finally:
            _open.pop()


@contextlib.contextmanager
def _common() -> Iterator[None]:
    """In a fork, torch's generator is the same on all ranks; elsewhere it is that already."""
    if not _open:
        yield
        return
    generator = torch.default_generator
    inside = generator.get_state()
    generator.manual_seed(next(_open[-1]))
    try:
        yield
    finally:
        generator.set_state(inside)


class Forked(Swapped):
    """A module whose random numbers are this rank's own: an attention on this rank's heads."""

    training: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        probability: Callable[[Any], float] | None = self._parallel.probability
        if not self.training or probability is None or probability(self) == 0.0:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with _fork():
            return super().forward(*args, **kwargs)  # type: ignore[misc]


class CommonDropout(Swapped):
    """A Dropout of replicated activations, or of this rank's positions: the mask of the whole, cut."""

    training: bool
    p: float

    @untraced
    def forward(self, input: Tensor) -> Tensor:
        layout = self._parallel.input
        is_cut = layout is not None and layout.kind == "shard"
        sharded = {layout.dim: self._parallel.comm} if is_cut and layout is not None else None
        with _common():
            return dropout(input, self.p, self.training, sharded=sharded)
