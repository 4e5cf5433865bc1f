"""How the ranks of a job find each other: who am I, how many are we, and which run folder do we share.

The run folder (mode 0700, removed when all have met) holds a unix socket for each rank; its place comes from,
in this order: an explicit torch group or store, the store that ``PYCOMM_RENDEZVOUS`` names,
``PYCOMM_RUN_DIR``, torchrun's store, Open MPI's or Slurm's job id; for their ranks on several hosts a store
that rank 0 serves (``MASTER_ADDR``, or Slurm's first host). The key in a store carries the run id. Its value
is the folder in which rank 0 waits now, a name that no other meeting has; rank 0 takes it back when all have
come, or when it gives up. When torchrun restarts a job, it may find what an earlier life left behind, if rank
0 was killed before it took it back: a rank goes on looking while it is alone there. (Nothing else tells lives
apart: torchrun's restart count is each agent's own, and differs between hosts.)
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from pycomm import rendezvous_slurm as slurm
from pycomm.errors import CommError, CommTimeoutError
from pycomm.hosts import Hosts, MovedError, meet, temporary_root
from pycomm.job_store import Meeting, given, open_store

_folders = itertools.count()  # of the communicators that meet in a folder named by the environment
_met: set[str] = set()  # meetings that this process was in, or where it found nobody: not to go there again
_NOWHERE = "nowhere"  # the key's value while rank 0 does not wait

#: The variables of rank, size, and what tells a job from others; the first that are set count.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", ()),
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")),
}


@dataclass(frozen=True)
class Place:
    """Who this process is, and where it meets the others."""

    rank: int
    size: int
    folder: str
    store: Any = None  # where rank 0 told the others the folder, under ``key``
    key: str = ""
    hosts: Hosts | None = None  # when the ranks are on several
    told: str = ""  # rank 0's folder, which other hosts do not have: the name of this meeting on all ranks

    @property
    def meeting(self) -> str:
        """What this meeting is called on every rank, and no other one is."""
        return self.told or self.folder

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Around the meeting there."""
        try:
            yield
            _met.add(self.meeting)
        finally:
            if self.store is not None and self.rank == 0:
                self.store.set(self.key, _NOWHERE)


def _integer(name: str) -> int:
    text = os.environ[name]
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name} must be an integer, got {text!r}") from None


def _by_store(store: Any, rank: int, size: int, timeout: float, job: str = "none") -> Place:
    if _check(Place(rank, size, "")).size == 1:
        return Place(rank, size, "")
    run = os.environ.get("TORCHELASTIC_RUN_ID", job)
    key = f"pycomm/{run}"
    end_s = time.monotonic() + timeout
    if rank == 0:
        folder = tempfile.mkdtemp(prefix="pycomm-", dir=temporary_root())
        store.set(key, folder)
    else:
        folder = _told(store, key, rank, size, timeout)

    def moved() -> bool:
        return store.get(key).decode() not in (folder, _NOWHERE)

    try:
        while True:
            try:
                name = f"{key}/{os.path.basename(folder)}"
                hosts = meet(store, name, rank, size, folder, timeout, moved)
                break
            except MovedError:
                _met.add(folder)
                timeout = max(end_s - time.monotonic(), 0.1)
                folder = _told(store, key, rank, size, timeout)
    except BaseException:
        if rank == 0:
            store.set(key, _NOWHERE)
            os.rmdir(folder)
        raise
    if hosts is None:
        return Place(rank, size, folder, store, key)
    if rank == 0 and hosts.folder == "":  # nobody else is on this host
        os.rmdir(folder)
    return Place(rank, size, hosts.folder, store, key, hosts, folder)


def _told(store: Any, key: str, rank: int, size: int, timeout: float) -> str:
    """The folder in which rank 0 waits.

    Asks again and again: torch's stores do not look for Ctrl-C while they wait, and complain of short waits.
    """
    end, pause_s = time.monotonic() + timeout, 1e-3
    try:
        while True:
            if store.check([key]):
                folder = store.get(key).decode()
                if folder not in (_NOWHERE, *_met):
                    return str(folder)
            if time.monotonic() > end:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
    except RuntimeError as error:  # a FileStore raises nothing more special
        raise CommError(
            f"rank {rank} of {size} asked the {type(store).__name__} for rank 0: {str(error).splitlines()[0]}"
        ) from error
    raise CommTimeoutError(
        f"rank {rank} of {size} waited {timeout:g} s for rank 0 to come to the {type(store).__name__}"
    )


def _by_group(group: Any, timeout: float) -> Place:
    """Through the group's own store: no call of its backend, so the timeout is ours, whatever the backend."""
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"group: rank {dist.get_rank()} of torch's world is not a member of it")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed process group, got {group!r}")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    store = dist.distributed_c10d._get_process_group_store(group)
    if store is None:
        raise ValueError("group has no store (backend mpi?): init() finds Open MPI's ranks with no argument")
    return _by_store(store, rank, size, timeout)


def _torchrun_store(rank: int, size: int, timeout: float) -> Any:
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    host, port = os.environ["MASTER_ADDR"], _integer("MASTER_PORT")
    return open_store(Meeting(host, port, f"MASTER_ADDR={host}, MASTER_PORT={port}"), rank, size, timeout)


