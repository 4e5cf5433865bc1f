"""Every example in a docstring of pycomm runs, alone on one rank, and prints what it says."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import io
import os
import pkgutil
import re
from pathlib import Path

import pytest

import pycomm
from ranks import run_ranks

#: In what an example prints, "..." is anything, and how wide a space is does not matter.
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules() -> list[str]:
    """Every module of pycomm whose source has an example."""
    found = ["pycomm", *(m.name for m in pkgutil.walk_packages(pycomm.__path__, "pycomm."))]
    named = []
    for name in found:
        spec = importlib.util.find_spec(name)
        source = spec.origin if spec is not None else None
        if source is not None and source.endswith(".py") and ">>> " in Path(source).read_text():
            named.append(name)
    return named


def examples(rank: int, size: int, name: str, folder: str) -> tuple[int, str]:
    """How many examples were tried, and what failed."""
    os.chdir(folder)
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = finder.find(module)
    if name == "pycomm.communicator":  # its all_reduce is a method of a class in C, which finders skip
        tests += finder.find(pycomm.Communicator.all_reduce, "pycomm.Communicator.all_reduce", module, {}, {})
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for test in tests:
            runner.run(test, clear_globs=True)
    return runner.tries, said.getvalue()


@pytest.mark.parametrize("name", modules())
def test_examples(name: str, tmp_path: Path) -> None:
    [(tried, failures)] = run_ranks(1, examples, name, str(tmp_path), env={"PYCOMM_TUNE": "off"})
    assert not failures, failures
    assert tried == count(name)  # none was overlooked


def count(name: str) -> int:
    """How many examples a module's text has, without those that ask to be skipped."""
    text = Path(str(importlib.import_module(name).__file__)).read_text()
    if name == "pycomm.communicator":
        text += "\n" + str(pycomm.Communicator.all_reduce.__doc__)
    return len(re.findall(r"^ *>>> (?!.*doctest: \+SKIP)", text, re.MULTILINE))
