"""How the ranks of a job find each other: who am I, how many are we, and which run folder do we share.

The run folder (mode 0700, removed when all have met) holds a unix socket for each rank; its place comes from,
in this order: an explicit torch group or store, ``PYCOMM_RUN_DIR``, torchrun's store, Open MPI's or Slurm's
job id. The key in a store carries the run id. Its value is the folder in which rank 0 waits now, a name that
no other meeting has; rank 0 takes it back when all have come, or when it gives up. When torchrun restarts a
job, it may find what an earlier life left behind, if rank 0 was killed before it took it back: a rank goes on
looking while it is alone there. (Nothing else tells lives apart: torchrun's restart count is each agent's
own, and differs between hosts.)
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pycomm.errors import CommError, CommTimeoutError
from pycomm.hosts import Hosts, MovedError, meet, temporary_root

_folders = itertools.count()  # of the communicators that meet in a folder named by the environment
_stores: list[Any] = []  # rank 0 of a store of ours serves it: it must live as long as the process
_met: set[str] = set()  # folders in which this process met its peers, or found nobody: not to go there again
_NOWHERE = "nowhere"  # the key's value while rank 0 does not wait


@dataclass(frozen=True)
class Place:
    """Who this process is, and where it meets the others."""

    rank: int
    size: int
    folder: str
    store: Any = None  # where rank 0 told the others the folder, under ``key``
    key: str = ""
    hosts: Hosts | None = None  # when the ranks are on several

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Around the meeting there."""
        try:
            yield
            _met.add(self.folder)
        finally:
            if self.store is not None and self.rank == 0:
                self.store.set(self.key, _NOWHERE)


def _integer(name: str) -> int:
    text = os.environ[name]
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name} must be an integer, got {text!r}") from None


def _by_store(store: Any, rank: int, size: int, timeout: float) -> Place:
    if _check(Place(rank, size, "")).size == 1:
        return Place(rank, size, "")
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
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
    return Place(rank, size, folder if hosts is None else hosts.folder, store, key, hosts)


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
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], _integer("MASTER_PORT")
    serves = rank == 0 and not agent
    try:
        # multi_tenant: torch.distributed may serve a store of its own on the same port of this process.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, size, serves, _patience(timeout), wait_for_workers=False, multi_tenant=True
        )
    except dist.DistError as error:
        kind, what = (CommError, "serve") if serves else (CommTimeoutError, "reach")
        raise kind(
            f"rank {rank} of {size} cannot {what} the job's store at MASTER_ADDR={host}, MASTER_PORT={port} "
            f"(timeout {timeout:g} s): {str(error).splitlines()[0]}"
        ) from error
    _stores.append(store)
    return store


def find(store: Any, group: Any, rank: int | None, size: int | None, timeout: float) -> Place:
    """This process's place in the job.

    Raises:
        ValueError: the arguments or the environment contradict themselves; the message names the variable.
    """
    env = os.environ
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
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, size = _integer("RANK"), _integer("WORLD_SIZE")
        if "PYCOMM_RUN_DIR" in env:
            restart = env.get("TORCHELASTIC_RESTART_COUNT", "0")
            name = f"pycomm-{restart}-{next(_folders)}" if restart != "0" else f"pycomm-{next(_folders)}"
            place = _check(Place(rank, size, f"{env['PYCOMM_RUN_DIR']}/{name}"))
            try:
                os.makedirs(env["PYCOMM_RUN_DIR"], mode=0o700, exist_ok=True)
            except OSError as error:
                raise ValueError(f"PYCOMM_RUN_DIR cannot be made or used: {error}") from error
            return place
        if _check(Place(rank, size, "")).size == 1:
            return Place(rank, size, "")
        if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
            raise ValueError(
                "RANK and WORLD_SIZE are set but MASTER_ADDR and MASTER_PORT are not: start with torchrun"
            )
        return _by_store(_torchrun_store(rank, size, timeout), rank, size, timeout)
    for r, s, job in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
        ("SLURM_PROCID", "SLURM_NTASKS", ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")),
    ):
        # A Slurm batch script itself has SLURM_PROCID but no step: it is one process, not a rank.
        if r not in env or s not in env or (r == "SLURM_PROCID" and "SLURM_STEP_ID" not in env):
            continue
        name = "-".join("".join(c if c.isalnum() else "_" for c in env[j]) for j in job if j in env)
        root = env.get("PYCOMM_RUN_DIR") or temporary_root()
        return _check(Place(_integer(r), _integer(s), f"{root}/pycomm-{os.getuid()}-{name}-{next(_folders)}"))
    if "RANK" in env or "WORLD_SIZE" in env:
        missing = "RANK" if "WORLD_SIZE" in env else "WORLD_SIZE"
        raise ValueError(f"of RANK and WORLD_SIZE only one is set: set {missing} too, or neither")
    return Place(0, 1, "")


def _check(place: Place) -> Place:
    if place.size < 1 or not 0 <= place.rank < place.size:
        raise ValueError(f"rank {place.rank} of {place.size}: a rank must be in [0, size)")
    return place


def _patience(timeout: float) -> timedelta:
    return timedelta(seconds=min(timeout, 1e8))  # three years: timedelta has an end, and float("inf") has not
