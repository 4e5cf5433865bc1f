"""Several hosts: pycomm against gloo over the same links, in the same processes.

    python bench/multihost.py [--launches 3] [--seconds 6] [--json FILE]        # as root

Hosts are network namespaces joined by veth pairs and a bridge, unshaped or shaped to 1 Gbit/s (tbf, burst
1 MB). Every rank is in a communicator of pycomm's and in a gloo group, which take turns; a call's time is the
slowest rank's, a figure the median over calls, the table shows the median over launches of the ratios, for a
line of several sizes the geometric mean and the lowest. Data are float32, one thread each.

The limit of a shaped link is what iperf3 (where it is installed, else one plain socket) gets one way, right
before; an all_reduce of 2 ranks sends every byte once each way. Compression ("on the wire") is measured
against our own all_reduce without it, in the same processes. The last lines are of bench/connecting.py; there
the third column is "at most".

The machine must otherwise be quiet; with two cores, more than one rank on a host shares them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import connecting
from namespaces import address, available, hosts, inside

KIB, MIB = 1 << 10, 1 << 20
PORT = 29_511
SMALL_TO_LARGE = tuple(4 << i for i in range(0, 25, 2))  # 4 B, 16 B, … 64 MiB
FP32 = "our fp32"  # all_reduce without compression
PLAIN = "not encrypted"  # our own all_reduce
LARGE = (MIB, 4 * MIB, 16 * MIB, 64 * MIB)


@dataclass(frozen=True)
class Case:
    """A line: this many hosts and ranks on each, and what is measured there."""

    name: str
    per_host: int
    rate: str
    sizes: tuple[int, ...]
    required: float  # of the geometric mean
    lowest: float = 0.0  # of every size
    against: str = "gloo"
    what: str = "all_reduce"
    compression: str | None = None  # of pycomm's side
    n_hosts: int = 2
    encrypt: bool = False  # pycomm's side


CASES = (
    Case("2 hosts × 1 rank, unshaped, 4 B–64 MiB", 1, "", SMALL_TO_LARGE, 1.5, 1.0),
    Case("2 hosts × 2 ranks, unshaped, 1–64 MiB", 2, "", LARGE, 3.0),
    Case("2 hosts × 1 rank, 1 Gbit/s, 4–64 MiB", 1, "1gbit", LARGE[1:], 0.95, 0.0, "iperf3"),
    Case("2 hosts × 2 ranks, 1 Gbit/s, 64 MiB", 2, "1gbit", (64 * MIB,), 1.4),
    Case("DDP, GPT of 17 M, 2 hosts, 1 Gbit/s", 1, "1gbit", (0,), 1.0, 0.0, "torch DDP", "ddp"),
    Case("the same, compression fp16", 1, "1gbit", (0,), 1.6, 0.0, "torch DDP", "ddp", "fp16"),
    Case("1 Gbit/s, fp16 on the wire, 64 MiB", 1, "1gbit", (64 * MIB,), 1.85, 0.0, FP32, compression="fp16"),
    Case("1 Gbit/s, int8 on the wire, 64 MiB", 1, "1gbit", (64 * MIB,), 3.4, 0.0, FP32, compression="int8"),
    Case("encrypted, unshaped, 1–64 MiB", 1, "", LARGE, 0.0, 0.0, PLAIN, encrypt=True),
    Case("encrypted, 1 Gbit/s, 64 MiB", 1, "1gbit", (64 * MIB,), 0.0, 0.0, PLAIN, encrypt=True),
)


def training(which: str, compression: str | None, comm: Any, gloo: Any) -> Callable[[], None]:
    """A training step of a GPT of 17 million parameters under one of the two DDPs."""
    import torch

    import pycomm
    from pycomm.demo.model import GPT, ModelConfig

    torch.manual_seed(0)
    model: Any = GPT(ModelConfig(n_layers=5, n_heads=8, n_channels=528, n_positions=128))
    if which == "pycomm":
        model = pycomm.DistributedDataParallel(model, communicator=comm, compression=compression)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=gloo)
    batch = torch.randint(256, (1, 65))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(batch).backward()

    return step


def calls(case: Case, n_bytes: int, comm: Any, plain: Any, gloo: Any) -> dict[str, Callable[[], Any]]:
    """What is timed, on each library."""
    import torch
    import torch.distributed as dist

    if case.what == "ddp":
        return {name: training(name, case.compression, comm, gloo) for name in ("pycomm", "gloo")}
    x = torch.ones(n_bytes // 4)
    y = x.clone()
    if case.compression is not None:
        return {
            "pycomm": lambda: comm.all_reduce(x, op="avg", compression=case.compression),
            case.against: lambda: comm.all_reduce(y, op="avg"),
        }
    if case.encrypt:
        return {
            "pycomm": lambda: comm.all_reduce(x, op="max"),
            case.against: lambda: plain.all_reduce(y, op="max"),
        }
    return {
        "pycomm": lambda: comm.all_reduce(x, op="max"),
        "gloo": lambda: dist.all_reduce(y, dist.ReduceOp.MAX),
    }


def measure(case: Case, seconds: float) -> dict[str, dict[str, float]]:
    """On every rank: seconds of a call by size and library, the slowest rank's."""
    import torch
    import torch.distributed as dist

    import pycomm

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], PORT, size, rank == 0)
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=size)
    plain = (
        pycomm.init(store=dist.PrefixStore("plain", store), rank=rank, size=size) if case.encrypt else None
    )
    os.environ["PYCOMM_ENCRYPT"] = str(int(case.encrypt))
    comm = pycomm.init(store=dist.PrefixStore("pycomm", store), rank=rank, size=size)
    found: dict[str, dict[str, float]] = {}
    for n_bytes in case.sizes:
        run = calls(case, n_bytes, comm, plain, dist.group.WORLD)
        n_calls = 50 if 0 < n_bytes <= 64 * KIB else 1
        times: dict[str, list[float]] = {name: [] for name in run}
        ends = time.monotonic() + seconds / len(case.sizes)
        n_blocks, more = 0, torch.ones(1)
        while more.item():
            for name, call in run.items():
                dist.barrier()
                began = time.perf_counter()
                for _ in range(n_calls):
                    call()
                took = torch.tensor([(time.perf_counter() - began) / n_calls], dtype=torch.float64)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if n_blocks > 0:  # the first connects
                    times[name].append(took.item())
            n_blocks += 1
            more.fill_(float(n_blocks < 6 or (n_blocks < 200 and time.monotonic() < ends)))
            dist.broadcast(more, 0)
        found[str(n_bytes)] = {name: statistics.median(t) for name, t in times.items()}
    for each in (comm, plain):
        if each is not None:
            each.close()
    dist.destroy_process_group()
    return found


