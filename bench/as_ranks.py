"""Starts a script of this folder as every rank of one job on this machine."""

from __future__ import annotations

import os
import subprocess
import sys


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
