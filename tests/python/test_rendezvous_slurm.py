"""Slurm's variables: hostlists, the host of rank 0, the port of the step's store."""

from __future__ import annotations

import os

import pytest

from pycomm import rendezvous_slurm as slurm


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever started the tests."""
    for name in [n for n in os.environ if n.startswith("SLURM_") or n == "PYCOMM_PORT_RANGE"]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("a[01-03,7],b5", ["a01", "a02", "a03", "a7", "b5"]),
        ("a,b.example.org,10.0.0.1", ["a", "b.example.org", "10.0.0.1"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("r[1-2]n[0-1]-ib", ["r1n0-ib", "r1n1-ib", "r2n0-ib", "r2n1-ib"]),
        ("x[5]", ["x5"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_hostlists(text: str, hosts: list[str]) -> None:
    assert slurm.hostlist(text) == hosts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no host's name"),
        ("a,,b", "is no host's name"),
        ("a b", "is no host's name"),
        ("a[1-2", "a bracket is not closed"),
        ("a1]", "brackets that do not match at character 3"),
        ("a[[1]]", "brackets that do not match"),
        ("a[]", "'' is no number and no range"),
        ("a[1-x]", "'1-x' is no number and no range"),
        ("a[3-1]", "the range '3-1' must rise"),
        ("a[0-999999999]", "must rise, by less than"),
        ("a[0-99999][0-99999]", "more than 131072 hosts"),
    ],
)
def test_hostlists_that_are_none(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="hostlist") as caught:
        slurm.hostlist(text)
    assert said in str(caught.value)
    assert repr(text) in str(caught.value)


def test_the_number_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slurm.n_hosts() == 1
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
    assert slurm.n_hosts() == 4
    monkeypatch.setenv("SLURM_NNODES", "3")
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "1")  # of a job on three
    assert slurm.n_hosts() == 1
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "two")
    with pytest.raises(ValueError, match="SLURM_STEP_NUM_NODES must be an integer, got 'two'"):
        slurm.n_hosts()


def test_the_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"SLURM_STEP_NODELIST is not set.*PYCOMM_RENDEZVOUS=tcp://"):
        slurm.first_host()
    monkeypatch.setenv("SLURM_JOB_NODELIST", "c[7-9]")
    assert slurm.first_host() == ("c7", "SLURM_JOB_NODELIST")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "c[8-9]")  # the step has not all of the job's hosts
    assert slurm.first_host() == ("c8", "SLURM_STEP_NODELIST")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NODEID", "1")
    with pytest.raises(ValueError, match=r"rank 0 is not on the first host of SLURM_STEP_NODELIST=c\[8-9\]"):
        slurm.first_host()
    monkeypatch.setenv("SLURM_STEP_NODELIST", "c[8")
    with pytest.raises(ValueError, match=r"SLURM_STEP_NODELIST: hostlist 'c\[8'"):
        slurm.first_host()


def test_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for job in range(4711, 4811):
        for step in range(4):
            monkeypatch.setenv("SLURM_JOB_ID", str(job))
            monkeypatch.setenv("SLURM_STEP_ID", str(step))
            found.add(slurm.port())
    assert len(found) == 400  # each step of each job its own
    assert all(20000 <= port <= 29999 for port in found)
    monkeypatch.setenv("PYCOMM_PORT_RANGE", "50000-50009")
    assert 50000 <= slurm.port() <= 50009
    monkeypatch.setenv("PYCOMM_PORT_RANGE", "50000")
    assert slurm.port() == 50000
    for text in ("5-", "9-1", "0-3", "1-70000", "http"):
        monkeypatch.setenv("PYCOMM_PORT_RANGE", text)
        with pytest.raises(ValueError, match="PYCOMM_PORT_RANGE must be like 50000-50100"):
            slurm.port()
    monkeypatch.delenv("PYCOMM_PORT_RANGE")
    monkeypatch.setenv("SLURM_JOB_ID", "x")
    with pytest.raises(ValueError, match="SLURM_JOB_ID must be an integer"):
        slurm.port()
