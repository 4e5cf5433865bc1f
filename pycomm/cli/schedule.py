"""``pycomm schedule``: list, show, verify and price the algorithms of ``csrc/schedule``.

    pycomm schedule list
    pycomm schedule show all_reduce ring --ranks 4 --rank 0
    pycomm schedule verify --all --ranks 1-17,64,100
    pycomm schedule verify all_reduce deterministic --hosts 0,1,0,1 --bytes 64MiB
    pycomm schedule cost all_reduce --ranks 8,64,1024 --bytes 1KiB,1MiB,1GiB --alpha 1us --beta 10GB/s

Every command takes ``--json``. ``verify`` exits with 1 when a proof fails and names the first step that
breaks a rule; a bad argument exits with 2. Nothing here needs torch.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from pycomm import _C
from pycomm.cli import across, units
from pycomm.cli.output import bad_argument, console, print_json, refusing

__all__ = ["app"]

app = typer.Typer(help="The collective algorithms: list, show, verify, cost.", no_args_is_help=True)

_core = _C.schedule
_ROOTED = ("broadcast", "reduce", "gather", "scatter")

Collective = Annotated[str, typer.Argument(help="all_reduce, reduce_scatter, all_gather, broadcast, …")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NChunks = Annotated[int, typer.Option("--n-chunks", help="Pipeline depth; 0: the algorithm's default.")]


def _chosen(collective: str | None, algorithm: str | None) -> list[_C.schedule.Algorithm]:
    """The catalog's lines of that name; None stands for all."""
    every = _core.catalog()
    if collective is None:
        return every
    of_kind = [a for a in every if a.collective == collective]
    if not of_kind:
        known = ", ".join(dict.fromkeys(a.collective for a in every))
        raise ValueError(f"there is no collective {collective!r}; expected one of: {known}")
    found = [a for a in of_kind if algorithm is None or a.name == algorithm]
    if not found:
        known = ", ".join(a.name for a in of_kind)
        raise ValueError(f"{collective} has no algorithm {algorithm!r}; expected one of: {known}")
    return found


def _yes(value: bool) -> str:
    return "yes" if value else "no"


@app.command("list")
def list_(as_json: Json = False) -> None:
    """All algorithms, with what they promise."""
    lines = [
        {
            "collective": a.collective,
            "algorithm": a.name,
            "deterministic": a.deterministic,
            "in_place": a.in_place,
            "n_chunks": a.default_n_chunks,
            "summary": a.summary,
        }
        for a in _core.catalog()
    ]
    if as_json:
        print_json(lines)
        return
    table = Table("collective", "algorithm", "deterministic", "in place", "n_chunks", "summary")
    for line in lines:
        table.add_row(
            str(line["collective"]),
            str(line["algorithm"]),
            _yes(bool(line["deterministic"])),
            _yes(bool(line["in_place"])),
            str(line["n_chunks"]),
            str(line["summary"]),
        )
    console().print(table)


def _schedule_json(s: _C.schedule.Schedule) -> dict[str, Any]:
    names = ("op", "peer", "round", "n_chunks", "src", "dst", "src_left")
    return {
        "rank": s.rank,
        "n_ranks": s.n_ranks,
        "root": s.root,
        "n_parts": s.n_parts,
        "n_in": s.n_in,
        "n_out": s.n_out,
        "n_scratch": s.n_scratch,
        "part": s.part,
        "steps": [dict(zip(names, step, strict=True)) for step in s.steps],
    }


@app.command()
def show(
    collective: Collective,
    algorithm: Annotated[str, typer.Argument(help="A name that `pycomm schedule list` shows.")],
    ranks: Annotated[int, typer.Option("--ranks", help="Number of ranks.")] = 4,
    rank: Annotated[int | None, typer.Option("--rank", help="This rank only.")] = None,
    root: Annotated[int, typer.Option("--root", help="Root rank, where there is one.")] = 0,
    n_chunks: NChunks = 0,
    as_json: Json = False,
) -> None:
    """What each rank does, round by round."""
    with refusing():
        _chosen(collective, algorithm)
        wanted = range(ranks) if rank is None else [rank]
        if ranks < 1:
            raise ValueError(f"--ranks is {ranks}, expected 1 or more")
        schedules = [_core.build(collective, algorithm, r, ranks, root, n_chunks) for r in wanted]
    if as_json:
        print_json([_schedule_json(s) for s in schedules])
        return
    out = console()
    for s in schedules:
        table = Table("round", "op", "step", title=f"{collective}/{algorithm}, rank {s.rank} of {ranks}")
        table.title_justify = "left"
        last = None
        for step, text in zip(s.steps, _core.step_texts(s), strict=True):
            if last is not None and step[2] != last:
                table.add_section()
            table.add_row("" if step[2] == last else str(step[2]), step[0], text.replace("[", r"\["))
            last = step[2]
        out.print(table)
        out.print(
            f"{s.n_parts} parts; chunks: {s.n_in} input, {s.n_out} output, {s.n_scratch} scratch", style="dim"
        )


