"""Processes of this Python that shall import the same pycomm, whatever folder they are started in."""

from __future__ import annotations

import os
from pathlib import Path


def child_environment() -> dict[str, str]:
    """The environment of a process ``python -c`` or ``-m``.

    Such a process looks for modules in the working folder first. In the source folder that is a pycomm
    without an extension, or with another one than that which is installed, so it is told not to (Python 3.11
    and newer), unless this process has its pycomm from there.

    Example:
        >>> child_environment()["PATH"] == os.environ["PATH"]
        True
    """
    from_here = Path(__file__).absolute().parents[1] == Path.cwd()
    return {**os.environ} if from_here else {**os.environ, "PYTHONSAFEPATH": "1"}
