"""Starts a script of this folder as every rank of one job on this machine, and what such scripts measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_as_ranks(n_ranks: int, folder: str, script: str, *arguments: str, **environment: str) -> None:
    """Runs ``script arguments`` as ranks that meet in ``folder``, with one thread each, and waits for them.

    Raises:
        SystemExit: a rank failed; the text has the exit codes of all.
    """
    ranks = []
    for rank in range(n_ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(n_ranks), "PYCOMM_RUN_DIR": folder}
        own = {**os.environ, **place, "OMP_NUM_THREADS": "1", **environment}
        ranks.append(subprocess.Popen([sys.executable, script, *arguments], env=own))
    codes = [process.wait() for process in ranks]
    if any(codes):
        raise SystemExit(f"{script}: exit codes of the ranks: {codes}")


def found_by_ranks(n_ranks: int, script: str, what: str, n_steps: int, **environment: str) -> Any:
    """What rank 0 of ``script --as-rank FILE --what … --steps …`` wrote: one run in fresh processes."""
    with tempfile.TemporaryDirectory(prefix="pycomm-bench-") as folder:
        result = Path(folder, "result.json")
        arguments = ("--as-rank", str(result), "--what", what, "--steps", str(n_steps))
        run_as_ranks(n_ranks, folder, script, *arguments, **environment)
        return json.loads(result.read_text())


def _resident(which: str) -> int:
    """Bytes of VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{which}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {which}")


def peak_bytes(call: Callable[[], object]) -> int:
    """Resident memory of this process at its highest during a call, above what it was before."""
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins again
    call()
    return _resident("VmHWM") - before
