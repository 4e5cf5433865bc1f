"""Random numbers that do not depend on how a model is cut.

All state is torch's default CPU generator, which every rank seeds alike (:func:`model_parallel_manual_seed`).
A dropout takes 63 bits of it, on every rank the same, as the key of a counter-based generator, and an element
is kept or not by its number in the whole tensor (philox.py). So a mask is the same for every degree, on the
CPU and on CUDA, two layers differ, and what restores torch's generator (``torch.utils.checkpoint``, a resumed
run) restores the masks.

What must differ between ranks is done inside ``get_rng_tracker().fork(name)``: the generator is then a
function of its state outside, which is the same on all ranks, and of the name's seed, which need not be.

Sources: J. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011; the names are Megatron's
(megatron/core/tensor_parallel/random.py).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pycomm.communicator import Communicator
from pycomm.tensor_parallel.checks import check_equal
from pycomm.tensor_parallel.group import Group, communicator_of
from pycomm.tensor_parallel.philox import keep_mask
from pycomm.tensor_parallel.regions import _apply, lengths_of
from pycomm.tensor_parallel.untraced import untraced

__all__ = ["ParallelDropout", "RngTracker", "dropout", "get_rng_tracker", "model_parallel_manual_seed"]

MODEL_PARALLEL = "model-parallel-rng"
_MODEL_PARALLEL_OFFSET = 2718  # Megatron's
Sharded = Mapping[int, Any]
"""For each sharded dimension the group whose ranks have the parts, in rank order, or (start, whole size)."""


def _draw() -> int:
    """63 bits of torch's default CPU generator: the same on all ranks whose generators are."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def _generators() -> list[torch.Generator]:
    """Those that torch's random functions use by default: the CPU's, and the current CUDA device's if any."""
    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return [torch.default_generator]
    return [torch.default_generator, cuda.default_generators[cuda.current_device()]]


class RngTracker:
    """Named streams of random numbers, each a seed; see :func:`get_rng_tracker`."""

    def __init__(self) -> None:
        self._seeds: dict[str, int] = {}

    def add(self, name: str, seed: int) -> None:
        """Names a stream.

        Args:
            name: not used before.
            seed: any integer; ranks that must differ give different ones.

        Raises:
            ValueError: there is a stream of that name.
        """
        if name in self._seeds:
            raise ValueError(f"RngTracker.add: there is a stream {name!r} already; reset() forgets all")
        self._seeds[name] = seed

    def reset(self) -> None:
        """Forgets all streams."""
        self._seeds.clear()

    def get_states(self) -> dict[str, int]:
        """The seed of each stream: with torch's own generator all that there is to save."""
        return dict(self._seeds)

    def set_states(self, states: Mapping[str, int]) -> None:
        """What :meth:`get_states` gave."""
        self._seeds = dict(states)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Inside, torch's random functions draw from the named stream; on CUDA, those of the current device.

        Outside, one number has been drawn from the CPU's generator, whatever happens inside; so ranks stay
        alike, each fork differs from the one before, and a recomputed one repeats.

        Raises:
            ValueError: there is no such stream.

        Example:
            >>> model_parallel_manual_seed(1)
            >>> with get_rng_tracker().fork():
            ...     mine = torch.rand(2)  # differs between ranks
            >>> alike = torch.rand(2)  # does not
        """
        if name not in self._seeds:
            known = ", ".join(map(repr, self._seeds)) or "none: call model_parallel_manual_seed"
            raise ValueError(f"RngTracker.fork: no stream {name!r}; there are {known}")
        text = f"{_draw()} {name} {self._seeds[name]}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
        outside = [(generator, generator.get_state()) for generator in _generators()]
        try:
            for generator, _ in outside:
                generator.manual_seed(seed)
            yield
        finally:
            for generator, state in outside:
                generator.set_state(state)


_tracker = RngTracker()


def get_rng_tracker() -> RngTracker:
    """The streams of this process.

    Example:
        >>> model_parallel_manual_seed(1)
        >>> list(get_rng_tracker().get_states())
        ['model-parallel-rng']
    """
    return _tracker


def model_parallel_manual_seed(seed: int, group: Group = None) -> None:
    """Seeds torch alike on all ranks, and the stream "model-parallel-rng" differently on each.

    Args:
        seed: the same on every rank.
        group: the tensor-parallel ranks; see :mod:`pycomm.tensor_parallel.group`.

    Example:
        >>> model_parallel_manual_seed(1234)
    """
    comm = communicator_of(group, who="model_parallel_manual_seed: group")
    torch.manual_seed(seed)
    _tracker.reset()
    _tracker.add(MODEL_PARALLEL, seed + _MODEL_PARALLEL_OFFSET + comm.rank)


class _Dropout(torch.autograd.Function):
    """x · mask / (1 − p); the mask is made again in backward, not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: int, whole: list[int], start: list[int]) -> Tensor:
        ctx.how = p, seed, whole, start
        keep = keep_mask(x.shape, whole, start, seed, p, x.device)
        return x * keep if p == 1.0 else (x * keep).mul_(1.0 / (1.0 - p))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _apply(_Dropout, gradient, *ctx.how), None, None, None, None


