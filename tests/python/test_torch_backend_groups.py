"""torch.distributed on pycomm: works and futures, groups and their life, deadlines, and what goes wrong."""

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pycomm
from ranks import run_ranks
from torch_backend_ranks import start, world

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).resolve().parents[2]


def works(rank: int, size: int) -> None:
    with world(rank, size):
        t = torch.full((4,), float(rank + 1))
        total = size * (size + 1) / 2
        work = dist.all_reduce(t, async_op=True)
        assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
        assert t.tolist() == [total] * 4 and work.result()[0] is t
        work.synchronize()

        t = torch.full((4,), float(rank + 1))
        future = dist.all_reduce(t, async_op=True).get_future()
        chain = future.then(lambda f: f.value()[0] / 2).then(lambda f: f.value() + 1)
        assert chain.wait().tolist() == [total / 2 + 1] * 4
        many = [dist.all_reduce(torch.full((3,), float(i)), async_op=True) for i in range(20)]
        values = torch.futures.wait_all([work.get_future() for work in many])
        assert [v[0][0].item() for v in values] == [size * float(i) for i in range(20)]

        # a recv that is not there yet: not completed, a wait that ends before it, and then it comes
        if rank == 0:
            got = torch.zeros(2)
            work = dist.irecv(got, 1)
            assert not work.is_completed()
            with pytest.raises(RuntimeError, match="not done after"):
                work.wait(timedelta(milliseconds=20))
            dist.send(torch.ones(1), 1)
            work.wait()
            assert got.tolist() == [7.0, 7.0] and work._source_rank() == 1
        elif rank == 1:
            dist.recv(torch.zeros(1), 0)
            dist.send(torch.full((2,), 7.0), 0)
        # synchronous calls give nothing
        assert dist.all_reduce(t) is None and dist.barrier() is None

        # a future that fails tells why in wait and in what hangs on it, and takes nothing down
        if rank == 1:
            dist.recv(torch.zeros(1), 0)
            dist.isend(torch.zeros(3), 0, tag=9)  # another size than expected
        if rank == 0:
            work = dist.irecv(torch.zeros(2), 1, tag=9)
            future = work.get_future()
            later = future.then(lambda f: f.value())
            dist.send(torch.zeros(1), 1)
            for wait in (work.wait, future.wait, later.wait):
                with pytest.raises(RuntimeError, match="recv"):
                    wait()
            assert isinstance(work.exception(), dist.DistBackendError) and not work.is_success()


def test_works_and_futures():
    run_ranks(3, works)


