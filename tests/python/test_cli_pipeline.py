"""``pycomm pipeline``: what it prints, its JSON and CSV, its exit codes and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pycomm.cli import app
from pycomm.pipeline.schedule.catalog import CATALOG, build
from pycomm.pipeline.schedule.order import Order


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["pipeline", *arguments])


def run_json(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_list_has_the_whole_catalog() -> None:
    assert [line["name"] for line in run_json("list")] == list(CATALOG)
    table = run("list").stdout
    assert all(entry.summary in table for entry in CATALOG.values())


def test_show() -> None:
    assert run("show", "gpipe", "-p", "2", "-m", "2").stdout == (
        "F0 F1 .  .  .  B0 -  B1 -\n.  F0 F1 B0 -  B1 -  .  .\n"
    )
    csv = run("show", "1F1B", "--ranks", "3", "--microbatches", "5", "--csv").stdout
    assert Order.from_csv(csv, "1F1B") == build("1F1B", 3, 5)
    text = run("show", "GPipe", "-p", "2", "-m", "1", "--transfers").stdout
    assert text == "rank 0: 0RECV_B0 0F0 0SEND_F0 0B0\nrank 1: 1RECV_F0 1F0 1B0 1SEND_B0\n"
    assert run_json("show", "GPipe", "-p", "2", "-m", "1") == [["0F0", "0B0"], ["1F0", "1B0"]]


def test_verify_all_and_one() -> None:
    report = run_json("verify", "--all", "-p", "1-3", "-m", "1-4", "-v", "2")
    assert report["ok"] and [r["schedule"] for r in report["results"]] == list(CATALOG)
    assert all(r["proofs"] == 12 for r in report["results"])
    assert run("verify", "1f1b", "-p", "4").stdout == "1f1b: proved for 16 sizes\n"


def test_a_file_that_is_wrong_exits_with_1(tmp_path: Any) -> None:
    (tmp_path / "bad.csv").write_text("0B0,0F0\n1F0,1B0\n")
    result = run("verify", str(tmp_path / "bad.csv"))
    assert result.exit_code == 1 and "deadlock: rank 0 at 0B0" in result.stdout
    (tmp_path / "good.csv").write_text("0F0,0B0\n1F0,1B0\n")
    assert run("verify", str(tmp_path / "good.csv")).exit_code == 0
    assert "idle 50.0%" in run("simulate", str(tmp_path / "good.csv")).stdout


def test_simulate(tmp_path: Any) -> None:
    found = run_json("simulate", "1F1B", "--ranks", "4", "--microbatches", "12", "--forward", "2")
    assert found["bubble"] == pytest.approx(3 / 15) and found["makespan"] == pytest.approx(60)
    assert found["peak_activations"] == [4, 3, 2, 1]
    pytest.importorskip("matplotlib")
    assert run("simulate", "GPipe", "--draw", str(tmp_path / "a.svg")).exit_code == 0
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert run("simulate", "GPipe", "--draw", str(tmp_path / "no" / "a.svg")).exit_code == 2


def test_choose_puts_the_quickest_that_fits_first() -> None:
    lines = run_json("choose", "--ranks", "4", "--microbatches", "8", "--max-activations", "4")
    fitting = [line for line in lines if line["fits"]]
    assert fitting and fitting == lines[: len(fitting)]
    assert [x["makespan"] for x in fitting] == sorted(x["makespan"] for x in fitting)
    assert max(fitting[0]["peak_activations"]) <= 4
    assert {line["schedule"] for line in lines} == set(CATALOG)
    assert "ZBVZeroBubble" in run("choose").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "nothing"), "there is no pipeline schedule 'nothing'"),
        (("show", "no.csv"), "cannot read no.csv: No such file"),
        (("show", "1F1B", "-m", "0"), "the number of microbatches must be at least 1, got 0"),
        (("show", "1F1B", "-v", "2"), "1F1B has 1 stage on a rank, not 2"),
        (("simulate", "1F1B", "--forward", "0"), "--forward must be a time above 0, got 0"),
        (("simulate", "1F1B", "--latency", "-1"), "--latency must be a time, got -1"),
        (("verify",), "give a schedule's name, or --all"),
        (("verify", "nothing"), "there is no pipeline schedule 'nothing'"),
        (("verify", "--all", "-m", "x"), "'x' is not a number of microbatches"),
        (("verify", "no.csv"), "cannot read no.csv: No such file"),
        (("show", "PipeDream2BW"), "PipeDream2BW runs on from step to step, and is a class only"),
        (("simulate", "1F1B", "--latency", "nan"), "--latency must be a time, got nan"),
        (("choose", "--max-activations", "0"), "--max-activations must be above 0, got 0"),
        (("choose", "--max-stages-per-rank", "0"), "--max-stages-per-rank must be at least 1, got 0"),
    ],
)
def test_a_bad_argument_exits_with_2(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_what_a_file_says_otherwise_is_not_left_out(tmp_path: Path) -> None:
    own = tmp_path / "own.csv"
    own.write_text(run("show", "ZBVZeroBubble", "-p", "2", "-m", "3", "--csv").stdout)
    assert run("show", str(own), "-p", "2", "-m", "3", "-v", "2").exit_code == 0
    for option, has in (("--ranks", 2), ("--microbatches", 3), ("--stages-per-rank", 2)):
        for command in ("show", "simulate"):
            result = run(command, str(own), option, "4")
            assert result.exit_code == 2
            assert f"{option} 4 does not go with {own}, which has {has}: leave it out" in result.stderr
    own.write_text("0F0,0X0\n")
    result = run("verify", str(own))
    assert result.exit_code == 1 and result.stdout.startswith(f"{own}: '0X0' is no action")
    own.write_bytes(b"\xff\xfe\xff")
    assert "it is not text" in run("show", str(own)).stderr


def test_the_package_names_what_it_has_before_it_imports_it():
    from pycomm import pipeline
    from pycomm.pipeline import named

    assert set(pipeline.__all__) == {*named.__all__, *pipeline._LATER}
    assert set(pipeline.__all__) <= set(dir(pipeline))
    assert all(getattr(pipeline, name) is not None for name in pipeline.__all__)
