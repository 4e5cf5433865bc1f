"""``pycomm pipeline``: show, verify, simulate and choose pipeline schedules.

    pycomm pipeline list
    pycomm pipeline show 1F1B --ranks 4 --microbatches 8
    pycomm pipeline verify --all --ranks 1-8 --microbatches 1-16
    pycomm pipeline simulate ZBVZeroBubble --ranks 4 --microbatches 8 --latency 0.1 --draw zbv.svg
    pycomm pipeline choose --ranks 4 --microbatches 16 --forward 10 --backward-input 11 --backward-weight 9
    pycomm pipeline simulate 1F1B --measured run.json --draw both.svg
    pycomm pipeline choose --measured run.json

``--measured`` takes ranks, microbatches, times and latency from a file that ``schedule.save_measured`` has
written in a run, in seconds; ``simulate`` then draws the run beside the simulation. Else times are those of
one microbatch through all that a rank holds, in any unit; ``choose`` and ``simulate`` divide them by the
stages on a rank. Every command takes ``--json``; ``show`` also ``--csv``, which torch reads as well. A
schedule may be a file of that form instead of a name. ``verify`` exits with 1 when a proof fails; a bad
argument exits with 2. Nothing here needs torch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from pycomm.cli import units
from pycomm.cli.output import bad_argument, console, print_json, refusing
from pycomm.pipeline.schedule import picture
from pycomm.pipeline.schedule.catalog import CATALOG, build
from pycomm.pipeline.schedule.measured import Measured
from pycomm.pipeline.schedule.order import Order
from pycomm.pipeline.schedule.reductions import with_reductions
from pycomm.pipeline.schedule.simulate import Costs, Timeline, simulate
from pycomm.pipeline.schedule.transfers import with_transfers
from pycomm.pipeline.schedule.verify import live_activations, verify

__all__ = ["app"]

app = typer.Typer(help="Pipeline schedules: list, show, verify, simulate, choose.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A name of `pycomm pipeline list`, or a CSV file of actions.")]
# None: not given, so that what a file says otherwise is an error and not left out.
Ranks = Annotated[int | None, typer.Option("--ranks", "-p", help="Ranks of the pipeline.", show_default="4")]
Microbatches = Annotated[
    int | None, typer.Option("--microbatches", "-m", help="Microbatches of a step.", show_default="8")
]
Stages = Annotated[
    int | None,
    typer.Option("--stages-per-rank", "-v", help="Stages on a rank; default: what it needs, or 2."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Forward = Annotated[
    float | None, typer.Option(help="Time of a microbatch's forward on a rank.", show_default="1.0")
]
Input = Annotated[
    float | None, typer.Option(help="… of its backward, the gradient of the input.", show_default="1.0")
]
Weight = Annotated[
    float | None, typer.Option(help="… of its backward, the gradient of the weights.", show_default="1.0")
]
Latency = Annotated[
    float | None,
    typer.Option(help="From the end of an action to its result on another rank.", show_default="0.0"),
]
Run = Annotated[
    Path | None,
    typer.Option("--measured", help="A run's file (schedule.save_measured): its ranks, microbatches, times."),
]


def _order(name: str, ranks: int | None, microbatches: int | None, stages: int | None) -> Order:
    if Path(name).suffix != ".csv":
        return build(name, 4 if ranks is None else ranks, 8 if microbatches is None else microbatches, stages)
    try:
        order = Order.from_csv(_text(Path(name)), Path(name).stem)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    _must_be(name, "--stages-per-rank", stages, order.n_stages / order.n_ranks)
    _must_be(name, "--ranks", ranks, order.n_ranks)
    _must_be(name, "--microbatches", microbatches, order.n_microbatches)
    return order


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        bad_argument(f"cannot read {path}: {error.strerror}")
    except UnicodeDecodeError as error:
        bad_argument(f"cannot read {path}: it is not text ({error})")


def _must_be(path: str | Path, option: str, given: int | None, has: float) -> None:
    if given is not None and given != has:
        raise ValueError(f"{option} {given} does not go with {path}, which has {has:g}: leave it out")


def _run(
    order: Order,
    forward: float | None,
    backward_input: float | None,
    backward_weight: float | None,
    latency: float | None,
    reduce: float = 0.0,
) -> Timeline:
    forward, backward_input, backward_weight = (
        1.0 if time is None else time for time in (forward, backward_input, backward_weight)
    )
    latency = 0.0 if latency is None else latency
    for what, value in (
        ("forward", forward),
        ("backward-input", backward_input),
        ("backward-weight", backward_weight),
    ):
        if not 0 < value < math.inf:
            raise ValueError(f"--{what} must be a time above 0, got {value:g}")
    if not 0 <= latency < math.inf:
        raise ValueError(f"--latency must be a time, got {latency:g}")
    if not 0 <= reduce < math.inf:
        raise ValueError(f"--reduce must be a time, got {reduce:g}")
    v = order.n_stages / order.n_ranks
    if reduce > 0:
        order = with_reductions(order)
    return simulate(order, Costs(forward / v, backward_input / v, backward_weight / v, latency, reduce / v))


def _measured(
    path: Path | None, ranks: int | None, microbatches: int | None, times: dict[str, float | None]
) -> Measured | None:
    """The file of --measured; what is given beside it must not say otherwise."""
    if path is None:
        return None
    try:
        run = Measured.from_json(_text(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    order = run.timeline.order
    _must_be(path, "--ranks", ranks, order.n_ranks)
    _must_be(path, "--microbatches", microbatches, order.n_microbatches)
    if given := [option for option, time in times.items() if time is not None]:
        raise ValueError(f"{', '.join(given)} and --measured: give the times or the file, not both")
    return run


def _times(
    forward: float | None, backward_input: float | None, backward_weight: float | None, latency: float | None
) -> dict[str, float | None]:
    return {
        "--forward": forward,
        "--backward-input": backward_input,
        "--backward-weight": backward_weight,
        "--latency": latency,
    }


def _figures(timeline: Timeline) -> dict[str, Any]:
    order = timeline.order
    v = order.n_stages / order.n_ranks
    return {
        "schedule": order.name,
        "ranks": order.n_ranks,
        "stages_per_rank": order.n_stages // order.n_ranks,
        "microbatches": order.n_microbatches,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        # In microbatches' worth of all that a rank holds.
        "peak_activations": [
            max(live_activations(order, rank), default=0) / v for rank in range(order.n_ranks)
        ],
    }


@app.command("list")
def list_(as_json: Json = False) -> None:
    """All schedules by name."""
    if as_json:
        print_json([{"name": e.name, "summary": e.summary} for e in CATALOG.values()])
        return
    table = Table("name", "stages per rank", "summary")
    for entry in CATALOG.values():
        table.add_row(entry.name, str(entry.stages_per_rank or "any"), entry.summary)
    console().print(table)


@app.command()
def show(
    name: Name,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: Stages = None,
    transfers: Annotated[bool, typer.Option("--transfers", help="With sends and receives.")] = False,
    replicas: Annotated[
        bool, typer.Option("--replicas", help="With reductions: each stage has data-parallel replicas.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the actions as CSV.")] = False,
    as_json: Json = False,
) -> None:
    """Every rank's actions in time: F, I and W take one column, B two (B5 -), a dot is idle."""
    with refusing():
        order = _order(name, ranks, microbatches, stages_per_rank)
        if replicas:
            order = with_reductions(order)
        rows = with_transfers(order) if transfers else [list(actions) for actions in order.actions]
        if as_json:
            print_json([[str(action) for action in actions] for actions in rows])
        elif as_csv:
            typer.echo("\n".join(",".join(map(str, actions)) for actions in rows))
        elif transfers:
            for rank, actions in enumerate(rows):
                typer.echo(f"rank {rank}: {' '.join(map(str, actions))}")
        else:
            typer.echo(picture.text(simulate(order, Costs(reduce=1.0))))


