"""The store in which the ranks of a job meet: opened, or an error that says why not, and what to do.

torch's TCPStore, which rank 0 serves (or torchrun's agent), or its FileStore in a folder of all hosts.
Why a TCPStore cannot be reached is told apart: its name has no address, no route leads there, nobody listens,
or nobody answers. All of these end within PYCOMM_CONNECT_TIMEOUT (10 s), since a name or port that is wrong
stays so; a rank 0 that starts later than that needs a larger one.
"""

from __future__ import annotations

import errno
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch.distributed as dist

from pycomm.errors import CommError, CommTimeoutError

__all__ = ["Meeting", "connect_timeout_s", "given", "open_store"]

_stores: list[Any] = []  # rank 0 of a store of ours serves it: it must live as long as the process
_files: dict[str, Any] = {}  # one FileStore a file: it counts who has it open


@dataclass(frozen=True)
class Meeting:
    """Where the store is; ``said`` is how the user or the launcher said so."""

    host: str
    port: int
    said: str
    file: str = ""  # instead of host and port


def connect_timeout_s() -> float:
    """``PYCOMM_CONNECT_TIMEOUT``: seconds within which the store must answer."""
    text = os.environ.get("PYCOMM_CONNECT_TIMEOUT") or "10"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"PYCOMM_CONNECT_TIMEOUT must be positive seconds, got {text!r}")
    return seconds


def given() -> Meeting | None:
    """``PYCOMM_RENDEZVOUS``: tcp://host:port (or host:port), or file:///path; None when it is not set.

    Raises:
        ValueError: it is neither.
    """
    text = os.environ.get("PYCOMM_RENDEZVOUS", "")
    if not text:
        return None
    wrong = ValueError(
        "PYCOMM_RENDEZVOUS must be tcp://HOST:PORT of rank 0, or file:///PATH on a file system that all "
        f"hosts share, got {text!r}"
    )
    said = f"PYCOMM_RENDEZVOUS={text}"
    try:
        parts = urlsplit(text if "://" in text else f"tcp://{text}")
        port = parts.port
    except ValueError as error:
        raise wrong from error
    path = unquote(parts.path)
    if parts.scheme == "file" and not parts.netloc and path.strip("/"):
        return Meeting("", 0, said, file=path)
    if parts.scheme == "tcp" and parts.hostname and port and path in ("", "/"):
        return Meeting(parts.hostname, port, said)
    raise wrong


def open_store(meeting: Meeting, rank: int, size: int, timeout: float) -> Any:
    """The store of the job.

    Raises:
        ValueError: the folder of the file cannot be used.
        CommTimeoutError: the store cannot be reached.
        CommError: rank 0 cannot serve it.
    """
    if meeting.file:
        return _file_store(meeting, rank, size, timeout)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not agent
    limit_s = min(timeout, connect_timeout_s())
    who = f"rank {rank} of {size}"
    end_s = time.monotonic() + limit_s
    _reach(meeting, who, limit_s, end_s, agent, serves)

    def make() -> Any:
        # multi_tenant: torch.distributed may serve a store of its own on the same port of this process.
        return dist.TCPStore(  # type: ignore[attr-defined]
            meeting.host,
            meeting.port,
            size,
            serves,
            _patience(limit_s),
            wait_for_workers=False,
            multi_tenant=True,
        )

    try:
        store = _in_time(make, end_s)
    except (dist.DistError, RuntimeError) as error:
        kind, what = (CommError, "serve") if serves else (CommTimeoutError, "reach")
        hint = _hint(meeting) if serves else "something else may listen there"
        raise kind(
            f"{who} cannot {what} the job's store at {meeting.said} from {_here()} (within {limit_s:g} s): "
            f"{str(error).splitlines()[0]}; {hint}"
        ) from error
    store.set_timeout(_patience(timeout))
    _stores.append(store)
    return store


def _in_time(make: Callable[[], Any], end_s: float) -> Any:
    """What ``make`` returns or raises; a RuntimeError when the time is over, and to Ctrl-C it listens.

    torch's client does neither when whoever listens there never says a word. Its thread is left behind then.
    """
    done: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((make(), None))
        except Exception as error:
            done.put((None, error))

    threading.Thread(target=run, name="pycomm-store", daemon=True).start()
    while True:
        try:
            made, error = done.get(timeout=0.1)
            break
        except queue.Empty:
            if time.monotonic() > end_s:
                raise RuntimeError("no answer from what listens there") from None
    if error is not None:
        raise error
    return made


