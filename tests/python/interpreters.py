"""Programs in interpreters of their own: what ranks that are forked (ranks.py) cannot show."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_interpreters(
    program: str,
    arguments: Sequence[Sequence[str]],
    *,
    timeout: float,
    env: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> list[tuple[int, str]]:
    """Runs ``program`` in a Python of its own for each of ``arguments``, all at once, from start to end.

    Args:
        program: the source.
        arguments: ``sys.argv[1:]`` of each.
        timeout: seconds until all must have ended.
        env: environment variables of the k-th, over those of this process.

    Returns:
        Exit status and output of each.

    Raises:
        subprocess.TimeoutExpired: one has not ended in time. All are killed.

    Example:
        >>> run_interpreters("import sys; print(sys.argv[1])", [["a"], ["b"]], timeout=30)
        [(0, 'a\\n'), (0, 'b\\n')]
    """
    common = os.environ | {"PYTHONPATH": str(ROOT), "PYCOMM_TUNE": "off", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, *own],
            env={**common, **env(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, own in enumerate(arguments)
    ]
    deadline = time.monotonic() + timeout
    try:
        outputs = [p.communicate(timeout=max(0.0, deadline - time.monotonic()))[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]
