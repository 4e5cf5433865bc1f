"""How ranks of several hosts find each other without torchrun: PYCOMM_RENDEZVOUS, Slurm, Open MPI; and every
way in which the store cannot be reached, told within ten seconds.

One machine plays the hosts (PYCOMM_HOSTID); where routes and names matter they are network namespaces.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from hosts_network import enter, ip, network
from test_init import LAUNCHERS, ROOT, environment, free_port, left_in, prove

import pycomm
from cases import raises
from hosts_ranks import PLACEMENTS, meet, place, store, wait_for
from pycomm import job_store
from ranks import run_ranks

dist: Any = torch.distributed  # torch's types do not export the stores

pytestmark = pytest.mark.timeout(120)


def joins(
    rank: int, size: int, placement: list[int], variables: dict[str, str], names: tuple[str, str]
) -> None:
    environment(**variables, **{names[0]: str(rank), names[1]: str(size)})
    place(rank, placement)
    with pycomm.init(timeout=60) as first:
        prove(first, rank, size)
        with pycomm.init(timeout=60) as second:  # while the first is open
            prove(second, rank, size)
            assert len(set(second._c.hosts)) == len(set(placement))
        prove(first, rank, size)


TORCHRUN = ("RANK", "WORLD_SIZE")
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS")


@pytest.mark.parametrize("names", [TORCHRUN, OPEN_MPI, SLURM], ids=["torchrun", "openmpi", "slurm"])
@pytest.mark.parametrize("form", ["tcp://127.0.0.1:{port}", "localhost:{port}", "file://{folder}/meeting"])
def test_a_rendezvous_that_is_given(form: str, names: tuple[str, str], tmp_path: Path) -> None:
    text = form.format(port=free_port(), folder=tmp_path)
    variables = {"PYCOMM_RENDEZVOUS": text, "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"}
    run_ranks(3, joins, PLACEMENTS["1+2"], variables, names, env={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert left_in(tmp_path) == []


def test_a_rendezvous_on_one_host(tmp_path: Path) -> None:
    variables = {"PYCOMM_RENDEZVOUS": f"tcp://[::1]:{free_port()}"}
    run_ranks(2, joins, [0, 0], variables, TORCHRUN, env={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert left_in(tmp_path) == []


def test_slurm_over_hosts(tmp_path: Path) -> None:
    """Nothing is shared and nothing set: the first host of the step, a port by its number."""
    variables = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
    }
    run_ranks(3, joins, PLACEMENTS["1+2"], variables, SLURM, env={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert left_in(tmp_path) == []


def test_slurm_with_a_master_address(tmp_path: Path) -> None:
    variables = {
        "SLURM_STEP_ID": "0",
        "SLURM_NNODES": "2",
        "SLURM_STEP_NODELIST": "nowhere[1-2]",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    run_ranks(2, joins, [0, 1], variables, SLURM, env={"XDG_RUNTIME_DIR": str(tmp_path)})


# ---- Open MPI's own mpirun ------------------------------------------------------------------------------

SCRIPT = """
import os, sys, torch, pycomm
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
# One machine plays two hosts, of ranks 0 and of 1 and 2.
os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1" if rank == 0 else "2"
os.environ.update(PYCOMM_HOSTID=f"host{min(rank, 1)}", PYCOMM_SOCKET_IFNAME="lo")
try:
    with pycomm.init(timeout=60) as comm:
        t = comm.all_reduce(torch.full((1000,), rank + 1.0), deterministic=True)
        hosts = " ".join(map(str, comm._c.hosts))
        os.write(1, f"SUM {int(t[0])} HOSTS {hosts}\\n".encode())  # at once: ranks share the output
except ValueError as error:
    os.write(1, f"REFUSED {error}\\n".encode())