@untraced
def dropout(
    input: Tensor, p: float = 0.5, training: bool = True, *, sharded: Sharded | None = None
) -> Tensor:
    """``F.dropout`` whose mask is that of one process, for every degree.

    Args:
        input: floating point; what this rank has of the whole.
        p: probability of an element to become zero, in [0, 1].
        training: False: the input is returned.
        sharded: which dimensions are cut, and how: for each the group whose ranks have the parts in rank
            order (None: the default group; ranks then tell each other their sizes), or the pair (start, whole
            size). A dimension that is not named is whole. Name the batch's dimension with the data-parallel
            group for the masks of one process with the whole batch.

    Returns:
        A tensor like the input.

    Raises:
        ValueError: ``p`` is out of range, or a dimension does not exist or does not fit.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> dropout(torch.ones(8), 0.5).unique()
        tensor([0., 2.])
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: p must be in [0, 1], got {p!r}")
    if not training or p == 0.0:
        return input
    seed = _draw()
    whole, start = list(input.shape), [0] * input.dim()
    for dim, cut in (sharded or {}).items():
        if not -input.dim() <= dim < input.dim():
            raise ValueError(f"dropout: no dimension {dim} in a tensor of shape {tuple(input.shape)}")
        if isinstance(cut, tuple):
            begin, size = cut
        else:
            comm = communicator_of(cut, who="dropout: sharded")
            check_equal(torch.tensor([seed], device="cpu"), "dropout, its seed from torch's generator,", comm)
            parts = lengths_of(input.shape[dim], comm)
            begin, size = sum(parts[: comm.rank]), sum(parts)
        if not 0 <= begin <= begin + input.shape[dim] <= size:
            raise ValueError(
                f"dropout: dimension {dim} of shape {tuple(input.shape)} cannot begin at {begin} of {size}"
            )
        start[dim], whole[dim] = begin, size
    out: Tensor = _apply(_Dropout, input, p, seed, whole, start)
    return out


class ParallelDropout(nn.Module):
    """:func:`dropout` as a layer.

    Args:
        p: probability of an element to become zero.
        sharded: which dimensions of the input are cut: see :func:`dropout`.

    Example:
        >>> layer = ParallelDropout(0.1, sharded={0: None})  # under sequence parallelism, (S, B, H)
        >>> layer(torch.ones(4, 2, 8)).shape
        torch.Size([4, 2, 8])
    """

    def __init__(self, p: float = 0.5, sharded: Sharded | None = None) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"ParallelDropout: p must be in [0, 1], got {p!r}")
        self.p = p
        self.sharded: dict[int, tuple[int, int] | Communicator] = {
            dim: cut if isinstance(cut, tuple) else communicator_of(cut, who="ParallelDropout: sharded")
            for dim, cut in (sharded or {}).items()
        }

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        return dropout(input, self.p, self.training, sharded=self.sharded)

    def extra_repr(self) -> str:
        """For print."""
        return f"p={self.p}, sharded={self.sharded}"
