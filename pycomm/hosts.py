"""The ranks of a job on several machines: who is where, and how their processes reach each other.

Ranks are on one host when they run under one kernel and see one folder for temporary files: then they can
share memory, through a socket there. (Containers of one machine that do not are hosts of their own.)
``PYCOMM_HOSTID`` says otherwise, as NCCL_HOSTID does. All that ranks tell each other goes through the store
in which they met, before any connection: rank 0 collects one text from each and hands out all of them.

The connections themselves are authenticated (docs/multi-host.md): with the secret in PYCOMM_SECRET_FILE, or
with one that rank 0 makes and the store hands out.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycomm import _C
from pycomm.errors import CommError, CommTimeoutError

CONNECT_TIMEOUT_S = 10.0
MAX_MEASURED_SOCKETS = 4
HEARTBEAT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Hosts:
    """The ranks of several hosts, as one of them sees them."""

    host_of: list[int]  # of each rank, numbered by their lowest ranks
    folder: str  # where this host's ranks meet; "" where there is one only
    net: _C.Net
    store: Any
    key: str  # of this meeting

    def local(self, rank: int) -> tuple[int, int]:
        """The rank's number on its host, and how many there are."""
        here = [r for r, host in enumerate(self.host_of) if host == self.host_of[rank]]
        return here.index(rank), len(here)

    def all_joined(self, rank: int, trouble: str, timeout: float) -> None:
        """Every rank says whether it has joined the others of its host; ``trouble``: why not, or "".

        Raises:
            CommError: some rank has not; each rank raises it, so that none finds out in its first call.
        """
        texts = exchange(self.store, f"{self.key}/joined", rank, len(self.host_of), trouble, timeout)
        troubles = {r: text for r, text in enumerate(texts) if text}
        # Those who only heard of it from a rank of their host, by its number there, add nothing.
        first_hand = {r: text for r, text in troubles.items() if " cannot join: " not in text}
        if wrong := [f"rank {r} cannot join: {text}" for r, text in (first_hand or troubles).items()]:
            raise CommError("; ".join(wrong))


def temporary_root() -> str:
    """Where run folders are made."""
    return os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()


def host_id() -> str:
    """This host, as a string that another one does not have."""
    if given := os.environ.get("PYCOMM_HOSTID"):
        return f"{given} given"
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown"
    folder = os.stat(temporary_root())
    return f"{socket.gethostname()} {boot}-{folder.st_dev:x}-{folder.st_ino:x}"


def _came(store: Any, key: str, end_s: float, moved: Callable[[], bool] = lambda: False) -> bool:
    """Waits until the store has the key, or the time is over.

    Raises:
        MovedError: ``moved()`` meanwhile.

    Asks again and again: torch's stores do not look for Ctrl-C while they wait, and complain of short waits.
    """
    pause_s = 1e-3
    while not store.check([key]):
        if moved():
            raise MovedError(f"rank 0 does not wait at {key} any more")
        if time.monotonic() > end_s:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
    return True


class MovedError(CommError):
    """Rank 0 waits somewhere else: what this rank found in the store is of an earlier life of the job."""


def exchange(
    store: Any,
    key: str,
    rank: int,
    size: int,
    text: str,
    timeout: float,
    moved: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Every rank's text, in the order of ranks; each key serves once.

    Args:
        moved: whether rank 0 is known not to wait for this key any more.

    Raises:
        MovedError: ``moved()``.
        CommTimeoutError: some ranks did not come; the message names them.
        CommError: the store has gone.
    """
    end_s = time.monotonic() + timeout
    others = range(1, size)
    try:
        store.set(f"{key}/{rank}", text)
        if rank == 0:
            all_came = all(_came(store, f"{key}/{other}", end_s) for other in others)
            came = [other for other in others if all_came or store.check([f"{key}/{other}"])]
            missing = [str(other) for other in others if other not in came]
            texts = [text, *(str(store.get(f"{key}/{other}").decode()) for other in others if all_came)]
            store.set(f"{key}/all", json.dumps([missing, texts]))
            if missing:  # this process may serve the store, and is about to leave: they must hear it first
                for other in came:
                    _came(store, f"{key}/{other}/told", end_s + 2.0)
        elif _came(store, f"{key}/all", end_s + 1.0, moved):  # rank 0's time begins earlier, or a bit later
            missing, texts = json.loads(store.get(f"{key}/all"))
            store.set(f"{key}/{rank}/told", "")
        else:
            missing, texts = ["0"], []
        if not missing:
            return [str(t) for t in texts]
    except MovedError:  # a RuntimeError too, as every CommError
        raise
    except RuntimeError as error:  # a FileStore raises nothing more special
        raise CommError(
            f"rank {rank} of {size} asked the {type(store).__name__} for the other ranks: "
            f"{str(error).splitlines()[0]}"
        ) from error
    raise CommTimeoutError(
        f"rank {rank} waited {timeout:g} s in the {type(store).__name__} for rank(s) {', '.join(missing)} to "
        f"join: were all {size} processes started, with the same store?"
    )


def _flag(name: str) -> bool:
    text = os.environ.get(name, "0")
    if text not in ("", "0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {text!r}")
    return text == "1"


def _zero_copy() -> str:
    text = os.environ.get("PYCOMM_ZERO_COPY") or "auto"
    if text not in ("auto", "0", "1"):
        raise ValueError(f"PYCOMM_ZERO_COPY must be auto, 0 or 1, got {text!r}")
    return text


def given_sockets() -> int | None:
    """``PYCOMM_SOCKETS``: connections from a rank to another; None: as measured (``tuning_hosts``)."""
    text = os.environ.get("PYCOMM_SOCKETS") or "auto"
    if text == "auto":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 16:
        raise ValueError(f"PYCOMM_SOCKETS must be auto or a number from 1 to 16, got {text!r}")
    return int(text)


def _heartbeat_s() -> float:
    """For how long a host may answer nothing, before it is taken for gone."""
    text = os.environ.get("PYCOMM_HEARTBEAT_TIMEOUT", "") or str(HEARTBEAT_TIMEOUT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 86400:
        raise ValueError(f"PYCOMM_HEARTBEAT_TIMEOUT must be seconds from 1 to 86400, got {text!r}")
    return seconds


def _master(store: Any) -> str:
    """An address of rank 0's host that the others know; "" when there is none."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    name = getattr(store, "host", "") or os.environ.get("MASTER_ADDR", "")
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)} if name else set()
    except OSError:
        return ""
    # A name that means this host itself everywhere tells nobody where that is.
    local = ("127.", "::1")
    return next((address for address in sorted(found) if not address.startswith(local)), "")


