"""What each collective moves: element counts, the places it can be called in, and nccl-tests' bus factors.

``count`` follows nccl-tests: elements per rank and block (a rank of an all-gather sends ``count``), while a
size in bytes is that of the larger of a rank's two buffers. A size too small for one element per block is
rounded up to one, and the table prints the size that was really used.
"""

from __future__ import annotations

import dataclasses

__all__ = ["REDUCES", "ROOTED", "Shape", "bus_factor", "places", "shape_of"]

REDUCES = frozenset({"all_reduce", "reduce_scatter", "reduce"})
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
_BLOCKWISE = frozenset({"reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"})


@dataclasses.dataclass(frozen=True)
class Shape:
    """One collective at one size: elements of a rank's input and output, and of a block (``count``)."""

    collective: str
    n_ranks: int
    rank: int
    root: int
    count: int
    n_in: int
    n_out: int

    @property
    def n_buffer(self) -> int:
        """Elements of the larger buffer, which is the only one when in place."""
        return max(self.n_in, self.n_out)

    def block(self, rank: int) -> slice:
        """The elements of ``rank``'s block."""
        return slice(rank * self.count, (rank + 1) * self.count)


def shape_of(collective: str, n_bytes: int, itemsize: int, n_ranks: int, rank: int, root: int) -> Shape:
    """The shape of ``collective`` whose larger buffer has about ``n_bytes`` bytes of ``itemsize`` each.

    Example:
        >>> shape_of("all_gather", 1024, 4, n_ranks=2, rank=0, root=0).count
        128
    """
    total = max(1, n_bytes // itemsize)
    block = max(1, total // n_ranks)
    all_blocks = block * n_ranks
    if collective not in _BLOCKWISE:
        return Shape(collective, n_ranks, rank, root, total, total, total)
    n_in = block if collective in ("all_gather", "gather") else all_blocks
    n_out = block if collective in ("reduce_scatter", "scatter") else all_blocks
    return Shape(collective, n_ranks, rank, root, block, n_in, n_out)


def places(collective: str) -> tuple[str, ...]:
    """``out`` and ``in``, as far as the call exists; torch's broadcast only exists in place."""
    if collective == "broadcast":
        return ("in",)
    if collective in ("all_reduce", "reduce_scatter", "all_gather", "reduce"):
        return ("out", "in")
    return ("out",)


def bus_factor(collective: str, n_ranks: int) -> float:
    """busbw / algbw: what a link carries for each byte of the result (nccl-tests, doc/PERFORMANCE.md).

    Example:
        >>> bus_factor("all_reduce", 4)
        1.5
    """
    if collective == "all_reduce":
        return 2 * (n_ranks - 1) / n_ranks
    if collective in _BLOCKWISE:
        return (n_ranks - 1) / n_ranks
    return 1.0
