"""How the commands speak: tables for people, JSON for programs, one line for an error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console

__all__ = ["bad_argument", "console", "print_json", "refusing"]


def console() -> Console:
    """Standard output; a pipe or file gets lines wide enough for every table."""
    return Console() if sys.stdout.isatty() else Console(width=160)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(value, indent=1))


def bad_argument(message: str) -> NoReturn:
    """Says what is wrong on standard error and exits with 2."""
    typer.echo(f"pycomm: {message}", err=True)
    raise typer.Exit(2)


@contextmanager
def refusing() -> Iterator[None]:
    """A ValueError inside (ScheduleError is one) is a bad argument."""
    try:
        yield
    except ValueError as error:
        bad_argument(str(error))
