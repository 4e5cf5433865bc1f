"""How much processor time does a rank burn while it waits two seconds for a late peer?

Two ranks; rank 1 sleeps before its call, rank 0 measures the CPU time of its whole process (every thread)
over the wait. The share must stay below 5%: a rank spins for a moment, then sleeps in a futex.

Run: python bench/late_peer.py [SECONDS]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

CALLS = ("all_reduce of 4 B", "all_reduce of 16 MiB", "barrier", "recv", "all_reduce, async")


def late_peer_shares(seconds: float = 2.0) -> dict[str, float]:
    """CPU seconds per second waited, for each way of waiting, on rank 0.

    Raises:
        RuntimeError: a rank failed; its output is in the message.
    """
    with tempfile.TemporaryDirectory(prefix="pycomm-late-") as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "rank", str(seconds)],
                env={**os.environ, "PYCOMM_RUN_DIR": folder, "RANK": str(rank), "WORLD_SIZE": "2"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            outputs = [process.communicate(timeout=60 + 10 * seconds)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    if any(process.returncode for process in ranks):
        raise RuntimeError("late_peer: a rank failed\n" + "\n".join(outputs))
    shares = [float(line.split()[1]) for line in outputs[0].splitlines() if line.startswith("share ")]
    return dict(zip(CALLS, shares, strict=True))


def _rank(seconds: float) -> None:
    import torch

    import pycomm

    torch.set_num_threads(1)
    with pycomm.init() as comm:
        small, large = torch.ones(1), torch.ones(4 << 20)
        send_or_recv = comm.recv if comm.rank == 0 else comm.send
        calls = (
            lambda: comm.all_reduce(small),
            lambda: comm.all_reduce(large),
            lambda: comm.barrier(),
            lambda: send_or_recv(small, 1 - comm.rank),
            lambda: comm.all_reduce(small, async_op=True).wait(),
        )
        for call in calls:
            call()  # the first use of a path may allocate and measure
            comm.barrier()
            if comm.rank == 1:
                time.sleep(seconds)
            wall, cpu = time.monotonic(), time.process_time()
            call()
            cpu, wall = time.process_time() - cpu, time.monotonic() - wall
            print(f"share {cpu / wall}", flush=True)
            comm.barrier()


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        _rank(float(sys.argv[2]))
    else:
        for name, share in late_peer_shares(float(sys.argv[1]) if len(sys.argv) > 1 else 2.0).items():
            print(f"{name:<22} {share:8.3%}")