@app.command("verify")
def verify_(
    name: Annotated[str | None, typer.Argument(help="A schedule, or a CSV file of actions.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All schedules.")] = False,
    ranks: Annotated[str, typer.Option("--ranks", "-p", help="Such as 4 or 1-8.")] = "1-8",
    microbatches: Annotated[str, typer.Option("--microbatches", "-m", help="Such as 8 or 1-16.")] = "1-16",
    stages_per_rank: Annotated[
        str, typer.Option("--stages-per-rank", "-v", help="Where any may be.")
    ] = "1-4",
    as_json: Json = False,
) -> None:
    """Proves: every computation once, no deadlock, no more activations than promised."""
    if (name is None) == (not every):
        bad_argument("give a schedule's name, or --all")
    with refusing():
        asked = {"ranks": ranks, "microbatches": microbatches, "stages": stages_per_rank}
        sizes = [units.rank_list(text, 64, what) for what, text in asked.items()]
        names = list(CATALOG) if name is None else [name]
        results = [_prove(one, *sizes) for one in names]
    if as_json:
        print_json({"ok": all(r["violation"] is None for r in results), "results": results})
    else:
        for r in results:
            what = r["violation"] or f"proved for {r['proofs']} sizes"
            typer.echo(f"{r['schedule']}: {what}")
    if any(r["violation"] for r in results):
        raise typer.Exit(1)


def _prove(name: str, ranks: list[int], microbatches: list[int], stages: list[int]) -> dict[str, Any]:
    proofs, violation = 0, None
    try:
        if Path(name).suffix == ".csv":
            verify(_order(name, None, None, None))
            proofs = 1
        else:
            build(name, 1, 1)  # an unknown name is a bad argument
            entry = next(e for e in CATALOG.values() if e.name.lower() == name.lower())
            for p in ranks:
                for v in [entry.stages_per_rank] if entry.stages_per_rank else stages:
                    for m in microbatches:
                        violation = f"p = {p}, v = {v}, m = {m}: "
                        verify(build(name, p, m, v), max(entry.peak(p, v, m, rank) for rank in range(p)))
                        proofs += 1
        violation = None
    except ValueError as error:
        if proofs == 0 and violation is None and Path(name).suffix != ".csv":
            raise
        violation = f"{violation or ''}{str(error).removeprefix(f'{name}: ')}"
    return {"schedule": name, "proofs": proofs, "violation": violation}


