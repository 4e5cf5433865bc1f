"""After a failure: where every rank's program was, and its recent calls, also as torch's tool reads them."""

import gc
import os
import subprocess
import sys
import time
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pycomm.torch_backend.flight_recorder import dump
from ranks import run_ranks
from torch_backend_ranks import start, world

pytestmark = pytest.mark.timeout(60)


def line_of(mark: str) -> str:
    """FILE:LINE of this file's only line that ends with the comment ``mark``."""
    lines = Path(__file__).read_text().splitlines()
    [number] = [i + 1 for i, line in enumerate(lines) if line.endswith(f"# {mark}")]
    return f"{__file__}:{number}"


def message_of(call) -> str:
    with pytest.raises(dist.DistBackendError) as caught:
        call()
    return str(caught.value)


def differ(rank, size, is_async):
    start(rank, size)
    dist.barrier()
    tensor = torch.ones(5)

    def step():
        if rank == 0:
            work = dist.all_reduce(tensor, async_op=is_async)  # the sum
        else:
            work = dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=is_async)  # the maximum
        if is_async:
            work.wait()

    began = time.monotonic()
    text = message_of(step)
    assert time.monotonic() - began < 5
    assert f"rank 0 called at {line_of('the sum')} in step" in text
    for other in range(1, size):
        assert f"rank {other} called at {line_of('the maximum')} in step" in text
    assert message_of(dist.barrier) == text  # the group has failed, and still says why


@pytest.mark.parametrize("is_async", [False, True])
def test_a_mismatch_shows_where_every_rank_called(is_async):
    run_ranks(3, differ, is_async)


def one_is_busy(rank, size):
    start(rank, size)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        store.wait(["the other has failed"])
        assert f"rank 0 called at {__file__}" in message_of(work.wait)
        return
    text = message_of(lambda: dist.all_reduce(torch.ones(4)))
    store.set("the other has failed", "yes")
    assert f"rank 0 called at {__file__}" in text
    assert "rank 1 is busy elsewhere" in text


def test_a_rank_that_is_busy_elsewhere_is_not_waited_for():
    run_ranks(2, one_is_busy)


def refused_before(rank, size):
    start(rank, size)
    for is_async in (False, True):  # calls that end badly and leave the group usable
        if rank == 0:
            with pytest.raises(ValueError, match="divide"):
                dist.all_to_all_single(torch.ones(5), torch.ones(5))
        elif is_async:
            assert "refused" in message_of(dist.all_reduce(torch.ones(3), async_op=True).wait)
        else:
            assert "refused" in message_of(lambda: dist.all_reduce(torch.ones(3)))
    dist.barrier()
    states = [(entry["state"], entry["failed"]) for entry in dump()["entries"]]
    assert states == [("started", True)] * 2 + [("completed", False)]
    text = message_of(lambda: dist.all_reduce(torch.ones(4 + rank)))  # differs
    assert text.count(f"called at {line_of('differs')} in") == size


def test_a_call_that_was_refused_is_not_taken_for_one_that_differs():
    run_ranks(3, refused_before)


def in_a_part(rank, size):
    start(rank, size)
    part = dist.new_group([0, 2], group_desc="the even ones")
    if rank != 1:
        text = message_of(lambda: dist.all_reduce(torch.ones(4 + rank), group=part))
        assert "rank 1 called all_reduce" in text  # of the group
        assert 'ranks of the group "the even ones"; in the world they are [0, 2]' in text
    dist.barrier()


def test_an_error_in_a_group_tells_the_ranks_of_the_world():
    run_ranks(3, in_a_part)


def again(rank, size):
    """A world made anew on the same store, with which torch counts its groups from 0 again."""
    signs = dist.FileStore(f"{os.environ['PYCOMM_RUN_DIR']}/signs", -1)
    start(rank, size, timeout=30)
    assert "different calls" in message_of(lambda: dist.all_reduce(torch.ones(4 + rank)))  # of the first
    if rank == 0:
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass"):
            dist.monitored_barrier(timeout=timedelta(milliseconds=100))
        signs.set("gave up", "")
    signs.wait(["gave up"])
    dist.destroy_process_group()
    start(rank, size)
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    if rank == 1:
        work = dist.all_reduce(torch.ones(5), async_op=True)
        signs.wait(["the other has failed"])
        message_of(work.wait)
    else:
        text = message_of(lambda: dist.all_reduce(torch.ones(4)))
        signs.set("the other has failed", "")
        assert "rank 1 is busy elsewhere" in text and line_of("of the first") not in text


