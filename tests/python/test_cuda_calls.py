"""Calls on CUDA tensors, on the emulated devices (tests/cuda_on_cpu/run_python.py); skipped elsewhere."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import pytest
import torch

import pycomm
from cases import raises
from pycomm import _C
from ranks import run_ranks

pytestmark = pytest.mark.skipif(
    _C.cuda.build() != "emulated", reason="needs a build with PYCOMM_CUDA=emulated"
)


def ways(rank: int, size: int) -> tuple[str, list[str]]:
    with pycomm.init(timeout=60) as comm:
        comm.all_reduce(torch.ones(1))
        names = comm._c.device_algorithms(0)
        for name in names:
            for count in (1, 70_001):
                t = torch.full((count,), float(rank + 1))
                comm.all_reduce(t, algorithm=name)
                assert bool((t == size * (size + 1) / 2).all()), (name, count)
        assert comm._c.device == rank
        assert f"rank {rank} of {size}, open, cuda:{rank}>" in repr(comm)
        return comm.device_description, names


def test_every_way() -> None:
    description, names = run_ranks(3, ways)[0]
    assert "peers' memory: yes" in description and "NCCL 2.32.3" in description
    assert {"peer", "peer_one_shot", "peer_two_shot", "nccl", "ring", "double_tree"} <= set(names)


def in_the_arena(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        t = comm.empty(1000, dtype=torch.bfloat16, device=f"cuda:{rank}")  # the first call: collective
        t.fill_(rank + 1)
        comm.all_reduce(t, algorithm="peer")
        assert bool((t == size * (size + 1) / 2).all())
        with raises(pycomm.CommError, "PYCOMM_DEVICE_ARENA"):
            comm.empty(1 << 30, device=f"cuda:{rank}")
        with raises(ValueError, "cuda:7", f"cuda:{rank}"):
            comm.empty(1, device="cuda:7")
        with raises(ValueError, "on the CPU or CUDA"):
            comm.empty(1, device="meta")
        with raises(TypeError, "empty: device"):
            comm.empty(1, device=1.5)  # type: ignore[arg-type]
        held = [comm.empty(60_000, device=f"cuda:{rank}") for _ in range(3)]
        held.clear()
        again = [comm.empty(60_000, device=f"cuda:{rank}") for _ in range(4)]  # the same memory
        comm.all_reduce(again, op="max")
    t += 1  # it outlives the communicator
    assert float(t[0]) == size * (size + 1) / 2 + 1


def test_memory_that_peers_reach() -> None:
    run_ranks(3, in_the_arena)


def wherever_they_die(rank: int, size: int) -> None:
    """Tensors that peers reach: beside an exception, in another thread, in a forked child, after close()."""
    with pycomm.init(timeout=60) as comm:

        def made() -> list[torch.Tensor]:
            return [comm.empty(250_000, device=f"cuda:{rank}")]  # there is no room for two

        held = made()
        with raises(KeyError, "told"):
            try:
                raise KeyError("told")
            finally:
                held.clear()
        for _ in range(3):
            held = made()
            comm.all_reduce(held[0].fill_(1.0), async_op=True).wait()
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()
        held = made()
        held[0].fill_(rank)
        child = os.fork()
        if child == 0:
            held.clear()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert bool((held[0] == rank).all())
    held.clear()


def test_tensors_that_peers_reach_die_anywhere() -> None:
    run_ranks(2, wherever_they_die)


def refused_in_the_first_call(rank: int, size: int) -> None:
    """Each time rank 1 alone is wrong, where ``empty`` is still collective; then all are right."""
    mine = f"cuda:{rank}"
    wrong: list[tuple[type[Exception], str, tuple, dict]] = [
        (TypeError, "uint16", (3,), {"dtype": torch.uint16, "device": mine}),
        (TypeError, "a size", ("x",), {"device": mine}),
        (ValueError, "too many bytes", (1 << 62, 1 << 62), {"device": mine}),
        (TypeError, "empty: device", (3,), {"device": 1.5}),
        (pycomm.CommError, "cuda:99: cudaSetDevice", (3,), {"device": "cuda:99"}),
    ]
    with pycomm.init(timeout=30) as comm:
        for kind, text, shape, options in wrong:
            if rank == 1:
                with raises(kind, text):
                    comm.empty(*shape, **options)
            else:
                with raises(pycomm.CommError, "rank 1 refused its call", text):
                    comm.empty(3, device=mine)
            assert comm._c.device == -1
        comm.all_reduce(comm.empty(3, device=mine))
    named = [] if rank == 1 else ["empty, the first call on CUDA"]
    with pycomm.init(timeout=30) as comm, raises(pycomm.MismatchError, *named):
        _ = comm.broadcast(torch.ones(3)) if rank == 1 else comm.empty(3, device=mine)


def test_the_first_empty_is_refused_on_all_ranks() -> None:
    run_ranks(3, refused_in_the_first_call)


def two_inits(rank: int, size: int) -> None:
    """As two DDPs make, each by an init() of its own: their calls are in one order, that of the program."""
    with pycomm.init(timeout=30) as one, pycomm.init(timeout=30) as other:
        works = []
        for k in range(60):
            for comm in (one, other) if k % 3 else (other, one):
                t = torch.full((50,), float(rank + k))
                works.append((comm.all_reduce(t, async_op=True, algorithm="nccl"), t, k))
        for work, t, k in works:
            work.wait()
            assert float(t[0]) == sum(range(size)) + size * k


@pytest.mark.timeout(120)
def test_communicators_of_two_inits_have_one_order() -> None:
    run_ranks(2, two_inits)


def close_with_a_call_that_hangs(rank: int, size: int) -> float:
    """The longest that another thread had to wait for the GIL."""
    comm = pycomm.init(timeout=4)
    comm.all_reduce(torch.ones(1), algorithm="nccl")
    comm.all_reduce(torch.ones(1), algorithm="nccl", async_op=True)  # the one that stays on the stream
    longest, stop = 0.0, threading.Event()

    def tick() -> None:
        nonlocal longest
        last = time.monotonic()
        while not stop.wait(0.01):
            longest, last = max(longest, time.monotonic() - last), time.monotonic()

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.monotonic()
    with contextlib.suppress(pycomm.CommError):
        comm.close()
    stop.set()
    thread.join()
    return longest / (time.monotonic() - begin)


def test_close_lets_other_threads_run() -> None:
    fault = {"LOOPBACK_NCCL_FAULT": "stall=0:1,stall=1:1"}
    assert max(run_ranks(2, close_with_a_call_that_hangs, env=fault)) < 0.5


def tables(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        with raises(ValueError, "no call on CUDA"):
            comm._c.device_algorithms(0)
        comm.all_reduce(torch.ones(1))
        rows = [(4096, "peer_one_shot"), (2**64 - 1, "ring")]
        comm._c.set_device_selection(0, rows)
        assert comm._c.device_selection(0) == rows
        child = comm.split(0)
        assert child is not None
        assert bool((child.all_reduce(torch.ones(5000)) == size).all())
        assert child._c.device_selection(0) == rows
        with raises(ValueError, "'doubling' is not one of all_reduce's"):
            comm._c.set_device_selection(0, [(10, "doubling")])
        with raises(ValueError, "sizes must rise"):
            comm._c.set_device_selection(0, [(10, "ring"), (10, "peer")])
        assert _C.cuda.built_in_selection()["all_reduce"] == [(1 << 20, "peer"), (2**64 - 1, "nccl")]
        # What the table names may not know the dtype.
        comm._c.set_device_selection(0, [(2**64 - 1, "nccl")])
        assert comm.all_reduce(torch.full((3,), rank, dtype=torch.int16), "max").tolist() == [size - 1] * 3
        child.close()


def test_selection_tables() -> None:
    run_ranks(2, tables)


def futures(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        t = torch.full((1000,), float(rank))
        future = comm.all_reduce(t, async_op=True).get_future()
        assert float(future.wait()[0]) == sum(range(size))
        work = comm.all_gather(torch.empty(size * 2), torch.full((2,), float(rank)), async_op=True)
        assert work.wait(timeout=30)
        assert work.result().tolist() == [float(q) for q in range(size) for _ in range(2)]
        assert work.is_completed()


def test_works_and_futures() -> None:
    run_ranks(2, futures)


def one_after_another(rank: int, size: int) -> None:
    for _ in range(2):  # jobs, whose ranks meet anew
        with pycomm.init(timeout=60) as comm:
            kept = comm.empty(10, device=f"cuda:{rank}").fill_(rank)
            for _ in range(4):
                with comm.split(0) as child:
                    t = child.empty(1000, device=f"cuda:{rank}").fill_(rank + 1)
                    child.all_reduce(t, algorithm="peer")  # refused where there was no memory
                assert bool((t == size * (size + 1) / 2).all())
                del t
        assert bool((kept == rank).all())
        del kept


def test_a_communicator_has_the_memory_of_those_before() -> None:
    run_ranks(3, one_after_another, env={"CUDA_ON_CPU_MEMORY": str(9 << 20)})  # each takes 2 MiB


def without_nccl(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        assert comm.device_description == "" and "cuda" not in repr(comm)
        t = torch.arange(size * 2, dtype=torch.float32)
        remedy = ("NCCL is not usable on rank 0", "PYCOMM_NCCL_LIB is '/nowhere/libnccl.so.2'", "unset it")
        with raises(ValueError, "all_to_all on CUDA: peers' memory has no all_to_all", *remedy):
            comm.all_to_all(torch.empty_like(t), t)
        with raises(ValueError, "no codes", *remedy):
            comm.all_reduce(t, compression="int8")
        with raises(ValueError, "all_reduce/ring on CUDA", *remedy):
            comm.all_reduce(t, algorithm="ring")
        assert bool((comm.all_reduce(torch.ones(3)) == size).all())  # peers' memory, as before
        assert "peers' memory: yes" in comm.device_description and remedy[0] in comm.device_description


def test_without_nccl_the_remedy_is_told() -> None:
    run_ranks(2, without_nccl, env={"PYCOMM_NCCL_LIB": "/nowhere/libnccl.so.2"})


def without_a_path(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        assert bool((comm.all_reduce(torch.ones(3)) == size).all())  # NCCL has a way through the host
        assert "GPU 0 has no peer access to its GPU 1" in comm.device_description
        with raises(ValueError, "all_reduce/peer on CUDA", "no NVLink or PCIe path between them"):
            comm.all_reduce(torch.ones(3), algorithm="peer")


def test_why_there_is_no_peer_memory_is_told() -> None:
    run_ranks(2, without_a_path, env={"CUDA_ON_CPU_PEER_ACCESS": "0"})


def coded(rank: int, size: int) -> list[bytes]:
    generator = torch.Generator().manual_seed(3)
    given = [torch.randn(n, generator=generator) * 10 for n in (700, 0, 5)][:size]
    counts = [t.numel() for t in given]
    results = []
    with pycomm.init(timeout=60) as comm:
        for compression, bound in (("int8", 1 / 254 + 2.0**-22), ("fp16", 2.0**-10)):
            feedback, total = pycomm.ErrorFeedback(), torch.zeros(sum(counts))
            for algorithm in (None, "peer", "nccl", "ring"):
                out = torch.empty(sum(counts))
                comm.all_gather(
                    out, given[rank], counts=counts, compression=compression, algorithm=algorithm,
                    error_feedback=feedback,
                )  # fmt: skip
                largest = torch.cat([t.abs().amax().expand(len(t)) if len(t) else t for t in given])
                assert bool(((out - torch.cat(given)).abs() <= 2 * bound * largest).all()), compression
                total += out
                results.append(out.numpy().tobytes())
            # What one call loses the next one sends.
            assert bool(((total - 4 * torch.cat(given)).abs() <= 1.2 * bound * largest + 1e-4).all())
        assert not torch.equal(out, torch.cat(given))
    return results


def test_all_gather_of_codes() -> None:
    results = run_ranks(3, coded)
    assert all(r == results[0] for r in results[1:])
