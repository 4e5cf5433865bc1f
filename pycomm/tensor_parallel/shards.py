"""Who holds what of a dimension: pure functions of sizes, with no tensor data and no communication.

Words: a *piece* is a half-open range of a dimension; a rank's *shard* is its pieces laid one after another;
a :class:`Split` says the pieces of every rank. Pieces of two ranks are disjoint or equal; an equal one is
*replicated*, and *owned* by the lowest of its ranks, so that each element of the whole counts once.

Everything follows from one rule, that of ``torch.chunk`` and DTensor's ``Shard``: of n elements over k ranks
each gets ⌈n / k⌉ while they last. So later ranks may have fewer, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Piece", "Split", "blocks", "chunks", "even", "fused", "heads"]

Piece = tuple[int, int]
"""start and stop."""


def chunks(size: int, degree: int) -> list[Piece]:
    """The pieces of ``size`` elements over ``degree`` ranks, one for each, as ``torch.chunk`` cuts.

    Example:
        >>> chunks(5, 3), chunks(2, 3)
        ([(0, 2), (2, 4), (4, 5)], [(0, 1), (1, 2), (2, 2)])
    """
    if size < 0 or degree < 1:
        raise ValueError(f"chunks: {size} elements over {degree} ranks: expected at least 0 over at least 1")
    each = -(-size // degree)
    return [(min(r * each, size), min((r + 1) * each, size)) for r in range(degree)]


@dataclass(frozen=True)
class Split:
    """The pieces of each rank, in the order in which they lie in its shard.

    Attributes:
        size: elements of the whole dimension.
        pieces: for each rank its pieces, disjoint and none empty; together they are the whole.

    Example:
        >>> split = Split(5, (((0, 2),), ((2, 4),), ((4, 5),)))
        >>> split.lengths, split.take(torch.arange(5), 0, rank=1)
        ([2, 2, 1], tensor([2, 3]))
    """

    size: int
    pieces: tuple[tuple[Piece, ...], ...]

    def __post_init__(self) -> None:
        distinct = sorted({piece for rank in self.pieces for piece in rank})
        ends = [0, *(stop for _, stop in distinct)]
        starts = [*(start for start, _ in distinct), self.size]
        held = [len(set(rank)) == len(rank) for rank in self.pieces]
        if starts != ends or any(a >= b for a, b in distinct) or not all(held) or not self.pieces:
            raise ValueError(
                f"Split: pieces of a dimension of {self.size} must be disjoint or equal, not empty, and "
                f"cover it, got {self.pieces}"
            )

    @property
    def degree(self) -> int:
        """How many ranks there are."""
        return len(self.pieces)

    @cached_property
    def lengths(self) -> list[int]:
        """Elements of each rank's shard."""
        return [sum(stop - start for start, stop in rank) for rank in self.pieces]

    @cached_property
    def is_replicated(self) -> bool:
        """Whether some piece is held by several ranks."""
        return sum(self.lengths) != self.size

    def owned(self, rank: int) -> list[tuple[Piece, int]]:
        """The pieces that no lower rank holds, each with where it begins in the rank's shard."""
        before = {piece for lower in self.pieces[:rank] for piece in lower}
        return [(piece, at) for piece, at in self.placed(rank) if piece not in before]

    def placed(self, rank: int) -> list[tuple[Piece, int]]:
        """The rank's pieces, each with where it begins in the rank's shard."""
        found, at = [], 0
        for start, stop in self.pieces[rank]:
            found.append(((start, stop), at))
            at += stop - start
        return found

    def take(self, whole: Tensor, dim: int, rank: int) -> Tensor:
        """The rank's shard of ``whole``, whose dimension ``dim`` has ``size`` elements: a view or a copy.

        Raises:
            ValueError: it has another size.
        """
        if whole.shape[dim] != self.size:
            raise ValueError(
                f"the whole has {whole.shape[dim]} elements in dimension {dim}, expected {self.size}"
            )
        parts = [whole.narrow(dim, start, stop - start) for start, stop in self.pieces[rank]]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0)

    def put(self, whole: Tensor, dim: int, rank: int, shard: Tensor) -> None:
        """Writes the rank's shard to its place in ``whole``: the opposite of :meth:`take`."""
        for (start, stop), at in self.placed(rank):
            whole.narrow(dim, start, stop - start).copy_(shard.narrow(dim, at, stop - start))

    def times(self, n: int) -> Split:
        """The split of a dimension with ``n`` elements for each of this one's: of features, given heads."""
        return Split(self.size * n, tuple(tuple((a * n, b * n) for a, b in rank) for rank in self.pieces))


