"""``pycomm.init()``: from the environment to a communicator."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from pycomm import _C, arguments, rendezvous, tuning_hosts
from pycomm.calling import KINDS
from pycomm.communicator import _AT_EXIT_S, Communicator, ended_by
from pycomm.errors import CommError
from pycomm.hosts import Hosts

RENDEZVOUS_TIMEOUT_S = 300.0
CALL_TIMEOUT_S = 600.0


def _forced_algorithms() -> dict[str, str]:
    """``PYCOMM_ALGORITHM``: "ring" (for all_reduce) or "all_reduce=ring,broadcast=chain"."""
    text = os.environ.get("PYCOMM_ALGORITHM", "")
    forced = {}
    for item in filter(None, text.split(",")):
        left, equals, right = item.partition("=")
        collective, name = (left, right) if equals else ("all_reduce", left)
        if collective not in KINDS or collective in ("all_to_all", "barrier"):
            raise ValueError(f"PYCOMM_ALGORITHM: {collective!r} is not a collective with algorithms")
        forced[collective] = name
    return forced


def _job_name(meeting: str) -> str:
    """What ``pycomm ps`` calls the job: the folder in which its ranks met, without the common part."""
    folder, _, last = meeting.rpartition("/")
    name = last.removeprefix("pycomm-")
    if name.isdecimal():  # the n-th meeting in a folder that PYCOMM_RUN_DIR names
        name = os.path.basename(folder) + (f"-{name}" if name != "0" else "")
    return name or f"alone-{os.getpid()}"


def _set(core: _C.Communicator) -> None:
    """What the environment asks for. Behind the meeting: so the others hear when it cannot be had."""
    try:
        deterministic = os.environ.get("PYCOMM_DETERMINISTIC", "0")
        if deterministic not in ("", "0", "1"):
            raise ValueError(f"PYCOMM_DETERMINISTIC must be 0 or 1, got {deterministic!r}")
        core.deterministic = deterministic == "1"
        for collective, name in _forced_algorithms().items():
            core.force_algorithm(KINDS[collective], name)
    except ValueError as error:
        core.close(_AT_EXIT_S, ended_by("init", error))
        raise


def _join_hosts(
    place: rendezvous.Place, hosts: Hosts, timeout: float, call_timeout: float
) -> _C.Communicator:
    local_rank, local_size = hosts.local(place.rank)
    try:
        core = _C.Communicator.join_hosts(
            place.folder, local_rank, local_size, timeout, call_timeout, hosts.net, hosts.host_of
        )
        _set(core)
    except CommError as error:
        hosts.all_joined(place.rank, str(error), timeout)
        raise
    except ValueError as error:
        with contextlib.suppress(CommError):  # it says the same, to the others
            hosts.all_joined(place.rank, str(error), timeout)
        raise
    hosts.all_joined(place.rank, "", timeout)
    return core


def init(
    *,
    store: Any = None,
    group: Any = None,
    rank: int | None = None,
    size: int | None = None,
    timeout: float | None = None,
) -> Communicator:
    """Joins the other ranks of this job, on this machine and others; every rank calls it.

    Args:
        store: a torch.distributed Store, with ``rank`` and ``size``.
        group: a torch.distributed process group of any backend, whose ranks these become.
        timeout: seconds to wait for the others here, and the default of every call. None: 300 here, and 600
            for calls.
        With none of these, the environment says who this is: RANK and WORLD_SIZE (torchrun's), Open MPI's or
        Slurm's variables; or else this process is alone (one rank). ``PYCOMM_RENDEZVOUS`` or
        ``PYCOMM_RUN_DIR`` says where the ranks meet, or else the launcher does.

    Returns:
        The communicator of all ranks.

    Raises:
        ValueError: contradictory arguments or environment.
        CommTimeoutError: some ranks did not come (the message names them), or rank 0's store is not reached.

    Example:
        >>> import pycomm
        >>> pycomm.init().size
        1
    """
    if timeout is None:
        timeout, call_timeout = RENDEZVOUS_TIMEOUT_S, CALL_TIMEOUT_S
    else:
        timeout = call_timeout = arguments.seconds("init: timeout", timeout)
    _C.set_log_level(os.environ.get("PYCOMM_LOG_LEVEL", ""))
    place = rendezvous.find(store, group, rank, size, timeout)
    with place.entered():
        if place.hosts is None:
            core = _C.Communicator.join(place.folder, place.rank, place.size, timeout, call_timeout)
            _set(core)
        else:
            core = _join_hosts(place, place.hosts, timeout, call_timeout)
    comm = Communicator(core)
    comm._met_in = place.meeting
    comm._show(_job_name(place.meeting), "", place.rank)
    tuning_hosts.load_or_measure(comm)
    return comm
