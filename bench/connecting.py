"""How long it takes ranks on several hosts to meet and connect, and what the proof of the secret costs of it.

    python bench/connecting.py [--ranks 64] [--launches 3]

Hosts are played by one machine over its loopback interface. *Joining*: from the moment when all processes
run until the slowest one has returned from ``pycomm.init`` and a first barrier. *Proof*: the first message
between two ranks connects and proves both ways; a later one does not; and a plain socket connects and carries
a byte there and back. The proof's cost is first − later − plain, the median over fresh communicators.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

JOIN_AT_MOST_S = 5.0
PROOF_AT_MOST_S = 5e-3
N_CONNECTS = 20


def _join(rank: int, size: int, per_host: int, port: int) -> float:
    import torch.distributed as dist

    import pycomm

    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    store.add("here", 1)
    while int(store.add("here", 0)) < size:
        time.sleep(0.01)
    began = time.monotonic()
    comm = pycomm.init(store=store, rank=rank, size=size, timeout=120)
    comm.barrier()
    took = time.monotonic() - began
    # Nobody leaves, and rank 0 does not stop the store, before all are there.
    comm.barrier()
    comm.close()
    return took


def _proof(rank: int, size: int, per_host: int, port: int) -> float:
    import torch.distributed as dist

    import pycomm

    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    listener = socket.create_server(("127.0.0.1", 0))
    store.set(f"plain{rank}", str(listener.getsockname()[1]))
    other = int(store.get(f"plain{1 - rank}"))
    found = []
    for i in range(N_CONNECTS):
        comm = pycomm.init(store=dist.PrefixStore(f"{i}", store), rank=rank, size=size, timeout=60)
        times = []
        for _ in range(3):
            began = time.perf_counter()
            comm.barrier()
            times.append(time.perf_counter() - began)
        began = time.perf_counter()
        if rank == 0:
            with socket.create_connection(("127.0.0.1", other)) as s:
                s.sendall(b"x")
                s.recv(1)
        else:
            s, _ = listener.accept()
            s.sendall(s.recv(1))
            s.close()
        plain = time.perf_counter() - began
        comm.barrier()
        comm.close()
        found.append(times[0] - min(times[1:]) - plain)
    return statistics.median(found)


def _as_rank(run: Callable[..., float], rank: int, size: int, per_host: int, port: int, results: Any) -> None:
    os.environ.update(
        PYCOMM_HOSTID=f"host{rank // per_host}",
        PYCOMM_SOCKET_IFNAME="lo",
        PYCOMM_TUNE="off",
        OMP_NUM_THREADS="1",
    )
    results.put(run(rank, size, per_host, port))


def _slowest(run: Callable[..., float], size: int, per_host: int) -> float:
    """What the slowest of ``size`` processes returns."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pycomm"])  # else 64 imports are measured
    results = context.Queue()
    processes = [
        context.Process(target=_as_rank, args=(run, rank, size, per_host, port, results))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"exit codes of the ranks: {[process.exitcode for process in processes]}")
    return max(results.get() for _ in processes)


def table(ranks: int, launches: int) -> tuple[list[str], bool]:
    """The lines of the table, and whether all are met."""
    lines, met = [], True

    def add(name: str, against: str, at_most: str, found: str, good: bool) -> None:
        nonlocal met
        met &= good
        lines.append(f"| {name} | {against} | {at_most} | {found} | | {'met' if good else '**missed**'} |")

    for per_host in (1, 8):
        took = statistics.median(_slowest(_join, ranks, per_host) for _ in range(launches))
        name = f"{ranks} ranks join, {per_host} a host"
        add(name, "", f"{JOIN_AT_MOST_S:g} s", f"{took:.2f} s", took < JOIN_AT_MOST_S)
    proof = statistics.median(_slowest(_proof, 2, 1) for _ in range(launches))
    add(
        "authentication, a connection",
        "connecting without",
        f"+{PROOF_AT_MOST_S * 1e3:g} ms",
        f"{proof * 1e3:+.2f} ms",
        proof < PROOF_AT_MOST_S,
    )
    return lines, met


def main() -> int:
    """Prints the table; 0 when all is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--launches", type=int, default=3)
    args = parser.parse_args()
    lines, met = table(args.ranks, args.launches)
    print("| case | against | at most | found | | |\n|---|---|---|---|---|---|")
    print("\n".join(lines))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
