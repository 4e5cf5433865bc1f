"""``pycomm ps``: jobs that hang, are stopped, run beside others or have ended, and what it shows of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_JOB = """
import os, signal, sys, time, torch, pycomm
comm = pycomm.init()
comm.barrier()
half = comm.split(color=0, key=-comm.rank)
half.barrier()
if comm.rank == 1:
    print("ready", flush=True)
    if sys.argv[1] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        sys.stdin.readline()
if sys.argv[1] == "recv" and comm.rank == 0:
    comm.recv(torch.zeros(1), 1)
elif sys.argv[1] == "recv":
    comm.send(torch.zeros(1), 0)
comm.all_reduce(torch.ones(3))
"""


class Job:
    """Two ranks; rank 1 waits for a line before it does what rank 0 waits for."""

    def __init__(self, folder: Path, form: str) -> None:
        folder.mkdir(mode=0o700)
        self.name = folder.name
        self.ranks = [self._start(folder, rank, form) for rank in range(2)]
        assert self.ranks[1].stdout is not None
        assert self.ranks[1].stdout.readline() == "ready\n"

    def _start(self, folder: Path, rank: int, form: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _JOB, form],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "PYCOMM_RUN_DIR": str(folder),
                "PYCOMM_TUNE": "off",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(_ROOT),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: Any) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()

    def end(self) -> None:
        """Lets it go on, to its end."""
        self.ranks[1].communicate("\n", timeout=60)
        assert [rank.wait(60) for rank in self.ranks] == [0, 0]


def ps(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pycomm.cli", "ps", *arguments],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )


def rows(*arguments: str) -> list[dict[str, Any]]:
    shown = ps("--json", *arguments)
    assert shown.returncode == 0, shown.stderr
    found: list[dict[str, Any]] = json.loads(shown.stdout)
    return found


def when(condition: Callable[[list[dict[str, Any]]], bool], job: str) -> list[dict[str, Any]]:
    """What is shown of a job as soon as ``condition`` holds of it."""
    deadline = time.monotonic() + 60
    while not condition(found := rows(job)):
        assert time.monotonic() < deadline, found
    return found


def waits(found: list[dict[str, Any]]) -> bool:
    """In the call that rank 1 does not make, not in one before."""
    return any(row["waits_for"] is not None and row["call"].startswith("all_reduce") for row in found)


@pytest.mark.timeout(120)
def test_a_job_that_hangs(tmp_path: Path) -> None:
    with Job(tmp_path / "hangs", "sleep") as job:
        zero, one, *split = when(waits, "hangs")
        assert zero["waited_s"] > 0
        assert (zero["job"], zero["rank"], zero["pid"], zero["group"]) == ("hangs", 0, job.ranks[0].pid, "")
        assert zero["call"].startswith("all_reduce #") and zero["inside"] and zero["waits_for"] == 1
        assert (one["rank"], one["pid"], one["state"]) == (1, job.ranks[1].pid, "sleeping")
        assert not one["inside"] and one["waits_for"] is None and one["group_size"] == 2
        number = int(zero["call"].rpartition("#")[2])
        assert int(one["call"].rpartition("#")[2]) == number - 1
        # The communicator that split made, with its ranks the other way round.
        assert [(row["group"], row["group_rank"], row["rank"], row["call"]) for row in split] == [
            ("1", 0, 1, "barrier #1"),
            ("1", 1, 0, "barrier #1"),
        ]
        table = ps("hangs").stdout
        assert (
            f"all_reduce #{number}" in table and "s for rank 1" in table and "no collective (last:" in table
        )
        before = zero["waited_s"]
        assert rows("hangs")[0]["waited_s"] > before
        job.end()
    assert rows("hangs") == []
    gone = ps("hangs")
    assert gone.returncode == 0
    assert "no job of this user whose name begins with hangs runs on this machine" in gone.stdout


@pytest.mark.timeout(120)
def test_a_job_with_a_stopped_rank_and_one_that_is_killed(tmp_path: Path) -> None:
    with Job(tmp_path / "stops", "stop") as job:
        found = when(lambda f: waits(f) and any(row["state"] == "stopped" for row in f), "stops")
        assert found[1]["pid"] == job.ranks[1].pid and found[1]["state"] == "stopped"
        assert "stopped" in ps("stops").stdout
        os.kill(job.ranks[1].pid, signal.SIGKILL)
        job.ranks[1].wait(60)
        assert all(row["pid"] != job.ranks[1].pid for row in rows("stops"))
        job.ranks[0].wait(60)
        assert rows("stops") == []


@pytest.mark.timeout(120)
def test_a_recv_and_two_jobs_at_once(tmp_path: Path) -> None:
    with Job(tmp_path / "first", "recv") as first, Job(tmp_path / "second", "sleep") as second:
        zero = when(lambda f: any(row["transfer"] for row in f), "first")[0]
        assert (zero["transfer"], zero["transfer_peer"], zero["rank"]) == ("recv", 1, 0)
        assert not zero["inside"] and "s in recv for rank 1" in ps("first").stdout
        pids = {row["pid"] for row in rows()}
        assert pids >= {rank.pid for job in (first, second) for rank in job.ranks}
        assert {row["job"] for row in rows("second")} == {"second"}
        first.end()
        second.end()


@pytest.mark.timeout(120)
def test_another_users_jobs_are_not_shown(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    with Job(tmp_path / "private", "sleep") as job:
        when(waits, "private")
        count = "print(len(look('private')), end='')"
        # The interpreter may lie where another user cannot go: all is imported before.
        other = f"import os; from pycomm.cli.ps import look; os.setuid(65534); {count}"
        shown = [
            subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, "PYTHONPATH": str(_ROOT)},
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            ).stdout
            for code in (f"from pycomm.cli.ps import look; {count}", other)
        ]
        assert shown == ["4", "0"]  # two ranks, two communicators each
        job.end()


def test_bad_arguments() -> None:
    shown = ps("--watch", "--json")
    assert shown.returncode == 2 and "--watch is for people, --json for programs" in shown.stderr
