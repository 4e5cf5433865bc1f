"""``make chaos``: plays the whole matrix, prints it, writes it into a document; fails when a cell does.

    python tests/chaos [--row REGEX] [--operation REGEX] [--transport REGEX] [--write FILE] [-v]

Without the right to make network namespaces only shared memory is played, and that is said.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS / "python"), str(_TESTS.parent)]

import pytest  # noqa: E402
from hosts_network import ip, require_network  # noqa: E402

from chaos.cell import Verdict, play  # noqa: E402
from chaos.matrix import OPERATIONS, ROWS, TRANSPORTS, makes_sense  # noqa: E402

BEGIN, END = "<!-- make chaos: begin -->", "<!-- make chaos: end -->"
WAITING = ("rank stopped", "rank slow", "link down", "link down and back", "host gone")
"""Rows whose jobs mostly wait: many of them side by side."""

Key = tuple[str, str, str]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The fault matrix.")
    for name in ("row", "operation", "transport"):
        parser.add_argument(f"--{name}", default="", help="only those that this regular expression finds")
    parser.add_argument("--write", type=Path, help="a document with the markers, for the table")
    parser.add_argument("-v", "--verbose", action="store_true", help="also what each rank said")
    return parser.parse_args()


def chosen(options: argparse.Namespace, have_network: bool) -> list[Key]:
    return [
        (row, operation, transport)
        for row in ROWS
        for operation in OPERATIONS
        for transport in TRANSPORTS
        if re.search(options.row, row)
        and re.search(options.operation, operation)
        and re.search(options.transport, transport)
        and makes_sense(row, operation, transport)
        and (have_network or transport == "shared memory")
    ]


def sweep() -> None:
    """Removes the hosts of runs that were killed before they could."""
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, timeout=20).stdout
    for name, pid in re.findall(r"^(pycomm-(\d+)-\S+)", listed, re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():
            ip("netns", "del", name)


def run_all(cells: list[Key], verbose: bool) -> dict[Key, Verdict]:
    """Those that wait side by side, then the others two at a time."""
    verdicts: dict[Key, Verdict] = {}
    context = multiprocessing.get_context("spawn")
    waiting = [cell for cell in cells if cell[0] in WAITING]
    busy = [cell for cell in cells if cell[0] not in WAITING]
    for some, n_at_once in ((waiting, 6), (busy, 2)):
        if not some:
            continue
        with ProcessPoolExecutor(min(n_at_once, len(some)), mp_context=context) as pool:
            pending: dict[Future[Verdict], Key] = {pool.submit(play, *cell): cell for cell in some}
            for done in as_completed(pending):
                verdict = verdicts[pending[done]] = done.result()
                show(verdict, verbose)
    return verdicts


def show(verdict: Verdict, verbose: bool) -> None:
    state = "ok" if not verdict.wrong else "WRONG"
    print(f"{state:5} {verdict.row} / {verdict.operation} / {verdict.transport}: {verdict.text}", flush=True)
    for line in verdict.wrong:
        print(f"      {line}", flush=True)
    if verbose or verdict.wrong:
        for line in verdict.reports:
            print(f"    . {line}", flush=True)


def table(verdicts: dict[Key, Verdict], seconds: float) -> str:
    """The matrix in Markdown: for each transport, rows by operations."""
    kernel, cores = platform.release().split("-")[0], os.cpu_count()
    n_wrong = sum(bool(v.wrong) for v in verdicts.values())
    lines = [
        f"`make chaos` of {time.strftime('%Y-%m-%d')}: Linux {kernel}, {cores} cores, {len(verdicts)} jobs "
        f"in {seconds / 60:.1f} minutes, {n_wrong} of them not as they must be."
    ]
    lines += ["", "| fault | how it is made | what must happen on every rank that lives |", "|---|---|---|"]
    for name in dict.fromkeys(key[0] for key in verdicts):
        row = ROWS[name]
        musts = dict.fromkeys(str(expect) for expect in row.expect.values() if expect is not None)
        lines.append(f"| {name} | {row.what} | {'; else '.join(musts)} |")
    for transport, placement in TRANSPORTS.items():
        n_hosts = len(set(placement))
        lines += ["", f"**{transport}**: {len(placement)} ranks on {n_hosts} host{'s' * (n_hosts > 1)}", ""]
        lines += ["| fault | " + " | ".join(OPERATIONS) + " |", "|---" * (len(OPERATIONS) + 1) + "|"]
        for row in dict.fromkeys(key[0] for key in verdicts if key[2] == transport):
            found = [verdicts.get((row, operation, transport)) for operation in OPERATIONS]
            texts = ["n/a" if v is None else v.text + (" **WRONG**" if v.wrong else "") for v in found]
            lines.append(f"| {row} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def write(path: Path, text: str) -> None:
    document = path.read_text()
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{path} has no markers {BEGIN} and {END} to write between")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main() -> int:
    options = arguments()
    have_network = True
    try:
        require_network()
        sweep()
    except pytest.skip.Exception as reason:
        have_network = False
        print(f"{reason}\n*** ONLY SHARED MEMORY IS PLAYED; the document is left as it is")
    begin_s = time.monotonic()
    cells = chosen(options, have_network)
    verdicts = run_all(cells, options.verbose)
    text = table(verdicts, time.monotonic() - begin_s)
    print(text)
    if options.write and have_network:
        write(options.write, text)
    wrong = [v for v in verdicts.values() if v.wrong]
    print(f"\n{len(verdicts)} jobs, {len(wrong)} not as they must be")
    return 1 if wrong or not verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
