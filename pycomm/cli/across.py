"""``pycomm schedule verify … --hosts``: deterministic reductions over hosts, proved for one placement.

    pycomm schedule verify all_reduce deterministic --hosts 0,1,0,1 --bytes 64MiB

What is proved (csrc/schedule/exact.h): with ranks placed so, every rank ends with exactly the canonical tree
T, for every root and both bindings. What is printed: how many maximal subtrees of T each host holds, and the
bytes that leave it for a vector of that size. They are those of the elements that travel: fp16, bf16 and fp8
travel as float32 in deterministic mode, so give the size in float32 for them.
"""

from __future__ import annotations

from typing import Any

import typer
from rich.table import Table

from pycomm import _C
from pycomm.cli import units
from pycomm.cli.output import bad_argument, console, print_json, refusing

__all__ = ["bytes_leaving", "verify"]

_core = _C.schedule
_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")


def host_list(text: str) -> list[int]:
    """The host of each rank.

    Raises:
        ValueError: The text is no list of at least two numbers; the error shows what is wanted.

    Example:
        >>> host_list("0,1,0,1")
        [0, 1, 0, 1]
    """
    items = [item.strip() for item in text.split(",")]
    if len(items) < 2 or not all(item.isdecimal() and len(item) < 7 for item in items):
        raise ValueError(f"--hosts is {text!r}: write the host's number for each rank, for example 0,1,0,1")
    return [int(item) for item in items]


def bytes_leaving(collective: str, hosts: list[int], n_bytes: float, root: int = 0) -> list[float]:
    """The bytes that leave each host in deterministic mode, hosts in the order of their lowest rank.

    Args:
        collective: "all_reduce", "reduce_scatter" (equal counts) or "reduce".
        hosts: The host of each rank; at least two hosts.
        n_bytes: Of the whole vector, as it travels. Cut evenly; small vectors are cut at cache lines.
        root: For reduce.

    Raises:
        ValueError: No placement on several hosts, or the collective does not reduce.

    Example:
        >>> bytes_leaving("all_reduce", [0, 1, 0, 1], 1000.0)  # two subtrees each: (2 + 1)/2 of the vector
        [1500.0, 1500.0]
    """
    proof = _core.verify_across(collective, hosts, root)
    return [n_bytes * parts / proof.n_parts for parts in proof.n_parts_leaving]


def _prove(collective: str, hosts: list[int], n_bytes: float) -> dict[str, Any]:
    roots = range(len(hosts)) if collective == "reduce" else [0]
    proofs = [(r, p, _core.verify_across(collective, hosts, r, p)) for r in roots for p in (False, True)]
    root, in_place, first = next((x for x in proofs if not x[2].ok), proofs[0])
    return {
        "collective": collective,
        "between": first.between,
        "proofs": sum(proof.ok for _, _, proof in proofs),
        "rounds": first.rounds,
        "subtrees": first.n_subtrees,
        "bytes_leaving": [n_bytes * parts / first.n_parts for parts in first.n_parts_leaving],
        "violation": None if first.ok else f"root {root}, in place {in_place}: {first.violation}",
    }


def verify(
    collective: str | None, algorithm: str | None, every: bool, hosts: str, n_bytes: str, as_json: bool
) -> None:
    """The command; exits with 1 at a violation and with 2 for a bad argument."""
    if every == (collective is not None):
        bad_argument("verify: give a collective (and an algorithm), or --all for every one")
    if algorithm not in (None, "deterministic"):
        bad_argument(f"verify --hosts proves `deterministic`, not {algorithm!r}: leave the algorithm out")
    with refusing():
        if collective is not None and collective not in _REDUCTIONS:
            raise ValueError(f"{collective!r} does not reduce; expected one of: {', '.join(_REDUCTIONS)}")
        placement, size = host_list(hosts), units.size(n_bytes)
        names = _REDUCTIONS if collective is None else [collective]
        results = [_prove(name, placement, size) for name in names]
    broken = [r for r in results if r["violation"] is not None]
    if as_json:
        print_json({"ok": not broken, "hosts": placement, "bytes": size, "results": results})
    else:
        _print(results, hosts, size)
    if broken:
        raise typer.Exit(1)


def _print(results: list[dict[str, Any]], hosts: str, size: float) -> None:
    out = console()
    for r in results:
        text = "proved" if r["violation"] is None else "violated"
        root = ", root 0" if r["collective"] == "reduce" else ""
        out.print(
            f"{r['collective']}, deterministic, ranks on hosts {hosts}: {text} ({r['proofs']} proofs, "
            f"{r['rounds']} rounds; between hosts: {r['between']})",
            highlight=False,
        )
        table = Table("host", "subtrees", f"bytes that leave it, of {units.bytes_text(size)}{root}")
        for host, (n_subtrees, leaving) in enumerate(zip(r["subtrees"], r["bytes_leaving"], strict=True)):
            table.add_row(str(host), str(n_subtrees), f"{leaving:.0f}")
        out.print(table)
        if r["violation"] is not None:
            out.print(r["violation"], markup=False, highlight=False)
