"""pycomm.bench: exact inputs against torch, the probe, whole runs, the command, the table."""

import functools
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from pycomm import _C, CommTimeoutError
from pycomm.bench import Measurement, Options, Report, Row, launch, parse_size
from pycomm.bench import table as text_table
from pycomm.bench.buffers import Contents, Memory, Slots, n_slots_for
from pycomm.bench.collectives import Shape, bus_factor, places, shape_of
from pycomm.bench.exact import PREMUL_FACTOR, expected, inputs
from pycomm.bench.options import COLLECTIVES, DTYPES, format_size
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


# ---- sizes and shapes -------------------------------------------------------------------------------


def test_sizes_are_written_as_in_nccl_tests() -> None:
    assert [parse_size(s) for s in ("4", "64K", "1.5M", "1g", "2 KiB", "3MB")] == [
        4, 65536, 3 << 19, 1 << 30, 2048, 3 << 20,
    ]  # fmt: skip
    assert [format_size(n) for n in (6, 1024, 1536, 64 << 20, 1 << 30)] == ["6", "1K", "1536", "64M", "1G"]
    for bad in ("", "x", "-4", "4T", "1..5K"):
        with pytest.raises(ValueError, match="expected a number of bytes"):
            parse_size(bad)


def test_the_sweep_ends_at_the_largest_size() -> None:
    assert Options(min_bytes=4, max_bytes=100, factor=3).sizes() == [4, 12, 36]
    assert Options(min_bytes=8, max_bytes=8).sizes() == [8]
    assert Options.from_json(Options(peers=("gloo",), op="max").to_json()) == Options(
        peers=("gloo",), op="max"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("collective", "all_reduced"), ("dtype", "float31"), ("op", "mean"), ("peers", ("nccl",)),
        ("buffers", ("gpu",)), ("min_bytes", 0), ("max_bytes", 1), ("factor", 1), ("ranks", 0),
        ("n_iters", 0), ("n_warmup", -1), ("root", -1), ("max_seconds", 0.0), ("max_seconds", math.nan),
    ],
)  # fmt: skip
def test_bad_options_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field.rstrip('s')}.* .*expected"):
        Options(**{field: value})  # type: ignore[arg-type]


def test_counts_and_bus_factors_are_those_of_nccl_tests() -> None:
    def counts(collective: str) -> tuple[int, int, int]:
        shape = shape_of(collective, 96, 4, n_ranks=3, rank=1, root=0)
        return shape.count, shape.n_in, shape.n_out

    assert (
        counts("all_reduce") == counts("broadcast") == counts("reduce") == counts("sendrecv") == (24, 24, 24)
    )
    assert counts("reduce_scatter") == counts("scatter") == (8, 24, 8)
    assert counts("all_gather") == counts("gather") == (8, 8, 24)
    assert counts("all_to_all") == (8, 24, 24)
    assert shape_of("all_gather", 4, 4, 3, 0, 0).n_out == 3  # never less than one element for each rank
    factors = {name: bus_factor(name, 4) for name in COLLECTIVES}
    assert factors == {
        "all_reduce": 1.5, "reduce_scatter": 0.75, "all_gather": 0.75, "broadcast": 1.0, "reduce": 1.0,
        "gather": 0.75, "scatter": 0.75, "all_to_all": 0.75, "sendrecv": 1.0,
    }  # fmt: skip


# ---- exact inputs -----------------------------------------------------------------------------------


def _shapes(collective: str, n_ranks: int, n_bytes: int, dtype: torch.dtype) -> list[Shape]:
    root = n_ranks - 1
    return [shape_of(collective, n_bytes, dtype.itemsize, n_ranks, rank, root) for rank in range(n_ranks)]


