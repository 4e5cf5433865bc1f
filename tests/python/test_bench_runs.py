"""pycomm.bench as it is used: whole runs of every collective, mpirun, torchrun, the command, the table."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pycomm.bench import Measurement, Options, Report, Row, launch
from pycomm.bench import table as text_table
from pycomm.bench.collectives import bus_factor, places
from pycomm.bench.options import COLLECTIVES
from pycomm.bench.plot import plot
from pycomm.bench.report import Regime
from pycomm.cli.bench import bench

ROOT = Path(__file__).resolve().parents[2]
QUICK = {
    "min_bytes": 48,
    "max_bytes": 48 * 256,
    "factor": 256,
    "n_iters": 3,
    "n_warmup": 0,
    "max_seconds": 1.0,
}


def _check(report: Report | None, libraries: set[str]) -> Report:
    assert report is not None
    assert report.n_wrong() == 0
    for row in report.rows:
        assert {m.library for m in row.measurements} == libraries, report.notes
        for m in row.measurements:
            factor = bus_factor(report.options.collective, report.n_ranks)
            assert 0 < m.best_us <= m.time_us <= max(m.p90_us, m.time_us)
            assert m.hot_us > 0
            assert m.n_samples >= min(3, report.options.n_iters)
            assert m.algbw == pytest.approx(row.n_bytes / m.time_us / 1e3)
            assert m.busbw == pytest.approx(m.algbw * factor)
    assert Report.from_json(report.to_json()) == report
    return report


@pytest.mark.timeout(300)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_runs_and_is_right(collective: str) -> None:
    """Three ranks (blocks of unequal alignment), root 1, pycomm on both buffers, gloo, the limit."""
    report = _check(
        launch(Options(collective, ranks=3, root=1, peers=("gloo",), **QUICK), quiet=True),
        {"pycomm", "gloo", "limit"},
    )
    for row in report.rows:
        for kind in ("ordinary", "arena"):
            assert [m.place for m in row.measurements if m.buffer == kind and m.library == "pycomm"] == list(
                places(collective)
            )
    lines = text_table.row_lines(report, report.rows[0])
    assert [line.split()[5] for line in lines] == ["ordinary", "arena"]
    assert len(lines[0].split()) == 6 + 10 + 3
    assert "measured / limit" in text_table.footer(report)


@pytest.mark.timeout(300)
def test_other_dtypes_and_operations() -> None:
    """float8 max, which gloo has not: empty cells, and a note says why; the limit runs in float32."""
    options = Options(dtype="float8_e5m2", op="max", peers=("gloo",), **QUICK)
    report = launch(options, quiet=True)
    assert report is not None
    _check(report, {"pycomm", "limit"})
    assert any(note.startswith("gloo: ") for note in report.notes)
    assert "-" in text_table.row_lines(report, report.rows[0])[0].split()[-3:]


@pytest.mark.timeout(300)
@pytest.mark.skipif(
    shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs Open MPI's mpirun and mpi4py",
)
def test_mpi_and_gloo_are_measured_in_the_same_processes() -> None:
    report = _check(
        launch(Options(peers=("gloo", "mpi"), **QUICK), quiet=True), {"pycomm", "gloo", "mpi", "limit"}
    )
    assert "Open MPI" in report.machine["mpi"]
    assert {m.place for m in report.rows[0].measurements if m.library == "mpi"} == {"out", "in"}


@pytest.mark.timeout(300)
def test_a_rank_that_fails_ends_the_run_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOMM_DETERMINISTIC", "perhaps")
    with pytest.raises(RuntimeError, match=r"(?s)failed \(exit status\): rank .*must be 0 or 1"):
        launch(Options(**QUICK), quiet=True)


@pytest.mark.timeout(300)
def test_under_torchrun_the_ranks_are_torchruns(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "from pathlib import Path\n"
        "from pycomm.bench import Options, launch\n"
        f"report = launch(Options(ranks=9, **{QUICK!r}))\n"
        f"if report: Path({str(tmp_path / 'report.json')!r}).write_text(report.to_json())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = _check(Report.from_json((tmp_path / "report.json").read_text()), {"pycomm", "limit"})
    assert report.n_ranks == 2
    assert "out-of-place" in done.stdout and "wrong elements: 0 OK" in done.stdout


# ---- the command, the picture, the table that must hold ---------------------------------------------


def _run_command(*args: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(bench)
    done = CliRunner().invoke(app, list(args))
    return done.exit_code, done.output


@pytest.mark.timeout(300)
def test_the_command_writes_json_and_a_picture(tmp_path: Path) -> None:
    json_path, png = tmp_path / "r.json", tmp_path / "r.png"
    code, output = _run_command(
        "all_gather", "-b", "4", "-e", "4K", "-f", "32", "--ranks", "2", "--peer", "gloo", "-n", "3",
        "-w", "0", "-d", "half", "--max-seconds", "1", "--buffer", "arena",
        "--json", str(json_path), "--plot", str(png),
    )  # fmt: skip
    assert code == 0, output
    report = Report.from_json(json_path.read_text())
    assert [row.n_bytes for row in report.rows] == [4, 128, 4096]
    assert report.options.dtype == "float16" and report.options.buffers == ("arena",)
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-b", "4X"], "expected a number of bytes"),
        (["all_reduced"], "collective 'all_reduced': expected one of all_reduce"),
        (["--peer", "nccl"], "peer 'nccl'"),
        (["--buffer", "gpu"], "buffer 'gpu'"),
        (["--algorithm", "rings"], "algorithm for all_reduce 'rings': expected one of direct"),
        (["all_to_all", "--algorithm", "ring"], "algorithm 'ring': all_to_all has none to choose from"),
        (["-o", "band"], "op for float32 'band': expected one of sum, product"),
        (["-b", "8", "-e", "4"], "max_bytes 4: expected at least 8"),
        (["-r", "2", "--ranks", "2"], "root 2: expected a rank below 2"),
        (["--json", "/nowhere/at/all/r.json"], "its folder does not exist"),
    ],
)
def test_bad_arguments_exit_with_2(args: list[str], said: str) -> None:
    code, output = _run_command(*args)
    assert code == 2
    assert said in output


def _made_report(n_ranks: int, times_us: dict[tuple[str, str, str], float], peers: tuple[str, ...]) -> Report:
    """A report of one size, 1 MiB, with these times: what the pure functions below are given."""
    n_bytes, factor = 1 << 20, bus_factor("all_reduce", n_ranks)
    measured = [
        Measurement(*key, t, t, t, t, 9, n_bytes / t / 1e3, n_bytes / t / 1e3 * factor, n_bytes / t / 1e3, 0)
        for key, t in times_us.items()
    ]
    report = Report(Options(ranks=n_ranks, peers=peers), n_ranks, {"cpu": "x"})
    report.rows.append(Row(n_bytes, n_bytes // 4, Regime(0.1, 3.0), measured))
    return report


TIMES = {
    ("pycomm", "ordinary", "out"): 40.0,
    ("pycomm", "ordinary", "in"): 32.0,
    ("pycomm", "arena", "out"): 20.0,
    ("pycomm", "arena", "in"): 16.0,
    ("gloo", "ordinary", "in"): 800.0,
    ("mpi", "ordinary", "out"): 100.0,
    ("mpi", "ordinary", "in"): 120.0,
    ("limit", "probe", "out"): 14.0,
    ("limit", "probe", "in"): 12.0,
}


def test_rows_compare_the_peers_fastest_call_with_ours_in_place(tmp_path: Path) -> None:
    report = _made_report(2, TIMES, ("gloo", "mpi"))
    ordinary, arena = (line.split() for line in text_table.row_lines(report, report.rows[0]))
    assert ordinary[6:11] == ["40.00", "26.21", "26.21", "0", "40.00"]
    assert ordinary[-6:] == ["800.0", "1.31", "25.00", "100.0", "10.49", "3.12"]
    assert arena[-4:] == ["50.00", "100.0", "10.49", "6.25"]
    assert "0.750 (0.750)" in text_table.footer(report)  # 12 us / 16 us, both in place
    assert text_table.header(report).count("busbw") == 4
    plot(report, tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 1000


def _bench_script(name: str):  # type: ignore[no-untyped-def]
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "bench" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(ROOT / "bench"))


def test_what_must_hold_is_judged_by_medians_and_the_lowest_size() -> None:
    script = _bench_script("table")
    slow = {**TIMES, ("pycomm", "arena", "in"): 40.0}
    reports = [_made_report(2, times, ("gloo", "mpi")) for times in (TIMES, slow, TIMES)]
    text, met = script.markdown(reports, {"barrier": 0.01, "recv": 0.2})
    lines = {
        tuple(cell.strip() for cell in line.split("|")[1:3]): line
        for line in text.splitlines()
        if "|" in line
    }
    assert "| 30× | 50.00× | 1M | met |" in lines["arena tensors, 1–4 MiB", "gloo busbw"]
    assert "| 0.6× | 0.75× | 1M | met |" in lines["arena tensors, 1–64 MiB", "zero-copy probe"]
    # the slower of our places: 100 / 40 for ordinary tensors, 100 / 20 for arena tensors
    assert "| 2× | 2.50× | 1M | met |" in lines["ordinary tensors, from 64 KiB", "Open MPI"]
    assert "| 5× | 5.00× | 1M | met |" in lines["arena tensors, from 64 KiB", "Open MPI"]
    assert "not measured" in lines["arena tensors, 64 MiB", "gloo busbw"]
    assert "met" in lines["rank waiting 2 s for a late peer, barrier", "its own CPU time"]
    assert "**missed**" in lines["rank waiting 2 s for a late peer, recv", "its own CPU time"]
    assert not met  # lines that were not measured do not count as met


@pytest.mark.timeout(120)
def test_a_waiting_rank_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shares = _bench_script("late_peer").late_peer_shares(0.5)
    assert len(shares) == 5
    assert max(shares.values()) < 0.05, shares


@pytest.mark.timeout(120)
def test_pipelines_are_measured_beside_torchs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = _bench_script("pipeline")
    times = script.launch("overhead", 2, 3)
    assert {kind: len(found) for kind, found in times.items()} == {"alone": 3, "pycomm": 3, "torch": 3}
    assert all(seconds > 0 for found in times.values() for seconds in found)
    run = {"measured": 0.30, "simulated": 0.25, "latency_s": 1e-4, "dispatch_s": 1e-5}
    case = {
        "runs": [run],
        "pycomm": {"step_s": [0.44], "bubble": [0.30]},
        "torch": {"step_s": [0.40], "bubble": [0.36]},
    }
    table = script.Table()
    script.sleeping_rows(table, [[case] * len(script.CASES)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 3 * len(script.CASES)
    assert "| 0.200 | 0.100 | **missed** |" in lines[2]  # 0.30 / 0.25 - 1
    assert "| 1.100 | 1.000 | **missed** |" in lines[3]
    assert "met" in lines[4] and not table.all_met  # 0.30 is nearer to 3/11 than 0.36


@pytest.mark.timeout(200)
def test_connecting_prints_its_table() -> None:
    command = [sys.executable, str(ROOT / "bench/connecting.py"), "--ranks", "4", "--launches", "1"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=180
    )
    assert done.returncode in (0, 1), done.stderr  # 1: a busy machine has missed a figure
    assert done.stdout.count("4 ranks join") == 2 and "| authentication, a connection |" in done.stdout
