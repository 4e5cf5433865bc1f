"""pycomm.init: every way in which the ranks of a job find each other, and what it says when they do not.

Launchers are real where they are installed (torchrun, mpirun); Slurm is its environment variables.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import pycomm
from cases import raises
from pycomm import tuning
from ranks import run_ranks

dist: Any = torch.distributed  # torch's types do not export the stores
ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PYCOMM_RUN_DIR", "MASTER_ADDR")


def environment(**values: str) -> None:
    """The launcher's variables of this rank are ``values`` and no others."""
    for name in LAUNCHERS:
        os.environ.pop(name, None)
    os.environ.update(values)


def prove(comm: pycomm.Communicator, rank: int, size: int) -> None:
    """These are the ``size`` ranks, each with its number, and data move."""
    assert (comm.rank, comm.size) == (rank, size)
    numbers = comm.all_gather(torch.zeros(size, dtype=torch.int64), torch.tensor([rank]))
    assert numbers.tolist() == list(range(size))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("pycomm-"))


# ---- launchers ------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, torch
import torch.distributed as dist
import pycomm

sys.path.insert(0, {tests!r})
from test_init import prove

what, out = sys.argv[1], sys.argv[2]
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
first = pycomm.init(timeout=60)
prove(first, first.rank, first.size)
second = pycomm.init(timeout=60)  # while the first is open
prove(second, first.rank, first.size)
if what == "restart" and attempt == "0" and first.rank == 1:
    sys.exit(7)