def even(size: int, degree: int) -> Split:
    """One dimension cut by :func:`chunks`.

    Example:
        >>> even(5, 2).pieces
        (((0, 3),), ((3, 5),))
    """
    return Split(size, tuple(((a, b),) if a < b else () for a, b in chunks(size, degree)))


def blocks(n_blocks: int, block: int, degree: int) -> Split:
    """``n_blocks`` blocks of ``block`` elements, none of which is cut.

    Example:
        >>> blocks(3, 8, 2).pieces
        (((0, 16),), ((16, 24),))
    """
    return even(n_blocks, degree).times(block)


def fused(parts: Sequence[Split | int], degree: int) -> Split:
    """Several matrices in one dimension, one after another, each split by itself.

    Each rank's shard holds its shard of the first part, then of the second, and so on; cutting the fused
    dimension as a whole instead would give one rank the queries and another the values.

    Args:
        parts: sizes, which are cut by :func:`even`, or splits of that degree.
        degree: how many ranks.

    Example:
        >>> fused([4, 2], 2).pieces
        (((0, 2), (4, 5)), ((2, 4), (5, 6)))
    """
    pieces: list[list[Piece]] = [[] for _ in range(degree)]
    base = 0
    for part in parts:
        split = part if isinstance(part, Split) else even(part, degree)
        if split.degree != degree:
            raise ValueError(f"fused: a part is split over {split.degree} ranks, expected {degree}")
        for mine, theirs in zip(pieces, split.pieces, strict=True):
            mine.extend((base + start, base + stop) for start, stop in theirs)
        base += split.size
    return Split(base, tuple(map(tuple, pieces)))


def heads(n_heads: int, n_kv_heads: int, degree: int) -> tuple[Split, Split]:
    """Query heads and key-value heads of grouped attention, so that each rank has what its queries need.

    Query head q attends with key-value head q div g, g = n_heads / n_kv_heads. With at least as many
    key-value heads as ranks, those are cut by :func:`chunks` and queries follow. With fewer, the ranks are
    cut into n_kv_heads teams, as equal as can be; each rank of a team holds the team's key-value head (it is
    replicated) and a chunk of its g query heads. On every rank each local key-value head serves equally many
    neighbouring local query heads; a rank without query heads has no key-value head either.

    Args:
        n_heads, n_kv_heads: of the whole layer; n_kv_heads divides n_heads.
        degree: how many ranks.

    Returns:
        The splits of the query heads and of the key-value heads, counted in heads (:meth:`Split.times` with
        the head size gives features).

    Raises:
        ValueError: the numbers of heads do not divide.

    Example:
        >>> queries, keys = heads(4, 1, 2)
        >>> queries.pieces, keys.pieces
        ((((0, 2),), ((2, 4),)), (((0, 1),), ((0, 1),)))
    """
    if n_kv_heads < 1 or n_heads % n_kv_heads != 0:
        raise ValueError(f"heads: {n_heads} query heads cannot share {n_kv_heads} key-value heads evenly")
    group = n_heads // n_kv_heads
    if n_kv_heads >= degree:
        keys = even(n_kv_heads, degree)
        return keys.times(group), keys
    query_pieces: list[tuple[Piece, ...]] = []
    key_pieces: list[tuple[Piece, ...]] = []
    for key in range(n_kv_heads):
        team = (key + 1) * degree // n_kv_heads - key * degree // n_kv_heads
        for start, stop in chunks(group, team):
            has_any = start < stop
            query_pieces.append(((key * group + start, key * group + stop),) if has_any else ())
            key_pieces.append(((key, key + 1),) if has_any else ())
    return Split(n_heads, tuple(query_pieces)), Split(n_kv_heads, tuple(key_pieces))