_REDUCE = {
    "sum": lambda a, b: a + b,
    "avg": lambda a, b: a + b,
    "premul_sum": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": lambda a, b: a & b,
    "bor": lambda a, b: a | b,
    "bxor": lambda a, b: a ^ b,
}


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5, 17])
@pytest.mark.parametrize("dtype_name", [d for d in DTYPES if d != "bool"])
def test_reductions_are_exact_in_the_dtype_itself(dtype_name: str, n_ranks: int) -> None:
    """Adding up in the dtype, one rank after the other, gives the expected value, which float64 gives too."""
    dtype = getattr(torch, dtype_name)
    integral, is_complex = not (dtype.is_floating_point or dtype.is_complex), dtype.is_complex
    shapes = _shapes("all_reduce", n_ranks, 3000 * dtype.itemsize, dtype)
    wide = torch.int64 if integral else torch.complex128 if is_complex else torch.float64
    for op, combine in _REDUCE.items():
        if (op in ("band", "bor", "bxor") and not integral) or (op in ("min", "max") and is_complex):
            continue
        if op in ("avg", "premul_sum") and integral:
            continue
        tensors = [inputs(shape, op, dtype) for shape in shapes]
        total = functools.reduce(combine, [t.to(wide) for t in tensors])
        if op == "avg":
            assert torch.equal(total.to(dtype).to(wide), total)  # the sum itself rounds nowhere
            total = total / n_ranks
        if op == "premul_sum":
            total = total * PREMUL_FACTOR
        for shape in shapes:
            want = expected(shape, op, dtype)
            assert want is not None and want.dtype == dtype
            assert torch.equal(want.view(torch.uint8), total.to(dtype).view(torch.uint8)), (op, shape.rank)
        if op == "sum":
            stepwise = functools.reduce(lambda a, b, d=dtype: (a.to(wide) + b.to(wide)).to(d), tensors)
            assert torch.equal(stepwise.to(wide), total)
            assert n_ranks == 1 or not torch.equal(total, total.roll(1)) or dtype_name.startswith("float8")


@pytest.mark.parametrize("op", ["sum", "product", "min", "max", "band", "bor", "bxor"])
def test_bool_sums_are_or_and_products_and(op: str) -> None:
    shapes = _shapes("all_reduce", 3, 2000, torch.bool)
    tensors = [inputs(shape, op, torch.bool) for shape in shapes]
    by_name = {"sum": torch.logical_or, "max": torch.logical_or, "bor": torch.logical_or,
               "product": torch.logical_and, "min": torch.logical_and, "band": torch.logical_and,
               "bxor": torch.logical_xor}  # fmt: skip
    want = functools.reduce(by_name[op], tensors)
    got = expected(shapes[1], op, torch.bool)
    assert got is not None and torch.equal(got, want)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_expected_results_are_those_of_the_definition(collective: str) -> None:
    """From all ranks' inputs, with torch.cat and sums, as MPI defines each collective."""
    n, dtype = 3, torch.int64
    shapes = _shapes(collective, n, 3 * 1700 * 8, dtype)
    sent, root, count = [inputs(s, "sum", dtype) for s in shapes], shapes[0].root, shapes[0].count
    assert all(len(x) == shapes[0].n_in for x in sent)
    total = sum(sent) if len({len(x) for x in sent}) == 1 else None
    for rank, shape in enumerate(shapes):
        mine = slice(rank * count, (rank + 1) * count)
        want = {
            "all_reduce": lambda: total,
            "reduce": lambda r=rank: total if r == root else None,
            "reduce_scatter": lambda m=mine: total[m],
            "all_gather": lambda: torch.cat(sent),
            "gather": lambda r=rank: torch.cat(sent) if r == root else None,
            "scatter": lambda m=mine: sent[root][m],
            "broadcast": lambda: sent[root],
            "all_to_all": lambda m=mine: torch.cat([x[m] for x in sent]),
            "sendrecv": lambda r=rank: sent[(r - 1) % n],
        }[collective]()
        got = expected(shape, "sum", dtype)
        assert (got is None) == (want is None)
        assert got is None or torch.equal(got, want)


# ---- buffers ----------------------------------------------------------------------------------------


def _memory(n_bytes: int) -> Memory:
    return Memory(
        "ordinary", *(torch.zeros(Memory.n_bytes_for(n_bytes), dtype=torch.uint8) for _ in range(2))
    )


