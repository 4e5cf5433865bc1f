"""Numbers with units as people write them on a command line, and back.

Sizes: ``1KiB`` and ``1K`` are 1024 bytes (nccl-tests' habit), ``1kB`` is 1000. Times: ``1us``, ``2.5ms``.
Bandwidths: ``10GB/s``, ``1GiB/s``; ``100Gbit/s`` is in bits. Every error is a ValueError that shows what was
given and an example of what is wanted.
"""

from __future__ import annotations

import re

__all__ = ["bandwidth", "bytes_text", "rank_list", "seconds", "seconds_text", "size"]

_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)"


def size(text: str) -> float:
    """Bytes.

    Example:
        >>> size("1.5KiB"), size("2M"), size("1kB")
        (1536.0, 2097152.0, 1000.0)
    """
    found = re.fullmatch(_NUMBER + r"\s*([kKMGT]?)(i?)(B?)", text.strip())
    if found:
        number, prefix, binary, unit = found.groups()
        if binary or not unit:
            prefix = prefix.upper()
        table = _BINARY if binary or not unit else _DECIMAL
        if prefix in table and not (binary and not prefix):
            return float(number) * table[prefix]
    raise ValueError(f"{text!r} is not a size: write for example 4, 64K, 1MiB or 10MB")


def seconds(text: str) -> float:
    """Seconds.

    Example:
        >>> seconds("250us")
        0.00025
    """
    found = re.fullmatch(_NUMBER + r"\s*(ns|us|µs|ms|s)", text.strip())
    if found:
        return float(found[1]) * _TIMES[found[2]]
    raise ValueError(f"{text!r} is not a time: write for example 800ns, 1us or 0.5ms")


def bandwidth(text: str) -> float:
    """Seconds per byte.

    Example:
        >>> bandwidth("10GB/s")
        1e-10
    """
    found = re.fullmatch(_NUMBER + r"\s*([kKMGT]?)(i?)(B|bit)/s", text.strip())
    if found:
        number, prefix, binary, unit = found.groups()
        scale = _BINARY.get(prefix.upper(), 0) if binary else _DECIMAL[prefix]
        per_second = float(number) * scale / (8 if unit == "bit" else 1)
        if per_second > 0 and not (binary and not prefix):
            return 1.0 / per_second
    raise ValueError(f"{text!r} is not a bandwidth above zero: write for example 10GB/s or 100Gbit/s")


def rank_list(text: str, most: int, what: str = "ranks") -> list[int]:
    """Numbers of ranks (or of ``what``), in order, each once.

    Example:
        >>> rank_list("1-3,8", 100)
        [1, 2, 3, 8]
    """
    numbers: set[int] = set()
    for item in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", item)
        first = int(found[1]) if found else 0
        last = int(found[2]) if found and found[2] else first
        if found is None or not 1 <= first <= last:
            raise ValueError(
                f"{item.strip()!r} is not a number of {what}: write for example 8 or 1-17,64,100"
            )
        if last > most:
            raise ValueError(f"{last} {what} are too many: at most {most} here")
        numbers.update(range(first, last + 1))
    return sorted(numbers)


def bytes_text(n_bytes: float) -> str:
    """``1 KiB``, ``1.5 MiB``, ``4 B``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.4g} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.4g} TiB"


def seconds_text(t: float) -> str:
    """``1.234 µs``: three digits behind the point."""
    for unit, scale in (("µs", 1e-6), ("ms", 1e-3)):
        if t < 1000 * scale:
            return f"{t / scale:.3f} {unit}"
    return f"{t:.3f} s"