def test_a_world_made_anew_hears_nothing_of_the_last_one():
    run_ranks(2, again)


def calls(rank, size):
    with world(rank, size):
        half = dist.new_group([0, 1], group_desc="a half")
        before = len(dump()["entries"])
        dist.all_reduce(torch.ones(3, 4, dtype=torch.float64))  # recorded
        work = dist.all_gather_into_tensor(torch.empty(2 * size), torch.ones(2), async_op=True)
        work.wait()
        dist.broadcast(torch.ones(()), 0, group=half)
        if rank == 0:
            dist.send(torch.ones(7, dtype=torch.int8), 1)
        else:
            dist.recv(torch.ones(7, dtype=torch.int8), 0)
        found = dump()
        reduced, gathered, sent, moved = found["entries"][before:]
        assert reduced["profiling_name"] == "gloo:all_reduce"
        assert reduced["input_sizes"] == reduced["output_sizes"] == [[3, 4]]
        assert reduced["input_dtypes"] == ["torch.float64"]
        assert reduced["frames"][0] == {
            "name": "calls",
            "filename": __file__,
            "line": int(line_of("recorded").rpartition(":")[2]),
        }
        assert gathered["profiling_name"] == "gloo:_all_gather_base"
        assert (gathered["input_sizes"], gathered["output_sizes"]) == ([[2]], [[2 * size]])
        assert gathered["collective_seq_id"] == reduced["collective_seq_id"] + 1
        assert sent["process_group"] == (half.group_name, "a half")
        assert found["pg_config"][half.group_name]["ranks"] == "[0, 1]"
        assert moved["profiling_name"] == ("gloo:send 0->1" if rank == 0 else "gloo:recv 1<-0")
        assert moved["is_p2p"] and moved["p2p_seq_id"] == 1
        assert all(entry["state"] == "completed" for entry in found["entries"])
        freed = weakref.ref(half.communicator)
        dist.destroy_process_group(half)
        del half
        gc.collect()
        assert freed() is None


def test_what_is_recorded():
    run_ranks(2, calls)


def one_pending(rank, size):
    with world(rank, size):
        dist.barrier()
        if rank == 0:
            work = dist.all_reduce(torch.ones(1000), async_op=True)
            assert dump()["entries"][-1]["state"] == "started"
            dist.distributed_c10d._get_default_store().set("seen", "yes")
            work.wait()
        else:
            dist.distributed_c10d._get_default_store().wait(["seen"])
            dist.all_reduce(torch.ones(1000))
        assert dump()["entries"][-1]["state"] == "completed"


def test_a_call_on_its_way():
    run_ranks(2, one_pending)


@pytest.mark.parametrize(("size", "kept"), [("0", 0), ("3", 3)])
def test_how_many_are_kept(size, kept):
    program = (
        "import pycomm, torch, torch.distributed as dist\n"
        "from pycomm.torch_backend.flight_recorder import dump\n"
        "dist.init_process_group('pycomm', store=dist.HashStore(), rank=0, world_size=1)\n"
        "for _ in range(5): dist.all_reduce(torch.ones(1))\n"
        "print(len(dump()['entries']))"
    )
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": size}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert done.stdout.split() == [str(kept)], done.stderr


def fail(rank, size, folder):
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/calls-"
    start(rank, size)
    dist.all_reduce(torch.ones(2))
    text = message_of(lambda: dist.all_reduce(torch.ones(4 + rank)))
    assert f"the recent calls are in {folder}/calls-{rank}" in text


def test_torchs_own_tool_reads_the_files(tmp_path):
    pytest.importorskip("torch.distributed.flight_recorder", reason="this torch brings no torchfrtrace")
    run_ranks(2, fail, str(tmp_path))
    tool = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(tmp_path)]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    told = done.stdout + done.stderr
    assert "Collective sequence number: 2 has errors" in told
    assert "SIZE_OR_SYNTAX_MISMATCH" in told and f"fail at {__file__}" in told