def _cases(a: _C.schedule.Algorithm, n: int) -> list[tuple[int, int, bool]]:
    """(root, n_chunks, in_place) that are proved for n ranks: every root up to 17 ranks, some above."""
    roots = [0]
    if a.collective in _ROOTED:
        roots = list(range(n)) if n <= 17 else [0, n // 2, n - 1]
    return [
        (root, chunks, in_place)
        for root in roots
        for chunks in (0, 3)
        for in_place in ((False, True) if a.in_place else (False,))
    ]


def _verify_one(a: _C.schedule.Algorithm, n: int) -> tuple[int, dict[str, Any] | None]:
    """Proofs that hold for n ranks, and the first that does not."""
    held = 0
    for root, chunks, in_place in _cases(a, n):
        proof = _core.verify(a.collective, a.name, n, root, chunks, in_place)
        if not proof.ok:
            return held, {
                "ranks": n,
                "root": root,
                "n_chunks": chunks,
                "in_place": in_place,
                "violation": proof.violation,
            }
        held += 1
    return held, None


@app.command()
def verify(
    collective: Annotated[str | None, typer.Argument(help="Only this collective.")] = None,
    algorithm: Annotated[str | None, typer.Argument(help="Only this algorithm of it.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All algorithms of all collectives.")] = False,
    ranks: Annotated[str, typer.Option("--ranks", help="Numbers of ranks.")] = "1-17,64,100",
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", help="The host of each rank: prove `deterministic` for ranks placed so."),
    ] = None,
    n_bytes: Annotated[
        str, typer.Option("--bytes", help="With --hosts: size of the whole vector.")
    ] = "64MiB",
    as_json: Json = False,
) -> None:
    """Proves algorithms for all ranks, roots and bindings; exits with 1 at a violation.

    With --hosts it proves what deterministic=True does for this placement of ranks on hosts, and prints the
    bytes that leave each host.
    """
    if hosts is not None:
        across.verify(collective, algorithm, every, hosts, n_bytes, as_json)
        return
    if every == (collective is not None):
        bad_argument("verify: give a collective (and an algorithm), or --all for every one")
    with refusing():
        numbers = units.rank_list(ranks, _core.MAX_VERIFY_RANKS)
        chosen = _chosen(collective, algorithm)
        results = []
        for a in chosen:
            done, failure = 0, None
            for n in numbers:
                held, failure = _verify_one(a, n)
                done += held
                if failure is not None:
                    break
            results.append(
                {"collective": a.collective, "algorithm": a.name, "proofs": done, "violation": failure}
            )
    broken = [r for r in results if r["violation"] is not None]
    if as_json:
        print_json({"ok": not broken, "ranks": numbers, "results": results})
    else:
        _print_proofs(results, ranks)
    if broken:
        raise typer.Exit(1)


def _print_proofs(results: list[dict[str, Any]], ranks: str) -> None:
    table = Table("collective", "algorithm", "proofs", "result", title=f"ranks {ranks}")
    table.title_justify = "left"
    for r in results:
        bad = r["violation"]
        text = "[green]proved[/]" if bad is None else f"[red]violated with {bad['ranks']} ranks[/]"
        table.add_row(r["collective"], r["algorithm"], str(r["proofs"]), text)
    out = console()
    out.print(table)
    for r in results:
        bad = r["violation"]
        if bad is None:
            continue
        place = ", in place" if bad["in_place"] else ""
        out.print(
            f"{r['collective']}/{r['algorithm']} with {bad['ranks']} ranks, root {bad['root']}, n_chunks "
            f"{bad['n_chunks']}{place}: {bad['violation']}",
            markup=False,
            highlight=False,
        )