def meet(
    store: Any, key: str, rank: int, size: int, folder: str, timeout: float, moved: Callable[[], bool]
) -> Hosts | None:
    """Who is where, told through the store; None when all ranks are on this host.

    Args:
        key: of this meeting; no other one has it.
        folder: where rank 0's host meets.
        moved: whether rank 0 waits for another meeting by now.

    Raises:
        MovedError: this meeting is one of an earlier life of the job.
    """
    me = f"{host_id()}\n{secrets.token_hex(8)}"
    told_hosts = exchange(store, f"{key}/hosts", rank, size, me, timeout, moved)
    if told_hosts[rank] != me:  # who had this rank in an earlier life met them there
        raise MovedError(f"rank {rank} had met the others at {key} in an earlier life")
    names = [text.partition("\n")[0] for text in told_hosts]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    if len(numbers) == 1:
        return None
    host_of = [numbers[name] for name in names]
    made_here = ""  # where this host's ranks meet, when it is not rank 0's
    if host_of.count(host_of[rank]) == 1:
        folder = ""
    elif host_of.index(host_of[rank]) == rank != 0:
        folder = made_here = tempfile.mkdtemp(prefix="pycomm-", dir=temporary_root())
    try:
        return _tell(store, key, rank, host_of, names, folder, timeout)
    except BaseException:
        if made_here:
            os.rmdir(made_here)
        raise


def _tell(
    store: Any, key: str, rank: int, host_of: list[int], names: list[str], folder: str, timeout: float
) -> Hosts:
    """The secret from rank 0; who listens where, and where each host's ranks meet, from all."""
    size = len(host_of)
    made = secrets.token_hex(32) if rank == 0 else ""
    made = exchange(store, f"{key}/secret", rank, size, made, timeout)[0]
    try:
        net = _net(key, rank, size, _master(store), made, names[rank].split()[0])
        mine = [net.address, f"rank {rank} (host {names[rank].split()[0]}, pid {os.getpid()})", ""]
    except (ValueError, CommError) as error:
        exchange(store, f"{key}/net", rank, size, json.dumps(["", "", str(error)]), timeout)
        raise
    told = [
        json.loads(t) for t in exchange(store, f"{key}/net", rank, size, json.dumps([*mine, folder]), timeout)
    ]
    wrong = [f"rank {r}: {t[2]}" for r, t in enumerate(told) if t[2]]
    if wrong:
        raise CommError(f"rank {rank}: other ranks cannot be reached: {'; '.join(wrong)}")
    net.set_peers([t[0] for t in told], [t[1] for t in told])
    return Hosts(host_of, told[host_of.index(host_of[rank])][3], net, store, key)


def _net(key: str, rank: int, size: int, master: str, secret: str, host: str) -> _C.Net:
    from pycomm import __version__  # the package is being imported when this module is

    encrypt, n_sockets = _flag("PYCOMM_ENCRYPT"), given_sockets()
    return _C.Net(
        rank,
        size,
        os.environ.get("PYCOMM_SOCKET_IFNAME", ""),
        master,
        os.environ.get("PYCOMM_PORT_RANGE", ""),
        n_sockets or MAX_MEASURED_SOCKETS,
        encrypt,
        _zero_copy(),
        bytes.fromhex(secret),
        os.environ.get("PYCOMM_SECRET_FILE", ""),
        key,
        f"pycomm {__version__}, {n_sockets or 'auto'} sockets, encryption {'on' if encrypt else 'off'}",
        host,
        CONNECT_TIMEOUT_S,
        _heartbeat_s(),
    )
