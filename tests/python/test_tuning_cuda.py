"""Selection for CUDA tensors: measured, agreed, kept, read, inherited; and tables that are wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import pycomm
from cases import prove, raises
from pycomm import _C, cache_files, devices, tuning_cuda
from pycomm.calling import KINDS
from ranks import run_ranks

emulated = pytest.mark.skipif(
    _C.cuda.build() != "emulated" or "PYCOMM_EMULATED_DEVICE" not in os.environ,
    reason="needs the extension with emulated CUDA, and PYCOMM_EMULATED_DEVICE=rank",
)
ANY = tuning_cuda.ANY_SIZE
MIXED = {
    "all_reduce": [(4096, "peer_one_shot"), (65536, "ring"), (ANY, "nccl")],
    "reduce_scatter": [(8192, "direct"), (ANY, "peer")],
    "broadcast": [(1, "nccl"), (ANY, "peer_two_shot")],
}


COUNTS = (1, 1_000, 9_001, 40_000)
"""Below and above the borders of the tables here."""

# ---- measured, kept, read ---------------------------------------------------------------------------


def measured(rank: int, size: int) -> tuple[tuning_cuda.Table, dict[str, list[str]]]:
    with pycomm.init() as comm:
        comm.deterministic = True  # it must not keep NCCL's own from being measured
        comm.tune(1.0, device="cuda")
        assert comm.deterministic
        comm.deterministic = False
        prove(comm, COUNTS)
        ways = {name: comm._c.device_algorithms(KINDS[name]) for name in tuning_cuda.MEASURED}
        return tuning_cuda.read(comm), ways


def loaded(rank: int, size: int) -> tuple[tuning_cuda.Table, tuning_cuda.Table, list[str]]:
    """This job's table and that of a pair split off, and what was warned of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pycomm.init() as comm:
            prove(comm, COUNTS)
            pair = comm.split(rank // 2)
            assert pair is not None
            prove(pair, COUNTS)
            return (
                tuning_cuda.read(comm),
                tuning_cuda.read(pair),
                [str(w.message) for w in said if "selection cache" in str(w.message)],
            )


@emulated
def test_measured_once_read_by_later_jobs_and_handed_to_children(tmp_path: Path) -> None:
    env = {"PYCOMM_CACHE_DIR": str(tmp_path)}
    found = run_ranks(3, measured, env=env, timeout=100)
    table, ways = found[0]
    assert all(other == (table, ways) for other in found)
    for name, rows in table.items():
        sizes = [max_bytes for max_bytes, _ in rows]
        assert sizes == sorted(set(sizes)) and sizes[-1] == ANY
        assert name not in ways or {way for _, way in rows} <= {*ways[name], "peer"}
    [file] = tmp_path.glob("cuda-*.json")
    content = json.loads(file.read_text())["table"]
    assert content["ranks"] == 3 and content["gpu"] == content["nccl"] == "emulated"
    assert content["selection"] == {name: [list(row) for row in rows] for name, rows in table.items()}

    env["PYCOMM_TUNE"] = "auto"
    for whole, pair, said in run_ranks(3, loaded, env=env, timeout=100):
        assert whole == table and pair == table and said == []  # nothing is kept for pairs
    keep(MIXED, 2)
    found = run_ranks(3, loaded, env=env, timeout=100)
    for rank, (whole, pair, _) in enumerate(found):
        assert whole == table
        assert pair == (table if rank == 2 else {**pair, **MIXED})


def keep(selection: Any, ranks: int, **changed: Any) -> Path:
    """Writes a cache file as ``measure`` does, in the folder that the one process sees."""
    facts = devices.facts()
    file = cache_files.cuda_file(facts, 1, ranks)
    content = {**facts, "ranks": ranks, "hosts": 1, "selection": selection, **changed}
    cache_files.save(file, cache_files.CUDA_FORMAT, content)
    return file


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOMM_CACHE_DIR", str(tmp_path))


@emulated
@pytest.mark.parametrize(
    "selection",
    [
        {"all_reduce": []},
        {"all_reduce": [[ANY, "quantum"]]},
        {"broadcast": [[8, "nccl"], [8, "nccl"], [ANY, "nccl"]]},
        {"broadcast": [["many", "nccl"]]},
        {"broadcast": [[8, "nccl"]]},
        {"all_to_all": [[ANY, "nccl"]]},
        ["all_reduce"],
    ],
    ids=["empty", "unknown way", "sizes", "no number", "an end", "collective", "no table"],
)
def test_a_damaged_cache_is_told_and_left(tmp_path: Path, selection: Any) -> None:
    file = keep(selection, 2)
    env = {"PYCOMM_CACHE_DIR": str(tmp_path), "PYCOMM_TUNE": "auto"}
    (first, _, said), (second, _, other) = run_ranks(2, loaded, env=env, timeout=100)
    assert len(said) == 1 and str(file) in said[0] and other == []
    assert first == second
    assert first["all_reduce"] == [(1 << 20, "peer"), (ANY, "nccl")]


@emulated
def test_tables_of_other_gpus_are_not_taken(tmp_path: Path) -> None:
    keep({"all_reduce": [[ANY, "ring"]]}, 2, gpu="emulated?")
    env = {"PYCOMM_CACHE_DIR": str(tmp_path), "PYCOMM_TUNE": "auto"}
    for table, _, said in run_ranks(2, loaded, env=env, timeout=100):
        assert table["all_reduce"] == [(1 << 20, "peer"), (ANY, "nccl")] and said == []


# ---- given tables -----------------------------------------------------------------------------------


def given(rank: int, size: int) -> None:
    with pycomm.init() as comm:
        tuning_cuda.apply(comm, MIXED)
        assert {name: rows for name, rows in tuning_cuda.read(comm).items() if name in MIXED} == MIXED
        prove(comm, COUNTS)
        child = comm.split(0, -rank)
        assert child is not None and tuning_cuda.read(child) == tuning_cuda.read(comm)
        prove(child, COUNTS)
        comm.deterministic = True  # what the table names is not, in part: another way serves
        prove(comm, COUNTS)


@emulated
@pytest.mark.parametrize("size", [2, 4])
def test_a_given_table_is_used_and_handed_to_children(size: int) -> None:
    run_ranks(size, given, timeout=100)


WRONG: list[tuple[Any, str]] = [
    ({"all_reduce": [(ANY, "quantum")]}, "algorithm 'quantum' is not one of all_reduce's: peer, peer_one"),
    (
        {"broadcast": [(8, "nccl"), (8, "peer"), (ANY, "peer")]},
        "entry 1 of the broadcast table on CUDA",
    ),
    ({"broadcast": [(8, "nccl")]}, "broadcast: the last row must be for any size (2**64 - 1 bytes), got 8"),
    ({"broadcast": []}, "at least one entry"),
    ({"broadcast": [(-1, "nccl"), (ANY, "nccl")]}, "broadcast: -1 bytes is not in [0, 2^64)"),
    (
        {"broadcast": [("many", "nccl")]},
        "rows (largest number of bytes, way), got [('many', 'nccl')]",
    ),
    ({"all_to_all": [(ANY, "nccl")]}, "'all_to_all' has no table; those that have: all_reduce"),
    ([], "expected a table for each collective, got []"),
]


def given_with_a_call_under_way(rank: int, size: int) -> None:
    with pycomm.init(timeout=20) as comm:
        tuning_cuda.apply(comm, {"all_reduce": [(ANY, "peer")]})
        for way in ("nccl", "peer", "ring"):
            t = torch.full((5_000,), float(rank))
            pause = 0.3 if rank == 1 else 0.0
            time.sleep(pause)  # the others' call waits for this one, and must not see the table before it
            work = comm.all_reduce(t, async_op=True)
            time.sleep(pause)
            tuning_cuda.apply(comm, {"all_reduce": [(ANY, way)]})
            work.wait()
            assert bool((t == sum(range(size))).all())


@emulated
def test_a_table_is_for_the_calls_after_it() -> None:
    run_ranks(3, given_with_a_call_under_way, timeout=100)


def refused(rank: int, size: int) -> None:
    with pycomm.init() as comm:
        before = tuning_cuda.read(comm)
        for wrong, words in WRONG:
            with raises(ValueError, words):
                tuning_cuda.apply(comm, wrong)
            assert tuning_cuda.read(comm) == before
        for wrong, words in WRONG:  # on one rank: the others are told
            right = {"broadcast": [(ANY, "nccl")]}
            with raises(ValueError if rank == 1 else pycomm.CommError, words):
                tuning_cuda.apply(comm, wrong if rank == 1 else right)
            assert tuning_cuda.read(comm) == before
        mine = {"broadcast": [(ANY, "nccl" if rank == 0 else "peer")]}
        others = ", ".join(map(str, range(1, size)))
        with raises(ValueError, f"the tables of ranks {others} differ from rank 0's"):
            tuning_cuda.apply(comm, mine)
        assert tuning_cuda.read(comm) == before
        prove(comm, COUNTS)


@emulated
def test_wrong_tables_are_refused_on_every_rank() -> None:
    run_ranks(3, refused, timeout=100)


# ---- without CUDA -----------------------------------------------------------------------------------


def without_cuda(rank: int, size: int) -> None:
    with pycomm.init() as comm:
        with raises(ValueError, "tune: device is cuda, but there is no CUDA device: "):
            comm.tune(0.1, device="cuda")
        with raises(ValueError, "tune: device must be on the CPU or CUDA, got meta"):
            comm.tune(0.1, device="meta")
        with raises(TypeError, "tune: device must be a torch.device, a string or a number, got [1]"):
            comm.tune(0.1, device=[1])  # type: ignore[arg-type]
        with raises(ValueError, "selection on CUDA: there is no CUDA device: "):
            tuning_cuda.apply(comm, {})
        built = _C.cuda.build() != "off"
        with raises(
            *((pycomm.CommError, "cuda:0: cudaSetDevice") if built else (ValueError, "no CUDA engine"))
        ):
            comm.empty(1, device="cuda")
        assert comm.all_reduce(torch.ones(1)).item() == size


@pytest.mark.skipif(bool(devices.count()), reason="there is a CUDA device")
def test_without_cuda_the_reason_is_told() -> None:
    run_ranks(2, without_cuda)


def test_the_command_needs_a_device(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pycomm.cli", "tune", "--device"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        return subprocess.run([*command, *arguments], env=env, capture_output=True, text=True, timeout=100)

    wrong = run("tpu")
    assert wrong.returncode == 2 and "--device is 'tpu', expected cpu or cuda" in wrong.stderr
    nothing = run("cuda", "--show", "--ranks", "5")
    assert nothing.returncode == 1
    assert f"CUDA tensors of 5 ranks in {tmp_path}: run pycomm tune --device cuda --ranks 5" in nothing.stderr
    if devices.why_none():
        missing = run("cuda")
        assert missing.returncode == 1 and "pycomm: tune: no CUDA device: " in missing.stderr
        return
    told = run("cuda", "--ranks", "2", "--seconds", "0.5", "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["ranks"] == 2
    shown = run("cuda", "--show", "--ranks", "2").stdout
    assert "CUDA tensors, 2 ranks: " in shown and "any size" in shown and "kept in " in shown


# ---- what the machine is made of --------------------------------------------------------------------


def test_facts_from_the_drivers_files(tmp_path: Path) -> None:
    """The files' text is as the driver writes it."""
    assert devices._gpu_names(tmp_path) == devices._driver_version(tmp_path) == "unknown"
    for i, model in enumerate(["NVIDIA H200", "NVIDIA H200", "NVIDIA A30"]):
        folder = tmp_path / "gpus" / f"0000:{i:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 178\nGPU UUID: \t GPU-1\n")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)\n"
        "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
    )
    assert devices._gpu_names(tmp_path) == "NVIDIA A30 + NVIDIA H200"
    assert devices._driver_version(tmp_path) == "580.65.06"


@pytest.mark.parametrize(
    ("ways", "ordered"),
    [
        (["peer", "peer_one_shot", "peer_two_shot", "nccl", "ring"],
         ["nccl", "peer_one_shot", "peer_two_shot", "ring"]),
        (["peer", "nccl", "direct"], ["nccl", "peer", "direct"]),
        (["peer", "peer_one_shot", "peer_two_shot"], ["peer_one_shot", "peer_two_shot"]),
        (["nccl", "tree"], ["nccl", "tree"]),
    ],
)  # fmt: skip
def test_nccls_own_is_what_others_must_beat(ways: list[str], ordered: list[str]) -> None:
    assert tuning_cuda._candidates(ways) == ordered