def find(store: Any, group: Any, rank: int | None, size: int | None, timeout: float) -> Place:
    """This process's place in the job.

    Raises:
        ValueError: the arguments or the environment contradict themselves; the message names the variable.
    """
    if group is not None:
        if store is not None or rank is not None or size is not None:
            raise ValueError("init(group=…) takes no store=, rank= or size=: the group has them")
        return _by_group(group, timeout)
    if store is not None:
        if not isinstance(store, dist.Store):  # type: ignore[attr-defined]
            raise TypeError(f"store must be a torch.distributed.Store, got {store!r}")
        if rank is None or size is None:
            raise ValueError("init(store=…) needs rank= and size= too")
        numbers: tuple[Any, Any] = (rank, size)
        if not all(isinstance(n, int) for n in numbers):
            raise TypeError(f"rank= and size= must be integers, got {rank!r} and {size!r}")
        return _by_store(store, rank, size, timeout)
    if rank is not None or size is not None:
        raise ValueError("rank= and size= go with store=; without it they come from the environment")
    return _by_environment(timeout)


def _by_environment(timeout: float) -> Place:
    env = os.environ
    for launcher, (r, s, _) in _LAUNCHERS.items():
        # A Slurm batch script itself has SLURM_PROCID but no step: it is one process, not a rank.
        if r not in env or s not in env or (launcher == "slurm" and "SLURM_STEP_ID" not in env):
            continue
        rank, size = _integer(r), _integer(s)
        alone = _check(Place(rank, size, "")).size == 1
        meeting = given()
        if alone and (meeting is not None or "PYCOMM_RUN_DIR" not in env):
            return Place(rank, size, "")
        if meeting is not None:
            return _by_store(
                open_store(meeting, rank, size, timeout), rank, size, timeout, _job(launcher) or "none"
            )
        if launcher == "torchrun":
            return _by_torchrun(rank, size, timeout)
        return _by_launcher(launcher, rank, size, timeout)
    if "RANK" in env or "WORLD_SIZE" in env:
        missing = "RANK" if "WORLD_SIZE" in env else "WORLD_SIZE"
        raise ValueError(f"of RANK and WORLD_SIZE only one is set: set {missing} too, or neither")
    return Place(0, 1, "")


def _job(launcher: str) -> str:
    """What tells this job from others, by the launcher's numbers."""
    names = _LAUNCHERS[launcher][2]
    return "-".join(
        "".join(c if c.isalnum() else "_" for c in os.environ[j]) for j in names if j in os.environ
    )


def _by_torchrun(rank: int, size: int, timeout: float) -> Place:
    env = os.environ
    if "PYCOMM_RUN_DIR" in env:
        restart = env.get("TORCHELASTIC_RESTART_COUNT", "0")
        name = f"pycomm-{restart}-{next(_folders)}" if restart != "0" else f"pycomm-{next(_folders)}"
        try:
            os.makedirs(env["PYCOMM_RUN_DIR"], mode=0o700, exist_ok=True)
        except OSError as error:
            raise ValueError(f"PYCOMM_RUN_DIR cannot be made or used: {error}") from error
        return Place(rank, size, f"{env['PYCOMM_RUN_DIR']}/{name}")
    if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
        raise ValueError(
            "RANK and WORLD_SIZE are set but MASTER_ADDR and MASTER_PORT are not: start with torchrun"
        )
    return _by_store(_torchrun_store(rank, size, timeout), rank, size, timeout)


def _by_launcher(launcher: str, rank: int, size: int, timeout: float) -> Place:
    """Open MPI's and Slurm's ranks: in a folder when they are on one host, else in a store of rank 0's."""
    env, job = os.environ, _job(launcher)
    if launcher == "slurm":
        several = slurm.n_hosts() > 1
    else:
        several = "OMPI_COMM_WORLD_LOCAL_SIZE" in env and _integer("OMPI_COMM_WORLD_LOCAL_SIZE") < size
    if not several:
        root = env.get("PYCOMM_RUN_DIR") or temporary_root()
        return Place(rank, size, f"{root}/pycomm-{os.getuid()}-{job}-{next(_folders)}")
    if "MASTER_ADDR" in env and "MASTER_PORT" in env:
        store = _torchrun_store(rank, size, timeout)
    elif launcher == "slurm":
        (host, name), port = slurm.first_host(), slurm.port()
        said = f"{host}:{port} (the first host of {name}={env[name]}, a port by SLURM_JOB_ID)"
        store = open_store(Meeting(host, port, said), rank, size, timeout)
    else:
        raise ValueError(
            f"rank {rank} of {size}: Open MPI started ranks on several hosts "
            f"({env['OMPI_COMM_WORLD_LOCAL_SIZE']} of {size} on this one), and does not say where rank 0 is. "
            "Say it: mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT …, an address of rank 0's host and a "
            "free port there, or -x PYCOMM_RENDEZVOUS=file:///PATH on a file system that all hosts share"
        )
    return _by_store(store, rank, size, timeout, job or "none")


def _check(place: Place) -> Place:
    if place.size < 1 or not 0 <= place.rank < place.size:
        raise ValueError(f"rank {place.rank} of {place.size}: a rank must be in [0, size)")
    return place
