"""What the extension says of CUDA on any machine: it imports, and counts no device where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pycomm import _C

SOURCE = Path(__file__).parents[2]


def test_the_build_says_what_it_has() -> None:
    assert _C.cuda.build() in ("off", "on", "emulated")
    if _C.cuda.build() == "off":
        assert _C.cuda.device_count() == 0


def test_no_visible_device_is_no_error() -> None:
    """CUDA_VISIBLE_DEVICES= hides all GPUs; importing and counting then work as on a machine with none."""
    if _C.cuda.build() == "emulated":
        pytest.skip("the CPU shim has devices of its own")
    done = subprocess.run(
        [sys.executable, "-c", "import pycomm._C as c; print(c.cuda.device_count())"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr
