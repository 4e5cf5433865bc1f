"""Real text that is on every machine: the source of Python's standard library, as bytes.

A *step's batch* is a function of (seed, step) alone, the same on every rank; rank r takes its r-th equal
share of the rows, so that n ranks together see exactly what one process sees.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["load_text", "rows_of_step"]

MAX_BYTES = 4 << 20


def load_text(max_bytes: int = MAX_BYTES) -> Tensor:
    """The standard library's top-level modules, sorted by name, one after another: uint8, (n_bytes,)."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if len(text) < 1 << 16:
        raise FileNotFoundError(
            f"{folder} has only {len(text)} bytes of *.py: the demo needs at least 64 KiB of text"
        )
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


def rows_of_step(
    text: Tensor, step: int, seed: int, n_rows: int, n_bytes: int, rank: int = 0, size: int = 1
) -> Tensor:
    """Rank ``rank``'s share of the ``n_rows`` windows of ``n_bytes`` bytes of a step.

    Returns:
        int64, (n_rows / size, n_bytes).

    Raises:
        ValueError: ``n_rows`` is not a multiple of ``size``.
    """
    if n_rows % size:
        raise ValueError(f"a global batch of {n_rows} rows cannot be shared equally by {size} ranks")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - n_bytes + 1, (n_rows,), generator=generator)
    share = starts[rank * (n_rows // size) : (rank + 1) * (n_rows // size)]
    return torch.stack([text[start : start + n_bytes] for start in share.tolist()]).long()
