"""``pycomm topo`` and NVML: through the real nvidia-ml-py, on a library that shows other machines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_SOURCE = Path(__file__).with_name("topo_loopback_nvml.cc")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler, "a C++ compiler builds pycomm, so there must be one"
    folder = tmp_path_factory.mktemp("nvml")
    target = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [*compiler.split(), "-std=c++20", "-shared", "-fPIC", "-O1", str(_SOURCE), "-o", str(target)],
        check=True,
        timeout=100,
    )
    return folder


def topo(folder: Path | None, box: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LOOPBACK_NVML": box, "PYTHONPATH": str(_ROOT)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if folder is not None:
        environment["LD_LIBRARY_PATH"] = str(folder)
    return subprocess.run(
        [sys.executable, "-m", "pycomm.cli", "topo", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def facts(folder: Path, box: str) -> dict[str, Any]:
    run = topo(folder, box, "--json")
    assert run.returncode == 0, run.stderr
    document: dict[str, Any] = json.loads(run.stdout)
    return document


def of_gpus(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What NVML did not say."""
    return [
        (fact["what"], fact["whose"], fact["why"])
        for fact in document["unknown"]
        if "GPU" in fact["whose"] and fact["what"] not in ("NUMA node", "CPUs", "path")
    ]


def test_switches_join_all_and_the_one_with_fewer_links_counts(library: Path) -> None:
    gpus = facts(library, "dgx")["gpus"]
    assert gpus["missing"] == "" and gpus["driver"] == "580.65.06" and gpus["cuda"] == "13.1"
    for i, row in enumerate(gpus["paths"]):
        assert row == ["X" if i == j else "NV17" if 7 in (i, j) else "NV18" for j in range(8)]
    assert gpus["peer_access"] == [["X" if i == j else "OK" for j in range(8)] for i in range(8)]
    assert gpus["devices"][5] == {
        "index": 5,
        "name": "Loopback GPU",
        "pci": "0000:15:00.0",
        "uuid": "GPU-00000005-1111-2222-3333-444444444444",
        "memory_bytes": 80 * 2**30,
        "compute_capability": "9.0",
        "numa_node": None,
        "cpus": None,
    }


def test_straight_links_are_counted_by_pair(library: Path) -> None:
    document = facts(library, "mesh")
    # One link is down, and both of its ends say so.
    expected = [["X" if i == j else "NV4" for j in range(4)] for i in range(4)]
    expected[0][1] = expected[1][0] = "NV3"
    assert document["gpus"]["paths"] == expected
    assert of_gpus(document) == []


def test_without_nvlink_the_common_ancestor_names_the_path(library: Path) -> None:
    document = facts(library, "pcie")
    assert document["gpus"]["paths"] == [
        ["X", "PIX", "SYS", "SYS"],
        ["PIX", "X", "SYS", "SYS"],
        ["SYS", "SYS", "X", "PHB"],
        ["SYS", "SYS", "PHB", "X"],
    ]
    assert document["gpus"]["peer_access"] == [
        ["X", "OK", "TNS", "TNS"],
        ["OK", "X", "TNS", "TNS"],
        ["TNS/NS", "TNS/NS", "X", "OK"],
        [None, None, "OK", "X"],
    ]
    assert of_gpus(document) == [
        ("memory", "GPU 2", "Not Supported"),
        ("memory", "GPU 3", "Not Supported"),
        ("peer access", "GPU 3 to GPU 0", "Not Supported"),
        ("peer access", "GPU 3 to GPU 1", "Not Supported"),
    ]


def test_what_is_not_supported_is_a_dash_with_a_footnote(library: Path) -> None:
    run = topo(library, "pcie")
    assert run.returncode == 0 and run.stderr == ""
    assert "-: memory of GPU 2, GPU 3: Not Supported" in run.stdout
    assert "TNS: the topology does not support it" in run.stdout
    assert "NS: not supported" in run.stdout


def test_a_lost_gpu_stays_in_the_list(library: Path) -> None:
    document = facts(library, "lost")
    assert [gpu["name"] for gpu in document["gpus"]["devices"]] == ["Loopback GPU", None]
    assert document["gpus"]["paths"] == [["X", None], [None, "X"]]
    assert of_gpus(document) == [("handle", "GPU 1", "GPU is lost")]


@pytest.mark.parametrize(
    ("box", "words"),
    [
        ("empty", "No GPUs are shown: the driver 580.65.06 is there, but no device"),
        (
            "unloaded",
            "No GPUs are shown: there is a driver library, but the kernel has no NVIDIA driver loaded",
        ),
    ],
)
def test_without_a_device_it_says_what_is_missing_and_shows_the_rest(
    library: Path, box: str, words: str
) -> None:
    run = topo(library, box)
    assert run.returncode == 0, run.stderr
    assert words in run.stdout and "CPUs" in run.stdout


def test_without_the_package_it_says_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("raise ImportError('blocked by the test')\n")
    run = subprocess.run(
        [sys.executable, "-m", "pycomm.cli", "topo"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{_ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert "nvidia-ml-py is not installed: pip install 'pycomm-collectives[cu13]'" in run.stdout
    assert "CPUs" in run.stdout


def test_all_gpus_are_shown_also_those_that_programs_here_do_not_see(library: Path) -> None:
    environment = {
        **os.environ,
        "LOOPBACK_NVML": "mesh",
        "LD_LIBRARY_PATH": str(library),
        "CUDA_VISIBLE_DEVICES": "2,3",
        "PYTHONPATH": str(_ROOT),
    }
    run = subprocess.run(
        [sys.executable, "-m", "pycomm.cli", "topo"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "CUDA_VISIBLE_DEVICES is '2,3'" in run.stdout and "GPU 3" in run.stdout
