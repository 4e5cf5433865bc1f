"""``pycomm bench --device cuda``: whole runs on emulated devices, what it refuses, and its table."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pycomm import _C, devices
from pycomm.bench import Options, Report, launch
from pycomm.bench import table as text_table
from pycomm.bench.collectives import bus_factor, places
from pycomm.bench.options import COLLECTIVES
from pycomm.bench.report import Measurement, Row
from pycomm.cli.bench import bench

emulated = pytest.mark.skipif(_C.cuda.build() != "emulated", reason="needs the extension with emulated CUDA")


def run_command(*args: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(bench)
    done = CliRunner().invoke(app, [*args, "--device", "cuda"])
    return done.exit_code, done.output


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOMM_TUNE", "off")


@emulated
@pytest.mark.timeout(200)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_runs_and_is_right(collective: str) -> None:
    options = Options(
        collective, ranks=3, root=1, device="cuda", min_bytes=48, max_bytes=48 * 64, factor=64,
        n_iters=2, n_warmup=1, max_seconds=1.0,
        algorithm=None if collective in ("all_to_all", "sendrecv") else "nccl",
    )  # fmt: skip
    report = launch(options, quiet=True)
    assert report is not None and report.n_wrong() == 0 and report.notes == []
    assert report.warning == "emulated: no time here means anything" and report.machine["gpu"] == "emulated"
    assert Report.from_json(report.to_json()) == report
    wanted = [("pycomm", "ordinary"), ("pycomm", "arena")]
    wanted += [("pycomm/nccl", "ordinary")] if options.algorithm else []
    for row in report.rows:
        found = [(m.library, m.buffer, m.place) for m in row.measurements]
        assert found == [(*which, place) for which in wanted for place in places(collective)]
        for m in row.measurements:
            assert 0 < m.best_us <= m.time_us and m.n_samples >= 3
            assert m.algbw == pytest.approx(row.n_bytes / m.time_us / 1e3)
            assert m.busbw == pytest.approx(m.algbw * bus_factor(collective, 3))


@emulated
@pytest.mark.timeout(200)
def test_where_devices_do_not_reach_each_other_the_arena_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_ON_CPU_PEER_ACCESS", "0")
    options = Options(
        "all_reduce", ranks=2, device="cuda", min_bytes=64, max_bytes=64, n_iters=2, max_seconds=1.0
    )
    report = launch(options, quiet=True)
    assert report is not None and report.n_wrong() == 0
    assert {m.buffer for row in report.rows for m in row.measurements} == {"ordinary"}
    [note] = report.notes
    assert "no arena: " in note and "no NVLink or PCIe path" in note


@emulated
@pytest.mark.timeout(200)
def test_the_command_prints_the_table_and_writes_json_and_a_picture(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    json_path, png = tmp_path / "r.json", tmp_path / "r.png"
    code, output = run_command(
        "all_reduce", "-b", "16", "-e", "4K", "-f", "256", "-n", "2", "-w", "0", "-d", "half",
        "--max-seconds", "1", "--algorithm", "peer_two_shot", "--json", str(json_path), "--plot", str(png),
    )  # fmt: skip
    assert code == 0, output
    report = Report.from_json(json_path.read_text())
    assert [row.n_bytes for row in report.rows] == [16, 4096] and report.n_ranks == 2
    printed = capfd.readouterr().out  # by rank 0
    assert printed.count("# *** emulated: no time here means anything") == 2
    assert "all_reduce, 2 ranks, float16, sum, CUDA tensors" in printed
    assert "pycomm/peer_two_shot" in printed and "limit" not in printed and " hot" not in printed
    assert "wrong elements: 0 OK" in printed
    assert png.stat().st_size > 1000


@emulated
@pytest.mark.parametrize("peer", ["nccl", "torch-symm-mem"])
def test_emulated_devices_have_no_peers(peer: str) -> None:
    code, output = run_command("--peer", peer)
    assert code == 2
    assert f"peer '{peer}': CUDA is emulated here, and torch has no tensors on such devices" in output


@emulated
def test_a_rank_without_a_device_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_ON_CPU_DEVICES", "1")
    code, output = run_command("-b", "16", "-e", "16", "--ranks", "2", "--max-seconds", "1")
    assert code == 1 and "rank 1" in output and "device" in output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--peer", "gloo"], "peer 'gloo': expected one of nccl, torch-symm-mem"),
        (["--algorithm", "quantum"], "algorithm for all_reduce 'quantum': expected one of direct"),
        (["reduce", "--algorithm", "peer_one_shot"], "algorithm for reduce 'peer_one_shot': expected one of"),
        (["all_to_all", "--algorithm", "nccl"], "algorithm 'nccl': all_to_all has none to choose from"),
    ],
)
def test_bad_arguments_exit_with_2(args: list[str], said: str) -> None:
    code, output = run_command(*args)
    assert code == 2
    assert said in output


def test_ways_of_devices_are_no_algorithms_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="algorithm for all_reduce 'nccl': expected one of direct"):
        Options(algorithm="nccl")
    with pytest.raises(ValueError, match="device 'tpu': expected one of cpu, cuda"):
        Options(device="tpu")
    assert Options(device="cuda", algorithm="nccl", peers=("nccl",)).compared() == ("pycomm/nccl", "nccl")
    assert Options(algorithm="ring", peers=("gloo",)).compared() == ("gloo",)


@pytest.mark.skipif(not devices.prepare(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_started() -> None:
    code, output = run_command("--peer", "nccl")
    assert code == 1
    assert "pycomm bench: no CUDA device: " in output


def test_the_table_on_cuda() -> None:
    """Made of numbers: peers' fastest calls, several kernels of one library, no hot column, the warning."""
    options = Options(
        device="cuda", peers=("nccl", "torch-symm-mem"), buffers=("ordinary",), algorithm="ring"
    )
    report = Report(options, 8, {"gpu": "x"}, warning="SEVERAL")
    times = {
        ("pycomm", "ordinary", "out"): 40.0,
        ("pycomm", "ordinary", "in"): 32.0,
        ("pycomm/ring", "ordinary", "in"): 64.0,
        ("nccl", "ordinary", "in"): 48.0,
        ("torch-symm-mem", "one-shot", "out"): 100.0,
        ("torch-symm-mem", "two-shot", "in"): 16.0,
    }
    measured = [Measurement(*key, t, t, t, t, 9, 1.0, 1.75, 1.0, 0) for key, t in times.items()]
    report.rows.append(Row(1 << 20, 1 << 18, None, measured))
    [line] = text_table.row_lines(report, report.rows[0])
    cells = line.split()
    assert cells[5:14] == ["ordinary", "40.00", "1.00", "1.75", "0", "32.00", "1.00", "1.75", "0"]
    assert cells[14:] == ["64.00", "1.75", "2.00", "48.00", "1.75", "1.50", "16.00", "1.75", "0.50"]
    header = text_table.header(report).splitlines()
    assert "# *** SEVERAL" in header
    assert "hot" not in "\n".join(header)
    footer = text_table.footer(report)
    assert "limit" not in footer and "wrong elements: 0 OK" in footer and footer.endswith("# *** SEVERAL")
