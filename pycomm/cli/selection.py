"""What ``pycomm.tuning_cuda`` has kept for CUDA tensors, as ``pycomm tune`` and ``pycomm topo`` show it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from pycomm import cache_files
from pycomm.cli import units

__all__ = ["kept", "show", "up_to"]

_FACTS = ("gpu", "driver", "nccl", "ranks", "hosts", "file")


def kept(ranks: int | None = None) -> list[dict[str, Any]]:
    """The tables of this machine's cache, the newest first; of ``ranks`` ranks where that is given.

    Each has gpu, driver, nccl, ranks, hosts, file, and table: collective -> [{"max_bytes", "algorithm"}, …].
    """
    found = []
    for content in cache_files.cuda_tables():
        try:
            told = {key: content[key] for key in _FACTS}
            told["table"] = {
                name: [{"max_bytes": int(max_bytes), "algorithm": str(way)} for max_bytes, way in rows]
                for name, rows in content["selection"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            cache_files.ignored(content["file"], error)
            continue
        if ranks is None or told["ranks"] == ranks:
            found.append(told)
    return found


def up_to(max_bytes: int) -> str:
    """The largest size of a row, for a person."""
    return "any size" if max_bytes >= 2**64 - 1 else units.bytes_text(max_bytes)


def show(told: dict[str, Any], out: Console) -> None:
    """Prints one of ``kept()``."""
    hosts = "" if told["hosts"] == 1 else f" on {told['hosts']} hosts"
    title = (
        f"CUDA tensors, {told['ranks']} ranks{hosts}: "
        f"{told['gpu']}, driver {told['driver']}, NCCL {told['nccl']}"
    )
    table = Table("collective", "up to", "algorithm")
    for name, rows in told["table"].items():
        for i, row in enumerate(rows):
            table.add_row(name if i == 0 else "", up_to(row["max_bytes"]), row["algorithm"])
        table.add_section()
    out.print(title, markup=False, highlight=False, soft_wrap=True)  # wider than the table
    out.print(table)
    out.print(f"kept in {told['file']}", markup=False, highlight=False, soft_wrap=True)
