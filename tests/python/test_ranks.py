"""The rank harness itself: results, exceptions, hangs with stacks, deaths; and nothing is left behind."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from ranks import Died, RankError, RanksTimedOut, run_ranks


class Awkward(Exception):
    """Cannot be unpickled: its constructor wants more than its args."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"awkward {a} {b}")


def results(rank: int, size: int, factor: int) -> tuple[int, int, torch.Tensor]:
    return rank, size, torch.full((2,), float(rank * factor))


def surroundings(rank: int, size: int) -> dict[str, Any]:
    imported = [name for name in ranks.PRELOADED if name in sys.modules]
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "EXTRA"]
    found: dict[str, Any] = {name: os.environ.get(name) for name in names}
    run_dir = os.environ["PYCOMM_RUN_DIR"]
    found |= {"run_dir": run_dir, "mode": os.stat(run_dir).st_mode & 0o777, "pid": os.getpid()}
    return found | {"threads": torch.get_num_threads(), "imported": imported}


def meet(rank: int, size: int) -> int:
    """Each rank writes its file and waits for all others: they run at the same time."""
    folder = Path(os.environ["PYCOMM_RUN_DIR"])
    (folder / str(rank)).touch()
    while len(list(folder.iterdir())) < size:
        time.sleep(0.001)
    return rank


def fail_on(rank: int, size: int, bad: int, awkward: bool) -> int:
    print(f"rank {rank} says hello")
    if rank == bad:
        raise Awkward(1, 2) if awkward else ValueError(f"bad luck on {rank}")
    return rank


def hang_on(rank: int, size: int, bad: int) -> None:
    if rank == bad:
        a_place_to_hang()


def a_place_to_hang() -> None:
    while True:
        time.sleep(1)


def fail_while_another_hangs(rank: int, size: int) -> None:
    if rank == 0:
        a_place_to_hang()
    raise LookupError("the first failure")


def die_on(rank: int, size: int, bad: int, how: int) -> int:
    if rank == bad:
        if how == 0:
            os._exit(3)
        os.kill(os.getpid(), how)
    return rank


def unpicklable(rank: int, size: int) -> Any:
    return lambda: rank


def test_results_come_in_rank_order() -> None:
    got = run_ranks(3, results, 10)
    assert [(rank, size) for rank, size, _ in got] == [(0, 3), (1, 3), (2, 3)]
    assert [tensor.tolist() for _, _, tensor in got] == [[0, 0], [10, 10], [20, 20]]


def test_environment_of_a_rank() -> None:
    got = run_ranks(2, surroundings, env={"EXTRA": "yes"})
    for rank, found in enumerate(got):
        assert found["RANK"] == found["LOCAL_RANK"] == str(rank)
        assert found["WORLD_SIZE"] == found["LOCAL_WORLD_SIZE"] == "2"
        assert (found["OMP_NUM_THREADS"], found["threads"], found["EXTRA"]) == ("1", 1, "yes")
        assert found["mode"] == 0o700 and found["imported"] == list(ranks.PRELOADED)
    assert got[0]["run_dir"] == got[1]["run_dir"] and not os.path.exists(got[0]["run_dir"])
    assert len({found["pid"] for found in got} | {os.getpid()}) == 3
    assert run_ranks(1, surroundings)[0]["run_dir"] != got[0]["run_dir"]
    assert os.environ.get("PYCOMM_RUN_DIR") != got[0]["run_dir"]


def test_ranks_run_together() -> None:
    assert run_ranks(5, meet) == [0, 1, 2, 3, 4]


def test_an_exception_is_raised_here_with_its_rank_and_traceback() -> None:
    with pytest.raises(ValueError, match="bad luck on 1") as caught:
        run_ranks(3, fail_on, 1, False)
    cause = caught.value.__cause__
    assert isinstance(cause, RankError) and cause.rank == 1
    text = str(cause)
    assert "rank 1 of 3 raised" in text and "in fail_on" in text and "rank 1 says hello" in text


def test_an_exception_that_cannot_be_pickled_comes_as_text() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 of 2 raised.*Awkward: awkward 1 2"):
        run_ranks(2, fail_on, 0, True)


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(RankError, match="function cannot be pickled"):
        run_ranks(1, unpicklable)


def test_a_hang_is_reported_with_stacks_and_ended() -> None:
    start = time.monotonic()
    with pytest.raises(RanksTimedOut) as caught:
        run_ranks(3, hang_on, 2, timeout=2.0)
    text = str(caught.value)
    assert caught.value.rank == 2 and "rank 2 of 3 was still running after 2 s" in text
    assert "in a_place_to_hang" in text and "in hang_on" in text
    assert "rank 0" not in text and "rank 1" not in text
    assert time.monotonic() - start < 2.0 + ranks.STACKS_S + 10


def test_the_first_failure_is_raised_though_others_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.3)
    with pytest.raises(LookupError, match="the first failure") as caught:
        run_ranks(2, fail_while_another_hangs)
    text = str(caught.value.__cause__)
    assert text.index("rank 1 of 2 raised") < text.index("rank 0 of 2 did not finish")
    assert "in a_place_to_hang" in text


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (signal.SIGKILL, "killed by SIGKILL"),
        (signal.SIGSEGV, "killed by SIGSEGV"),
        (0, "exited with status 3"),
    ],
)
def test_a_death_is_reported(how: int, said: str) -> None:
    with pytest.raises(RankError, match=f"rank 1 of 3 (was )?{said}") as caught:
        run_ranks(3, die_on, 1, int(how))
    assert caught.value.rank == 1
    if how == signal.SIGSEGV:  # faulthandler wrote where
        assert "in die_on" in str(caught.value)


def test_a_death_may_be_wanted() -> None:
    assert run_ranks(3, die_on, 1, int(signal.SIGKILL), may_die=[1]) == [0, Died(-signal.SIGKILL), 2]


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(1, results, 1)  # the fork server, which stays, is up now
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    run_ranks(2, results, 1)
    with pytest.raises(RanksTimedOut):
        run_ranks(2, hang_on, 0, timeout=0.5)
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= before
    assert multiprocessing.active_children() == []


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="n must be at least 1, not 0"):
        run_ranks(0, results, 1)
    with pytest.raises(Exception, match="pickle"):
        run_ranks(1, lambda rank, size: 1)


def test_a_rank_starts_quickly() -> None:
    """Tens of milliseconds; the bound only catches a fork server that lost its imports (seconds)."""
    run_ranks(1, results, 1)
    start = time.monotonic()
    run_ranks(2, results, 1)
    assert time.monotonic() - start < 2.0