@pytest.mark.parametrize("n_bytes", [4, 100, 4096, 65536, 65540, 1 << 20])
@pytest.mark.parametrize("place", ["out", "in"])
def test_dirtying_rewrites_every_slot_and_wrong_elements_are_counted(n_bytes: int, place: str) -> None:
    shape = shape_of("all_reduce", n_bytes, 4, 2, 1, 0)
    slots = Slots(_memory(n_bytes), Contents(shape, "sum", torch.float32, n_slots_for(n_bytes)), place)
    want = expected(shape, "sum", torch.float32)
    assert len(slots.pairs) == n_slots_for(n_bytes)
    assert want is not None
    slots.dirty()
    for data, out in slots.pairs:
        assert torch.equal(data, inputs(shape, "sum", torch.float32))
        assert (data.data_ptr() == out.data_ptr()) == (place == "in")
        assert data.data_ptr() % 64 == slots.pairs[0][0].data_ptr() % 64
    if place == "out":
        assert slots.n_wrong() == len(slots.pairs) * shape.n_out  # poison is never right
    for _, out in slots.pairs:
        out.copy_(want)
    assert slots.n_wrong() == 0
    slots.pairs[-1][1][-1] += 1
    slots.pairs[0][1][0] = math.nan
    assert slots.n_wrong() == (
        1 if n_bytes == 65540 + 1 or (shape.n_out == 1 and len(slots.pairs) == 1) else 2
    )
    slots.dirty()
    assert torch.equal(slots.pairs[0][0], inputs(shape, "sum", torch.float32))
    slots.zero()
    assert not any(data.any() for data, _ in slots.pairs)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_in_place_the_own_block_lies_within_the_larger_buffer(collective: str) -> None:
    shape = shape_of(collective, 3 * 80, 4, 3, 2, 0)
    slots = Slots(_memory(240), Contents(shape, "sum", torch.float32, 1), "in")
    slots.dirty()
    data, out = slots.pairs[0]
    small, large = (data, out) if collective == "all_gather" else (out, data)
    assert small.data_ptr() == large.data_ptr() + 2 * 80
    assert torch.equal(data, inputs(shape, "sum", torch.float32))


# ---- the probe --------------------------------------------------------------------------------------


def test_the_probe_refuses_what_would_leave_a_segment() -> None:
    probe = _C.Probe(rank=0, n_ranks=2, n_bytes=4096)
    with pytest.raises(ValueError, match="rank 1 is not attached"):
        probe.plan([([(1, 0)], [(0, 0)], 1)])
    for offset, n_elems in ((4096, 1), (2, 1), (0, 1025), (8192, 0)):
        with pytest.raises(ValueError, match="leave a segment of 4096 bytes"):
            probe.plan([([(0, offset)], [(0, 0)], n_elems)])
    with pytest.raises(ValueError, match="at least one source"):
        probe.plan([([], [(0, 0)], 1)])
    with pytest.raises(ValueError, match="attached once"):
        probe.attach(0, probe.fd)
    larger = _C.Probe(1, 2, 8192)
    with pytest.raises(ValueError, match="one size for all"):
        probe.attach(1, larger.fd)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        _C.Probe(2, 2, 4096)


def test_a_rank_that_does_not_come_is_a_timeout_error() -> None:
    probe, other = _C.Probe(0, 2, 4096), _C.Probe(1, 2, 4096)
    probe.attach(1, other.fd)
    probe.set_timeout(0.05)
    with pytest.raises(CommTimeoutError, match="rank 1 did not arrive"):
        probe.exchange()


@pytest.mark.parametrize("n_src", [1, 2, 3, 4])
@pytest.mark.parametrize("n_dst", [1, 2, 3, 4])
@pytest.mark.parametrize("n_elems", [0, 1, 31, 32, 1000])
def test_moves_add_all_sources_into_all_destinations(n_src: int, n_dst: int, n_elems: int) -> None:
    probe = _C.Probe(0, 1, 8 * 4096)
    data = torch.frombuffer(probe, dtype=torch.float32).view(8, 1024)
    data.copy_(torch.randint(-50, 50, data.shape))
    before = data.clone()
    source, target = [(0, 4096 * i) for i in range(n_src)], [(0, 4096 * (4 + i)) for i in range(n_dst)]
    probe.run(probe.plan([(source, target, n_elems)]))
    after = before.clone()
    after[4 : 4 + n_dst, :n_elems] = before[:n_src, :n_elems].sum(0)
    assert torch.equal(data, after)


# ---- whole runs -------------------------------------------------------------------------------------


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
def test_a_rank_that_fails_ends_the_run_with_its_words() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)failed \(exit status\): rank .*avg"):
        launch(Options(dtype="int32", op="avg", **QUICK), quiet=True)


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
    assert json.loads(reports[0].to_json())["rows"]


@pytest.mark.timeout(120)
def test_a_waiting_rank_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shares = _bench_script("late_peer").late_peer_shares(0.5)
    assert len(shares) == 5
    assert max(shares.values()) < 0.05, shares
