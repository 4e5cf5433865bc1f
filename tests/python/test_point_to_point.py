"""send, recv, isend and irecv: matched by (source, tag) in order, any source, both ways at once; faults."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import pycomm
from cases import DTYPES, check, raises, values
from hosts_ranks import meet
from pycomm.staging import through_host
from ranks import HOST, Died, run_ranks

#: More than all cells of a pipe hold (8 × 32 KiB): the sender needs the receiver's help.
LARGE = 300_007


def every_dtype_and_size(rank: int, size: int) -> None:
    left, right = (rank - 1) % size, (rank + 1) % size
    with pycomm.init(timeout=60) as comm:
        for dtype in DTYPES:
            for count in (0, 1, 7, 10_000):
                got = torch.zeros(count, dtype=dtype)
                work = comm.isend(values(rank, count, dtype), right)
                assert comm.recv(got, left) == left
                assert work.wait()
                check(got, values(left, count, dtype), rank, dtype, count)
        # Layouts: a transposed matrix to a strided row.
        matrix = values(rank, 12, torch.float32).reshape(3, 4).t()
        target = torch.zeros(12, 2)
        works = [comm.isend(matrix, right, tag=1), comm.irecv(target[:, 0], left, tag=1)]
        for work in works:
            work.wait()
        want = values(left, 12, torch.float32).reshape(3, 4).t()
        check(target[:, 0], want, rank)
        assert bool((target[:, 1] == 0).all())
        comm.send(matrix, right, tag=2)
        comm.recv(target[:, 1], left, tag=2)
        check(target[:, 1], want, rank)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_every_dtype_and_size_around_a_ring(n: int) -> None:
    run_ranks(n, every_dtype_and_size)


def both_directions(rank: int, size: int) -> None:
    """Large messages both ways at once: blocking sends first, then isend and irecv on both sides."""
    other = 1 - rank
    with pycomm.init(timeout=60) as comm:
        mine, got = values(rank, LARGE, torch.int64), torch.zeros(LARGE, dtype=torch.int64)
        comm.send(mine, other)
        comm.recv(got, other)
        check(got, values(other, LARGE, torch.int64), rank)
        for _ in range(3):
            works = [comm.isend(mine, other), comm.irecv(got.zero_(), other)]
            for work in works:
                work.wait()
            check(got, values(other, LARGE, torch.int64), rank)


def test_both_directions_do_not_deadlock() -> None:
    run_ranks(2, both_directions)


def tags(rank: int, size: int) -> None:
    """Ten tags with three messages each; received in another order of tags, each tag's in the order sent."""
    with pycomm.init(timeout=60) as comm:
        if rank == 0:
            works = [
                comm.isend(torch.full((LARGE // 9,), 100.0 * tag + k), 1, tag)
                for k in range(3)
                for tag in range(10)
            ]
            for work in works:
                work.wait()
        else:
            for tag in (7, 3, 9, 0, 1, 2, 8, 6, 5, 4):
                for k in range(3):
                    got = torch.zeros(LARGE // 9)
                    assert comm.recv(got, 0, tag) == 0
                    assert bool((got == 100.0 * tag + k).all()), (tag, k, got[0])
        comm.barrier()


def test_tags_in_any_order() -> None:
    run_ranks(2, tags)


def any_source(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        if rank == 0:
            counted = [0] * size
            for i in range(3 * (size - 1)):
                got = torch.zeros(1, dtype=torch.int64)
                if i % 2:
                    source = comm.recv(got)
                else:
                    work = comm.irecv(got)
                    work.wait()
                    source = work.source()
                # From each source, in the order in which it sent.
                assert got.item() == 10 * source + counted[source]
                counted[source] += 1
            assert counted == [0] + [3] * (size - 1)
            # A tag that nobody else uses is not stolen by "any source" of another tag.
            assert comm.recv(torch.zeros(2), 2, tag=5) == 2
        else:
            if rank == 2:
                comm.send(torch.ones(2), 0, tag=5)
            for k in range(3):
                comm.send(torch.tensor([10 * rank + k]), 0)
        comm.barrier()


def test_any_source() -> None:
    run_ranks(4, any_source)


def beside_collectives(rank: int, size: int) -> None:
    """Transfers progress while collectives run, and the other way round."""
    other = 1 - rank
    with pycomm.init(timeout=60) as comm:
        got = torch.zeros(LARGE)
        sent = comm.isend(values(rank, LARGE, torch.float32), other, tag=3)
        assert comm.all_reduce(torch.ones(50_000)).sum() == 100_000
        received = comm.irecv(got, other, tag=3)
        comm.barrier()
        received.wait()
        sent.wait()
        check(got, values(other, LARGE, torch.float32), rank)
        # A receive that nobody will serve for a while does not hold up collectives.
        late = comm.irecv(torch.zeros(1), other, tag=4)
        for _ in range(50):
            comm.barrier()
        assert not late.is_completed()
        comm.barrier()
        comm.send(torch.ones(1), other, tag=4)
        late.wait()
        # A rank blocked in recv on one thread, in collectives on another.
        box = torch.zeros(1)
        thread = threading.Thread(target=lambda: comm.recv(box, other, tag=6))
        thread.start()
        for _ in range(50):
            comm.all_reduce(torch.ones(100))
        comm.send(torch.full((1,), 7.0), other, tag=6)
        thread.join(30)
        assert not thread.is_alive()
        assert box.item() == 7


def test_independent_of_collectives() -> None:
    run_ranks(2, beside_collectives)


def refused(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        t = torch.ones(3)
        for peer in (-1, size, 99):
            with raises(ValueError, f"must be a rank in [0, {size})", f"got {peer}"):
                comm.send(t, peer)
        with raises(ValueError, f"src must be a rank in [0, {size}), or None or -1 for any, got {size}"):
            comm.recv(t, size)
        with raises(TypeError, "Tensor"):
            comm.send([1.0, 2.0], 0)
        with raises(ValueError, "requires grad"):
            comm.recv(torch.ones(3, requires_grad=True), 0)
        with raises(ValueError, "timeout"):
            comm.send(t, 0, timeout=-1.0)
        comm.barrier()  # the communicator is as good as before


def test_bad_arguments_are_refused() -> None:
    run_ranks(2, refused)


def wrong_size(rank: int, size: int, sent: torch.Tensor, expected: torch.Tensor) -> str:
    comm = pycomm.init(timeout=20)
    if rank == 0:
        comm.send(sent, 1, tag=3)
    else:
        with raises(pycomm.MismatchError, "recv(source 0, tag 3) on rank 1", "expects", "the message has"):
            comm.recv(expected, 0, tag=3)
    with pytest.raises(pycomm.MismatchError) as error:  # the communicator has failed, on both
        comm.barrier()
    meet(rank, size, "end")  # between hosts: who fails first connects to the other only to say so
    return str(error.value)


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (torch.ones(4), torch.ones(3)),
        (torch.ones(3), torch.ones(4)),
        (torch.ones(0), torch.ones(4)),
        (torch.ones(4), torch.ones(4, dtype=torch.int32)),
        (torch.ones(LARGE), torch.ones(2)),
    ],
    ids=["longer", "shorter", "empty", "dtype", "large"],
)
def test_a_message_of_another_size_or_dtype(sent: torch.Tensor, received: torch.Tensor) -> None:
    for text in run_ranks(2, wrong_size, sent, received):
        assert f"{sent.numel() * 4} bytes of float32" in text


def lost_peer(rank: int, size: int, how: str, form: str) -> float:
    """Rank 2 goes; rank 0 waits for its message, rank 1 lives on (so that not all are gone)."""
    comm = pycomm.init(timeout=30)
    pid, seen = comm._c.pid(2), Path(os.environ["PYCOMM_RUN_DIR"]) / "seen"
    comm.barrier()
    if rank == 2:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        comm.close() if how == "closed" else comm.abort("enough")
        return 0.0
    begin = time.monotonic()
    if rank == 1:
        while not seen.exists():
            time.sleep(0.01)
        return 0.0
    # An abort is an error of the aborter's making, and told as such.
    kind = pycomm.CommError if how == "aborted" else pycomm.PeerLostError
    with raises(kind, f"rank 2 (host {HOST}, pid {pid}", "recv" if "recv" in form else "send"):
        if form == "recv":
            comm.recv(torch.zeros(4), 2)
        elif form == "irecv":
            comm.irecv(torch.zeros(4), 2).wait()
        else:  # more than the pipe holds
            comm.send(torch.zeros(LARGE), 2)
    took = time.monotonic() - begin
    seen.touch()
    return took


@pytest.mark.parametrize("how", ["killed", "closed", "aborted"])
@pytest.mark.parametrize("form", ["recv", "irecv", "send"])
def test_a_lost_peer_is_named(how: str, form: str) -> None:
    took = run_ranks(3, lost_peer, how, form, may_die=[2])
    assert took[0] < 3.0
    assert how != "killed" or took[2] == Died(-signal.SIGKILL)


def last_words(rank: int, size: int) -> None:
    """What a rank has sent arrives although the rank has gone since."""
    comm = pycomm.init(timeout=30)
    if rank == 1:
        comm.send(torch.arange(1000), 0)
        comm.send(torch.arange(5), 0, tag=1)
        os._exit(0)
    while os.path.exists(f"/proc/{comm._c.pid(1)}"):
        time.sleep(0.01)
    got, more = torch.zeros(1000, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    comm.recv(more, 1, tag=1)
    comm.recv(got, 1)
    assert torch.equal(got, torch.arange(1000))
    assert torch.equal(more, torch.arange(5))


@pytest.mark.parametrize("is_send", [True, False])
def test_a_message_through_host_memory_is_not_captured(
    is_send: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with raises(ValueError, "isend cannot be captured into a CUDA graph", "before the capture"):
        through_host("isend", torch.ones(2), is_send)


def test_messages_outlive_their_sender() -> None:
    run_ranks(2, last_words, may_die=[1])


def deadlines(rank: int, size: int) -> None:
    comm = pycomm.init(timeout=0.4)
    if rank == 0:
        begin = time.monotonic()
        with raises(pycomm.CommTimeoutError, "recv", f"rank 1 (host {HOST}, pid"):
            comm.recv(torch.zeros(1), 1, timeout=1.2)  # the call's own time counts, not the communicator's
        assert 1.1 < time.monotonic() - begin < 3.0
    else:
        time.sleep(2.5)


def test_a_deadline_names_the_peer() -> None:
    run_ranks(2, deadlines)


def any_source_all_gone(rank: int, size: int, form: str) -> None:
    comm = pycomm.init(timeout=30)
    comm.barrier()
    if rank > 0:
        comm.close()
        return
    begin = time.monotonic()
    with raises(pycomm.PeerLostError, "closed its communicator"):
        comm.recv(torch.zeros(1)) if form == "recv" else comm.irecv(torch.zeros(1)).wait()
    assert time.monotonic() - begin < 3.0


@pytest.mark.parametrize("form", ["recv", "irecv"])
def test_any_source_ends_when_nobody_is_left(form: str) -> None:
    run_ranks(3, any_source_all_gone, form)


def interrupted(rank: int, size: int, form: str) -> None:
    """Ctrl-C in a blocked transfer: at once, and the memory of the tensor is nobody's any more."""
    comm = pycomm.init(timeout=30)
    comm.barrier()
    if rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        t, begin = torch.zeros(LARGE), time.monotonic()
        with raises(KeyboardInterrupt):
            comm.recv(t, 1) if form == "recv" else comm.send(t, 1)
        assert time.monotonic() - begin < 2.0
        del t
        with raises(pycomm.CommError, "interrupted"):
            comm.barrier()
    else:
        with raises(pycomm.CommError, "rank 0", "interrupted"):
            comm.barrier()


@pytest.mark.parametrize("form", ["recv", "send"])
def test_ctrl_c_in_a_blocked_transfer(form: str) -> None:
    run_ranks(2, interrupted, form)
