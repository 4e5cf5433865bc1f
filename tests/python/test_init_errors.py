"""pycomm.init says what is wrong: contradictions, bad values, ranks that do not come, bad run folders."""

from __future__ import annotations

import os
import re
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from test_init import LAUNCHERS, environment, free_port, left_in, opened, prove

import pycomm
from cases import raises
from ranks import run_ranks

dist: Any = torch.distributed  # torch's types do not export the stores

#: environment -> the words of the ValueError
ENVIRONMENTS: list[tuple[dict[str, str], str]] = [
    ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK must be an integer, got 'one'"),
    ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE must be an integer, got ''"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT are not: start with torchrun"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT"),
    (
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "http"},
        "MASTER_PORT must be an integer, got 'http'",
    ),
    ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "rank 2 of 2"),
    ({"RANK": "-1", "WORLD_SIZE": "2", "PYCOMM_RUN_DIR": "/nowhere"}, "rank -1 of 2"),
    ({"RANK": "1", "WORLD_SIZE": "1"}, "rank 1 of 1"),
    ({"RANK": "0", "WORLD_SIZE": "0"}, "rank 0 of 0"),
    ({"RANK": "0"}, "of RANK and WORLD_SIZE only one is set: set WORLD_SIZE too"),
    ({"WORLD_SIZE": "2"}, "of RANK and WORLD_SIZE only one is set: set RANK too"),
    ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "3", "PMIX_NAMESPACE": "x"}, "rank 3 of 3"),
    ({"OMPI_COMM_WORLD_RANK": "a", "OMPI_COMM_WORLD_SIZE": "3"}, "OMPI_COMM_WORLD_RANK must be an integer"),
    ({"SLURM_PROCID": "5", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}, "rank 5 of 2"),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "b", "SLURM_STEP_ID": "0"}, "SLURM_NTASKS must be an integer"),
    ({"PYCOMM_ALGORITHM": "quick"}, "PYCOMM_ALGORITHM: algorithm 'quick' is not one of all_reduce's"),
    ({"PYCOMM_ALGORITHM": "broadcast=one_shot"}, "not one of broadcast's"),
    ({"PYCOMM_ALGORITHM": "barrier=ring"}, "PYCOMM_ALGORITHM: 'barrier' is not a collective with algorithms"),
    ({"PYCOMM_TUNE": "on"}, "PYCOMM_TUNE must be auto or off, got 'on'"),
    ({"PYCOMM_DETERMINISTIC": "yes"}, "PYCOMM_DETERMINISTIC must be 0 or 1, got 'yes'"),
]


def bad_environments(rank: int, size: int) -> None:
    environment()
    for values, words in ENVIRONMENTS:
        before = os.environ.copy()
        os.environ.update(values)
        with raises(ValueError, words):
            pycomm.init(timeout=5)
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
    with pycomm.init() as comm:
        prove(comm, 0, 1)


def test_bad_environments(tmp_path: Path) -> None:
    run_ranks(1, bad_environments, env={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert left_in(tmp_path) == []


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    store = dist.HashStore()
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"store": store}, ValueError, "init(store=…) needs rank= and size= too"),
        ({"store": store, "rank": 0}, ValueError, "needs rank= and size="),
        ({"store": store, "rank": 2, "size": 2}, ValueError, "rank 2 of 2"),
        ({"store": store, "rank": -1, "size": 2}, ValueError, "rank -1 of 2"),
        ({"store": store, "rank": 0, "size": 0}, ValueError, "rank 0 of 0"),
        ({"store": store, "rank": "0", "size": 2}, TypeError, "rank= and size= must be integers, got '0'"),
        ({"store": "tcp://x", "rank": 0, "size": 2}, TypeError, "store must be a torch.distributed.Store"),
        ({"rank": 0, "size": 2}, ValueError, "rank= and size= go with store="),
        ({"size": 1}, ValueError, "rank= and size= go with store="),
        ({"timeout": 0}, ValueError, "timeout must be positive seconds, got 0"),
        ({"timeout": -3.0}, ValueError, "timeout must be positive seconds, got -3.0"),
        ({"timeout": float("nan")}, ValueError, "timeout must be positive seconds, got nan"),
        ({"timeout": "soon"}, TypeError, "timeout must be positive seconds, got 'soon'"),
    ]
    for arguments, kind, words in bad:
        with raises(kind, words):
            pycomm.init(**arguments)


# ---- who does not come is named, in time ----------------------------------------------------------------


