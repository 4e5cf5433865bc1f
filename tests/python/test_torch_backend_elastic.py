"""torchrun restarts all ranks after one was killed: the example elastic_train.py, as a user starts it."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(110)]
ROOT = Path(__file__).resolve().parents[2]
COMMAND = [
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("--max-restarts", "1"),
    str(ROOT / "tests" / "python" / "trainers" / "elastic_train.py"),
]


def spared() -> None:
    """In the new process: SIGTERM stays pending, here and in the ranks.

    torchrun sends it to the survivors when it sees the dead rank, which may be before they have said what
    they saw. They end of themselves.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    """The example, with its checkpoints, its result and whatever else it leaves in ``folder``."""
    (folder / "tmp").mkdir(parents=True)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYCOMM_TUNE": "off",
        "TMPDIR": str(folder / "tmp"),
    }
    environment.pop("XDG_RUNTIME_DIR", None)
    environment.pop("PYCOMM_RUN_DIR", None)
    return subprocess.Popen(
        [*COMMAND, "--folder", str(folder / "checkpoints"), "--out", str(folder / "result.pt"), *more],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=spared,
    )


def processes_of(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        if str(folder) in command and process.status() != psutil.STATUS_ZOMBIE:
            found.append(command)
    return found


@pytest.fixture
def short_path():
    """A folder for run folders: pytest's own may be too long for the path of a unix socket (107 bytes)."""
    with tempfile.TemporaryDirectory(prefix="pycomm-elastic-") as folder:
        yield Path(folder)


def test_a_killed_rank_a_restart_and_the_same_bits(short_path):
    folders = short_path / "disturbed", short_path / "undisturbed"
    runs = [start(folders[0], "--die", "7"), start(folders[1])]
    try:
        (out, err), (calm_out, calm_err) = (run.communicate(timeout=100) for run in runs)
    finally:
        for run in runs:
            run.kill()
    assert runs[0].returncode == 0, out + err
    assert runs[1].returncode == 0, calm_out + calm_err

    # The second life begins behind the last checkpoint, and ends with the bits of the undisturbed run.
    assert "life 0 begins with step 0\n" in out and "life 1 begins with step 6\n" in out
    assert "life 1" not in calm_out
    results = [torch.load(folder / "result.pt") for folder in folders]
    assert results[0]["backend"] == "pycomm" and results[0]["ranks"] == 2
    assert results[0]["loss"] == results[1]["loss"]
    assert results[0]["parameters"].keys() == results[1]["parameters"].keys()
    for name, p in results[0]["parameters"].items():
        assert torch.equal(p, results[1]["parameters"][name]), name

    # The survivor named the dead one, with the process that torchrun had to bury.
    [pid] = re.findall(r"exitcode: -9\) local_rank: 1 \(pid: (\d+)\)", err)
    assert re.search(rf"DistPeerLostError: all_reduce.*: rank 1 \(host \S+, pid {pid}, dead\) died", err), err
    assert "DistPeerLostError" not in calm_err

    # Nothing is left: no process, no run folder, no name in shared memory.
    assert processes_of(short_path) == []
    assert [found for folder in folders for found in (folder / "tmp").glob("**/pycomm*")] == []
    assert list(Path("/dev/shm").glob("*pycomm*")) == []
