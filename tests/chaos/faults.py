"""How each fault is made: from outside the job, by what really does it (signals, links, limits, strangers).

A fault is a function of the Scene. It notes in ``board.fault_at`` when it began (CLOCK_MONOTONIC, which all
processes of a machine share) and returns when it is over, or has been made if it lasts.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hosts_network import enter, ip

from . import strangers
from .board import Board
from .rank import Job

PAUSE_S = 7.0
"""How long stopped, slow and unplugged ranks stay so: beyond the warning (5 s), within the limit (10 s)."""


@dataclass
class Scene:
    """A job that is running, as seen by whoever breaks it."""

    job: Job
    board: Board
    network: list[str]  # the hosts, a further one for strangers, the switch
    victims: list[int] = field(default_factory=list)  # ranks that errors should name
    notes: list[str] = field(default_factory=list)  # what was found while the fault was made

    @property
    def victim(self) -> int:
        return self.board.size - 1

    @property
    def last_host(self) -> int:
        return self.job.placement[self.victim]

    def begins(self) -> None:
        self.board.fault_at = time.monotonic()

    def link(self, state: str) -> None:
        """Pulls the plug of the last host, or puts it back: at the switch, so the host keeps its address."""
        ip("-n", self.network[-1], "link", "set", f"port{self.last_host}", state)

    def as_stranger(self, work: Callable[[], None]) -> None:
        """Runs it on a host that belongs to nobody."""

        trouble: list[Exception] = []

        def there() -> None:
            try:
                enter(self.network[-2])
                work()
            except Exception as error:
                trouble.append(error)

        thread = threading.Thread(target=there)
        thread.start()
        thread.join()
        if trouble:
            raise trouble[0]

    def listeners(self) -> list[strangers.Address]:
        found: dict[strangers.Address, None] = {}
        for rank in range(self.board.size):
            found.update(dict.fromkeys(strangers.listeners(self.board.pid(rank))))
        return list(found)


Fault = Callable[[Scene], None]


def kill(scene: Scene) -> None:
    scene.begins()
    os.kill(scene.board.pid(scene.victim), signal.SIGKILL)


def stop(scene: Scene) -> None:
    pid = scene.board.pid(scene.victim)
    scene.begins()
    os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    os.kill(pid, signal.SIGCONT)


def slow(scene: Scene) -> None:
    scene.begins()
    scene.board.slow = 1
    time.sleep(PAUSE_S)


def link_down(scene: Scene) -> None:
    scene.link("down")
    scene.begins()


def link_down_and_back(scene: Scene) -> None:
    scene.link("down")
    scene.begins()
    time.sleep(PAUSE_S)
    scene.link("up")


def host_gone(scene: Scene) -> None:
    """All at once, as when the power fails: nobody there says goodbye."""
    scene.link("down")
    scene.begins()
    for rank, host in enumerate(scene.job.placement):
        if host == scene.last_host:
            os.kill(scene.board.pid(rank), signal.SIGKILL)


def _disturb(scene: Scene, how: Callable[[list[strangers.Address]], int]) -> None:
    addresses = scene.listeners()
    scene.begins()
    scene.as_stranger(lambda: scene.notes.append(f"{how(addresses)} connections"))


def port_scan(scene: Scene) -> None:
    _disturb(scene, strangers.scan)


def garbage(scene: Scene) -> None:
    _disturb(scene, strangers.garbage)


def stranger_with_wrong_secret(scene: Scene) -> None:
    _disturb(scene, strangers.wrong_secret)


def insider(scene: Scene) -> None:
    """Whoever has the secret may break the job, but no process of it: the rank that it plays is lost."""
    folder = Path(scene.job.folder)
    secret = bytes.fromhex((folder / "secret").read_text())
    # A rank that the last one will send to: itself not yet connected, its place is free.
    to = 0 if scene.job.placement[1] != 0 else 1
    address = strangers.listeners(scene.board.pid(to))[0]

    def work() -> None:
        scene.begins()
        refused = strangers.insider(
            address, secret, scene.victim, to, scene.board.size, folder / "run" / "store"
        )
        if refused:
            raise RuntimeError(f"the insider was not let in: {refused}")

    scene.as_stranger(work)


def wrong_secret(scene: Scene) -> None:
    """The settings of the last host's ranks do it; they connect at the first call."""
    scene.begins()


def reset(scene: Scene) -> None:
    """Breaks all connections of the last rank's host, as a firewall does that has forgotten them."""
    host = scene.network[scene.last_host]
    scene.begins()
    done = subprocess.run(
        ["ip", "netns", "exec", host, "ss", "-K", "state", "established"],
        capture_output=True,
        text=True,
        timeout=20,
    )
    n = done.stdout.count("ESTAB") or max(0, len(done.stdout.splitlines()) - 1)
    if n == 0:
        raise RuntimeError(f"ss -K broke no connection: {done.stdout}{done.stderr}")
    scene.notes.append(f"{n} connections")


def no_descriptors(scene: Scene) -> None:
    """The last rank may open none any more, from before its first call on."""
    pid = scene.board.pid(scene.victim)
    highest = max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 1, highest + 1))
    scene.begins()


def no_memory(scene: Scene) -> None:
    """The last rank's shared files may not grow: it has no memory for its arena when it joins.

    A memfd has no tmpfs of a size of its own, and the memory controller kills a process instead of refusing
    (which is the row "rank killed"); a limit of file sizes refuses the growth itself.
    """
    resource.prlimit(scene.board.pid(scene.victim), resource.RLIMIT_FSIZE, (4096, 4096))
    scene.begins()


def differ(scene: Scene) -> None:
    scene.begins()