@app.command("simulate")
def simulate_(
    name: Name,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: Stages = None,
    forward: Forward = None,
    backward_input: Input = None,
    backward_weight: Weight = None,
    latency: Latency = None,
    reduce: Annotated[
        float | None,
        typer.Option(help="Time to average a rank's gradients over replicas.", show_default="0.0"),
    ] = None,
    measured: Run = None,
    draw: Annotated[Path | None, typer.Option(help="Write the timeline: PNG, SVG, PDF.")] = None,
    as_json: Json = False,
) -> None:
    """How long a step takes, how much of it is idle, and how many activations each rank keeps."""
    with refusing():
        times = _times(forward, backward_input, backward_weight, latency) | {"--reduce": reduce}
        run = _measured(measured, ranks, microbatches, times)
        if run is not None:
            ran = run.timeline.order
            if Path(name).suffix != ".csv":
                ranks, microbatches = ran.n_ranks, ran.n_microbatches
            if stages_per_rank is None and ran.name.lower() == name.lower():
                stages_per_rank = ran.n_stages // ran.n_ranks
        order = _order(name, ranks, microbatches, stages_per_rank)
        verify(order)
        if run is None:
            timeline = _run(order, forward, backward_input, backward_weight, latency, reduce or 0.0)
        else:
            timeline = simulate(order, run.costs_for(order))
    figures = _figures(timeline)
    pictures = {f"{order.name}, simulated": timeline}
    if run is not None:
        pictures[f"{run.timeline.order.name}, measured"] = run.timeline
        figures["measured"] = {"makespan": run.timeline.makespan, "bubble": run.timeline.bubble}
    if draw is not None:
        try:
            picture.draw(pictures if run is not None else {order.name: timeline}, draw, "s" if run else "")
        except ModuleNotFoundError:
            bad_argument("--draw needs matplotlib: pip install 'pycomm-collectives[plot]'")
        except (OSError, ValueError) as error:
            bad_argument(f"cannot draw {draw}: {error}")
    if as_json:
        spans = [[[str(s.action), s.start, s.end] for s in row] for row in timeline.spans]
        reductions = [[[str(s.action), s.start, s.end] for s in row] for row in timeline.reductions]
        print_json({**figures, "timeline": spans, **({"reductions": reductions} if reductions else {})})
        return
    if run is None:
        typer.echo(picture.text(timeline))
    peaks = ", ".join(f"{peak:g}" for peak in figures["peak_activations"])
    typer.echo(f"step {timeline.makespan:.6g}, idle {timeline.bubble:.1%}, activations of each rank: {peaks}")
    if run is not None:
        typer.echo(
            f"measured, {run.timeline.order.name}: step {run.timeline.makespan:.4g}, idle "
            f"{run.timeline.bubble:.1%}, latency {run.costs.latency:.2g}"
        )


@app.command()
def choose(
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    max_stages_per_rank: Annotated[int, typer.Option(help="Try so many where any may be.")] = 4,
    max_activations: Annotated[
        float | None, typer.Option(help="At most so many microbatches' activations on a rank.")
    ] = None,
    forward: Forward = None,
    backward_input: Input = None,
    backward_weight: Weight = None,
    latency: Latency = None,
    measured: Run = None,
    as_json: Json = False,
) -> None:
    """All schedules on one model, the quickest that fits first."""
    found = []
    with refusing():
        if max_activations is not None and not max_activations > 0:
            raise ValueError(f"--max-activations must be above 0, got {max_activations:g}")
        if max_stages_per_rank < 1:
            raise ValueError(f"--max-stages-per-rank must be at least 1, got {max_stages_per_rank}")
        times = _times(forward, backward_input, backward_weight, latency)
        run = _measured(measured, ranks, microbatches, times)
        if run is not None:
            ranks, microbatches = run.timeline.order.n_ranks, run.timeline.order.n_microbatches
        for entry in CATALOG.values():
            for v in [entry.stages_per_rank] if entry.stages_per_rank else range(2, max_stages_per_rank + 1):
                order = _order(entry.name, ranks, microbatches, v)
                if run is None:
                    timeline = _run(order, forward, backward_input, backward_weight, latency)
                else:
                    timeline = simulate(order, run.costs_for(order))
                line = _figures(timeline)
                peak = max(line["peak_activations"])
                line["fits"] = max_activations is None or peak <= max_activations
                found.append(line)
    found.sort(key=lambda line: (not line["fits"], line["makespan"], max(line["peak_activations"])))
    if as_json:
        print_json(found)
        return
    table = Table("schedule", "stages per rank", "step", "idle", "activations", "fits")
    for line in found:
        table.add_row(
            line["schedule"],
            str(line["stages_per_rank"]),
            f"{line['makespan']:.4g}",
            f"{line['bubble']:.1%}",
            f"{max(line['peak_activations']):g}",
            "yes" if line["fits"] else "no",
        )
    console().print(table)
