"""The table: which faults, in which calls, over what; and what must happen.

A row says how a fault is made and what must come of it on each transport; None where it makes no sense. An
expectation holds for every rank that lives.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import faults
from .faults import PAUSE_S, Fault

#: The host of each rank.
TRANSPORTS: dict[str, list[int]] = {
    "shared memory": [0, 0, 0],
    "TCP": [0, 1, 2],
    "hierarchical": [0, 0, 1, 1],
}


@dataclass(frozen=True)
class Expect:
    """What must happen on every rank that lives."""

    outcomes: tuple[str, ...] = ("completed",)
    within_s: float = 0.0  # from the fault to the exception
    slack_s: float = 1.0  # for a machine that is busy with other cells; not part of the promise
    names: bool = False  # the exception names a rank that is to blame
    all_alike: bool = False  # a victim is told the same as the others, else whom it has lost
    says: str = ""  # a pattern in the exception
    own: str = ""  # a pattern in the exception of a victim that lives, where it is about itself
    warns: str = ""  # what a healthy rank has logged about a victim: a pattern
    strangers: bool = False  # some rank has logged them

    def __str__(self) -> str:
        """For the reader of the table."""
        text = " or ".join(self.outcomes)
        if self.within_s:
            text += f" within {self.within_s:g} s"
        if self.names:
            text += ", naming both calls" if self.all_alike else ", naming a rank to blame"
        if self.warns:
            text += ", after a warning at 5 s"
        return text + (", strangers logged" if self.strangers else "")


@dataclass(frozen=True)
class Row:
    """A fault."""

    fault: Fault
    expect: dict[str, Expect | None]
    what: str  # in a line, for the reader of the table
    kills: bool = False  # victims die of it
    whole_host: bool = False  # all ranks of the last host are victims, else the last rank
    at: str = (
        "calls"  # when it is made: before all "join", before the "first call", or while they make "calls"
    )
    linger_s: float = 1.0  # how long the job goes on after it
    slow_s: float = 0.0
    differ: str = ""
    other_secret: bool = False  # the last host's ranks have another secret
    n_sockets: int = 0  # for each pair; 0: as by default
    shape: str = ""  # the last host's link, for tc

    def victims(self, placement: list[int]) -> list[int]:
        if not self.whole_host:
            return [len(placement) - 1]
        return [rank for rank, host in enumerate(placement) if host == placement[-1]]


def everywhere(expect: Expect) -> dict[str, Expect | None]:
    return dict.fromkeys(TRANSPORTS, expect)


def between_hosts(expect: Expect) -> dict[str, Expect | None]:
    return {**everywhere(expect), "shared memory": None}


GOES_ON = Expect()
NAMED_SOON = Expect(("PeerLostError",), within_s=1.0, names=True)
NOT_REACHED = Expect(
    ("PeerLostError",), within_s=10.0, slack_s=3.0, names=True, warns="has not answered"
)  # the limit is looked at with the beat, each second

ROWS: dict[str, Row] = {
    "rank killed": Row(faults.kill, everywhere(NAMED_SOON), "SIGKILL, while data move", kills=True),
    "rank stopped": Row(
        faults.stop, everywhere(Expect(warns="stopped")), f"SIGSTOP, after {PAUSE_S:g} s SIGCONT"
    ),
    "rank slow": Row(
        faults.slow,
        everywhere(Expect(warns=r"waited (?!.*stopped)")),
        f"{PAUSE_S:g} s outside of pycomm between two calls",
        slow_s=PAUSE_S,
    ),
    "link down": Row(
        faults.link_down,
        between_hosts(NOT_REACHED),
        "the last host's cable is pulled",
        whole_host=True,
        linger_s=14.0,
    ),
    "link down and back": Row(
        faults.link_down_and_back,
        between_hosts(GOES_ON),
        f"the cable is put back after {PAUSE_S:g} s",
        whole_host=True,
        linger_s=5.0,
    ),
    "host gone": Row(
        faults.host_gone,
        between_hosts(NOT_REACHED),
        "the power of the last host fails",
        kills=True,
        whole_host=True,
        linger_s=14.0,
    ),
    "port scanned": Row(
        faults.port_scan,
        between_hosts(Expect(strangers=True)),
        "a stranger knocks at the open ports and the 200 about each",
        linger_s=0.5,
    ),
    "garbage": Row(
        faults.garbage,
        between_hosts(Expect(strangers=True)),
        "a stranger sends noise, too little, too much, what it was sent, in every state of the handshake",
        linger_s=0.5,
    ),
    "garbage, authenticated": Row(
        faults.insider,
        between_hosts(Expect(("PeerLostError", "completed"), within_s=1.0, names=True)),
        "a process that has the secret says that it is the last rank, is let in, and sends noise",
        at="first call",
        n_sockets=1,  # what the insider says of itself
    ),
    "stranger, wrong secret": Row(
        faults.stranger_with_wrong_secret,
        between_hosts(Expect(strangers=True)),
        "a stranger greets correctly, with another secret",
        linger_s=0.5,
    ),
    "rank, wrong secret": Row(
        faults.wrong_secret,
        between_hosts(
            Expect(
                ("PeerLostError",),
                within_s=10.0,
                names=True,
                says="secret.*fingerprint|that process has ended|connection reset",
                strangers=True,
            )
        ),
        "the last host has another PYCOMM_SECRET_FILE",
        whole_host=True,
        at="first call",
        other_secret=True,
    ),
    "connection reset": Row(
        faults.reset,
        between_hosts(NAMED_SOON),
        "RST to both ends of all connections of the last host, in mid-transfer",
        whole_host=True,
        shape="tbf rate 200mbit burst 64kb latency 50ms",
    ),
    "fd limit reached": Row(
        faults.no_descriptors,
        {
            **between_hosts(
                Expect(
                    ("PeerLostError", "completed"),
                    within_s=3.0,
                    # The last rank; or, where connections are only being made, one that ended because of it.
                    says="rank [0-3] |Too many open files",
                )
            ),
            "shared memory": GOES_ON,
        },
        "the last rank may open no descriptor any more, from before its first call",
        at="first call",
    ),
    "/dev/shm full": Row(
        faults.no_memory,
        everywhere(
            Expect(("CommError",), within_s=2.0, names=True, says="no memory", own="shared arena: no memory")
        ),
        "the last rank gets no memory for its shared arena when it joins",
        at="join",
    ),
    **{
        f"mismatch of {what}": Row(
            faults.differ,
            everywhere(
                Expect(
                    ("MismatchError",),
                    within_s=1.0,
                    names=True,
                    all_alike=True,
                    says="rank . called .*; rank . called |rank . sends .* to rank ., which expects ",
                )
            ),
            f"another {what} on the last rank",
            differ=what,
            linger_s=3.0,
        )
        for what in ("op", "dtype", "count", "order")
    },
}

OPERATIONS = ("all_reduce", "broadcast", "all_to_all", "barrier", "DDP step")


def makes_sense(row: str, operation: str, transport: str) -> bool:
    """Whether there is such a cell."""
    if ROWS[row].expect[transport] is None:
        return False
    what = ROWS[row].differ
    if what in ("dtype", "count"):
        return operation != "barrier"
    return what != "op" or operation in ("all_reduce", "DDP step")
