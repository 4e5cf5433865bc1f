"""async_op=True and Work: waiting, timeouts, errors, Futures, order, dropped works, several threads."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any, cast

import pytest
import torch

import pycomm
from cases import check, raises, values
from pycomm.work import Keeper, Work
from ranks import HOST, run_ranks


def every_collective(rank: int, size: int) -> None:
    n, me, f32 = size, rank, torch.float32
    whole = torch.cat([values(q, 50, f32) for q in range(n)])
    total = torch.stack([values(q, 50 * n, f32) for q in range(n)]).sum(0)
    mine = slice(50 * me, 50 * me + 50)
    with pycomm.init(timeout=60) as comm:
        last = n - 1
        part, big = torch.zeros(50), torch.zeros(50 * n)
        reduced = values(me, 50 * n, f32)
        works = [
            comm.all_reduce(reduced, async_op=True),
            comm.reduce_scatter(part, values(me, 50 * n, f32), async_op=True),
            comm.all_gather(big, values(me, 50, f32), async_op=True),
        ]
        sent = whole.clone() if me == last else torch.zeros_like(whole)
        works.append(comm.broadcast(sent, last, async_op=True))
        rooted = values(me, 50 * n, f32)
        works.append(comm.reduce(rooted, last, async_op=True))
        gathered = torch.zeros(50 * n) if me == last else None
        works.append(comm.gather(values(me, 50, f32), gathered, last, async_op=True))
        scattered = torch.zeros(50)
        works.append(comm.scatter(scattered, whole if me == last else None, last, async_op=True))
        swapped = torch.zeros(n)
        works.append(comm.all_to_all(swapped, torch.arange(n) + 10.0 * me, async_op=True))
        works.append(comm.barrier(async_op=True))
        for work in reversed(works):
            assert isinstance(work, pycomm.Work)
            assert work.wait() is True
            assert work.wait() is True  # again
            assert work.is_completed()
            assert work.exception() is None
        assert works[0].result() is reduced
        check(reduced, total, me)
        check(part, total[mine], me)
        check(big, whole, me)
        check(sent, whole, me)
        check(rooted, total if me == last else values(me, 50 * n, f32), me)
        if gathered is not None:
            check(gathered, whole, me)
        check(scattered, values(me, 50, f32), me)
        check(swapped, torch.arange(n) * 10.0 + me, me)


def test_every_collective() -> None:
    run_ranks(3, every_collective)


def order_and_many(rank: int, size: int) -> None:
    """Program order: each call reads what the one before it wrote, asynchronous or not."""
    with pycomm.init(timeout=60) as comm:
        t = torch.ones(3, dtype=torch.int64)
        works = [comm.all_reduce(t, async_op=True) for _ in range(20)]
        comm.all_reduce(t)  # behind them
        assert t.tolist() == [size**21] * 3
        assert all(w.is_completed() for w in works)
        tensors = [torch.full((100 + i,), float(i + rank)) for i in range(500)]
        works = [comm.all_reduce(x, "max", async_op=True) for x in tensors]
        for i, (work, x) in enumerate(zip(works, tensors, strict=True)):
            assert work.wait(timeout=30)
            assert bool((x == i + size - 1).all())


def test_program_order_and_many_outstanding() -> None:
    run_ranks(2, order_and_many)
    run_ranks(4, order_and_many)


def dropped(rank: int, size: int) -> None:
    """A Work that nobody keeps: the call still happens, and its tensors live until it has."""
    with pycomm.init(timeout=60) as comm:
        for i in range(200):
            comm.all_reduce(torch.full((3000,), float(i)), async_op=True)
            if i % 50 == 0:
                gc.collect()
        kept = torch.ones(2000)
        comm.all_reduce(kept, async_op=True)
        comm.isend(torch.full((200_000,), 5.0), 1 - rank)
        gc.collect()
        comm.barrier()
        assert bool((kept == size).all())
        got = torch.zeros(200_000)
        comm.recv(got, 1 - rank)
        assert bool((got == 5).all())
        comm.barrier()  # close() ends sends that are pending, and the peer may still be receiving ours


def test_dropping_a_work() -> None:
    run_ranks(2, dropped)


def timeouts(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        if rank == 1:
            time.sleep(0.5)
        t = torch.ones(4)
        work = comm.all_reduce(t, async_op=True)
        if rank == 0:
            begin = time.monotonic()
            assert not work.is_completed()
            with raises(pycomm.CommTimeoutError, "0.05 s"):
                work.wait(timeout=0.05)
            with raises(pycomm.CommTimeoutError, "0.0 s"):
                work.wait(timeout=0.0)
            assert time.monotonic() - begin < 0.45
            assert work.exception() is None
            with raises(ValueError, "timeout"):
                work.wait(timeout=-1.0)
        work.wait(timeout=30)
        assert t.tolist() == [2.0] * 4
        comm.barrier()  # the timeout of a wait has not harmed the call


def test_wait_with_a_timeout_leaves_the_call() -> None:
    run_ranks(2, timeouts)


def call_timeout(rank: int, size: int) -> None:
    comm = pycomm.init(timeout=60)
    if rank == 1:
        time.sleep(1.5)
        return
    work = comm.all_reduce(torch.ones(4), async_op=True, timeout=0.5)
    with raises(pycomm.CommTimeoutError, "all_reduce/one_shot #1", f"rank 1 (host {HOST}, pid", "0.5 s"):
        work.wait()
    assert work.is_completed()
    error = work.exception()
    assert type(error) is pycomm.CommTimeoutError
    with raises(pycomm.CommTimeoutError, f"rank 1 (host {HOST}, pid"):
        comm.barrier()  # it has failed, and says the same again


def test_the_timeout_of_the_call_itself() -> None:
    run_ranks(2, call_timeout)


def errors(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        if rank == 0:  # a bad call is refused at once, and the others hear of it in their Work
            with raises(ValueError, "'band' is not defined"):
                comm.all_reduce(torch.ones(3), "band", async_op=True)
        else:
            work = comm.all_reduce(torch.ones(3), async_op=True)
            with raises(pycomm.CommError, "rank 0 refused"):
                work.wait()
            assert "rank 0 refused" in str(work.exception())
            with raises(pycomm.CommError, "rank 0 refused"):
                work.get_future().wait()
        comm.barrier()
        t = torch.ones(2)
        comm.all_reduce(t, async_op=True).wait()
        assert t.tolist() == [size] * 2


def test_errors_of_an_asynchronous_call() -> None:
    run_ranks(3, errors)


def futures(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        t = torch.ones(1000)
        future = comm.all_reduce(t, async_op=True).get_future()
        assert isinstance(future, torch.futures.Future)
        half = future.then(lambda f: f.value() / size)
        twice = half.then(lambda f: f.value() * 2)
        assert bool((twice.wait() == 2.0).all())
        assert future.wait() is t
        # A non-contiguous output is complete when the Future is.
        strided = torch.ones(100, 2)[:, 1]
        got = comm.all_reduce(strided, async_op=True).get_future().wait()
        assert bool((got == size).all())
        gathered = [torch.zeros(2) for _ in range(size)]
        works = [comm.all_gather(gathered, torch.full((2,), float(rank)), async_op=True) for _ in range(30)]
        outputs = torch.futures.wait_all([w.get_future() for w in works])
        assert all(o is gathered for o in outputs)
        assert [g.tolist() for g in gathered] == [[float(q)] * 2 for q in range(size)]


def test_torch_futures() -> None:
    run_ranks(2, futures)


def futures_in_their_order(rank: int, size: int) -> None:
    """A Future is complete when its call is: one that waits for a peer does not hold up the others."""
    with pycomm.init(timeout=60) as comm:
        got = torch.zeros(3)
        open_one = comm.irecv(got, 1 - rank, tag=9).get_future()  # nothing is sent yet
        for i in range(20):
            t = torch.full((10,), float(i))
            assert comm.all_reduce(t, async_op=True).get_future().wait() is t
            assert bool((t == size * i).all())
        second = comm.irecv(torch.zeros(1), 1 - rank, tag=8).get_future()
        comm.send(torch.ones(1), 1 - rank, tag=8)
        check(second.wait(), torch.ones(1))
        assert not open_one.done()
        comm.barrier()
        comm.send(torch.full((3,), rank + 1.0), 1 - rank, tag=9)
        assert open_one.wait() is got
        check(got, torch.full((3,), 2.0 - rank))
        # One that is never sent ends with the communicator.
        never = comm.irecv(got, 1 - rank, tag=10).get_future()
    with pytest.raises(RuntimeError, match="closed"):
        never.wait()


def test_a_future_that_waits_does_not_hold_up_others() -> None:
    run_ranks(2, futures_in_their_order)


def threads(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        # wait() in other threads, several for one work
        t = torch.ones(100_000)
        work = comm.all_reduce(t, async_op=True)
        seen: list[float] = []
        waiters = [threading.Thread(target=lambda: seen.append(work.wait() * float(t[0]))) for _ in range(4)]
        for w in waiters:
            w.start()
        for w in waiters:
            w.join(30)
        assert seen == [float(size)] * 4
        # A blocked call leaves the interpreter to other threads.
        ticks, stop = [0], threading.Event()

        def tick() -> None:
            while not stop.is_set():
                ticks[0] += 1
                time.sleep(0.005)

        ticker = threading.Thread(target=tick)
        ticker.start()
        if rank == 1:
            time.sleep(0.5)
        before = ticks[0]
        comm.all_reduce(torch.ones(4))
        if rank == 0:
            assert ticks[0] - before > 10
        stop.set()
        ticker.join()
        # Two threads that call at once are served one after the other; here both make the same calls.
        results: list[float] = []

        def calls() -> None:
            for _ in range(300):
                results.append(float(comm.all_reduce(torch.ones(64))[0]))

        callers = [threading.Thread(target=calls) for _ in range(3)]
        for c in callers:
            c.start()
        for c in callers:
            c.join(60)
        assert results == [float(size)] * 900


def test_several_threads() -> None:
    run_ranks(2, threads)


def closing(rank: int, size: int) -> None:
    """close() lets what is queued finish first."""
    comm = pycomm.init(timeout=60)
    tensors = [torch.ones(50_000) for _ in range(20)]
    works = [comm.all_reduce(t, async_op=True) for t in tensors]
    comm.close()
    assert all(w.is_completed() and w.exception() is None for w in works)
    assert all(bool((t == size).all()) for t in tensors)
    late = None
    with raises(pycomm.CommError, "closed"):
        late = comm.all_reduce(tensors[0], async_op=True)
        late.wait()


class _WaitedElsewhere:
    """Of a call that goes on on its device after ``wait``: another stream waits for it than its caller's."""

    is_over = False

    def is_ordered(self) -> bool:
        return False

    def wait(self, timeout: float, on_host: bool = False) -> bool:
        return True

    def done(self) -> bool:
        return self.is_over

    over = done

    def raise_if_failed(self) -> None:
        pass


def test_tensors_are_kept_where_another_stream_waits() -> None:
    keeper, call, t = Keeper(), _WaitedElsewhere(), torch.ones(3)
    alive = weakref.ref(t)
    keeper.add(Work(cast(Any, call), t, None, None)).wait()
    del t
    another = Work(cast(Any, _WaitedElsewhere()), None, None, None)
    keeper.add(another)
    assert alive() is not None  # memory of the caller's stream would be used again
    call.is_over = True
    keeper.add(another)
    assert alive() is None


def test_close_waits_for_the_queue() -> None:
    run_ranks(2, closing)
