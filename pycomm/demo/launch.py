"""Starts one way of training and follows it: two ranks under torchrun, or one process.

Every process has one thread, as torchrun would have it, also the one that trains alone: threads that meet
after each operation suffer most on a busy machine, and would make the comparison one of luck. What they print
to stderr goes to FOLDER/<way>.log; its first traceback is shown when they fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from pycomm.demo.train import RankResult

__all__ = ["N_RANKS", "run_way"]

N_RANKS = 2
LIMIT_S = 600.0
"""Nothing here takes a minute on two cores; what takes ten hangs."""


def run_way(way: str, folder: Path, n_steps: int, on_step: Callable[[int, float], None]) -> list[RankResult]:
    """Trains one way and returns what its ranks saw, in rank order.

    Raises:
        RuntimeError: a rank failed (its last words are quoted), or ten minutes were not enough.
    """
    n_ranks = 1 if way == "one" else N_RANKS
    task = ["-m", "pycomm.demo.train", way, str(folder), "--steps", str(n_steps)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    command = [sys.executable, *([] if way == "one" else torchrun), *task]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    results = [folder / f"{way}.rank{rank}.json" for rank in range(n_ranks)]
    for path in results:
        path.unlink(missing_ok=True)
    log_path = folder / f"{way}.log"
    with (
        log_path.open("w") as log,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        watch = threading.Timer(LIMIT_S, process.terminate)  # torchrun ends its ranks
        watch.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    state = json.loads(line)
                    on_step(state["step"], state["loss"])
            status = process.wait()
        finally:
            watch.cancel()
            process.terminate()
    if status != 0 or not all(path.exists() for path in results):
        # the first failure is the cause; torchrun's account of it comes last and is long
        _, traceback, words = log_path.read_text(errors="replace").partition("Traceback")
        first_words = "\n".join((traceback + words).splitlines()[:40])
        raise RuntimeError(
            f"demo: training '{way}' ended with status {status} (all of it: {log_path})\n{first_words}"
        )
    return [RankResult(**json.loads(path.read_text())) for path in results]