def as_rank(number: int, seconds: float, result: Path) -> None:
    """What every rank runs; rank 0 writes what was found."""
    found = measure(CASES[number], seconds)
    if os.environ["RANK"] == "0":
        result.write_text(json.dumps(found))


def one_way(names: list[str]) -> float:
    """Bytes a second from host 1 to host 0: iperf3's, or one plain socket's."""
    if shutil.which("iperf3"):
        server = subprocess.Popen(inside(names[0], ["iperf3", "-s", "-1"]), stdout=subprocess.DEVNULL)
        time.sleep(0.5)
        command = inside(names[1], ["iperf3", "-c", address(0), "-t", "4", "-O", "1", "-J"])
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        server.wait()
        return float(json.loads(text)["end"]["sum_received"]["bits_per_second"]) / 8
    server = subprocess.Popen(inside(names[0], [sys.executable, __file__, "--sink"]), stdout=subprocess.PIPE)
    time.sleep(0.5)
    subprocess.run(inside(names[1], [sys.executable, __file__, "--source"]), check=True)
    return float(server.communicate()[0])


def sink() -> None:
    """The receiving end of a plain socket: bytes a second after the first second."""
    listener = socket.create_server((address(0), PORT))
    connection, _ = listener.accept()
    room, n_bytes, began = bytearray(MIB), 0, time.monotonic()
    while n := connection.recv_into(room):
        if time.monotonic() - began < 1.0:
            n_bytes, since = 0, time.monotonic()
        n_bytes += n
    print(n_bytes / (time.monotonic() - since))


