"""Where Slurm's ranks meet: what a step's variables say about its hosts.

Slurm tells every process the list of its step's hosts, of which the first runs rank 0, so nothing has to be
shared or configured: rank 0 serves the job's store there, on a port made from the numbers of job and step.
The list is a *hostlist*, Slurm's short form: ``gpu[01-03,7],login`` is gpu01, gpu02, gpu03, gpu7 and login.
Source: Slurm's manual, "scontrol show hostnames".
"""

from __future__ import annotations

import os
import re

__all__ = ["DEFAULT_PORTS", "first_host", "hostlist", "n_hosts", "port"]

#: Without PYCOMM_PORT_RANGE; below the ports that Linux gives to outgoing connections.
DEFAULT_PORTS = (20000, 29999)
_MAX_HOSTS = 1 << 17


def _groups(text: str) -> list[str]:
    """Cuts at the commas that are not inside of brackets."""
    groups, depth, start = [], 0, 0
    for at, c in enumerate(text):
        depth += (c == "[") - (c == "]")
        if depth not in (0, 1):
            raise ValueError(f"hostlist {text!r}: brackets that do not match at character {at + 1}")
        if c == "," and depth == 0:
            groups.append(text[start:at])
            start = at + 1
    if depth != 0:
        raise ValueError(f"hostlist {text!r}: a bracket is not closed")
    return [*groups, text[start:]]


def _numbers(text: str, whole: str) -> list[str]:
    """``01-03,7``: 01, 02, 03, 7."""
    found: list[str] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None:
            raise ValueError(f"hostlist {whole!r}: {item!r} is no number and no range such as 01-16")
        low, high = int(match[1]), int(match[2] or match[1])
        if not low <= high < low + _MAX_HOSTS:
            raise ValueError(f"hostlist {whole!r}: the range {item!r} must rise, by less than {_MAX_HOSTS}")
        found += [str(n).zfill(len(match[1])) for n in range(low, high + 1)]
    return found


def hostlist(text: str) -> list[str]:
    """The hosts of a hostlist, in its order.

    Args:
        text: names with commas; each may have ranges in brackets, several pairs of them too.

    Raises:
        ValueError: the text is none; the message shows what is wrong.

    Example:
        >>> hostlist("a[01-03,7],b5,r[1-2]n[0-1]")
        ['a01', 'a02', 'a03', 'a7', 'b5', 'r1n0', 'r1n1', 'r2n0', 'r2n1']
    """
    hosts: list[str] = []
    for group in _groups(text.strip()):
        names = [""]
        for i, piece in enumerate(re.split(r"\[([^\[\]]*)\]", group)):
            tails = _numbers(piece, text) if i % 2 else [piece]
            if len(hosts) + len(names) * len(tails) > _MAX_HOSTS:
                raise ValueError(f"hostlist {text!r}: more than {_MAX_HOSTS} hosts")
            names = [name + tail for name in names for tail in tails]
        if not re.fullmatch(r"[\w.:-]+", names[0]):
            raise ValueError(f"hostlist {text!r}: {group!r} is no host's name")
        hosts += names
    return hosts


def n_hosts() -> int:
    """How many hosts this process's step is on; 1 where Slurm does not say."""
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        text = os.environ.get(name, "")
        if text:
            if not text.isdecimal():
                raise ValueError(f"environment variable {name} must be an integer, got {text!r}")
            return int(text)
    return 1


def first_host() -> tuple[str, str]:
    """The host that runs rank 0, and the variable that says so.

    Raises:
        ValueError: Slurm does not say, or rank 0 is elsewhere (an arbitrary distribution).
    """
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        text = os.environ.get(name, "")
        if not text:
            continue
        try:
            first = hostlist(text)[0]
        except ValueError as error:
            raise ValueError(f"environment variable {name}: {error}") from error
        if os.environ.get("SLURM_PROCID") == "0" and os.environ.get("SLURM_NODEID", "0") != "0":
            raise ValueError(
                f"rank 0 is not on the first host of {name}={text} (SLURM_NODEID is "
                f"{os.environ['SLURM_NODEID']}), so the others do not know where it is: set "
                "PYCOMM_RENDEZVOUS=tcp://HOST:PORT with rank 0's host for all, or distribute ranks in order"
            )
        return first, name
    raise ValueError(
        "Slurm started ranks on several hosts, but SLURM_STEP_NODELIST is not set, so this one does not know "
        "where rank 0 is: set PYCOMM_RENDEZVOUS=tcp://HOST:PORT with rank 0's host"
    )


def port() -> int:
    """The port of the step's store: the same on all ranks, another one for other steps and later jobs.

    Within PYCOMM_PORT_RANGE, else DEFAULT_PORTS. Two jobs whose numbers differ by a multiple of the range's
    length would share one if they ran on the same host; the second says that the port is in use.

    Raises:
        ValueError: PYCOMM_PORT_RANGE or a number of Slurm's is none.
    """
    low, high = DEFAULT_PORTS
    if text := os.environ.get("PYCOMM_PORT_RANGE", ""):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not 1 <= low <= high <= 65535:
            raise ValueError(f"PYCOMM_PORT_RANGE must be like 50000-50100, within 1 to 65535, got {text!r}")
    numbers = []
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"):
        value = os.environ.get(name, "0")
        if not value.isdecimal():
            raise ValueError(f"environment variable {name} must be an integer, got {value!r}")
        numbers.append(int(value))
    # 16 steps of a job have ports of their own, and so have the next 600 jobs (of the default range).
    return low + (16 * numbers[0] + numbers[1]) % (high - low + 1)
