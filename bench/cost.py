"""Does the cost model predict the time of ring and direct in shared memory? Prints measured / predicted.

    python bench/cost.py [--ranks 2] [--json cost.json]

Calibration: one algorithm that is not among the predicted ones, timed at three sizes, gives alpha, a call's
fixed time with its synchronisations (4 KiB), and beta, seconds per byte touched in cache (1 MiB) and out of
it (64 MiB). All ranks' inputs and outputs together are in cache while they fill at most half of the last one,
and out of it from twice of it on; between, beta is taken as linear in the logarithm of the size. The
algorithm is halving_doubling, which like the predicted ones reduces in one phase and distributes in another:
where the two cores share no cache, a byte of a sum that is written for a peer to read costs more than one
that is only copied (one_shot's are twice as cheap there). Prediction:

    t = alpha + bytes touched * beta(size)

where the bytes that the busiest rank touches are counted from the schedule (csrc/schedule/cost_shared.cc).
The waits of later tiles overlap with work, so what they cost is in beta. Ordinary tensors (tiled protocol)
and arena tensors (direct protocol) are calibrated apart.
Calls of all algorithms at a size are interleaved; a time is the median over repetitions of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from as_ranks import run_as_ranks

CALIBRATED = "halving_doubling"
PREDICTED = ("ring", "direct")
SIZES = [64 << (10 + 2 * i) for i in range(6)]  # 64 KiB … 64 MiB
FIXED, NEAR, FAR = 4 << 10, 1 << 20, 64 << 20
TILE = 128 << 10


def last_cache_bytes() -> int:
    """The size of the last cache of core 0; 32 MiB where the kernel does not tell."""
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return int(sizes[-1].read_text().strip().removesuffix("K")) << 10 if sizes else 32 << 20


def measure(comm: Any, protocol: str, sizes: list[int], algorithms: tuple[str, ...]) -> dict[str, float]:
    """Seconds of a call by "algorithm size"; collective, the same result on every rank."""
    import torch

    times: dict[str, float] = {}
    for n_bytes in sizes:
        make = comm.empty if protocol == "direct" else torch.empty
        source, target = make(n_bytes // 4), make(n_bytes // 4)
        source.fill_(1.0)
        target.fill_(0.0)
        samples: dict[str, list[float]] = {a: [] for a in algorithms}
        n_samples = 41 if n_bytes <= 1 << 20 else 11
        for i in range(n_samples + 2):  # the first two lower the plan and touch the memory
            for algorithm in algorithms:
                # algorithm= would leave the tile to the table; a row names both.
                comm._c.set_selection(0, [(2**64 - 1, algorithm, algorithm, TILE)])
                comm.barrier()
                begin = time.perf_counter()
                comm.all_reduce(source, out=target)
                took = time.perf_counter() - begin
                if i >= 2:
                    samples[algorithm].append(took)
        for algorithm in algorithms:
            median = torch.tensor([statistics.median(samples[algorithm])], dtype=torch.float64)
            comm.all_reduce(median, op="max", algorithm="direct")
            times[f"{algorithm} {n_bytes}"] = float(median.item())
    return times


def rank_main(result: Path) -> None:
    """What every rank runs; rank 0 writes what it measured."""
    import pycomm

    report: dict[str, Any] = {}
    with pycomm.init() as comm:
        for protocol in ("tiled", "direct"):
            report[protocol] = measure(comm, protocol, [FIXED, *SIZES], (CALIBRATED, *PREDICTED))
        if comm.rank == 0:
            result.write_text(json.dumps(report))


def touched(algorithm: str, n_ranks: int, n_bytes: int, protocol: str) -> float:
    """Bytes that the busiest rank reads and writes."""
    from pycomm import _C

    _, read, written = _C.schedule.shared_work("all_reduce", algorithm, n_ranks, n_bytes, protocol, TILE)
    return read + written


class Model:
    """A protocol's constants on this machine, from the calibration alone."""

    def __init__(self, times: dict[str, float], n_ranks: int, protocol: str) -> None:
        self.n_ranks, self.protocol = n_ranks, protocol
        small, near, far = (times[f"{CALIBRATED} {n}"] for n in (FIXED, NEAR, FAR))
        at_small, at_near, at_far = (touched(CALIBRATED, n_ranks, n, protocol) for n in (FIXED, NEAR, FAR))
        if not small < near < far:
            raise SystemExit(f"bench/cost.py: this machine is too busy to calibrate: {times}")
        self.near = (near - small) / (at_near - at_small)
        self.far = (far - small) / (at_far - at_small)
        self.alpha = max(small - at_small * self.near, 0.0)

    def beta(self, n_bytes: int) -> float:
        """Seconds per byte touched by a call of this size."""
        x = math.log2(2 * self.n_ranks * n_bytes / last_cache_bytes()) / 2 + 0.5
        return self.near + (self.far - self.near) * min(max(x, 0.0), 1.0)

    def predict(self, algorithm: str, n_bytes: int) -> float:
        """Seconds of a call."""
        return self.alpha + touched(algorithm, self.n_ranks, n_bytes, self.protocol) * self.beta(n_bytes)


def start(n_ranks: int, result: Path) -> None:
    """Runs this file as every rank, and raises if one fails."""
    with tempfile.TemporaryDirectory(prefix="pycomm-cost-") as folder:
        run_as_ranks(n_ranks, folder, __file__, "--as-rank", str(result), PYCOMM_TUNE="off")


def main() -> None:
    """Calibrates, measures, predicts, prints; exits with 1 when a ratio is beyond a factor of 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="at least 2")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank is not None:
        rank_main(options.as_rank)
        return
    if options.ranks < 2:
        parser.error(f"--ranks is {options.ranks}, expected 2 or more")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "measured.json")
        start(options.ranks, result)
        report = json.loads(result.read_text())
    rows = []
    for protocol in ("tiled", "direct"):
        model = Model(report[protocol], options.ranks, protocol)
        print(
            f"{'ordinary' if protocol == 'tiled' else 'arena'} tensors, {options.ranks} ranks: alpha "
            f"{model.alpha * 1e6:.2f} us, beta {model.near * 1e12:.1f} ps per byte in cache, "
            f"{model.far * 1e12:.1f} out of it"
        )
        print(f"{'algorithm':>10} {'bytes':>10} {'measured us':>12} {'predicted us':>13} {'ratio':>6}")
        for algorithm in PREDICTED:
            for n_bytes in SIZES:
                measured = report[protocol][f"{algorithm} {n_bytes}"]
                predicted = model.predict(algorithm, n_bytes)
                rows.append(
                    {
                        "protocol": protocol,
                        "algorithm": algorithm,
                        "bytes": n_bytes,
                        "measured_s": measured,
                        "predicted_s": predicted,
                    }
                )
                print(
                    f"{algorithm:>10} {n_bytes:>10} {measured * 1e6:12.1f} {predicted * 1e6:13.1f} "
                    f"{measured / predicted:6.2f}"
                )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    beyond = [r for r in rows if not 0.5 <= float(r["measured_s"]) / float(r["predicted_s"]) <= 2]
    print(f"{len(rows) - len(beyond)} of {len(rows)} within a factor of 2")
    raise SystemExit(1 if beyond else 0)


if __name__ == "__main__":
    main()
