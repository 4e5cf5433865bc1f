"""What comes to an open port: scanners, garbage in every state, wrong secrets, a broken insider.

The protocol is written down in csrc/transport/tcp/handshake.h (40 bytes each way, then 360 each way) and
message.h; this is a second implementation of its initiator, in Python's own hmac and hashlib.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

MAGIC = b"PYCOMM\r\n"
PATIENCE_S = 0.5

Address = tuple[str, int]


def listeners(pid: int) -> list[Address]:
    """Where this process listens (IPv4)."""
    sockets = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        local, state, inode = words[1], words[3], words[9]
        if state == "0A" and f"socket:[{inode}]" in sockets:
            host, port = local.split(":")
            found.append((socket.inet_ntoa(struct.pack("<I", int(host, 16))), int(port, 16)))
    return found


@contextlib.contextmanager
def _connected(address: Address) -> Iterator[socket.socket]:
    """A connection that the other side may end at any time: then the block is over."""
    with (
        socket.create_connection(address, PATIENCE_S) as s,
        contextlib.suppress(ConnectionError, TimeoutError),
    ):
        s.settimeout(PATIENCE_S)
        yield s


def scan(addresses: list[Address]) -> int:
    """Knocks at every port about each address: connects and hangs up, or keeps silent; how many were open."""
    n_open = 0
    for host, open_port in addresses:
        for port in range(max(1, open_port - 100), min(65536, open_port + 100)):
            with contextlib.suppress(ConnectionRefusedError), _connected((host, port)):
                n_open += 1
        with _connected((host, open_port)) as s:
            n_open += 1
            s.recv(1)
    return n_open


def garbage(addresses: list[Address]) -> int:
    """Sends at every state of the handshake what does not belong there; how many times."""
    noise = secrets.token_bytes
    before_hello = [
        noise(1),
        noise(40),
        noise(100_000),
        b"GET / HTTP/1.1\r\n\r\n" * 3,
        MAGIC,
        MAGIC + noise(31),
    ]
    after_hello = [noise(1), noise(359), noise(360), bytes(360), b"\xff" * 360, noise(100_000)]
    n = 0
    for address in addresses:
        for words in before_hello:
            with _connected(address) as s:
                n += 1
                s.sendall(words)
        for words in after_hello:
            with _connected(address) as s:
                n += 1
                s.sendall(MAGIC + noise(32))
                s.recv(40)
                s.sendall(words)
                s.recv(400)
        with _connected(address) as s:  # its own challenge, sent back
            n += 1
            s.sendall(MAGIC + noise(32))
            s.sendall(s.recv(40) * 9)
            s.recv(400)
        with _connected(address) as s:  # learns the challenge of one connection, uses it in another
            s.sendall(MAGIC + noise(32))
            theirs = s.recv(40)
            with _connected(address) as other:
                n += 1
                other.sendall(theirs)
                other.recv(40)
    return n


def wrong_secret(addresses: list[Address]) -> int:
    """Proves to each a secret that is not the job's, everything else being right; how many times."""
    for address in addresses:
        for _ in range(3):
            with _connected(address) as s:
                greet(s, secrets.token_bytes(32), terms(0, 1, 3, b"another job"))
    return 3 * len(addresses)


def terms(from_rank: int, to_rank: int, n_ranks: int, job: bytes, settings: bytes = b"") -> bytes:
    """What an initiator says of itself; 320 bytes."""
    numbers = struct.pack("<8I", 1, n_ranks, from_rank, to_rank, 0, 1, 0, 0)
    hashes = struct.pack("<3Q", fnv1a(job), 0, fnv1a(settings)) + bytes(8)
    return numbers + hashes + b"host x, pid 1".ljust(64, b"\0") + settings.ljust(192, b"\0")


def fnv1a(text: bytes) -> int:
    """The hash that stands for long texts (net.cc)."""
    h = 14695981039346656037
    for c in text:
        h = ((h ^ c) * 1099511628211) & (2**64 - 1)
    return h


def greet(s: socket.socket, secret: bytes, mine: bytes) -> bytes:
    """The four messages of the handshake; the acceptor's terms and verdict, or nothing when it hung up."""
    first = MAGIC + secrets.token_bytes(32)
    s.sendall(first)
    second = _receive(s, 40)
    third = mine + bytes(8)
    mac = hmac.new(secret, b"pycomm initiator" + first + second + third, hashlib.sha256).digest()
    s.sendall(third + mac)
    return _receive(s, 360)[:328]


def _receive(s: socket.socket, n: int) -> bytes:
    got = b""
    while len(got) < n and (part := s.recv(n - len(got))):
        got += part
    return got


def insider(address: Address, secret: bytes, from_rank: int, to_rank: int, size: int, store: Path) -> str:
    """A broken process of the job: proves itself as another rank, then sends what is no message.

    Returns:
        "" when it was let in, else how the other side refused it.
    """
    # The job's name, and the settings that must be equal, are public to whoever can read the store.
    names = re.findall(rb"pycomm/none/pycomm-\w+", store.read_bytes())
    if not names:
        return "refused: the store has no name of the job in it"
    import pycomm

    settings = f"pycomm {pycomm.__version__}, 1 sockets, encryption off".encode()
    with _connected(address) as s:
        reply = greet(s, secret, terms(from_rank, to_rank, size, names[0], settings))
        if len(reply) < 328 or reply[320] != 0:
            return f"refused: {reply[64:128].rstrip(bytes(1)).decode(errors='replace') or 'hung up'}"
        s.sendall(secrets.token_bytes(5600))
        s.recv(1)
        return ""
    return "hung up"
