"""examples/elastic_train.py on two hosts: a rank is killed, torchrun restarts all, and the end is the same.

Two agents of torchrun (one for each host, ``PYCOMM_HOSTID``) meet over loopback, with two ranks each. The
reference is the same program, which nobody disturbs: the last loss and the weights must be equal bit for bit.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 180.0


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Short: pytest's own may be too long for the path of a unix socket (107 bytes)."""
    with tempfile.TemporaryDirectory(prefix="pycomm-elastic-") as name:
        yield Path(name)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def spared() -> None:
    """In the new process: SIGTERM stays pending, here and in the ranks.

    An agent sends it to its ranks as soon as it hears of a restart, which may be before they have said what
    they saw. They end of themselves. Without it the agents may count restarts differently: the host whose
    ranks were ended has had none, by its agent's count.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def agent(host: str, place: Path, port: int, spare: bool, *options: str) -> subprocess.Popen[str]:
    (place / host).mkdir(parents=True)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYCOMM_TUNE": "off",
        "PYCOMM_HOSTID": host,
        "PYCOMM_SOCKET_IFNAME": "lo",
        "TMPDIR": str(place / host),
    }
    for name in ("XDG_RUNTIME_DIR", "PYCOMM_RUN_DIR"):
        environment.pop(name, None)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"),
        *("--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
        *("--rdzv-id", "elastic", "--local-addr", "127.0.0.1"),
        *(str(ROOT / "examples" / "elastic_train.py"), "--folder", str(place / "checkpoints"), *options),
    ]
    with open(place / f"{host}.out", "w") as out, open(place / f"{host}.err", "w") as err:
        before = spared if spare else None
        return subprocess.Popen(
            command, env=environment, stdout=out, stderr=err, text=True, preexec_fn=before
        )


def run(place: Path, spare: bool, *options: str) -> tuple[str, str]:
    """What both agents and their ranks said."""
    port = free_port()
    agents = [agent(host, place, port, spare, *options) for host in ("hosta", "hostb")]
    end_s = time.monotonic() + LIMIT_S
    try:
        codes = [a.wait(timeout=max(0.0, end_s - time.monotonic())) for a in agents]
    finally:
        for a in agents:
            a.kill()
            a.wait()
    out, err = ("".join((place / f"{h}.{k}").read_text() for h in ("hosta", "hostb")) for k in ("out", "err"))
    assert codes == [0, 0], out + err
    return out, err


def ending(out: str) -> str:
    [line] = re.findall(r"^loss .*$", out, re.MULTILINE)
    return str(line)


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> str:
    out, err = run(folder / "calm", False)
    assert "4 ranks begin with step 0\n" in out and "PeerLostError" not in err, out + err
    return ending(out)


@pytest.mark.parametrize(("victim", "spare"), [(3, True), (3, False), (0, False)])
def test_a_killed_rank_and_the_same_bits(folder: Path, undisturbed: str, victim: int, spare: bool) -> None:
    place = folder / f"killed-{victim}-{spare}"
    out, err = run(place, spare, "--die", f"7:{victim}")
    # The second life begins behind the last checkpoint, of steps 0 to 5, and ends as if nothing had been.
    assert re.findall(r"ranks begin with step (\d+)", out) == ["0", "6"], out
    assert ending(out) == undisturbed
    assert not spare or re.search(rf"PeerLostError: .*rank {victim} \(host", err), err
    # Nothing is left, also of the killed one.
    assert list(place.glob("host?/**/pycomm*")) == []
    assert sorted(p.name for p in (place / "checkpoints").glob("*.pt")) == [
        f"step-{step:06}.pt" for step in (2, 5, 8, 11)
    ]
