"""``pycomm bench``: nccl-tests' table with peers and the memory's limit (see ``pycomm.bench``)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pycomm import devices
from pycomm.bench.control import launched_by
from pycomm.bench.launch import launch
from pycomm.bench.options import COLLECTIVES, OPS, Options, parse_size
from pycomm.bench.plot import check_plot_possible, plot

__all__ = ["bench"]

_BUFFERS = {"ordinary": ("ordinary",), "arena": ("arena",), "both": ("ordinary", "arena"), "none": ()}
_DEFAULTS = Options()
_TYPES = {  # nccl-tests' short names, next to torch's
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def _n_gpus() -> int:
    return 0 if devices.is_emulated() else devices.count()


def bench(
    collective: Annotated[str, typer.Argument(help=f"One of {', '.join(COLLECTIVES)}.")] = "all_reduce",
    min_bytes: Annotated[str, typer.Option("-b", "--minbytes", help="First size: 4, 64K, 1M.")] = "4",
    max_bytes: Annotated[str, typer.Option("-e", "--maxbytes", help="Largest size.")] = "64M",
    factor: Annotated[int, typer.Option("-f", "--stepfactor", help="From one size to the next.")] = 4,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", help="Ranks to start (not under torchrun, mpirun); default: 2, or one for each GPU."
        ),
    ] = None,
    datatype: Annotated[
        str, typer.Option("-d", "--datatype", help="A torch dtype: float32, bfloat16…")
    ] = "float32",
    op: Annotated[str, typer.Option("-o", "--op", help=f"One of {', '.join(OPS)}.")] = "sum",
    root: Annotated[int, typer.Option("-r", "--root", help="Root rank.")] = 0,
    iters: Annotated[
        int, typer.Option("-n", "--iters", help="Timed iterations, at most.")
    ] = _DEFAULTS.n_iters,
    warmup: Annotated[int, typer.Option("-w", "--warmup_iters", help="Before them.")] = _DEFAULTS.n_warmup,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", help="gloo or mpi; on CUDA nccl or torch-symm-mem; may be repeated."),
    ] = None,
    buffer: Annotated[
        str, typer.Option("--buffer", help="ordinary, arena, both, or none (peers only).")
    ] = "both",
    algorithm: Annotated[
        str | None,
        typer.Option("--algorithm", help="For pycomm; default: its choice, on CUDA measured as well."),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda: where the tensors are.")] = "cpu",
    max_seconds: Annotated[float, typer.Option("--max-seconds", help="Bound on the measuring.")] = 60.0,
    json: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Write a picture (PNG) here.")] = None,
) -> None:
    """Times a collective on dirtied and on hot buffers, checks its results, and compares.

    Prints nccl-tests' table; for peers, measured interleaved in the same run, their columns and the ratio;
    and measured / limit, the limit being a zero-copy memory probe. Exits with 1 when pycomm's results are
    wrong or a rank failed, with 2 when an option is.

    With --device cuda a rank has a GPU, a call is timed by CUDA events over calls in a row, and nothing is
    compared with a limit.

    Example: pycomm bench all_reduce -b 4 -e 64M -f 4 --ranks 2 --peer gloo --peer mpi --plot bench.png
    """
    try:
        if buffer not in _BUFFERS:
            raise ValueError(f"buffer {buffer!r}: expected one of {', '.join(_BUFFERS)}")
        if ranks is None:
            ranks = max(2, _n_gpus()) if device == "cuda" else 2
        options = Options(
            collective=collective,
            min_bytes=parse_size(min_bytes),
            max_bytes=parse_size(max_bytes),
            factor=factor,
            ranks=ranks,
            dtype=_TYPES.get(datatype, datatype),
            op={"prod": "product", "mulsum": "premul_sum"}.get(op, op),
            root=root,
            n_iters=iters,
            n_warmup=warmup,
            peers=tuple(dict.fromkeys(peer or [])),
            buffers=_BUFFERS[buffer],
            algorithm=algorithm,
            max_seconds=max_seconds,
            device=device,
        )
        if options.root >= ranks and launched_by() is None:
            raise ValueError(f"root {root}: expected a rank below {ranks}")
        for path in (json, plot_path):
            if path is not None and not path.resolve().parent.is_dir():
                raise ValueError(f"{path}: its folder does not exist")
    except ValueError as error:
        typer.echo(f"pycomm bench: {error}", err=True)
        raise typer.Exit(2) from None
    try:
        if plot_path is not None:
            check_plot_possible()
        report = launch(options)
    except ValueError as error:
        typer.echo(f"pycomm bench: {error}", err=True)
        raise typer.Exit(2) from None
    except RuntimeError as error:
        typer.echo(f"pycomm bench: {error}", err=True)
        raise typer.Exit(1) from None
    if report is None:
        return
    if json is not None:
        json.write_text(report.to_json() + "\n")
    if plot_path is not None:
        plot(report, plot_path)
    if any(m.wrong for row in report.rows for m in row.measurements if m.library.startswith("pycomm")):
        raise typer.Exit(1)