def failing_hook(rank: int, size: int) -> str:
    """A peer dies while torch's reducer waits for futures in C++."""
    start(rank, size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    if rank == 1:
        os._exit(3)
    try:
        model(torch.ones(1, 4)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_a_peer_that_dies_in_torchs_ddp_is_an_error():
    [message, _] = run_ranks(2, failing_hook, may_die=[1])
    assert "rank 1" in message and ("died" in message or "dead" in message)


def groups(rank: int, size: int) -> None:
    with world(rank, size):
        assert dist.get_backend() == "pycomm" and dist.is_initialized()
        pair = dist.new_group([1, 3])
        t = torch.tensor([float(rank)])
        if rank in (1, 3):
            assert dist.get_rank(pair) == (rank == 3) and dist.get_world_size(pair) == 2
            dist.all_reduce(t, group=pair)
            assert t.item() == 4.0
            dist.broadcast(t.fill_(rank), src=3, group=pair)
            assert t.item() == 3.0
            out = [torch.zeros(1), torch.zeros(1)]
            dist.all_gather(out, torch.tensor([float(rank)]), group=pair)
            assert [o.item() for o in out] == [1.0, 3.0]
            if rank == 1:
                dist.send(torch.tensor([5.0]), 3, group=pair)
            else:
                assert dist.recv(t, 1, group=pair) == 1 and t.item() == 5.0
                # torch's rank of whoever sent, not the group's
            dist.destroy_process_group(pair)
        mine, every = dist.new_subgroups(2)
        assert len(every) == 2
        t = torch.tensor([float(rank)])
        dist.all_reduce(t, group=mine)
        assert t.item() == (1.0 if rank < 2 else 5.0)
        mine, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        t = torch.tensor([float(rank)])
        dist.all_reduce(t, group=mine)
        assert t.item() == (2.0 if rank % 2 == 0 else 4.0)
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        t = torch.tensor([float(rank)])
        dist.all_reduce(t, group=mesh["a"].get_group())
        assert t.item() == (2.0 if rank % 2 == 0 else 4.0)
        # two groups at once, from two threads
        other = dist.new_group(list(range(size)))
        results: list[float] = []

        def use() -> None:
            for i in range(50):
                x = torch.tensor([float(i)])
                dist.all_reduce(x, group=other)
                results.append(x.item())

        thread = threading.Thread(target=use)
        thread.start()
        for i in range(50):
            x = torch.tensor([float(i)])
            dist.all_reduce(x)
            assert x.item() == size * i
        thread.join()
        assert results == [size * float(i) for i in range(50)]
        half = dist.split_group(split_ranks=[[3, 1], [0, 2]], group_desc="half")
        assert half.group_desc == "half" and dist.get_process_group_ranks(half) == (
            [1, 3] if rank % 2 else [0, 2]
        )
        before = half._get_sequence_number_for_group()
        t = torch.tensor([float(rank)])
        dist.all_reduce(t, group=half)
        assert t.item() == (4.0 if rank % 2 else 2.0)
        assert half._get_sequence_number_for_group() == before + 1
        alone = dist.split_group(half, [[1]])  # ranks are the parent's: 2 and 3 of the world
        assert (alone is None) == (rank < 2)
        assert alone is None or dist.get_process_group_ranks(alone) == [rank]
        for lists, said in (
            ([], "None or empty"),
            ([[0], [0]], "one group at most"),
            ([[9]], "4 ranks, got rank 9"),
        ):
            with pytest.raises(ValueError, match=said):
                dist.split_group(split_ranks=lists)
    assert not dist.is_initialized()
    with world(rank, size, name="again"):  # and once more, on a new store
        t = torch.ones(2)
        dist.all_reduce(t)
        assert t.tolist() == [size] * 2
    start(rank, size, name="third")
    dist.barrier()
    group = dist.group.WORLD
    dist.distributed_c10d._abort_process_group()
    with pytest.raises(pycomm.CommError, match="aborted"):
        group.allreduce([torch.ones(1)]).wait()


def test_groups_and_their_life():
    run_ranks(4, groups)


def faults(rank: int, size: int) -> None:
    # deadlines: of the group, and of one call
    start(rank, size, name="deadlines")
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=20))
    assert group.communicator.timeout == 20 and dist.group.WORLD.communicator.timeout == 30
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=19), group)
    dist.group.WORLD.set_timeout(timedelta(seconds=0.5))
    assert group.communicator.timeout == 19 and dist.group.WORLD.communicator.timeout == 0.5
    if rank == 0:
        before = time.monotonic()
        with pytest.raises(dist.DistBackendError, match=r"Timed out.*rank 1") as caught:
            dist.all_reduce(torch.ones(1))
        assert 0.4 < time.monotonic() - before < 10 and isinstance(caught.value, pycomm.CommTimeoutError)
        options = dist.BarrierOptions()
        options.timeout = timedelta(milliseconds=300)
        before = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="Timed out"):
            group.barrier(options).wait()
        assert time.monotonic() - before < 10
        dist.distributed_c10d._get_default_store().set("over", "")
    else:
        dist.distributed_c10d._get_default_store().wait(["over"], timedelta(seconds=30))
    dist.distributed_c10d._abort_process_group()

    # calls that differ: an error on every rank, which names both
    differing = {
        "dtype": lambda: dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank else torch.float32)),
        "op": lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM),
        "count": lambda: dist.all_reduce(torch.ones(4 + rank)),
        "root": lambda: dist.broadcast(torch.ones(4), 1 if rank else 0),
        "call": lambda: dist.barrier() if rank else dist.all_reduce(torch.ones(4)),
    }
    start(rank, size, name="mismatch")
    for what, call in differing.items():
        dist.destroy_process_group()  # a world that failed stays failed
        start(rank, size, name=f"mismatch of {what}")
        before = time.monotonic()
        with pytest.raises(dist.DistBackendError) as caught:
            call()
        assert isinstance(caught.value, pycomm.MismatchError), (what, caught.value)
        assert time.monotonic() - before < 5
        assert "all_reduce" in str(caught.value) or "broadcast" in str(caught.value), str(caught.value)
    dist.destroy_process_group()

    # a call that one rank makes wrongly is refused: an error everywhere, and the group lives on
    start(rank, size, name="refused")
    for wrong, word in (
        (lambda: dist.all_reduce(torch.ones(3, dtype=torch.uint16)), "uint16"),
        (lambda: dist.all_to_all_single(torch.ones(5), torch.ones(5)), "divide"),
        (lambda: dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], (2,)), dist.ReduceOp.MAX), "sparse"),
        (lambda: dist.all_reduce(torch.empty(3, device="meta")), "meta"),
    ):
        if rank == 0:
            with pytest.raises((TypeError, ValueError, RuntimeError), match=word):
                wrong()
        else:
            with pytest.raises(pycomm.CommError, match="rank 0"):
                dist.all_reduce(torch.ones(3))
    t = torch.ones(2)
    dist.all_reduce(t)
    assert t.tolist() == [size] * 2

    store = dist.distributed_c10d._get_default_store()
    # monitored barriers name who is missing, and leave the group as it was
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)
    if rank == 0:
        with pytest.raises(RuntimeError, match="Ranks 1, 2 failed to pass monitoredBarrier in 200 ms"):
            dist.monitored_barrier(timeout=timedelta(milliseconds=200), wait_all_ranks=True)
        store.set("rank 0 gave up", "")
    else:
        store.wait(["rank 0 gave up"], timedelta(seconds=30))
        with pytest.raises(RuntimeError, match=f"Rank {rank} successfully reached.*Ranks 1, 2 failed"):
            dist.monitored_barrier(timeout=timedelta(seconds=20))
    dist.all_reduce(t)
    # a group that was destroyed while another rank uses it
    if rank == 0:
        dist.destroy_process_group()
    else:
        with pytest.raises(pycomm.PeerLostError, match="rank 0"):
            dist.all_reduce(t)
        dist.destroy_process_group()
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        dist.all_reduce(t)


