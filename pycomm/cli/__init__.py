"""The command line: ``pycomm schedule``, ``pycomm tune``. Each command is one file here and one line below.

Exit codes: 0 all is well, 1 something is proved wrong or has failed, 2 a bad argument. torch is imported by a
command that needs it, not by this module.
"""

from __future__ import annotations

import typer

from pycomm.cli import schedule
from pycomm.cli.tune import tune

__all__ = ["app", "main"]

app = typer.Typer(
    name="pycomm",
    help="Collective communication for PyTorch: prove, price, tune and measure its algorithms.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(schedule.app, name="schedule")
app.command()(tune)


def main() -> None:
    """The ``pycomm`` program."""
    app()
