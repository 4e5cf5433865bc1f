"""Selection on two levels: measured within each host and between them, agreed, kept, read, inherited."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from cases import prove, raises
from hosts_ranks import PLACEMENTS, join
from pycomm import _C, tuning, tuning_hosts
from pycomm.hosts import given_sockets
from ranks import run_ranks

COUNTS = (1, 1_000, 50_000, 700_001)
"""Every size class of the table."""

Found = tuple[dict[str, Any], dict[str, Any], str, str]


def measured(rank: int, size: int, placement: list[int], **settings: str) -> Found:
    """Both tables, the file between hosts, and what was warned of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with join(rank, placement, PYCOMM_TUNE="auto", **settings) as comm:
            prove(comm, COUNTS)
            file = str(tuning_hosts.cache_file(comm))
            found = tuning_hosts.read(comm), tuning.read(comm)
    return *found, file, " ".join(str(w.message) for w in said if "selection" in str(w.message))


@pytest.mark.parametrize("name", ["2x1", "2x2", "01022"])
def test_the_first_use_measures_and_the_second_reads(tmp_path: Path, name: str) -> None:
    placement = PLACEMENTS[name]
    env = {"PYCOMM_CACHE_DIR": str(tmp_path)}
    first = run_ranks(len(placement), measured, placement, env=env, timeout=150)
    assert all(f[0] == first[0][0] for f in first), "one table between the hosts"
    for host in set(placement):
        tables = [f[1] for f, h in zip(first, placement, strict=True) if h == host]
        assert all(t == tables[0] for t in tables), "one table within a host"
    file = Path(first[0][2])
    written = json.loads(file.read_text())
    names = {a.name for a in _C.schedule.catalog()}
    for rows in written["table"].values():
        assert rows[-1][0] == tuning_hosts.ANY_SIZE
        assert all(row[1] in names and row[2] in tuning_hosts.SOCKETS for row in rows)
    changed = file.stat().st_mtime_ns
    second = run_ranks(len(placement), measured, placement, env=env, timeout=150)
    assert [f[0] for f in second] == [f[0] for f in first]
    assert file.stat().st_mtime_ns == changed


@pytest.mark.parametrize(
    "table",
    [
        {"all_reduce": []},
        {"all_reduce": [[tuning_hosts.ANY_SIZE, "quantum", 1]]},
        {"broadcast": [[8, "chain", 1], [8, "chain", 1]]},
        {"broadcast": [["many", "chain", 1]]},
        ["all_reduce"],
    ],
    ids=["empty", "unknown algorithm", "sizes", "no number", "no table"],
)
def test_a_damaged_cache_costs_a_second_not_a_job(tmp_path: Path, table: Any) -> None:
    env = {"PYCOMM_CACHE_DIR": str(tmp_path)}
    placement = PLACEMENTS["2x1"]
    (_, _, name, _), _ = run_ranks(2, measured, placement, env=env, timeout=100)
    Path(name).write_text(json.dumps({"format": tuning_hosts.FORMAT, "table": table}))
    (_, _, _, said), (_, _, _, other) = run_ranks(2, measured, placement, env=env, timeout=100)
    assert name in said and other == ""
    assert json.loads(Path(name).read_text())["table"] != table, "measured anew"


def given(rank: int, size: int, placement: list[int]) -> None:
    with join(rank, placement, PYCOMM_TUNE="auto", PYCOMM_SOCKETS="2") as comm:
        prove(comm, COUNTS)
        assert {row[2] for rows in tuning_hosts.read(comm).values() for row in rows} <= {0, 2}
        half = comm.split(0, -comm.rank)
        assert half is not None
        assert tuning_hosts.read(half) == tuning_hosts.read(comm)
        assert tuning.read(half) == tuning.read(comm)
        prove(half, COUNTS)
        local = comm.split(placement[rank])
        assert local is not None
        prove(local, COUNTS)
        with raises(ValueError, "all ranks are on one host"):
            local._c.host_selection(0)


def test_given_sockets_and_children(tmp_path: Path) -> None:
    env = {"PYCOMM_CACHE_DIR": str(tmp_path)}
    for _ in range(2):  # measured, and read
        run_ranks(4, given, PLACEMENTS["2x2"], env=env, timeout=150)


def untuned(rank: int, size: int, placement: list[int]) -> None:
    with join(rank, placement, PYCOMM_TUNE="off") as comm:
        assert {row[2] for rows in tuning_hosts.read(comm).values() for row in rows} == {1}
        assert not os.path.exists(tuning_hosts.cache_file(comm))
        comm.tune(0.3)
        assert comm.rank != 0 or os.path.exists(tuning_hosts.cache_file(comm))
        prove(comm, COUNTS)


def test_off_measures_nothing_until_told(tmp_path: Path) -> None:
    run_ranks(3, untuned, PLACEMENTS["1+2"], env={"PYCOMM_CACHE_DIR": str(tmp_path)}, timeout=100)


def test_wrong_number_of_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOMM_SOCKETS", "17")
    with pytest.raises(ValueError, match="PYCOMM_SOCKETS must be auto or a number from 1 to 16, got '17'"):
        given_sockets()