@app.command()
def cost(
    collective: Collective,
    algorithm: Annotated[str | None, typer.Argument(help="Only this algorithm.")] = None,
    ranks: Annotated[str, typer.Option("--ranks", help="Numbers of ranks, up to 100000.")] = "8,64,1024",
    sizes: Annotated[str, typer.Option("--bytes", help="Sizes of the whole vector.")] = "1KiB,1MiB,1GiB",
    alpha: Annotated[str, typer.Option("--alpha", help="Latency of a message.")] = "1us",
    beta: Annotated[str, typer.Option("--beta", help="Bandwidth of a link.")] = "10GB/s",
    gamma: Annotated[str | None, typer.Option("--gamma", help="Reduction speed; default: no cost.")] = None,
    ranks_per_node: Annotated[int, typer.Option("--ranks-per-node", help="0: all on one node.")] = 0,
    alpha_between: Annotated[
        str | None, typer.Option("--alpha-between", help="Between nodes; default: --alpha.")
    ] = None,
    beta_between: Annotated[
        str | None, typer.Option("--beta-between", help="Between nodes; default: --beta.")
    ] = None,
    slice_: Annotated[str | None, typer.Option("--slice", help="Cut messages into such slices.")] = None,
    n_chunks: NChunks = 0,
    as_json: Json = False,
) -> None:
    """Predicted times by the alpha-beta-gamma model (csrc/schedule/cost.h)."""
    with refusing():
        numbers = units.rank_list(ranks, _core.MAX_COST_RANKS)
        n_bytes = [units.size(item) for item in sizes.split(",")]
        model = {
            "alpha": units.seconds(alpha),
            "beta": units.bandwidth(beta),
            "gamma": 0.0 if gamma is None else units.bandwidth(gamma),
            "alpha_between": units.seconds(alpha_between or alpha),
            "beta_between": units.bandwidth(beta_between or beta),
            "slice_bytes": 0.0 if slice_ is None else units.size(slice_),
        }
        if slice_ is not None and model["slice_bytes"] == 0:
            raise ValueError("--slice must be larger than 0")
        chosen = _chosen(collective, algorithm)
        rows = [
            {
                "ranks": n,
                "bytes": b,
                "algorithm": a.name,
                "seconds": c.seconds,
                "method": c.method,
                "rounds": c.rounds,
                "max_bytes_sent": c.max_bytes_sent,
            }
            for n in numbers
            for b in n_bytes
            for a in chosen
            for c in [
                _core.cost(
                    collective,
                    a.name,
                    n,
                    b,
                    alpha=model["alpha"],
                    beta=model["beta"],
                    gamma=model["gamma"],
                    ranks_per_node=ranks_per_node,
                    alpha_between=model["alpha_between"],
                    beta_between=model["beta_between"],
                    slice_bytes=model["slice_bytes"],
                    n_chunks=n_chunks,
                )
            ]
        ]
    if as_json:
        print_json({"collective": collective, "ranks_per_node": ranks_per_node, "model": model, "rows": rows})
        return
    _print_costs(collective, [a.name for a in chosen], numbers, n_bytes, rows)


def _print_costs(
    collective: str, names: list[str], numbers: list[int], sizes: list[float], rows: list[dict[str, Any]]
) -> None:
    out = console()
    by_key = {(r["ranks"], r["bytes"], r["algorithm"]): r for r in rows}
    table = Table("ranks", "bytes", title=f"{collective}: predicted time, the least in bold")
    table.title_justify = "left"
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for n in numbers:
        for b in sizes:
            times = [by_key[n, b, name]["seconds"] for name in names]
            cells = [units.seconds_text(t) for t in times]
            least = times.index(min(times))
            cells[least] = f"[bold]{cells[least]}[/]"
            marks = ["~" if by_key[n, b, name]["method"] == "streamed" else "" for name in names]
            table.add_row(str(n), units.bytes_text(b), *(m + c for m, c in zip(marks, cells, strict=True)))
        table.add_section()
    out.print(table)
    if any(r["method"] == "streamed" for r in rows):
        out.print("~ streamed: rounds of some ranks, not every message (csrc/schedule/cost.h)", style="dim")
