"""``pycomm schedule``: what it prints, its JSON, its exit codes and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pycomm import _C
from pycomm.cli import app, schedule, units


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["schedule", *arguments])


def run_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_list_has_the_whole_catalog() -> None:
    lines = run_json("list")
    assert len(lines) == len(_C.schedule.catalog())
    ring = next(x for x in lines if (x["collective"], x["algorithm"]) == ("all_reduce", "ring"))
    assert ring["deterministic"] is False and ring["in_place"] is True
    table = run("list").stdout
    assert all(line["algorithm"] in table and line["summary"] in table for line in lines)


def test_show_prints_the_ring() -> None:
    text = run("show", "all_reduce", "ring", "--ranks", "3", "--rank", "1").stdout
    assert "all_reduce/ring, rank 1 of 3" in text
    assert "out[0] = (from rank 0) + in[0]" in text
    shown = run_json("show", "all_reduce", "ring", "--ranks", "3")
    assert [s["rank"] for s in shown] == [0, 1, 2]
    first = shown[0]["steps"][0]
    assert (first["op"], first["peer"], first["round"], first["src"]) == ("send", 1, 0, 0)


def test_verify_all_and_one() -> None:
    report = run_json("verify", "--all", "--ranks", "1-5,8")
    assert report["ok"] and report["ranks"] == [1, 2, 3, 4, 5, 8]
    assert len(report["results"]) == len(_C.schedule.catalog())
    assert all(r["violation"] is None and r["proofs"] >= 12 for r in report["results"])
    one = run("verify", "all_reduce", "ring", "--ranks", "1-4")
    assert one.exit_code == 0 and "proved" in one.stdout


def test_a_violation_is_named_and_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proofs of real, broken schedules go through the command's reporting."""
    real = _C.schedule

    class Breaking:
        MAX_VERIFY_RANKS = real.MAX_VERIFY_RANKS
        catalog = staticmethod(real.catalog)

        @staticmethod
        def verify(
            collective: str, name: str, n: int, root: int, chunks: int, in_place: bool
        ) -> _C.schedule.Proof:
            schedules = [real.build(collective, name, r, n, root, chunks) for r in range(n)]
            schedules[0].steps = schedules[0].steps[:-1]
            return real.verify_schedules(schedules, collective, root, in_place)

    monkeypatch.setattr(schedule, "_core", Breaking)
    result = run("verify", "all_reduce", "ring", "--ranks", "3")
    assert result.exit_code == 1
    assert "violated with 3 ranks" in result.stdout
    assert "all_reduce/ring with 3 ranks, root 0, n_chunks 0: rank " in result.stdout
    result = run("verify", "all_reduce", "ring", "--ranks", "3", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["ok"] is False


def test_cost_against_the_closed_form() -> None:
    report = run_json(
        "cost", "all_reduce", "ring", "--ranks", "8,64", "--bytes", "1MiB", "--alpha", "2us",
        "--beta", "10GB/s", "--gamma", "40GB/s",
    )  # fmt: skip
    for row in report["rows"]:
        n, part = row["ranks"], 2**20 / row["ranks"]
        by_hand = 2 * (n - 1) * (2e-6 + part / 10e9) + (n - 1) * part / 40e9
        assert row["seconds"] == pytest.approx(by_hand, rel=1e-9)
    table = run("cost", "all_reduce", "--ranks", "8", "--bytes", "1KiB,1MiB").stdout
    assert "halving_doubling" in table and "1 MiB" in table


def test_cost_of_two_levels_and_many_ranks() -> None:
    common = ("cost", "all_reduce", "ring", "--ranks", "16", "--bytes", "1MiB")
    flat = run_json(*common)["rows"][0]["seconds"]
    far = ("--alpha-between", "10us", "--beta-between", "1GB/s")
    assert run_json(*common, "--ranks-per-node", "16", *far)["rows"][0]["seconds"] == flat
    assert run_json(*common, "--ranks-per-node", "4", *far)["rows"][0]["seconds"] == pytest.approx(10 * flat)
    many = run_json("cost", "all_reduce", "ring", "--ranks", "100000", "--bytes", "1GiB")["rows"][0]
    assert many["method"] == "streamed" and many["rounds"] == 2 * 99999


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "all_reduce", "rign"), "no algorithm 'rign'; expected one of: direct"),
        (("show", "allreduce", "ring"), "no collective 'allreduce'; expected one of: all_reduce"),
        (("show", "all_reduce", "ring", "--rank", "9"), "rank is 9, expected 0 to 3"),
        (("show", "all_reduce", "ring", "--ranks", "0"), "--ranks is 0, expected 1 or more"),
        (("show", "all_reduce", "ring", "--n-chunks", "-1"), "n_chunks is -1"),
        (("verify",), "give a collective (and an algorithm), or --all"),
        (("verify", "all_reduce", "--all"), "give a collective (and an algorithm), or --all"),
        (("verify", "--all", "--ranks", "4-2"), "'4-2' is not a number of ranks"),
        (("verify", "--all", "--ranks", "0"), "'0' is not a number of ranks"),
        (("verify", "--all", "--ranks", "5000"), "5000 ranks are too many: at most 1024"),
        (("cost", "all_reduce", "--bytes", "1XB"), "'1XB' is not a size"),
        (("cost", "all_reduce", "--alpha", "1"), "'1' is not a time"),
        (("cost", "all_reduce", "--beta", "0GB/s"), "'0GB/s' is not a bandwidth above zero"),
        (("cost", "all_reduce", "--slice", "0"), "--slice must be larger than 0"),
        (("cost", "all_reduce", "--ranks", "8", "--bytes", "1GiB", "--slice", "1"), "use larger slices"),
        (("cost", "all_reduce", "--ranks-per-node", "-1"), "ranks_per_node is -1"),
    ],
)
def test_bad_arguments_exit_with_2_and_say_why(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_command_line_does_not_import_torch() -> None:
    code = (
        "import sys; from pycomm.cli import app; from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(app, ['schedule', 'list']).exit_code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_units() -> None:
    assert [units.size(t) for t in ("4", "1K", "1k", "1KiB", "1kB", "1KB", "2.5MB", "1e3")] == [
        4, 1024, 1024, 1024, 1000, 1000, 2.5e6, 1000,
    ]  # fmt: skip
    assert units.seconds("800ns") == pytest.approx(8e-7)
    assert units.bandwidth("100Gbit/s") == pytest.approx(1 / 12.5e9)
    assert units.bandwidth("1GiB/s") == pytest.approx(1 / 2**30)
    assert units.rank_list("3,1-2,2", 10) == [1, 2, 3]
    for text in ("", "K", "-1", "1iB", "1 B/s", "nan"):
        with pytest.raises(ValueError, match="is not a size"):
            units.size(text)
    assert units.bytes_text(1536) == "1.5 KiB" and units.seconds_text(2.5e-3) == "2.500 ms"


def test_verify_over_hosts() -> None:
    report = run_json("verify", "all_reduce", "deterministic", "--hosts", "0,1,0,1", "--bytes", "64MiB")
    (result,) = report["results"]
    assert report["ok"] and report["hosts"] == [0, 1, 0, 1]
    assert result["between"] == "exact" and result["subtrees"] == [2, 2]
    assert result["bytes_leaving"] == [1.5 * 2**26] * 2  # (2 + 1)/2 of the vector
    text = run("verify", "--all", "--hosts", "0,0,1,1").stdout
    assert text.count("proved") == 3 and "halving_doubling" in text  # as the default: the order is kept
    # The bytes of the default: 2 (H - 1)/H of the vector.
    (aligned,) = run_json("verify", "all_reduce", "--hosts", "0,0,1,1,2,2,3,3", "--bytes", "4KiB")["results"]
    assert aligned["bytes_leaving"] == [1.5 * 4096] * 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["all_reduce", "--hosts", "0,x"], "write the host's number for each rank"),
        (["all_reduce", "--hosts", "0,0"], "the ranks are on one host"),
        (["all_reduce", "ring", "--hosts", "0,1"], "proves `deterministic`, not 'ring'"),
        (["broadcast", "--hosts", "0,1"], "'broadcast' does not reduce"),
        (["--hosts", "0,1"], "give a collective"),
        (["all_reduce", "--hosts", "0,1", "--bytes", "many"], "is not a size"),
    ],
)
def test_verify_over_hosts_refuses(arguments: list[str], said: str) -> None:
    result = run("verify", *arguments)
    assert result.exit_code == 2
    assert said in result.output