def never_comes(rank: int, size: int, how: str, missing: int, place: str) -> tuple[str, str]:
    """Rank ``missing`` reaches the store or the group, but does not call init."""
    timeout = 1.0
    given: dict[str, Any] = {}
    environment(RANK=str(rank), WORLD_SIZE=str(size), GLOO_SOCKET_IFNAME="lo")
    if how == "run folder":
        os.environ["PYCOMM_RUN_DIR"] = place
    elif how == "address":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=place)
    elif how == "group":
        dist.init_process_group("gloo", store=dist.FileStore(place, size), rank=rank, world_size=size)
        dist.barrier()  # who does not come must not hang up while the others still connect
        given = {"group": dist.group.WORLD}
    else:
        given = {"store": opened(how, place, size), "rank": rank, "size": size}
    if rank == missing:
        return "", ""
    begin = time.monotonic()
    try:
        pycomm.init(timeout=timeout, **given)
    except pycomm.CommTimeoutError as error:
        took = time.monotonic() - begin
        assert timeout * 0.9 < took < 2 * timeout + 3.0, took
        return type(error).__name__, str(error)
    raise AssertionError("init returned without a rank")


@pytest.mark.parametrize("how", ["run folder", "address", "file", "tcp", "group"])
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_never_comes(how: str, missing: int, tmp_path: Path) -> None:
    server = dist.TCPStore("127.0.0.1", 0, 3, True, timedelta(seconds=30), wait_for_workers=False)
    temp = tmp_path / "temp"
    temp.mkdir(mode=0o700)
    place = {"address": str(free_port()), "tcp": str(server.port)}.get(how, str(tmp_path / "place"))
    if how == "run folder":
        Path(place).mkdir(mode=0o700)
    results = run_ranks(3, never_comes, how, missing, place, env={"XDG_RUNTIME_DIR": str(temp)})
    for rank, (_, message) in enumerate(results):
        if rank == missing:
            continue
        if how == "address" and missing == 0:
            assert f"rank {rank} of 3 cannot reach the job's store at MASTER_ADDR=127.0.0.1" in message
        elif how != "run folder" and missing == 0:
            assert f"rank {rank} of 3 waited 1 s for rank 0" in message
        else:
            assert f"rank {rank} waited 1 s in " in message
            assert f"for rank(s) {missing} to join" in message
    assert left_in(temp) == []


def wrong_numbers(rank: int, size: int, how: str) -> str:
    if how == "twins" and rank == 2:
        os.environ["RANK"] = "1"
    if how == "sizes" and rank == 1:
        os.environ["WORLD_SIZE"] = "4"
    try:
        pycomm.init(timeout=3)
    except (ValueError, pycomm.CommError) as error:
        return str(error)
    raise AssertionError("init returned")


def test_two_processes_with_one_rank() -> None:
    """Nobody starts; who comes second says why (the others may only see that somebody is missing)."""
    told = run_ranks(3, wrong_numbers, "twins")
    assert any("1.sock is in use: two processes have the same rank" in text for text in told[1:]), told


def test_ranks_that_think_of_different_sizes() -> None:
    told = run_ranks(3, wrong_numbers, "sizes")
    assert any(re.search(r"rank \d of \d .*tried to join; this is rank \d of \d", text) for text in told), (
        told
    )


def bad_folder(rank: int, size: int, folder: str) -> str:
    os.environ["PYCOMM_RUN_DIR"] = folder
    try:
        pycomm.init(timeout=3)
    except (ValueError, pycomm.CommError) as error:
        return str(error)
    raise AssertionError("init used a folder that it cannot")


def meets_in(rank: int, size: int, folder: str) -> int:
    os.environ["PYCOMM_RUN_DIR"] = folder
    with pycomm.init(timeout=20) as comm:
        return int(comm.all_reduce(torch.ones(1)).item())


def test_a_run_folder_is_made_and_what_a_killed_job_left_is_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "of" / "jobs"
    assert run_ranks(2, meets_in, str(folder)) == [2, 2]
    left = folder / "pycomm-0" / "0.sock"
    left.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        killed.bind(str(left))  # never listened, and nobody will
    assert run_ranks(2, meets_in, str(folder)) == [2, 2]


def test_run_folders_that_cannot_be(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "file").touch()
    for message in run_ranks(2, bad_folder, str(shared / "file")):
        assert "file" in message
    for message in run_ranks(2, bad_folder, str(tmp_path / ("x" * 100))):
        assert "x" * 100 in message
