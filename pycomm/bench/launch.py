"""Starts the ranks of a bench run, or becomes one of them under torchrun or mpirun.

Own ranks are subprocesses with a private run folder (0700) that holds the file rendezvous; with the mpi peer
they are started by ``mpirun``, all libraries in the same processes so that they can be interleaved. A rank
that fails ends the run: the others are terminated and its last words are in the error.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pycomm import devices
from pycomm.bench.control import STORE_VARIABLE, launched_by
from pycomm.bench.options import Options
from pycomm.bench.report import Report
from pycomm.children import child_environment

__all__ = ["launch"]

_SLACK_S = 180.0  # starting, checking and finishing rounds that began in time


def launch(options: Options, *, quiet: bool = False) -> Report | None:
    """Runs the bench; prints the table as it grows unless ``quiet``.

    Under torchrun or mpirun (their variables are set) this process is one rank, and all must call it.

    Returns:
        The report; None on ranks other than 0 of a launcher that is not ours.

    Raises:
        ValueError: an option is out of range for these ranks, or a peer cannot be where CUDA is emulated.
        RuntimeError: a rank failed (its output is quoted), the run took far longer than ``max_seconds``, the
            mpi peer is asked for without mpi4py or Open MPI's mpirun, or there is no CUDA device.
    """
    if options.device == "cuda":
        if why := devices.prepare():
            raise RuntimeError(f"no CUDA device: {why}")
        if devices.is_emulated() and options.peers:
            raise ValueError(
                f"peer {options.peers[0]!r}: CUDA is emulated here, and torch has no tensors on such devices"
            )
    if launched_by() is not None:
        from pycomm.bench import worker

        return worker.run(options)
    if options.root >= options.ranks:
        raise ValueError(f"root {options.root}: expected a rank below {options.ranks}")
    with tempfile.TemporaryDirectory(prefix="pycomm-bench-") as folder:
        run_dir = Path(folder)
        (run_dir / "options.json").write_text(options.to_json())
        _run(options, run_dir, quiet)
        report = run_dir / "report.json"
        if not report.exists():
            raise RuntimeError(f"bench: rank 0 ended without a report\n{_last_words(run_dir)}")
        return Report.from_json(report.read_text())


def _commands(options: Options, run_dir: Path) -> list[tuple[str, list[str], dict[str, str]]]:
    """(name, command, extra environment) of each process to start."""
    worker = [sys.executable, "-m", "pycomm.bench.worker", str(run_dir)]
    shared = {
        STORE_VARIABLE: str(run_dir / "store"),
        "PYCOMM_RUN_DIR": str(run_dir),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(options.ranks),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    if "mpi" in options.peers:
        return [("mpirun", [*_mpirun(options.ranks), *worker], shared)]
    return [
        (f"rank {rank}", worker, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(options.ranks)
    ]


def _mpirun(n_ranks: int) -> list[str]:
    if importlib.util.find_spec("mpi4py") is None:
        raise RuntimeError("bench: the mpi peer needs mpi4py: pip install mpi4py, or leave the peer out")
    mpirun = shutil.which("mpirun")
    version = ""
    if mpirun is not None:
        version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    if mpirun is None or "Open MPI" not in version:
        raise RuntimeError(
            "bench: the mpi peer needs Open MPI's mpirun on PATH; "
            f"found {mpirun or 'none'} ({version.strip()[:60]})"
        )
    # unbound, since gloo and pycomm have threads beside the caller's
    command = [mpirun, "--oversubscribe", "--bind-to", "none", "-np", str(n_ranks)]
    return [*command, "--allow-run-as-root"] if os.geteuid() == 0 else command


def _run(options: Options, run_dir: Path, quiet: bool) -> None:
    processes: list[tuple[str, subprocess.Popen[bytes]]] = []
    deadline = time.monotonic() + options.max_seconds + _SLACK_S
    try:
        for name, command, extra in _commands(options, run_dir):
            with open(run_dir / f"{name}.log", "wb") as log:
                processes.append(
                    (
                        name,
                        subprocess.Popen(
                            command,
                            env={**child_environment(), **extra},
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.DEVNULL if quiet else None,
                            stderr=log,
                        ),
                    )
                )
        while any(process.poll() is None for _, process in processes):
            failed = [name for name, process in processes if process.poll() not in (None, 0)]
            if failed:
                time.sleep(1.0)  # the others may be about to say why
                break
            if time.monotonic() > deadline:
                waiting = [name for name, process in processes if process.poll() is None]
                raise RuntimeError(
                    f"bench: {', '.join(waiting)} still running {_SLACK_S:.0f} s after max_seconds "
                    f"{options.max_seconds:g}\n{_last_words(run_dir)}"
                )
            time.sleep(0.02)
        failures = [f"{name} ({p.returncode})" for name, p in processes if p.poll() not in (None, 0)]
        if failures:
            raise RuntimeError(f"bench: failed (exit status): {', '.join(failures)}\n{_last_words(run_dir)}")
    finally:
        _stop([process for _, process in processes])


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_words(run_dir: Path, n_lines: int = 12) -> str:
    """The ends of all logs, the one that stopped first at the top: it is the likeliest cause."""
    logs = sorted(run_dir.glob("*.log"), key=lambda path: path.stat().st_mtime)
    parts = []
    for log in logs:
        lines = log.read_text(errors="replace").splitlines()
        if lines:
            parts.append(f"--- {log.stem}, end of its error output:\n" + "\n".join(lines[-n_lines:]))
    return "\n".join(parts)
