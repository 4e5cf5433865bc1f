"""Some cells of the fault matrix, so that every run of the tests plays it; all of them: ``make chaos``."""

from __future__ import annotations

from pathlib import Path

import pytest
from hosts_network import require_network

from chaos.__main__ import BEGIN, END, table, write
from chaos.cell import Verdict, play
from chaos.matrix import OPERATIONS, ROWS, TRANSPORTS, makes_sense

CELLS = [
    ("rank killed", "all_to_all", "shared memory"),
    ("rank killed", "DDP step", "hierarchical"),
    ("connection reset", "broadcast", "TCP"),
    ("garbage", "all_reduce", "TCP"),
    ("/dev/shm full", "all_reduce", "hierarchical"),
    ("mismatch of order", "barrier", "hierarchical"),
]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("row", "operation", "transport"), CELLS)
def test_a_cell(row: str, operation: str, transport: str) -> None:
    if transport != "shared memory":
        require_network()
    verdict = play(row, operation, transport)
    assert not verdict.wrong, "\n".join([*verdict.wrong, *verdict.reports])


def test_every_row_says_what_must_happen_on_every_transport() -> None:
    for name, row in ROWS.items():
        assert row.expect.keys() == TRANSPORTS.keys(), name
    for operation in OPERATIONS:
        n = sum(makes_sense(row, operation, transport) for row in ROWS for transport in TRANSPORTS)
        assert n > 30, operation


def test_the_table_goes_between_the_markers(tmp_path: Path) -> None:
    key = ("rank killed", "barrier", "TCP")
    text = table({key: Verdict(*key, text="PeerLostError ×2, names 2, 0.01 s", wrong=["late"])}, 60.0)
    path = tmp_path / "document.md"
    path.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    write(path, text)
    found = path.read_text()
    assert found.startswith(f"above\n{BEGIN}\n") and found.endswith(f"{END}\nbelow\n") and "old" not in found
    row = "| rank killed | n/a | n/a | n/a | PeerLostError ×2, names 2, 0.01 s **WRONG** | n/a |"
    assert row in found
    path.write_text("no markers")
    with pytest.raises(SystemExit, match="markers"):
        write(path, text)
