"""One cell: one job, one fault, and what came of it on every rank, compared with what must."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hosts_network import enter, ip, network

from ranks import Died, RankError, RanksTimedOut, run_ranks

from .board import Board, wait_until
from .faults import Scene
from .matrix import ROWS, TRANSPORTS, Expect, Row
from .rank import Job, Report, run

TIMEOUT_S = 120.0


@dataclass
class Verdict:
    """What happened in a cell; ``wrong`` is empty when it is what must happen."""

    row: str
    operation: str
    transport: str
    text: str = ""  # for the table
    took_s: float = 0.0  # the slowest survivor's
    wrong: list[str] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)  # of each rank, for a person


@contextlib.contextmanager
def _hosts(transport: str) -> Iterator[list[str]]:
    """Namespaces: the ranks' hosts, the strangers' host, the switch; none for shared memory."""
    placement = TRANSPORTS[transport]
    if len(set(placement)) == 1:
        yield []
        return
    with network(max(placement) + 2) as names:
        yield [*names, f"pycomm-{os.getpid()}-switch"]


def play(row_name: str, operation: str, transport: str) -> Verdict:
    """Runs the job with the fault, in namespaces and folders of its own that are gone afterwards."""
    row, placement = ROWS[row_name], TRANSPORTS[transport]
    expect = row.expect[transport]
    assert expect is not None, "a cell that makes no sense"
    verdict = Verdict(row_name, operation, transport)
    folder = Path(tempfile.mkdtemp(prefix="pycomm-chaos-"))
    before = _segments()
    try:
        with _hosts(transport) as names:
            if names and row.shape:
                ip_tc(names[placement[-1]], row.shape)
            job = _job(row, operation, placement, names, folder)
            board = Board(folder / "board", len(placement), create=True)
            scene = Scene(job, board, names, victims=row.victims(placement))
            results, trouble = _run(row, scene, board)
            verdict.wrong += trouble
            judge(verdict, expect, scene, results)
            verdict.wrong += _open_ports(names[:-2])
        verdict.wrong += _left_in(folder)
        verdict.wrong += [f"segment {name} is left in /dev/shm" for name in _segments() - before]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return verdict


def ip_tc(host: str, shape: str) -> None:
    ip("netns", "exec", host, "tc", "qdisc", "add", "dev", "eth0", "root", *shape.split())


def _job(row: Row, operation: str, placement: list[int], names: list[str], folder: Path) -> Job:
    for name in ("run", "tmp"):
        (folder / name).mkdir(mode=0o700)
    settings: dict[int, dict[str, str]] = {}
    for name in ("secret", "other-secret"):
        path = folder / name
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))
    for rank, host in enumerate(placement):
        other = row.other_secret and host == placement[-1]
        settings[rank] = {"PYCOMM_SECRET_FILE": str(folder / ("other-secret" if other else "secret"))}
        if row.n_sockets:
            settings[rank]["PYCOMM_SOCKETS"] = str(row.n_sockets)
    return Job(
        operation,
        placement,
        names[:-2],
        str(folder),
        slow_s=row.slow_s,
        differ=row.differ,
        settings=settings,
    )


def _run(row: Row, scene: Scene, board: Board) -> tuple[list[Any], list[str]]:
    """The results of all ranks, while a thread makes the fault; and what went wrong that must never."""
    trouble: list[str] = []

    def break_it() -> None:
        try:
            ranks = range(board.size)
            wait_until(lambda: all(board.pid(r) for r in ranks), "all ranks begin")
            if row.at != "join":
                board.join = 1
                wait_until(lambda: all(board.ready(r) for r in ranks), "all ranks join")
            if row.at == "calls":
                board.go = 1
                wait_until(lambda: all(board.call(r) >= 3 for r in ranks), "calls go well")
            row.fault(scene)
            board.join = board.go = 1
            time.sleep(row.linger_s)
        except Exception as error:
            trouble.append(f"the fault could not be made: {type(error).__name__}: {error}")
        board.join = board.go = board.stop = 1

    thread = threading.Thread(target=break_it)
    thread.start()
    results: list[Any] = [None] * board.size
    folder = scene.job.folder
    try:
        results = run_ranks(
            board.size,
            run,
            scene.job,
            timeout=TIMEOUT_S,
            env={"PYCOMM_RUN_DIR": f"{folder}/run", "XDG_RUNTIME_DIR": f"{folder}/tmp"},
            may_die=scene.victims if row.kills else (),
        )
    except RanksTimedOut as error:
        trouble.append(f"a hang: {error}")
    except RankError as error:
        trouble.append(f"a process was lost: {error}")
    thread.join()
    return results, trouble


# ---- the verdict ----------------------------------------------------------------------------------------


def judge(verdict: Verdict, expect: Expect, scene: Scene, results: list[Any]) -> None:
    outcomes: list[str] = []
    named: set[str] = set()
    for rank, result in enumerate(results):
        if isinstance(result, Died):
            verdict.reports.append(f"rank {rank}: killed by {signal.Signals(-result.exitcode).name}")
            continue
        if not isinstance(result, Report):
            verdict.reports.append(f"rank {rank}: no report")
            continue
        took_s = result.at_s - scene.board.fault_at
        verdict.reports.append(
            f"rank {rank}: {result.outcome} after {took_s:.2f} s, {result.n_calls} calls; {result.text}"
        )
        outcomes.append(result.outcome)
        if result.outcome != "completed":
            verdict.took_s = max(verdict.took_s, took_s)
            named.update(_culprits(result.text))
        verdict.wrong += [f"rank {rank}: {what}" for what in _faults_of(rank, result, took_s, expect, scene)]
    errors = {rank: _errors(scene, rank) for rank in range(scene.board.size)}
    warnings, wrong = _warnings(expect, scene, errors)
    verdict.wrong += wrong
    if expect.strangers and not any("refused a connection" in text for text in errors.values()):
        verdict.wrong.append("no rank has logged the strangers")
    verdict.reports += [f"rank {rank} logged: {text.strip()}" for rank, text in errors.items() if text]
    verdict.reports += scene.notes
    verdict.text = _cell_text(outcomes, named, verdict.took_s, warnings)


def _errors(scene: Scene, rank: int) -> str:
    return (Path(scene.job.folder) / f"stderr-{rank}").read_text(errors="replace")


def _culprits(text: str) -> list[str]:
    """The rank that an error is about; a rank that only passed the news on is none."""
    text = text.rpartition(" failed: ")[2]
    if differ := re.findall(r"rank (\d+) called|rank (\d+) sends|to rank (\d+), which expects", text):
        return ["".join(words) for words in differ]
    found = re.search(r"rank (\d+) \(host|rank (\d+)\b", text)
    return [] if found is None else [found[1] or found[2]]


def _faults_of(rank: int, report: Report, took_s: float, expect: Expect, scene: Scene) -> Iterator[str]:
    """What is not as it must be in how this rank ended."""
    if report.outcome not in expect.outcomes:
        yield f"{report.outcome}, expected {' or '.join(expect.outcomes)}: {report.text}"
    elif report.outcome != "completed":
        if took_s > expect.within_s + expect.slack_s:
            yield f"told after {took_s:.1f} s, must be within {expect.within_s:g} s: {report.text}"
        if rank in scene.victims and expect.own:
            must = expect.own
        else:
            must = expect.says
            alike = expect.all_alike or rank not in scene.victims
            blamed = (
                scene.victims if alike else [r for r in range(scene.board.size) if r not in scene.victims]
            )
            if expect.names and not any(re.search(rf"rank {r}\b", report.text) for r in blamed):
                yield f"names none of the ranks {blamed}: {report.text}"
        if not re.search(must, report.text):
            yield f"does not say {must!r}: {report.text}"
        if report.joined and report.again != report.outcome:
            yield f"the next call raised {report.again or 'nothing'} after {report.outcome}"
    if report.close_s > 5:
        yield f"close() took {report.close_s:.1f} s"
    if report.leaks:
        yield f"left behind: {', '.join(report.leaks)}"


def _warnings(expect: Expect, scene: Scene, errors: dict[int, str]) -> tuple[int, list[str]]:
    """How many healthy ranks have warned, and what is missing.

    A rank may wait for another healthy one, and name that; who waits for the victim must tell its state.
    """
    n, told = 0, False
    for rank, text in errors.items():
        if rank in scene.victims:
            continue
        lines = [line for line in text.splitlines() if " has waited " in line]
        n += bool(lines)
        about = [line for line in lines if any(f" for rank {r} " in line for r in scene.victims)]
        told = told or any(re.search(expect.warns, line) for line in about)
    return n, [f"nobody has warned with {expect.warns!r}"] if expect.warns and not told else []


def _cell_text(outcomes: list[str], named: set[str], took_s: float, n_warned: int) -> str:
    kinds = sorted(set(outcomes))
    text = ", ".join(f"{kind} ×{outcomes.count(kind)}" for kind in kinds)
    if named:
        text += f", names {' '.join(sorted(named))}"
    if took_s:
        text += f", {took_s:.2f} s"
    if n_warned:
        text += f", {n_warned} warned"
    return text


# ---- leaks, seen from outside ---------------------------------------------------------------------------


def _segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "pycomm" in name}


def _left_in(folder: Path) -> list[str]:
    """Files that no process of the job has removed; the store is torch's, and stays."""
    left = list((folder / "tmp").rglob("*"))
    left += [path for path in (folder / "run").rglob("*") if path.name != "store"]
    return [f"{path.relative_to(folder)} is left" for path in left]


def _open_ports(names: list[str]) -> list[str]:
    """What still listens on the hosts when all ranks have gone."""
    found: list[str] = []

    def look() -> None:
        for name in names:
            enter(name)
            for table in ("tcp", "tcp6"):
                for line in Path(f"/proc/thread-self/net/{table}").read_text().splitlines()[1:]:
                    if line.split()[3] == "0A":
                        found.append(f"{name} still listens at {line.split()[1]}")

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found
