"""Hosts as network namespaces of this machine, each with one interface on a common bridge: for tests.

``with network(3) as hosts:`` makes three and removes them, with all that is in them. A rank calls
``enter(hosts[i])`` first, before it has threads or sockets. Host i is 10.79.0.(i+1) and fd79::(i+1) on
``eth0``. It needs the right to make namespaces (root) and the program ``ip``; without them tests are skipped,
loudly.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_CLONE_NEWNET = 0x40000000


def ip(*words: str) -> None:
    """``ip …``; a failure is an AssertionError with what it said."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


def require_network() -> None:
    """Skips the test where namespaces cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("*** NO NETWORK NAMESPACES: the program ip is missing (Debian: iproute2)")
    probe = f"pycomm-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=20)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, timeout=20)
    if made.returncode != 0:
        pytest.skip(f"*** NO NETWORK NAMESPACES: this needs root ({made.stderr.strip()})")


@contextlib.contextmanager
def network(n: int) -> Iterator[list[str]]:
    """The names of ``n`` hosts on one bridge."""
    require_network()
    base = f"pycomm-{os.getpid()}"
    switch, hosts = f"{base}-switch", [f"{base}-{i}" for i in range(n)]
    try:
        for name in (switch, *hosts):
            ip("netns", "add", name)
        ip("-n", switch, "link", "add", "switch0", "type", "bridge")
        ip("-n", switch, "link", "set", "switch0", "up")
        for i, host in enumerate(hosts):
            port = f"port{i}"
            ip("link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", port, "netns", switch)
            ip("-n", switch, "link", "set", port, "master", "switch0", "up")
            ip("-n", host, "addr", "add", f"10.79.0.{i + 1}/24", "dev", "eth0")
            ip("-n", host, "addr", "add", f"fd79::{i + 1}/64", "dev", "eth0", "nodad")
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "link", "set", "eth0", "up")
        yield hosts
    finally:
        for name in (switch, *hosts):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def enter(host: str) -> None:
    """Moves the calling thread, and those that it starts, to this host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{host}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns({host})")


def sent_bytes(interface: str = "eth0") -> int:
    """Of the calling thread's host: what left through the interface so far."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise AssertionError(f"no interface {interface}")