def _file_store(meeting: Meeting, rank: int, size: int, timeout: float) -> Any:
    path = Path(meeting.file)
    if not path.parent.is_dir() or path.is_dir():
        what = "is a folder" if path.is_dir() else f"is in {path.parent}, which is no folder"
        raise ValueError(
            f"rank {rank} of {size} on {_here()}: {meeting.said} {what} here: name a file, in a folder that "
            "all hosts of the job have"
        )
    if meeting.file not in _files:
        try:
            store = dist.FileStore(meeting.file, size)  # type: ignore[attr-defined]
            store.set_timeout(_patience(timeout))
        except RuntimeError as error:
            raise CommError(
                f"rank {rank} of {size} on {_here()} cannot use {meeting.said}: {str(error).splitlines()[0]}"
            ) from error
        _files[meeting.file] = store
    return _files[meeting.file]


def _here() -> str:
    return f"host {socket.gethostname()}"


def _addresses(host: str, port: int) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys((e[0], e[4]) for e in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))


def _hint(meeting: Meeting) -> str:
    """What a person should look at when rank 0 cannot serve there."""
    found = ", ".join(dict.fromkeys(str(a[0]) for _, a in _addresses(meeting.host, meeting.port)))
    return (
        f"{meeting.host!r} is {found}, which must be an address of the host of rank 0, and port "
        f"{meeting.port} must be free there"
    )


def _reach(meeting: Meeting, who: str, limit_s: float, end_s: float, agent: bool, serves: bool) -> None:
    """Returns once somebody listens at the store's address; an error, when time is over, says why not.

    For the rank that serves it is enough that the address is known.
    """
    pause_s = 0.01
    while True:
        began_s = time.monotonic()
        why = _knock(meeting, end_s, agent, serves)
        if why is None:
            return
        now_s = time.monotonic()
        left_s = end_s - now_s - (now_s - began_s)  # a try that is cut short would say less
        if left_s <= 0:
            break
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, 0.25)
    kind, what = (CommError, "serve") if serves else (CommTimeoutError, "reach")
    raise kind(
        f"{who} cannot {what} the job's store at {meeting.said}, from {_here()}, within {limit_s:g} s: {why}"
    )


def _knock(meeting: Meeting, end_s: float, agent: bool, serves: bool) -> str | None:
    """None when somebody listens there; else what is in the way and what to do."""
    host = meeting.host
    try:
        addresses = _addresses(host, meeting.port)
    except OSError as error:
        return (
            f"{host!r} cannot be resolved here ({error.strerror}): is it spelt right, and does this host "
            "know it (DNS, /etc/hosts)? An address will do instead of a name"
        )
    reasons = []
    for family, address in addresses if not serves else []:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as s:
                # The kernel finds out after three seconds that nobody has an address of this network.
                s.settimeout(max(0.1, min(5.0, end_s - time.monotonic())))
                s.connect(address)
            return None
        except OSError as error:
            reasons.append((str(address[0]), error))
    if not reasons:
        return None
    shown = next((r for r in reasons if not _is_loopback(r[0])), reasons[0])
    return _reason(host, meeting.port, *shown, agent) + _if_loopback(host, [r[0] for r in reasons])


def _reason(host: str, port: int, address: str, error: OSError, agent: bool) -> str:
    there = f"{address} port {port}" if address == host else f"{host} ({address}) port {port}"
    if isinstance(error, ConnectionRefusedError):
        serves = "torchrun's agent" if agent else "rank 0"
        later = "" if agent else "; if it starts later than this rank, raise PYCOMM_CONNECT_TIMEOUT"
        return (
            f"{there} refused the connection: nobody listens there. Does {serves} run on that host, with "
            f"this port{later}?"
        )
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return (
            f"{there} timed out: no answer. Does a firewall drop it (open the port), or is the host down, or "
            "not the one that is meant?"
        )
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL):
        return (
            f"no route to {there} ({error.strerror}): is that host down, or its address in a network that "
            "this host does not have?"
        )
    return f"{there}: {error.strerror or error}"


def _is_loopback(address: str) -> bool:
    return re.match(r"127\.|::1$", address) is not None


def _if_loopback(host: str, addresses: list[str]) -> str:
    if not all(map(_is_loopback, addresses)):
        return ""
    return (
        f" ({host!r} is {', '.join(addresses)} here, which is this host itself: if rank 0 is on another one, "
        "give an address that other hosts reach; Debian's /etc/hosts has 127.0.1.1 for its own name)"
    )


def _patience(timeout: float) -> timedelta:
    return timedelta(seconds=min(timeout, 1e8))  # three years: timedelta has an end, and float("inf") has not
