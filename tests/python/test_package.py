"""The package itself: its version, and what it says where its extension was not built."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pycomm


def test_an_unbuilt_extension_says_so_and_what_to_do(tmp_path: Path) -> None:
    source = Path(pycomm.__file__).parent
    shutil.copytree(source, tmp_path / "pycomm", ignore=shutil.ignore_patterns("_C.*", "__pycache__"))
    for command in (["-c", "import pycomm"], ["-c", "import pycomm._C"], ["-m", "pycomm.cli", "--help"]):
        run = subprocess.run(
            [sys.executable, "-P", *command] if sys.version_info >= (3, 11) else [sys.executable, *command],
            env={"PYTHONPATH": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert run.returncode == 1
        assert "ImportError: pycomm's C++ extension was not built" in run.stderr
        assert "pip install -e ." in run.stderr


def test_the_version_is_the_distributions() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "pycomm.cli", "--version"], capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0 and shown.stdout == f"pycomm {pycomm.__version__}\n"
