"""How the ranks of a job find each other: who am I, how many are we, and which run folder do we share.

The run folder (mode 0700, removed when all have met) holds a unix socket for each rank; its place comes from,
in this order: an explicit torch group or store, ``PYCOMM_RUN_DIR``, torchrun's store, Open MPI's or Slurm's
job id. Keys in a store carry the run id, the restart count and the number of the communicator, so that a
restarted or second job never meets an older one's.
"""

from __future__ import annotations

import itertools
import os
import socket
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

_folders = itertools.count()  # of the communicators that meet in a folder named by the environment
_stores: list[Any] = []  # rank 0 of a store of ours serves it: it must live as long as the process


@dataclass(frozen=True)
class Place:
    """Who this process is, and where it meets the others."""

    rank: int
    size: int
    folder: str


def _integer(name: str) -> int:
    text = os.environ[name]
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name} must be an integer, got {text!r}") from None


def _temp_root() -> str:
    return os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()


def _host() -> str:
    """This machine, as a string that another machine does not have."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown"
    return f"{socket.gethostname()} {boot}"


def _other_host(mine: str, first: str, rank: int) -> ValueError:
    return ValueError(
        f"rank {rank} runs on {mine.split()[0]}, rank 0 on {first.split()[0]}: this version connects the "
        "ranks of one machine; start all of them there"
    )


def _by_store(store: Any, rank: int, size: int, timeout: float) -> Place:
    if size == 1:
        return Place(rank, size, "")
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # Each rank's k-th communicator of this store meets the others' k-th, whatever else it has made meanwhile.
    # (An agent's store outlives a worker that it restarts, hence the restart count.)
    prefix = f"pycomm/{run}/{restart}"
    key = f"{prefix}/{store.add(f'{prefix}/made by rank {rank}', 1)}"
    if rank == 0:
        folder = tempfile.mkdtemp(prefix="pycomm-", dir=_temp_root())
        store.set(key, f"{_host()}\n{folder}")
        return Place(rank, size, folder)
    store.wait([key], timedelta(seconds=timeout))
    first, _, folder = store.get(key).decode().partition("\n")
    if first.split()[-1] != _host().split()[-1]:
        raise _other_host(_host(), first, rank)
    return Place(rank, size, folder)


def _by_group(group: Any) -> Place:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return Place(rank, size, "")
    message: list[Any] = [None]
    if rank == 0:
        message = [(_host(), tempfile.mkdtemp(prefix="pycomm-", dir=_temp_root()))]
    dist.broadcast_object_list(message, src=dist.get_global_rank(group, 0), group=group)
    first, folder = message[0]
    if first.split()[-1] != _host().split()[-1]:
        raise _other_host(_host(), first, rank)
    return Place(rank, size, folder)


def _torchrun_store(rank: int, size: int, timeout: float) -> Any:
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], _integer("MASTER_PORT")
    # multi_tenant: torch.distributed may serve a store of its own on the same port of this process.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        size,
        rank == 0 and not agent,
        timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,
    )
    _stores.append(store)
    return store


def find(store: Any, group: Any, rank: int | None, size: int | None, timeout: float) -> Place:
    """This process's place in the job.

    Raises:
        ValueError: the arguments or the environment contradict themselves; the message names the variable.
    """
    env = os.environ
    if group is not None:
        return _check(_by_group(group))
    if store is not None:
        if rank is None or size is None:
            raise ValueError("init(store=…) needs rank= and size= too")
        return _check(_by_store(store, rank, size, timeout))
    if rank is not None or size is not None:
        raise ValueError("rank= and size= go with store=; without it they come from the environment")
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, size = _integer("RANK"), _integer("WORLD_SIZE")
        if "PYCOMM_RUN_DIR" in env:
            return _check(Place(rank, size, f"{env['PYCOMM_RUN_DIR']}/pycomm-{next(_folders)}"))
        if size == 1:
            return _check(Place(rank, size, ""))
        if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
            raise ValueError(
                "RANK and WORLD_SIZE are set but MASTER_ADDR and MASTER_PORT are not: start with torchrun"
            )
        return _check(_by_store(_torchrun_store(rank, size, timeout), rank, size, timeout))
    for r, s, job in (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
        ("SLURM_PROCID", "SLURM_NTASKS", ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")),
    ):
        # A Slurm batch script itself has SLURM_PROCID but no step: it is one process, not a rank.
        if r not in env or s not in env or (r == "SLURM_PROCID" and "SLURM_STEP_ID" not in env):
            continue
        name = "-".join("".join(c if c.isalnum() else "_" for c in env[j]) for j in job if j in env)
        root = env.get("PYCOMM_RUN_DIR") or _temp_root()
        return _check(Place(_integer(r), _integer(s), f"{root}/pycomm-{os.getuid()}-{name}-{next(_folders)}"))
    return Place(0, 1, "")


def _check(place: Place) -> Place:
    if place.size < 1 or not 0 <= place.rank < place.size:
        raise ValueError(f"rank {place.rank} of {place.size}: a rank must be in [0, size)")
    return place
