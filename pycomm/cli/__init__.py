"""The command line: ``pycomm schedule``, ``pipeline``, ``tune``, ``ps``, ``topo``, ``bench``; a file each.

Exit codes: 0 all is well, 1 something is proved wrong or has failed, 2 a bad argument. torch is imported by a
command that needs it, not by this module; a command whose file imports torch is listed in ``_LATER``.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
import typer.core

from pycomm.cli import pipeline, schedule
from pycomm.cli.ps import ps
from pycomm.cli.topo import topo
from pycomm.cli.tune import tune

__all__ = ["app", "main"]

#: Command -> the module that has a function of that name.
_LATER = {"bench": "pycomm.cli.bench"}


class _Commands(typer.core.TyperGroup):
    """A group that imports the commands of ``_LATER`` when they are called, or shown in the help."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *_LATER]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _LATER:
            return super().get_command(ctx, cmd_name)
        one = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        one.command(cmd_name)(getattr(importlib.import_module(_LATER[cmd_name]), cmd_name))
        return typer.main.get_command(one)


app = typer.Typer(
    cls=_Commands,
    name="pycomm",
    help="Collective communication for PyTorch: prove, price, tune and measure its algorithms.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(schedule.app, name="schedule")
app.add_typer(pipeline.app, name="pipeline")
app.command()(tune)
app.command()(ps)
app.command()(topo)


def _print_version(asked: bool) -> None:
    if asked:
        import pycomm

        typer.echo(f"pycomm {pycomm.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The ``pycomm`` program."""
    app()
