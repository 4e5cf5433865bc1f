"""How the ranks of a bench run find each other and agree, apart from anything that is measured.

The control channel is torch's default process group over gloo (also the group that the gloo peer uses). The
ranks were started by this bench's launcher (a file store in its run folder), by torchrun, or by mpirun.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["STORE_VARIABLE", "Control", "launched_by", "load_mpi"]

STORE_VARIABLE = "PYCOMM_BENCH_STORE"


def launched_by() -> str | None:
    """``bench``, ``torchrun`` or ``mpirun`` when this process is one of several ranks, else None."""
    if STORE_VARIABLE in os.environ:
        return "bench"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return "torchrun"
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        return "mpirun"
    return None


def load_mpi() -> Any:
    """mpi4py's MPI module, with the cheapest thread level that this program's use allows."""
    mpi4py = importlib.import_module("mpi4py")
    mpi4py.rc.thread_level = "funneled"
    return importlib.import_module("mpi4py.MPI")


def _mpi_store_path(rank: int) -> str:
    path = os.path.join(tempfile.mkdtemp(prefix="pycomm-bench-"), "store") if rank == 0 else None
    return str(load_mpi().COMM_WORLD.bcast(path, 0))


class Control:
    """This rank among the others. Every method is collective."""

    def __init__(self, timeout_s: float, one_host: bool = True) -> None:
        """Joins the run that the environment describes.

        Raises:
            RuntimeError: the environment describes none; with ``one_host``: ranks are on more than one.
        """
        launcher = launched_by()
        if launcher is None:
            raise RuntimeError("bench: no ranks here: neither RANK nor OMPI_COMM_WORLD_RANK is set")
        by_mpi = "OMPI_COMM_WORLD_RANK" in os.environ and launcher != "torchrun"
        self.rank = int(os.environ["OMPI_COMM_WORLD_RANK" if by_mpi else "RANK"])
        self.n_ranks = int(os.environ["OMPI_COMM_WORLD_SIZE" if by_mpi else "WORLD_SIZE"])
        timeout = timedelta(seconds=timeout_s)
        if launcher == "torchrun":
            dist.init_process_group("gloo", timeout=timeout)
        else:
            path = os.environ.get(STORE_VARIABLE) or _mpi_store_path(self.rank)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{path}",
                rank=self.rank,
                world_size=self.n_ranks,
                timeout=timeout,
            )
        self._store = dist.distributed_c10d._get_default_store()
        hosts = self.exchange("host", _host())
        if one_host and len(set(hosts)) != 1:
            raise RuntimeError(f"bench: ranks on several hosts ({hosts}), but the limit is one's memory")

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        dist.barrier()

    def max(self, values: list[float]) -> list[float]:
        """Element by element, the largest over ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        result: list[float] = tensor.tolist()
        return result

    def sum(self, values: list[int]) -> list[int]:
        """Element by element, the sum over ranks."""
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor)
        result: list[int] = tensor.tolist()
        return result

    def decide(self, choice: bool) -> bool:
        """Rank 0's choice, on every rank."""
        tensor = torch.tensor([choice], dtype=torch.uint8)
        dist.broadcast(tensor, 0)
        return bool(tensor.item())

    def exchange(self, key: str, value: Any) -> list[Any]:
        """Every rank's value (as JSON), in rank order; a key is used once."""
        self._store.set(f"bench/{key}/{self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"bench/{key}/{rank}")) for rank in range(self.n_ranks)]

    def close(self) -> None:
        """Leaves the run."""
        dist.destroy_process_group()


def _host() -> str:
    # the boot id tells hosts apart even where containers share a host name
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