"""


def mpirun(tmp_path: Path, *options: str) -> str:
    program = shutil.which("mpirun")
    if program is None or "Open MPI" not in subprocess.check_output([program, "--version"], text=True):
        pytest.skip("Open MPI's mpirun is not installed: init under it is NOT tested")
    command = [program, "--oversubscribe", "--bind-to", "none", "-np", "3", *options]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    script, temp = tmp_path / "script.py", tmp_path / "temp"
    script.write_text(SCRIPT)
    temp.mkdir(mode=0o700)
    env = {k: v for k, v in os.environ.items() if k not in LAUNCHERS} | {
        "PYTHONPATH": str(ROOT), "PYCOMM_TUNE": "off", "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(temp),
    }  # fmt: skip
    done = subprocess.run(
        [*command, sys.executable, str(script)],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert left_in(temp) == []
    return done.stdout


@pytest.mark.parametrize("how", ["address", "file"])
def test_mpirun_over_hosts(how: str, tmp_path: Path) -> None:
    if how == "address":
        options = ["-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={free_port()}"]
    else:
        options = ["-x", f"PYCOMM_RENDEZVOUS=file://{tmp_path}/meeting"]
    assert mpirun(tmp_path, *options).count("SUM 6 HOSTS 0 1 1") == 3


def test_mpirun_over_hosts_needs_to_be_told_where(tmp_path: Path) -> None:
    text = mpirun(tmp_path)
    assert text.count("REFUSED") == 3
    assert "Open MPI started ranks on several hosts (2 of 3 on this one)" in text
    assert "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT" in text


# ---- bad input ------------------------------------------------------------------------------------------

BAD = ["host", "tcp://host", "tcp://:5", "tcp://host:http", "tcp://host:99999", "tcp://host:0", "tcp://h:1/x",
       "file://relative", "file:///", "http://host:5"]  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_a_rendezvous_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOMM_RENDEZVOUS", text)
    with pytest.raises(ValueError, match="PYCOMM_RENDEZVOUS must be tcp://HOST:PORT") as caught:
        job_store.given()
    assert repr(text) in str(caught.value)


def test_connect_timeouts_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("0", "-1", "soon", "inf", "nan"):
        monkeypatch.setenv("PYCOMM_CONNECT_TIMEOUT", text)
        with pytest.raises(ValueError, match="PYCOMM_CONNECT_TIMEOUT must be positive seconds"):
            job_store.connect_timeout_s()


def refused(rank: int, size: int, variables: dict[str, str], host: str = "") -> tuple[str, float, str]:
    """Only rank 1 of two comes, or rank 0 where it cannot serve; what it is told, and after which time."""
    if host:
        enter(host)
    environment(**{"WORLD_SIZE": "2", "RANK": "1", **variables})
    begin = time.monotonic()
    try:
        pycomm.init()  # the default timeout: five minutes
    except (ValueError, pycomm.CommError) as error:
        return type(error).__name__, time.monotonic() - begin, str(error)
    raise AssertionError("init returned")


def told(variables: dict[str, str], host: str = "", rank: int = 1) -> str:
    ((_, took, text),) = run_ranks(1, refused, {**variables, "RANK": str(rank)}, host, timeout=60)
    assert took < 12.0, (took, text)  # 10 s, and what this machine's other work takes
    assert f"rank {rank} of 2" in text
    assert socket.gethostname() in text
    return str(text)


def test_a_port_that_refuses() -> None:
    port = free_port()
    for variables in (
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        {"PYCOMM_RENDEZVOUS": f"127.0.0.1:{port}"},
    ):
        text = told({**variables, "PYCOMM_CONNECT_TIMEOUT": "1"})
        assert f"127.0.0.1 port {port} refused the connection: nobody listens there" in text
        assert str(next(iter(variables.values()))) in text
        assert "Does rank 0 run on that host" in text and "PYCOMM_CONNECT_TIMEOUT" in text


def test_a_port_that_refuses_is_told_in_time() -> None:
    assert "refused" in told({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())})


def test_a_name_that_has_no_address() -> None:
    text = told({"PYCOMM_RENDEZVOUS": "tcp://no-such-host.invalid:29500"})
    assert "'no-such-host.invalid' cannot be resolved" in text
    text = told({"PYCOMM_RENDEZVOUS": "tcp://no-such-host.invalid:29500"}, rank=0)
    assert "cannot serve" in text and "'no-such-host.invalid' cannot be resolved" in text


def test_a_name_that_is_this_host() -> None:
    text = told({"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "PYCOMM_CONNECT_TIMEOUT": "1"})
    assert "refused" in text
    assert "which is this host itself: if rank 0 is on another one, give an address that other hosts" in text


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = told({"PYCOMM_RENDEZVOUS": f"127.0.0.1:{port}"}, rank=0)
        assert "cannot serve the job's store" in text and f"port {port} must be free there" in text
        text = told({"PYCOMM_RENDEZVOUS": f"127.0.0.1:{port}", "PYCOMM_CONNECT_TIMEOUT": "2"})
        assert "something else may listen there" in text


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    text = told({"PYCOMM_RENDEZVOUS": f"file://{tmp_path}/missing/meeting"})
    assert "is in" in text and "which is no folder" in text
    assert "is a folder" in told({"PYCOMM_RENDEZVOUS": f"file://{tmp_path}"})


def test_hosts_that_do_not_answer() -> None:
    with network(2) as hosts:
        ip("-n", hosts[1], "neigh", "add", "10.79.0.77", "lladdr", "02:00:00:00:00:77", "dev", "eth0")
        for address, said in (
            ("10.79.0.99", "no route to 10.79.0.99"),  # of this network, and nobody has it
            ("10.80.0.1", "no route to 10.80.0.1"),  # of none that this host has
            ("10.79.0.77", "10.79.0.77 port 29500 timed out"),  # what goes there is lost
            ("10.79.0.1", "10.79.0.1 port 29500 refused"),  # the other host, where nobody listens
        ):
            assert said in told({"PYCOMM_RENDEZVOUS": f"tcp://{address}:29500"}, hosts[1])


def on_network(rank: int, size: int, hosts: list[str], variables: dict[str, str]) -> None:
    enter(hosts[rank])
    environment(RANK=str(rank), WORLD_SIZE=str(size), **variables)
    place(rank, list(range(size)), PYCOMM_SOCKET_IFNAME="")
    with pycomm.init(timeout=30) as comm:
        prove(comm, rank, size)
        comm.barrier()


def test_hosts_of_a_network(tmp_path: Path) -> None:
    with network(2) as hosts:
        for variables in (
            {"PYCOMM_RENDEZVOUS": "tcp://10.79.0.1:29500"},
            {"PYCOMM_RENDEZVOUS": "[fd79::1]:29500"},
            {"PYCOMM_RENDEZVOUS": f"file://{tmp_path}/meeting"},
        ):
            run_ranks(2, on_network, hosts, variables, timeout=60)


def unlike(rank: int, size: int, hosts: list[str], what: str) -> tuple[float, str]:
    """Rank 1 differs, or cannot be reached; both are told, in joining or in the first call."""
    enter(hosts[rank])
    place(rank, [0, 1], PYCOMM_SOCKET_IFNAME="", PYCOMM_RENDEZVOUS="tcp://10.79.0.1:29500")
    if rank == 1 and what == "version":
        pycomm.__version__ = "99.1"
    if rank == 1 and what == "encryption":
        os.environ["PYCOMM_ENCRYPT"] = "1"
    if rank == 1 and what == "interface":
        os.environ["PYCOMM_SOCKET_IFNAME"] = "ib0"
    begin = time.monotonic()
    try:
        comm = pycomm.init(timeout=30)
        meet(rank, size, "joined")
        if what == "link" and rank == 0:  # nothing is connected yet
            ip("-n", hosts[1], "link", "set", "eth0", "down")
        meet(rank, size, "go")
        begin = time.monotonic()
        comm.all_reduce(torch.ones(3))
    except (ValueError, pycomm.CommError) as error:
        took, text = time.monotonic() - begin, str(error)
        meet(rank, size, "told")  # who ends at once resets connections on which the other is still told
        return took, text
    raise AssertionError("ranks that differ went on")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("version", ("pycomm 99.1",)),
        ("encryption", ("PYCOMM_ENCRYPT differs",)),
        ("link", ("rank", "10.79.0.")),
        ("interface", ("PYCOMM_SOCKET_IFNAME=ib0 matches no interface", "eth0 10.79.0.2/24")),
    ],
)
def test_ranks_that_differ(what: str, words: tuple[str, ...]) -> None:
    with network(2) as hosts:
        for took, text in run_ranks(2, unlike, hosts, what, timeout=60):
            assert took < 12.0, (took, text)
            for word in words:
                assert word in text
            assert what != "encryption" or text.count("(host") == 1, f"who is named twice: {text}"
            if what == "link":
                assert "no route" in text or "timed out" in text or "unreachable" in text, text


def barriers(rank: int, size: int, placement: list[int]) -> None:
    """torch's monitored_barrier meets in the store, under the name of the communicator's meeting."""
    place(rank, placement)
    dist.init_process_group("pycomm", store=store(size), rank=rank, world_size=size)
    for _ in range(2):
        dist.monitored_barrier(timeout=timedelta(seconds=20))
    dist.destroy_process_group()


def test_a_meeting_has_one_name_on_all_hosts() -> None:
    run_ranks(3, barriers, PLACEMENTS["1+2"])


def moves(rank: int, size: int) -> float:
    """Rank 1 comes first, and finds where rank 0 of an earlier life was."""
    place(rank, [0, 1])
    meeting = store(size)
    if rank == 0:
        meeting.set("pycomm/none", "/gone/pycomm-earlier")
        meet(rank, size, "set")
        wait_for(lambda: meeting.check(["pycomm/none/pycomm-earlier/hosts/1"]))
    else:
        meet(rank, size, "set")
    comm = pycomm.init(store=meeting, rank=rank, size=size, timeout=30)
    comm.all_reduce(x := torch.ones(3))
    return float(x[0])


def test_a_rank_that_finds_an_earlier_life_of_the_job() -> None:
    assert run_ranks(2, moves, timeout=60) == [2.0, 2.0]


def refused_there(rank: int, size: int, placement: list[int]) -> None:
    """Rank 1's init fails behind the meeting; the other one is told why."""
    place(rank, placement, PYCOMM_ALGORITHM="quick" if rank == 1 else "")
    if rank == 1:
        with raises(ValueError, "algorithm 'quick' is not one of all_reduce's"):
            pycomm.init(store=store(size), rank=rank, size=size, timeout=30)
        return
    with pytest.raises(pycomm.CommError, match=r"rank 1.*PYCOMM_ALGORITHM: algorithm 'quick' is not one of"):
        pycomm.init(store=store(size), rank=rank, size=size, timeout=30).barrier()


@pytest.mark.parametrize("placement", [[0, 0], [0, 1]])
def test_an_init_that_fails_behind_the_meeting(placement: list[int]) -> None:
    run_ranks(2, refused_there, placement, timeout=60)


def test_a_wrong_type() -> None:
    with raises(TypeError, "store must be a torch.distributed.Store, got 'tcp://host:1'"):
        pycomm.init(store="tcp://host:1", rank=0, size=2)
