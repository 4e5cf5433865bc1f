"""pycomm.init: every way in which the ranks of a job find each other (test_init_errors.py: when they do not).

Launchers are real where they are installed (torchrun, mpirun); Slurm is its environment variables.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
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
