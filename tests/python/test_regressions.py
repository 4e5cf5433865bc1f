"""What a review found: each once hung, crashed, failed the wrong rank, or gave wrong numbers in silence."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

import pycomm
from cases import raises
from pycomm import tuning
from ranks import run_ranks


def usable(comm: pycomm.Communicator) -> None:
    assert comm.all_reduce(torch.ones(1)).item() == comm.size


def counts_where_none_belong(rank: int, size: int) -> None:
    with pycomm.init(timeout=10) as comm:
        for call in (
            lambda counts: comm.broadcast(torch.ones(10), counts=counts),
            lambda counts: comm.reduce(torch.ones(10), counts=counts),
            lambda counts: comm.barrier(counts=counts),
        ):
            for counts in ([10, 10], [10**8, 10**8], [3]):
                with raises(TypeError, "counts"):
                    call(counts)
        with raises(ValueError, "elements"):
            comm.all_gather(torch.ones(4), torch.ones(2), counts=[2**63, 2**63 + 4])
        usable(comm)


def test_counts_where_none_belong() -> None:
    run_ranks(2, counts_where_none_belong)


def child_that_fails(rank: int, size: int) -> None:
    with pycomm.init(timeout=10) as comm:
        if rank == 0:
            pid = os.fork()
            if pid == 0:
                try:
                    with comm:
                        raise ValueError("a bug in a worker")
                except ValueError:
                    comm.abort("a worker ends")
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        usable(comm)


def test_a_forked_child_cannot_fail_its_parents_job() -> None:
    run_ranks(2, child_that_fails)


def child_with_threads_of_its_own(rank: int, size: int) -> None:
    comm = pycomm.init(timeout=10)
    comm.all_reduce(torch.ones(1), async_op=True).wait()  # a progress thread, and below one for p2p
    comm.irecv(torch.ones(1), 1 - rank)
    pid = os.fork()
    if pid == 0:
        os.environ.update(RANK="0", WORLD_SIZE="1")
        own = pycomm.init()
        result = own.all_reduce(torch.ones(1), async_op=True).get_future().wait()
        own.close()
        comm.close()
        os._exit(0 if result.item() == 1 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    comm.send(torch.ones(1), 1 - rank)
    usable(comm)
    comm.close()


def test_a_forked_child_closes_what_it_inherited_and_what_it_made() -> None:
    run_ranks(2, child_with_threads_of_its_own)


def interrupted_refusal(rank: int, size: int) -> None:
    comm = pycomm.init(timeout=20)
    comm.barrier()
    if rank == 0:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            for _ in range(100):  # the first few need no peer
                with pytest.raises(ValueError, match="op"):
                    comm.all_reduce(torch.ones(2), op="bad")
        with raises(pycomm.CommError, "interrupted (Ctrl-C)"):
            comm.barrier()
    else:
        time.sleep(1.0)
        with pytest.raises(pycomm.CommError):
            for _ in range(200):
                try:
                    comm.all_reduce(torch.ones(2))
                except pycomm.CommError as error:
                    if "Ctrl-C" in str(error):
                        raise


def test_ctrl_c_in_a_refusal_is_nobody_elses() -> None:
    run_ranks(2, interrupted_refusal)


def dropped_works(rank: int, size: int) -> None:
    with pycomm.init(timeout=20) as comm:
        pending = comm.irecv(torch.ones(1), 1 - rank, tag=7)
        for _ in range(50):
            comm.all_reduce(torch.ones(1 << 18), async_op=True).wait()
        comm.all_reduce(torch.ones(1), async_op=True)
        assert len(comm._works._works) <= 3, "finished works are let go although an older one is pending"
        comm.send(torch.ones(1), 1 - rank, tag=7)
        pending.wait()
        usable(comm)


def test_finished_works_do_not_hold_their_tensors() -> None:
    run_ranks(2, dropped_works)


def polled(rank: int, size: int) -> None:
    with pycomm.init(timeout=20) as comm:
        strided = torch.ones(4, 6)[:, ::2]
        work = comm.all_reduce(strided, async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
        assert bool((strided == size).all()), "is_completed() means that the tensor holds the result"
        work.wait()
        assert bool((strided == size).all())


def test_a_polled_work_has_its_result() -> None:
    run_ranks(2, polled)


def other_dtypes(rank: int, size: int, op: str | tuple[str, float], deterministic: bool) -> None:
    comm = pycomm.init(timeout=10)
    tensor = torch.ones(4, dtype=torch.float16 if rank == 0 else torch.bfloat16)
    with raises(pycomm.MismatchError, "float16", "bfloat16"):
        comm.all_reduce(tensor, op=op, deterministic=deterministic, algorithm="halving_doubling")


@pytest.mark.parametrize(("op", "deterministic"), [(("premul_sum", 0.5), False), ("sum", True)])
def test_dtypes_that_differ_where_the_work_is_in_float32(op, deterministic) -> None:
    run_ranks(2, other_dtypes, op, deterministic)


def deterministic_on_one_rank(rank: int, size: int) -> None:
    comm = pycomm.init(timeout=10)
    with raises(pycomm.MismatchError, "deterministic"):
        comm.all_reduce(torch.ones(4), deterministic=rank == 0, algorithm="direct")


def test_a_difference_in_deterministic_is_named() -> None:
    run_ranks(2, deterministic_on_one_rank)


def shrunk(rank: int, size: int) -> None:
    with pycomm.init(timeout=10) as comm:
        tensor = torch.ones(1 << 20)
        tensor.untyped_storage().resize_(1 << 12)
        with raises(ValueError, "its storage ends after 4096"):
            comm.all_reduce(tensor)
        usable(comm)


def test_a_storage_smaller_than_its_tensor() -> None:
    run_ranks(2, shrunk)


def long_words(rank: int, size: int) -> None:
    with pycomm.init(timeout=10) as comm:
        for word in ("é" * 600, "aé" * 600, "€" * 500, "a€" * 500):
            with raises(pycomm.CommError if rank else ValueError):
                comm.all_reduce(torch.ones(4), op=word if rank == 0 else "sum")
        usable(comm)


def test_long_words_that_are_not_ascii() -> None:
    run_ranks(2, long_words)


def queued_send(rank: int, size: int) -> None:
    comm = pycomm.init(timeout=30)
    comm.barrier()
    if rank == 0:
        first = comm.isend(torch.ones(10**6), 1, tag=1)
        begin = time.monotonic()
        with raises(pycomm.CommTimeoutError, "send(tag 2)"):
            comm.send(torch.ones(10**6), 1, tag=2, timeout=0.5)
        assert time.monotonic() - begin < 5
        assert first.exception() is not None
    else:
        with raises(pycomm.CommTimeoutError, "send(tag 2)"):
            comm.barrier()


def test_the_deadline_of_a_send_behind_another() -> None:
    run_ranks(2, queued_send)


def with_cache(rank: int, size: int, folder: str) -> str:
    os.environ.update(PYCOMM_CACHE_DIR=folder, PYCOMM_TUNE="auto")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pycomm.init(timeout=20) as comm:
            usable(comm)
    return " ".join(str(w.message) for w in said)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [[2**64 - 1, "quantum", "direct", 131072]],
        [[2**64 - 1, "direct", "direct", 17]],
        [[-1, "direct", "direct", 131072]],
    ],
)
def test_a_cache_of_another_version_costs_a_second_not_a_job(tmp_path: Path, rows) -> None:
    os.environ["PYCOMM_CACHE_DIR"] = str(tmp_path)
    try:
        path = tuning.cache_file(2)
    finally:
        del os.environ["PYCOMM_CACHE_DIR"]
    table = {name: [[2**64 - 1, "direct", "direct", 131072]] for name in tuning.COLLECTIVES}
    table["all_reduce"] = rows
    path.write_text(json.dumps({"format": tuning.FORMAT, "table": table}))
    said = run_ranks(2, with_cache, str(tmp_path))
    assert str(path) in said[0] and said[1] == ""
    assert json.loads(path.read_text())["table"]["all_reduce"] != rows, "measured anew"
    assert run_ranks(2, with_cache, str(tmp_path)) == ["", ""]


def selection_of(rank: int, size: int, folder: str) -> tuple[tuning.Table, str]:
    said = with_cache(rank, size, folder)
    with pycomm.init(timeout=20) as comm:
        return tuning.read(comm), said


def test_a_cached_table_unlike_the_default_is_told_by_calls_alike_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCOMM_CACHE_DIR", str(tmp_path))
    table = {name: [[2**64 - 1, "direct", "direct", 524288]] for name in tuning.COLLECTIVES}
    tuning.cache_file(3).write_text(json.dumps({"format": tuning.FORMAT, "table": table}))
    for read, said in run_ranks(3, selection_of, str(tmp_path)):
        assert read == {name: [tuple(row) for row in rows] for name, rows in table.items()} and said == ""
