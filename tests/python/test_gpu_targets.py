"""``make test-gpu`` and ``make bench-gpu``: what they do without a GPU, and for which GPUs they build."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]


def with_nvidia_smi(folder: Path, script: str | None) -> dict[str, str]:
    """An environment whose only programs are the system's basic ones and, when given, this nvidia-smi."""
    for name in ("sh", "bash", "sed", "sort", "paste", "make", "echo", "cat"):
        for place in ("/usr/bin", "/bin"):
            if Path(place, name).exists() and not (folder / name).exists():
                (folder / name).symlink_to(Path(place, name))
    if script is not None:
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "nvidia-smi").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return {**kept, "PATH": str(folder)}


def architectures(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(_ROOT / "tests/gpu/architectures.sh")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_each_architecture_once(tmp_path: Path) -> None:
    run = architectures(with_nvidia_smi(tmp_path, "printf '9.0\\n8.0\\n9.0\\n10.3\\n'"))
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.strip().split(";")) == ["103-real", "80-real", "90-real"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "no GPU: nvidia-smi was not found, so there is no NVIDIA driver here"),
        ("echo 'No devices were found'", "no GPU: nvidia-smi names no device: No devices were found"),
        ("echo 'it failed'; exit 9", "no GPU: nvidia-smi says: it failed"),
    ],
)
def test_without_a_gpu_tests_are_skipped_and_benchmarks_fail(
    tmp_path: Path, script: str | None, reason: str
) -> None:
    environment = with_nvidia_smi(tmp_path, script)
    run = architectures(environment)
    assert (run.returncode, run.stdout, run.stderr) == (1, "", f"{reason}\n")
    tests = subprocess.run(
        ["make", "-C", str(_ROOT), "--no-print-directory", "test-gpu"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (tests.returncode, tests.stdout) == (0, f"SKIPPED: {reason}\n"), tests.stderr
    bench = subprocess.run(
        ["make", "-C", str(_ROOT), "--no-print-directory", "bench-gpu"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert bench.returncode != 0 and reason in bench.stderr
