"""Hosts made of network namespaces on one machine, joined by a bridge; needs root.

Host i has one interface, eth0, with the address 10.77.0.(i + 1), and a loopback of its own. A rate shapes
what leaves each host (tbf, burst 1 MB). Everything goes with the ``with`` block, also when it ends with an
exception.

    with hosts(2, rate="1gbit") as names:
        subprocess.run(inside(names[1], ["ip", "addr"]))
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence

SUBNET = "10.77.0"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def available() -> str:
    """Why hosts cannot be made here; "" when they can."""
    name = f"pycomm-{os.getpid()}-try"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "delete", name)
    except OSError as error:
        return f"network namespaces need root and iproute2: {error}"
    return ""


def address(host: int) -> str:
    """Of a host's interface."""
    return f"{SUBNET}.{host + 1}"


def inside(name: str, command: Sequence[str]) -> list[str]:
    """The command, to be run on that host."""
    return ["ip", "netns", "exec", name, *command]


@contextlib.contextmanager
def hosts(n: int, rate: str = "") -> Iterator[list[str]]:
    """Makes n hosts; their names are those of their namespaces.

    Raises:
        OSError: no right to do so; the text has the command.
    """
    names = [f"pycomm-{os.getpid()}-{i}" for i in range(n)]
    switch = f"pycomm-{os.getpid()}-switch"
    made: list[str] = []
    try:
        for name in (switch, *names):
            _run("ip", "netns", "add", name)
            made.append(name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for i, name in enumerate(names):
            port = f"port{i}"
            _run(
                "ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch
            )
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "addr", "add", f"{address(i)}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            if rate:
                shape = ["tbf", "rate", rate, "burst", "1mb", "latency", "50ms"]
                _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *shape)
        yield names
    finally:
        for name in made:
            _run("ip", "netns", "delete", name)
