"""``pycomm tune``: measures with real ranks, keeps the table, and shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pycomm import _C, tuning


def run(cache: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "PYCOMM_TUNE")}
    return subprocess.run(
        [sys.executable, "-m", "pycomm.cli", "tune", *arguments],
        env={**inherited, "PYCOMM_CACHE_DIR": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.timeout(110)
def test_tune_measures_keeps_and_shows(tmp_path: Path) -> None:
    measured = run(tmp_path, "--ranks", "2", "--seconds", "0.5", "--json")
    assert measured.returncode == 0, measured.stderr
    report = json.loads(measured.stdout)
    assert report["ranks"] == 2 and Path(report["file"]).parent == tmp_path
    assert set(report["table"]) == set(tuning.COLLECTIVES)
    known = {(a.collective, a.name) for a in _C.schedule.catalog()}
    for collective, rows in report["table"].items():
        assert all((collective, row["algorithm"]) in known for row in rows)
        assert rows[-1]["max_bytes"] == 2**64 - 1
    assert json.loads(run(tmp_path, "--ranks", "2", "--show", "--json").stdout) == report
    table = run(tmp_path, "--ranks", "2", "--show").stdout
    assert "2 ranks" in table and "any size" in table and "with arena tensors" in table


@pytest.mark.timeout(110)
def test_tune_runs_as_a_rank_where_it_was_launched(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    command = [sys.executable, "-m", "pycomm.cli", "tune", "--seconds", "0.3", "--json"]
    ranks = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "PYCOMM_RUN_DIR": str(folder),
                "PYCOMM_CACHE_DIR": str(tmp_path / "cache"),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=90)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0]
    assert json.loads(outputs[0])["ranks"] == 2 and outputs[1] == ""


def test_show_without_a_table_says_what_to_do(tmp_path: Path) -> None:
    result = run(tmp_path, "--ranks", "3", "--show")
    assert result.returncode == 1
    assert "run pycomm tune --ranks 3" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "0"), "--ranks is 0, expected 1 or more"),
        (("--ranks", "1"), "one rank has nothing to choose"),
        (("--seconds", "0"), "--seconds is 0.0, expected more than 0"),
        (("--seconds", "nan"), "--seconds is nan"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    result = run(tmp_path, *arguments)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.timeout(60)
def test_a_rank_that_fails_ends_the_command(tmp_path: Path) -> None:
    result = run(tmp_path, "--ranks", "2", PYCOMM_ALGORITHM="all_reduce=nonsense")
    assert result.returncode == 1
    assert "nonsense" in result.stderr and "failed (exit code 1)" in result.stderr