def test_deadlines_mismatches_refusals_and_monitored_barriers():
    run_ranks(3, faults)


def backend_strings(rank: int, size: int) -> None:
    with pytest.raises((ValueError, AssertionError), match="pycom"):  # torch's own
        start(rank, size, backend="pycom")
    for string in ("cpu:pycomm", "cpu:pycomm,cuda:pycomm"):
        with world(rank, size, backend=string, name=string):
            t = torch.ones(2)
            dist.all_reduce(t)
            assert t.tolist() == [size] * 2
    for string in ("cpu:gloo,cuda:pycomm", "cuda:pycomm"):
        start(rank, size, backend=string, name=string)
        with pytest.raises(ValueError, match=r"cpu:pycomm"):
            dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()


def test_backend_strings():
    run_ranks(2, backend_strings)


ORDERS = ["import pycomm, torch", "import torch, pycomm", "import torch.distributed, pycomm"]


@pytest.mark.parametrize("first", ORDERS)
def test_import_in_any_order(first):
    code = (
        f"{first}\nimport torch.distributed as dist\n"
        "dist.init_process_group('pycomm', store=dist.HashStore(), rank=0, world_size=1)\n"
        "t = torch.ones(2)\ndist.all_reduce(t)\ndist.monitored_barrier()\n"
        "print(t.tolist(), dist.get_backend())\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=50)
    assert done.stdout.strip() == "[1.0, 1.0] pycomm", done.stderr
    assert "Error" not in done.stderr
