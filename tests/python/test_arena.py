"""Arena tensors (comm.empty): ordinary tensors with storage of their own, as long as anybody holds them."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import os
import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import pycomm
from cases import DTYPES, check, expected, raises, values
from ranks import run_ranks


def in_use(comm: pycomm.Communicator) -> int:
    return comm._c.arena_bytes_in_use()


def owned(comm: pycomm.Communicator, t: torch.Tensor) -> bool:
    return comm._c.owns(t.data_ptr())


def kinds(rank: int, size: int) -> None:
    """Every dtype and shape, alone and beside ordinary tensors."""
    with pycomm.init(timeout=60) as comm:
        for dtype, shape in itertools.product(DTYPES, ((), (0,), (3, 0), (1,), (2, 3, 4), (1000,))):
            t = comm.empty(shape, dtype=dtype)
            assert (t.dtype, t.shape, t.device.type) == (dtype, shape, "cpu")
            assert type(t) is torch.Tensor
            assert t.is_contiguous()
            assert t.is_leaf
            assert not t.requires_grad
            assert t.storage_offset() == 0
            assert t.untyped_storage().nbytes() == t.numel() * t.element_size()
            assert t.data_ptr() % 128 == 0
            if t.numel() > 0:
                assert owned(comm, t)
            inputs = [values(q, t.numel(), dtype) for q in range(size)]
            want = expected("sum", inputs)
            for arena_in, arena_out in ((True, True), (True, False), (False, True)):
                t.copy_(inputs[rank].reshape(shape))
                ordinary = inputs[rank].reshape(shape).clone()
                source = t if arena_in else ordinary
                out = comm.empty(shape, dtype=dtype) if arena_out else torch.zeros(shape, dtype=dtype)
                check(comm.all_reduce(source, out=out), want, dtype, shape)
                check(source, inputs[rank], dtype, shape)
            mixed = t if rank == 0 else ordinary
            check(comm.all_reduce(mixed), want, dtype, shape, "mixed")
        assert comm.empty(2, 3).shape == comm.empty([2, 3]).shape == comm.empty(torch.Size((2, 3))).shape
        assert comm.empty(np.int64(4)).shape == (4,)
        for bad in ((-1,), ([2, -1],), (2**63,)):
            with raises(ValueError, "empty: a size must be an integer in [0, 2^63)"):
                comm.empty(*bad)
        for wrong in ((2.5,), ("a",), (None,), ([2], 3)):
            with raises(TypeError, "empty: a size must be an integer in [0, 2^63)"):
                comm.empty(*wrong)
        with raises(TypeError, "empty: dtype torch.uint16 is not supported"):
            comm.empty(3, dtype=torch.uint16)


def test_every_dtype_and_shape() -> None:
    run_ranks(2, kinds)


def copies(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        whole = comm.empty(1 << 20).fill_(7.0)  # much of the arena lies behind it
        t = comm.empty(5).copy_(torch.arange(5.0))
        saved = io.BytesIO()
        torch.save(t, saved)
        assert len(saved.getvalue()) < 4096
        assert len(pickle.dumps(t)) < 4096
        saved.seek(0)
        module = torch.nn.Linear(1, 1)
        module.weight = torch.nn.Parameter(t)
        for other in (
            torch.load(saved, weights_only=True),
            pickle.loads(pickle.dumps(t)),
            copy.deepcopy(t),
            copy.deepcopy(module).weight.detach(),
            t.clone(),
            t + 0,
        ):
            check(other, torch.arange(5.0))
            assert not owned(comm, other)
            comm.all_reduce(other)
            check(other, torch.arange(5.0) * size)
        # Views are the same memory.
        for view in (t[1:], t.view(1, 5), t.detach(), torch.from_numpy(t.numpy()), module.weight.detach()):
            assert owned(comm, view)
        with torch.no_grad():
            comm.all_reduce(module.weight)
        check(t, torch.arange(5.0) * size)
        with pytest.raises(RuntimeError, match="not resizable"):  # torch's: no write beyond the block
            t.resize_(1000)
        left = comm.empty(5).copy_(torch.arange(5.0)).share_memory_()
        assert not owned(comm, left)
        check(comm.all_reduce(left), torch.arange(5.0) * size)
        assert bool((whole == 7.0).all())


def test_copies_are_ordinary_and_small() -> None:
    run_ranks(2, copies)


def given_back(rank: int, size: int) -> None:
    with pycomm.init(timeout=60) as comm:
        before = in_use(comm)
        t = comm.empty(100_000)
        held = in_use(comm) - before
        assert 400_000 <= held < 400_000 + 4096
        view, array = t[3:5], t.numpy()
        del t
        assert in_use(comm) - before == held
        del view
        assert in_use(comm) - before == held
        array[:] = 3.0
        del array
        assert in_use(comm) == before
        # A call that is under way holds its tensors; a finished one does not.
        work = comm.all_reduce(comm.empty(100_000).fill_(1.0), async_op=True)
        work.wait()
        check(work.result()[:3], torch.full((3,), float(size)))
        del work
        comm.barrier(async_op=True).wait()
        comm.all_reduce(torch.ones(2), async_op=True).wait()
        gc.collect()
        assert in_use(comm) - before < held
        # Zero sizes cost little and come back too.
        before = in_use(comm)
        several = [comm.empty(0, 5) for _ in range(10)]
        assert in_use(comm) - before <= 10 * 128
        del several
        assert in_use(comm) == before
        # The same memory again and again, in any order of freeing, from several threads.
        tensors = [comm.empty(1000 * (i % 7)) for i in range(50)]
        full = in_use(comm)
        for i in range(200):
            tensors[i * 13 % 50] = torch.empty(0)
            tensors[i * 13 % 50] = comm.empty(1000 * (i * 13 % 50 % 7))
            assert in_use(comm) <= full
        del tensors

        def use() -> None:
            for i in range(100):
                comm.empty(100 + i).fill_(float(i))

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert in_use(comm) == before


def test_memory_is_given_back() -> None:
    run_ranks(2, given_back)


def arenas_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("pycomm-arena")


def outlives(rank: int, size: int) -> None:
    """After close, and when no communicator is left, the tensor is still a tensor."""
    comm = pycomm.init(timeout=60)
    child = comm.split(0)
    assert child is not None
    t = comm.empty(100_000).fill_(rank + 1.0)
    of_child = child.empty(100_000).fill_(rank + 1.0)
    child.close()
    with raises(pycomm.CommError, "closed"):
        child.empty(3)
    del child
    gc.collect()
    check(comm.all_reduce(of_child), comm.all_reduce(t.clone()))  # of the same arena
    comm.all_reduce(t)
    total = size * (size + 1) / 2
    comm.close()
    with raises(pycomm.CommError, "closed"):
        comm.empty(3)
    assert bool((t == total).all())
    del comm
    gc.collect()
    t.add_(1.0)
    again = pycomm.init(timeout=60)  # another arena, in which this one's tensors are ordinary
    assert not owned(again, t)
    again.all_reduce(t)
    assert bool((t == (total + 1) * size).all())
    assert arenas_mapped() >= 1 + size
    again.close()
    del again, of_child
    gc.collect()
    assert bool((t == (total + 1) * size).all())
    del t
    gc.collect()
    assert arenas_mapped() == 0


def test_tensors_outlive_their_communicator() -> None:
    run_ranks(2, outlives)


def quarantined(rank: int, size: int) -> None:
    """After a timeout a peer may still write into the tensors of the call: their memory is not used again."""
    comm = pycomm.init(timeout=60)
    child = comm.split(0)  # of the same arena, and unharmed
    assert child is not None
    before = in_use(comm)
    t = comm.empty(100_000).fill_(1.0)
    untouched = comm.empty(200_000)
    comm.all_reduce(t)
    dropped = Path(os.environ["PYCOMM_RUN_DIR"]) / "dropped"
    if rank == 1:  # comes too late
        deadline = time.monotonic() + 30
        while not dropped.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with raises(pycomm.CommTimeoutError, "rank 1"):
            comm.all_reduce(t)
        child.barrier()
        return
    place = t.data_ptr()
    with raises(pycomm.CommTimeoutError, "rank 1"):
        comm.all_reduce(t, timeout=0.5)
    held = in_use(comm)
    del t
    gc.collect()
    assert in_use(comm) == held
    del untouched  # was in no such call
    gc.collect()
    assert in_use(comm) == held - 800_000
    later = [child.empty(size) for size in (100_000, 100_000, 50_000)]
    assert all(not place <= x.data_ptr() < place + 400_000 for x in later)
    del later
    assert before + 400_000 <= in_use(comm)
    dropped.touch()
    child.barrier()


def test_tensors_of_a_call_that_timed_out_keep_their_memory() -> None:
    run_ranks(2, quarantined)