prove(first, first.rank, first.size)
if what == "torch":
    dist.init_process_group("gloo")
    for given in ({{}}, {{"group": dist.group.WORLD}}):
        with pycomm.init(timeout=60, **given) as third:
            prove(third, dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
first.close()
open(f"{{out}}/{{what}}-{{attempt}}-{{first.rank}}-of-{{first.size}}", "w").close()
"""


def launched(command: Sequence[str], what: str, tmp_path: Path) -> list[str]:
    """Runs SCRIPT under a launcher; the names of the files that its ranks left."""
    script, out, temp = tmp_path / "script.py", tmp_path / "out", tmp_path / "temp"
    out.mkdir()
    temp.mkdir(mode=0o700)
    script.write_text(SCRIPT.format(tests=str(ROOT / "tests" / "python")))
    env = {k: v for k, v in os.environ.items() if k not in LAUNCHERS} | {
        "PYTHONPATH": str(ROOT), "PYCOMM_TUNE": "off", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "XDG_RUNTIME_DIR": str(temp),
    }  # fmt: skip
    done = subprocess.run(
        [*command, sys.executable, str(script), what, str(out)] if command[0] != sys.executable
        else [*command, str(script), what, str(out)],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert left_in(temp) == []
    return sorted(path.name for path in out.iterdir())


def torchrun(n: int, *options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", *options]


def test_torchrun_two_ranks_and_torchs_own_groups(tmp_path: Path) -> None:
    assert launched(torchrun(2), "torch", tmp_path) == ["torch-0-0-of-2", "torch-0-1-of-2"]


def test_torchrun_one_rank(tmp_path: Path) -> None:
    assert launched(torchrun(1), "alone", tmp_path) == ["alone-0-0-of-1"]


def test_torchrun_restarts_the_ranks(tmp_path: Path) -> None:
    """The agent's store outlives the first attempt: the second must not meet what the first wrote there."""
    files = launched(torchrun(2, "--max-restarts=1", "--monitor-interval=0.1"), "restart", tmp_path)
    assert files[-2:] == ["restart-1-0-of-2", "restart-1-1-of-2"]


def test_mpirun(tmp_path: Path) -> None:
    mpirun = shutil.which("mpirun")
    if mpirun is None or "Open MPI" not in subprocess.check_output([mpirun, "--version"], text=True):
        pytest.skip("Open MPI's mpirun is not installed: init under it is NOT tested")
    command = [mpirun, "--oversubscribe", "--bind-to", "none", "-np", "3"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    names = ["mpi-0-0-of-3", "mpi-0-1-of-3", "mpi-0-2-of-3"]
    assert launched(command, "mpi", tmp_path) == names


def by_master_address(rank: int, size: int, port: int) -> None:
    """torchrun's variables without its agent: rank 0 serves the store, torch's on the same port or not."""
    environment(
        RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    with pycomm.init(timeout=60) as first:
        prove(first, rank, size)
        dist.init_process_group("gloo")
        with pycomm.init(timeout=float("inf")) as second:
            prove(second, rank, size)
        dist.destroy_process_group()
        with pycomm.init(timeout=60) as third:
            prove(third, rank, size)


def test_master_address_and_port(tmp_path: Path) -> None:
    run_ranks(3, by_master_address, free_port(), env={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert left_in(tmp_path) == []


def by_slurm(rank: int, size: int) -> None:
    job = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(size), "SLURM_JOB_ID": "4711"}
    environment(**job)
    with pycomm.init() as script:  # the batch script itself has no step: it is no rank
        prove(script, 0, 1)
    environment(**job, SLURM_STEP_ID="0")
    for _ in range(2):
        with pycomm.init(timeout=60) as comm:
            prove(comm, rank, size)
    os.environ["SLURM_STEP_ID"] = "1"  # the next srun of the job
    with pycomm.init(timeout=60) as comm:
        prove(comm, rank, size)


def test_slurm(tmp_path: Path) -> None:
    run_ranks(3, by_slurm, env={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert left_in(tmp_path) == []


def by_run_folder(rank: int, size: int, folder: str) -> None:
    open_ones = []
    environment(RANK=str(rank), WORLD_SIZE=str(size), PYCOMM_RUN_DIR=folder)
    for _ in range(3):
        comm = pycomm.init(timeout=60)
        prove(comm, rank, size)
        open_ones.append(comm)
    for comm in open_ones:
        prove(comm, rank, size)
    os.environ["WORLD_SIZE"] = "1"
    os.environ["RANK"] = "0"
    with pycomm.init() as alone:
        prove(alone, 0, 1)


def test_run_folder(tmp_path: Path) -> None:
    run_ranks(4, by_run_folder, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def by_nothing(rank: int, size: int) -> None:
    environment()
    with pycomm.init() as comm, pycomm.init() as other:
        prove(comm, 0, 1)
        prove(other, 0, 1)


def test_alone() -> None:
    run_ranks(2, by_nothing)


# ---- a store, a group -----------------------------------------------------------------------------------


def opened(kind: str, place: str, size: int) -> Any:
    if kind == "file":
        return dist.FileStore(place, size)
    return dist.TCPStore("127.0.0.1", int(place), size, False, timedelta(seconds=30), wait_for_workers=False)


def by_store(rank: int, size: int, kind: str, place: str) -> None:
    environment()
    store = opened(kind, place, size)
    with pycomm.init(store=store, rank=rank, size=size, timeout=60) as comm:
        prove(comm, rank, size)
        # Some ranks make communicators of their own between: the numbers of the others are not disturbed.
        for _ in range(rank):
            pycomm.init().close()
        if rank < 2:
            pair = dist.PrefixStore("pair", store)
            for _ in range(2):
                with pycomm.init(store=pair, rank=1 - rank, size=2, timeout=60) as two:
                    prove(two, 1 - rank, 2)
        with pycomm.init(store=store, rank=size - 1 - rank, size=size, timeout=60) as reverse:
            prove(reverse, size - 1 - rank, size)
            prove(comm, rank, size)
        with pycomm.init(store=store, rank=0, size=1) as alone:
            prove(alone, 0, 1)
        comm.barrier()  # the store's server is rank 0's or the test's: nobody needs it any more


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_a_store(kind: str, tmp_path: Path) -> None:
    temp = tmp_path / "temp"
    temp.mkdir(mode=0o700)
    server = dist.TCPStore("127.0.0.1", 0, 3, True, timedelta(seconds=30), wait_for_workers=False)
    place = str(server.port) if kind == "tcp" else str(tmp_path / "store")
    run_ranks(3, by_store, kind, place, env={"XDG_RUNTIME_DIR": str(temp)})
    assert left_in(temp) == []


def by_group(rank: int, size: int, place: str) -> None:
    environment(GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", store=dist.FileStore(place, size), rank=rank, world_size=size)
    members = [3, 1, 0]  # torch orders them
    part = dist.new_group(members)
    single = dist.new_group([2])
    assert part is not None
    for _ in range(2):
        with pycomm.init(group=dist.group.WORLD, timeout=60) as comm:
            prove(comm, rank, size)
            if rank in members:
                with pycomm.init(group=part, timeout=60) as group:
                    prove(group, dist.get_rank(part), 3)
            else:
                with raises(ValueError, f"group: rank {rank} of torch's world is not a member"):
                    pycomm.init(group=part)
                with pycomm.init(group=single) as alone:
                    prove(alone, 0, 1)
            prove(comm, rank, size)
    with raises(TypeError, "group must be a torch.distributed process group, got 'gloo'"):
        pycomm.init(group="gloo")
    for more in ({"rank": 0}, {"size": 4}, {"store": dist.HashStore()}):
        with raises(ValueError, "init(group=…) takes no store=, rank= or size="):
            pycomm.init(group=dist.group.WORLD, **more)
    dist.destroy_process_group()


def test_a_group_and_a_part_of_it(tmp_path: Path) -> None:
    run_ranks(4, by_group, str(tmp_path / "store"), env={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert left_in(tmp_path) == []


# ---- what is wrong is said ------------------------------------------------------------------------------

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
        ({"timeout": None}, TypeError, "timeout must be positive seconds, got None"),
    ]
    for arguments, kind, words in bad:
        with raises(kind, words):
            pycomm.init(**arguments)


def forced(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        assert comm.deterministic is False
        prove(comm, rank, size)
        big = torch.ones(100_000)
        comm.all_reduce(big)
        assert bool((big == size).all())
        if rank == 0:  # what is forced is what the peers hear of
            with raises(pycomm.MismatchError, "all_reduce/ring", "all_reduce/direct"):
                comm.all_reduce(big)
        else:
            with raises(pycomm.MismatchError, "all_reduce/ring", "all_reduce/direct"):
                comm.all_reduce(big, algorithm="direct")


def test_a_forced_algorithm() -> None:
    for text in ("ring", "all_reduce=ring", "broadcast=chain,all_reduce=ring"):
        run_ranks(2, forced, env={"PYCOMM_ALGORITHM": text, "PYCOMM_DETERMINISTIC": ""})


def measures(rank: int, size: int) -> tuple[dict[str, list[tuple[int, str, str, int]]], bool]:
    file = tuning.cache_file(size)
    before = file.exists()
    with pycomm.init(timeout=60) as comm:
        prove(comm, rank, size)
        comm.barrier()
        assert file.exists()
        return tuning.read(comm), before


def test_the_first_use_measures_and_the_second_reads(tmp_path: Path) -> None:
    env = {"PYCOMM_TUNE": "auto", "PYCOMM_CACHE_DIR": str(tmp_path / "cache")}
    (first, had), (same, _) = run_ranks(2, measures, env=env)
    assert not had
    assert first == same
    (second, had), (same, _) = run_ranks(2, measures, env=env)
    assert had
    assert first == second == same


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


def wrong_numbers(rank: int, size: int, how: str) -> None:
    if how == "twins" and rank == 2:
        os.environ["RANK"] = "1"
    if how == "sizes" and rank == 1:
        os.environ["WORLD_SIZE"] = "4"
    pycomm.init(timeout=3)


def test_two_processes_with_one_rank() -> None:
    with pytest.raises(pycomm.CommError, match=r"1\.sock exists already: two processes have the same rank"):
        run_ranks(3, wrong_numbers, "twins")


def test_ranks_that_think_of_different_sizes() -> None:
    with pytest.raises(ValueError, match=r"rank \d of \d .*tried to join; this is rank \d of \d"):
        run_ranks(3, wrong_numbers, "sizes")


def bad_folder(rank: int, size: int, folder: str) -> str:
    os.environ["PYCOMM_RUN_DIR"] = folder
    try:
        pycomm.init(timeout=3)
    except (ValueError, pycomm.CommError) as error:
        return str(error)
    raise AssertionError("init used a folder that it cannot")


def test_run_folders_that_cannot_be(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "file").touch()
    for folder, words in ((str(shared / "none" / "none"), "none"), (str(shared / "file"), "file")):
        for message in run_ranks(2, bad_folder, folder):
            assert words in message
    for message in run_ranks(2, bad_folder, str(tmp_path / ("x" * 100))):
        assert "x" * 100 in message
