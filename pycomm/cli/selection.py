"""Which algorithm serves which size of CUDA tensors, as ``pycomm tune`` and ``pycomm topo`` show it.

What ``pycomm.tuning_cuda`` has kept, and the built-in choice, which serves where nothing was measured.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from pycomm import _C, cache_files
from pycomm.cli import units

__all__ = ["built_in", "kept", "show", "show_built_in", "up_to"]

_FACTS = ("gpu", "driver", "nccl", "ranks", "hosts", "file")


def kept(ranks: int | None = None) -> list[dict[str, Any]]:
    """The tables of this machine's cache, the newest first; of ``ranks`` ranks where that is given.

    Each has gpu, driver, nccl, ranks, hosts, file, and table: collective -> [{"max_bytes", "algorithm"}, …].
    """
    found = []
    for content in cache_files.cuda_tables():
        try:
            told = {key: content[key] for key in _FACTS}
            told["table"] = _table(content["selection"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            cache_files.ignored(content["file"], error)
            continue
        if ranks is None or told["ranks"] == ranks:
            found.append(told)
    return found


def built_in() -> dict[str, list[dict[str, Any]]]:
    """The table of a communicator for which none was kept; empty where the build has no CUDA."""
    return _table(_C.cuda.built_in_selection())


def _table(selection: Any) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [{"max_bytes": int(max_bytes), "algorithm": str(way)} for max_bytes, way in rows]
        for name, rows in selection.items()
    }


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
    _print(title, told["table"], out)
    out.print(f"kept in {told['file']}", markup=False, highlight=False, soft_wrap=True)


def show_built_in(out: Console) -> None:
    """Prints ``built_in()``, said to be that."""
    title = (
        "CUDA tensors: nothing was measured on this machine, so calls take the built-in choice, which is a "
        "guess (pycomm tune --device cuda measures)"
    )
    _print(title, built_in(), out)


def _print(title: str, rows_of: dict[str, list[dict[str, Any]]], out: Console) -> None:
    table = Table("collective", "up to", "algorithm")
    for name, rows in rows_of.items():
        for i, row in enumerate(rows):
            table.add_row(name if i == 0 else "", up_to(row["max_bytes"]), row["algorithm"])
        table.add_section()
    out.print(title, markup=False, highlight=False, soft_wrap=True)  # wider than the table
    out.print(table)
