"""Which elements a dropout keeps, as a function of a seed and of their numbers in the whole tensor.

An element's *number* is its row-major index in the tensor that one process would have. Element g is kept when
word g mod 4 of Philox4x32-10, with counter g div 4 and the seed as key, is at least probability · 2³². So a
mask does not depend on how the whole is cut. On the CPU a kernel does it (csrc/kernels/random.h); elsewhere
the same bits come from torch's operations, here.

Source: J. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pycomm._C import kernels

__all__ = ["keep_mask", "words"]

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def words(numbers: Tensor, seed: int) -> Tensor:
    """The 32 random bits of each element, as int64 in [0, 2^32).

    Args:
        numbers: int64, not negative, any shape and device.
        seed: in [0, 2^64).

    Example:
        >>> [hex(w) for w in words(torch.arange(4), seed=0).tolist()]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    block = numbers >> 2
    c0, c1 = block & _LOW, (block >> 32) & _LOW
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & _LOW, seed >> 32
    for _ in range(10):
        # int64 wraps, so the product's 64 bits are right whatever its sign; the shift is masked.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW,
        )  # fmt: skip
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    word = numbers & 3
    return torch.where(word < 2, torch.where(word == 0, c0, c1), torch.where(word == 2, c2, c3))


def keep_mask(
    sizes: Sequence[int],
    whole: Sequence[int],
    start: Sequence[int],
    seed: int,
    p: float,
    device: torch.device,
) -> Tensor:
    """Which elements of a box are kept, with probability 1 - p each.

    Args:
        sizes: of the box, which is what this rank has.
        whole: of the whole tensor.
        start: where the box begins in it, in each dimension.
        seed: in [0, 2^64).
        p: probability of not being kept, in [0, 1].
        device: of the result.

    Returns:
        bool, of shape ``sizes``.

    Example:
        >>> both = keep_mask([4, 2], [4, 2], [0, 0], 7, 0.5, torch.device("cpu"))
        >>> part = keep_mask([1, 2], [4, 2], [3, 0], 7, 0.5, torch.device("cpu"))
        >>> torch.equal(part[0], both[3])
        True
    """
    strides = [1] * len(whole)
    for d in range(len(whole) - 2, -1, -1):
        strides[d] = strides[d + 1] * whole[d + 1]
    first = sum(a * s for a, s in zip(start, strides, strict=True))
    threshold = round(p * 2.0**32)
    if device.type == "cpu":
        keep = torch.empty(tuple(sizes), dtype=torch.bool, device="cpu")
        if keep.numel() > 0:
            kernels.keep_mask(keep.data_ptr(), *_merged(sizes, strides), first, seed, threshold)
        return keep
    numbers = torch.full((), first, dtype=torch.int64, device=device)
    for size, stride in zip(sizes, strides, strict=True):
        numbers = numbers.unsqueeze(-1) + torch.arange(size, device=device) * stride
    return words(numbers, seed) >= threshold


def _merged(sizes: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Neighbouring dimensions that are uncut as one: longer runs of neighbouring numbers."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if merged and merged[-1][1] == size * stride:
            merged[-1] = merged[-1][0] * size, stride
        else:
            merged.append((size, stride))
    return [size for size, _ in merged], [stride for _, stride in merged]