def source() -> None:
    """The sending end."""
    connection = socket.create_connection((address(0), PORT))
    block, ends = bytes(MIB), time.monotonic() + 5.0
    while time.monotonic() < ends:
        connection.sendall(block)


def launch(number: int, seconds: float) -> dict[str, Any]:
    """One run of a case in fresh processes and namespaces."""
    case = CASES[number]
    with (
        tempfile.TemporaryDirectory(prefix="pycomm-bench-") as folder,
        hosts(case.n_hosts, case.rate) as names,
    ):
        result = Path(folder, "result.json")
        report: dict[str, Any] = {}
        if case.against == "iperf3":
            report["one_way"] = one_way(names)
        ranks = []
        for rank in range(case.n_hosts * case.per_host):
            host = rank // case.per_host
            own = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(case.n_hosts * case.per_host),
                "MASTER_ADDR": address(0),
                "PYCOMM_HOSTID": f"h{host}",
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, __file__, "--as-rank", str(result), "--case", str(number)]
            ranks.append(
                subprocess.Popen(inside(names[host], [*command, "--seconds", str(seconds)]), env=own)
            )
        codes = [process.wait() for process in ranks]
        if any(codes):
            raise SystemExit(f"{case.name}: exit codes of the ranks: {codes}")
        report["times"] = json.loads(result.read_text())
        return report


def ratios(case: Case, report: dict[str, Any]) -> dict[int, float]:
    """By size: how many times as fast as what it is compared with."""
    found = {}
    for text, times in report["times"].items():
        n_bytes = int(text)
        if case.against == "iperf3":
            peer = n_bytes / report["one_way"]
        else:
            peer = times[case.against if case.against in times else "gloo"]
        found[n_bytes] = peer / times["pycomm"]
    return found


def size_text(n_bytes: int) -> str:
    """4 B, 16 KiB, 64 MiB."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if n_bytes >= unit:
            return f"{n_bytes // unit} {name}"
    return f"{n_bytes} B"


def main() -> int:
    """Measures every line, prints the table, and returns 0 when all are met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="measuring time of a case in a launch")
    parser.add_argument("--case", type=int, action="append", help="only this line, from 0; may be repeated")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sink", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--source", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sink or args.source:
        sink() if args.sink else source()
        return 0
    if args.as_rank:
        as_rank(args.case[0], args.seconds, args.as_rank)
        return 0
    if why := available():
        raise SystemExit(why)
    reports: dict[str, Any] = {}
    all_met = True
    print("| case | against | at least | geometric mean | lowest | |\n|---|---|---|---|---|---|")
    details = []
    for number in args.case or range(len(CASES)):
        case = CASES[number]
        runs = [launch(number, args.seconds) for _ in range(args.launches)]
        reports[case.name] = runs
        each = [ratios(case, run) for run in runs]
        by_size = {n: statistics.median(run[n] for run in each) for n in each[0]}
        mean = math.exp(statistics.fmean(math.log(r) for r in by_size.values()))
        worst = min(by_size, key=lambda n: by_size[n])
        met = mean >= case.required and by_size[worst] >= case.lowest
        all_met &= met
        at_least = f"{case.required:g}" + (f" ({case.lowest:g} each)" if case.lowest else "")
        lowest = f"{by_size[worst]:.2f} at {size_text(worst)}"
        verdict = "met" if met else "**missed**"
        if not case.required:
            at_least, verdict = "", ""  # a figure to know
        print(
            f"| {case.name} | {case.against} | {at_least} | {mean:.2f} | {lowest} | {verdict} |", flush=True
        )
        times = runs[0]["times"]
        details.append(
            f"- {case.name}: "
            + "; ".join(
                f"{size_text(n)}: {r:.2f} ({times[str(n)]['pycomm'] * 1e6:.0f} µs)"
                for n, r in by_size.items()
            )
        )
    if not args.case:
        lines, met = connecting.table(64, args.launches)
        print("\n".join(lines), flush=True)
        all_met &= met
    print("\nMedian ratio (and pycomm's time in the first launch) by size:\n\n" + "\n".join(details))
    if args.json:
        args.json.write_text(json.dumps(reports) + "\n")
    return 0 if all_met else 1


if __name__ == "__main__":
    sys.exit(main())
