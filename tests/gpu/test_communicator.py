"""A Communicator on GPUs: every collective, way and dtype; streams, lifetimes, DDP, graphs.

Run by `make test-gpu`, or with an extension that was built with CUDA: `python -m pytest tests/gpu`. Ranks are
processes; they share a GPU where there are fewer GPUs than ranks (then NCCL's ways are left out, which NCCL
2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1 has as well). Expected values are exact: torch's in float64 or int64.
Where CUDA is emulated what needs no stream runs as well (tests/cuda_on_cpu/run_python.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import pycomm
from cases import check, expected, raises, values
from pycomm import devices
from pycomm.calling import KINDS
from ranks import run_ranks

WHY = devices.why_none()
pytestmark = [
    pytest.mark.skipif(bool(WHY), reason=f"no GPU: {WHY}"),
    pytest.mark.timeout(300),
]
needs_streams = pytest.mark.skipif(devices.is_emulated(), reason="torch has no streams on emulated devices")
RANKS = sorted({2, 3, min(8, max(2, devices.count()))}) if not devices.is_emulated() else [2, 3]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32)
COUNTS = (1, 9_001) if devices.is_emulated() else (1, 1_003, 70_001, 5_000_011)


def ways(comm: pycomm.Communicator, device: torch.device, name: str) -> list[str | None]:
    """None: the communicator's choice. Collective."""
    comm.all_reduce(torch.ones(1, device=device))
    return [None, *comm._c.device_algorithms(KINDS[name])]


# ---- every collective ----------------------------------------------------------------------------------


def collectives(rank: int, size: int, dtype: torch.dtype, count: int) -> None:
    device = devices.take()
    with pycomm.init(timeout=120) as comm:
        inputs = [values(q, count, dtype) for q in range(size)]
        total, whole, mine = expected("sum", inputs), torch.cat(inputs), inputs[rank].to(device)

        def new(n: int) -> torch.Tensor:
            return torch.empty(n, dtype=dtype, device=device)

        calls: dict[str, Callable[[str | None], tuple[torch.Tensor, torch.Tensor]]] = {
            "all_reduce": lambda way: (comm.all_reduce(mine, out=new(count), algorithm=way), total),
            "reduce_scatter": lambda way: (
                comm.reduce_scatter(new(count), torch.cat([mine] * size), algorithm=way),
                total,
            ),
            "all_gather": lambda way: (comm.all_gather(new(size * count), mine, algorithm=way), whole),
            "broadcast": lambda way: (comm.broadcast(mine.clone(), size - 1, algorithm=way), inputs[-1]),
            "reduce": lambda way: (
                comm.reduce(mine.clone(), 0, out=new(count), algorithm=way) if rank == 0
                else comm.reduce(mine, 0, algorithm=way) or mine,
                total if rank == 0 else inputs[rank],
            ),
            "gather": lambda way: (
                comm.gather(mine, new(size * count) if rank == 0 else None, 0, algorithm=way)
                if rank == 0 else comm.gather(mine, None, 0, algorithm=way) or mine,
                whole if rank == 0 else inputs[rank],
            ),
            "scatter": lambda way: (
                comm.scatter(new(count), whole.to(device) if rank == 0 else None, 0, algorithm=way),
                inputs[rank],
            ),
        }  # fmt: skip
        for name, call in calls.items():
            for way in ways(comm, device, name):
                got, want = call(way)
                check(got.cpu(), want, name, way, rank)
        if "nccl" in comm._c.device_algorithms(KINDS["all_reduce"]):
            blocks = torch.cat([values(size * rank + q, count, dtype) for q in range(size)]).to(device)
            want = torch.cat([values(size * q + rank, count, dtype) for q in range(size)])
            check(comm.all_to_all(new(size * count), blocks).cpu(), want, "all_to_all", rank)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", RANKS)
def test_every_collective_by_every_way(size: int, dtype: torch.dtype, count: int) -> None:
    run_ranks(size, collectives, dtype, count, timeout=240)


def tensors(rank: int, size: int) -> None:
    device = devices.take()
    where = f"cuda:{rank}" if devices.is_emulated() else device
    with pycomm.init(timeout=120) as comm:
        odd = values(rank, 2_002, torch.float32).to(device)[1::2]  # staged: not contiguous
        want = expected("sum", [values(q, 2_002, torch.float32)[1::2] for q in range(size)])
        check(comm.all_reduce(odd).cpu(), want, "strided")
        pieces = [values(rank + k, 100 + k, torch.bfloat16).to(device) for k in range(40)]  # one packed call
        comm.all_reduce(pieces, "max")
        for k, piece in enumerate(pieces):
            want = expected("max", [values(q + k, 100 + k, torch.bfloat16) for q in range(size)])
            check(piece.cpu(), want, "piece", k)
        if "peer" in comm._c.device_algorithms(KINDS["all_reduce"]):
            arena = comm.empty(5_001, device=where).copy_(values(rank, 5_001, torch.float32))
            want = expected("sum", [values(q, 5_001, torch.float32) for q in range(size)])
            check(comm.all_reduce(arena).cpu(), want, "arena")
        child = comm.split(0, -rank)
        assert child is not None
        check(child.all_reduce(torch.ones(7, device=device)).cpu(), torch.full((7,), float(size)), "child")


@pytest.mark.parametrize("size", RANKS)
def test_layouts_lists_memory_of_its_own_and_children(size: int) -> None:
    run_ranks(size, tensors, timeout=240)


# ---- streams --------------------------------------------------------------------------------------------


def streams(rank: int, size: int) -> None:
    """No synchronisation anywhere but in the comparisons at the end."""
    device = devices.take()
    n = 1 << 22
    with pycomm.init(timeout=120) as comm:
        side = torch.cuda.Stream(device)
        results = []
        for k in range(8):
            with torch.cuda.stream(side if k % 2 else torch.cuda.current_stream(device)):
                torch.cuda._sleep(5_000_000)  # a few milliseconds: the call must wait for what fills x
                x = torch.full((n,), float(rank + k), device=device)
                comm.all_reduce(x)
                results.append(x * 2)  # behind the call, on the stream it was made on
                x.fill_(-1.0)
        works = []
        for k in range(8):
            y = torch.full((n,), float(rank + k), device=device)
            works.append(comm.all_reduce(y, async_op=True))
            del y  # freed while the call may not have begun
            torch.full((n,), -7.0, device=device)  # and its memory, if torch gave it away, written over
        for work in works:
            work.wait()
            results.append(work.result() * 2)
        for k, got in enumerate(results):
            want = 2.0 * (sum(range(size)) + size * (k % 8))
            assert bool((got == want).all()), (k, got[:4], want)


@needs_streams
@pytest.mark.parametrize("size", RANKS)
def test_streams_order_calls_and_keep_tensors(size: int) -> None:
    run_ranks(size, streams, timeout=240)


def staged_results(rank: int, size: int) -> None:
    """Copies of what is not contiguous come back on the call's stream, whoever looks first, and where."""
    device = devices.take()
    side = torch.cuda.Stream(device)
    want = expected("sum", [values(q, 2_000_002, torch.float32)[1::2] for q in range(size)])
    with pycomm.init(timeout=120) as comm:
        for k in range(8):
            with torch.cuda.stream(side):
                odd = values(rank, 2_000_002, torch.float32).to(device)[1::2]
                work = comm.all_reduce(odd, async_op=True)
                torch.cuda._sleep(20_000_000)  # the copy comes behind this
            if k % 4 == 1:
                while not work.is_completed():
                    pass
            elif k % 4 == 2:
                work.get_future().wait()
            elif k % 4 == 3:  # the sweep of another call finds it done, and another stream waits for it
                comm.all_reduce(torch.ones(1, device=device))
                torch.cuda.synchronize(device)
                comm.all_reduce(torch.ones(1, device=device), async_op=True).wait()
                side = torch.cuda.Stream(device)
            with torch.cuda.stream(side if k % 4 == 3 else torch.cuda.current_stream(device)):
                work.wait()
                got = odd.clone()
            torch.cuda.synchronize(device)
            check(got.cpu(), want, k)
        with torch.cuda.stream(side):
            message = torch.empty(1_000_001, device=device)
            torch.cuda._sleep(20_000_000)
            message.fill_(-1.0)  # the message is written behind this
            receives = comm.irecv(message, (rank - 1) % size)
        sends = comm.isend(torch.full((1_000_001,), float(rank), device=device), (rank + 1) % size)
        receives.wait()
        check(message.clone().cpu(), torch.full((1_000_001,), float((rank - 1) % size)), "irecv")
        sends.wait()


@needs_streams
@pytest.mark.parametrize("size", RANKS)
def test_staged_results_come_on_the_calls_stream(size: int) -> None:
    run_ranks(size, staged_results, timeout=240)


def memory_that_is_used_again(rank: int, size: int) -> None:
    """The arena has room for two of these, and each is let go while its stream is far behind."""
    device = devices.take()
    n = 6 << 20
    side = torch.cuda.Stream(device)
    with pycomm.init(timeout=120) as comm:
        comm.all_reduce(torch.ones(1, device=device))
        if "peer" not in comm._c.device_algorithms(KINDS["all_reduce"]):
            return
        copies = []
        for k in range(12):
            made_on = side if k % 3 == 1 else torch.cuda.current_stream(device)
            with torch.cuda.stream(made_on):
                x = comm.empty(n, device=device)
            used_on = side if k % 3 == 0 else torch.cuda.current_stream(device)
            used_on.wait_stream(made_on)
            with torch.cuda.stream(used_on):
                torch.cuda._sleep(20_000_000)
                x.fill_(float(k))
                copies.append(x[::4096].clone())
                del x
        torch.cuda.synchronize(device)
        for k, got in enumerate(copies):
            check(got.cpu(), torch.full_like(got, float(k), device="cpu"), k)


@needs_streams
@pytest.mark.parametrize("size", RANKS)
def test_memory_is_used_again_behind_its_streams(size: int) -> None:
    run_ranks(size, memory_that_is_used_again, timeout=240)


# ---- training -------------------------------------------------------------------------------------------


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).double()


def train(rank: int, size: int) -> list[torch.Tensor]:
    device = devices.take()
    batches = [torch.linspace(-1, 1, 32 * 4, dtype=torch.float64).view(4, 32) * (q + 1) for q in range(size)]
    plain = model().to(device)
    with pycomm.init(timeout=120) as comm:
        ddp = pycomm.DistributedDataParallel(copy.deepcopy(plain), communicator=comm)
        for net, batch in ((ddp, batches[rank]), (plain, torch.cat(batches))):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                net(batch.to(device)).square().mean().backward()
                optimizer.step()
        for got, want in zip(ddp.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        return [p.detach().cpu() for p in ddp.parameters()]


@pytest.mark.parametrize("size", RANKS)
def test_ddp_equals_one_process(size: int) -> None:
    found = run_ranks(size, train, timeout=240)
    assert all(torch.equal(a, b) for other in found for a, b in zip(other, found[0], strict=True))


# ---- graphs ---------------------------------------------------------------------------------------------


def captured(rank: int, size: int) -> None:
    device = devices.take()
    with pycomm.init(timeout=120) as comm:
        for way in [
            w for w in ways(comm, device, "all_reduce") if w in ("peer_one_shot", "peer_two_shot", "nccl")
        ]:
            x = torch.ones(70_001, device=device)
            comm.all_reduce(x, algorithm=way)  # opens what a capture may not
            torch.cuda.synchronize(device)
            comm.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                comm.all_reduce(x, algorithm=way)
            for k in range(3):
                x.fill_(float(rank + k))
                graph.replay()
                assert bool((x == float(sum(range(size)) + size * k)).all()), (way, k, x[:4])
            torch.cuda.synchronize(device)
            comm.barrier()
            del graph


@needs_streams
@pytest.mark.parametrize("size", RANKS)
def test_all_reduce_in_a_graph(size: int) -> None:
    run_ranks(size, captured, timeout=240)


# ---- what is refused, before any launch -----------------------------------------------------------------


def refusals(rank: int, size: int) -> None:
    """Each is wrong on rank 1 alone; all ranks hear of it, and the communicator stays usable."""
    device = devices.take()
    with pycomm.init(timeout=60) as comm:

        def right() -> None:
            check(comm.all_reduce(torch.ones(7, device=device)).cpu(), torch.full((7,), float(size)), "right")

        def refused(kind: type[Exception], words: str, wrong: Callable[[], object]) -> None:
            if rank == 1:
                with raises(kind, words):
                    wrong()
            else:
                with raises(pycomm.CommError, "rank 1 refused its call", words):
                    right()
            right()

        right()
        here, there = torch.ones(7, device=device), torch.ones(7)
        refused(ValueError, "too_many is not", lambda: comm.all_reduce(here, algorithm="too_many is not"))
        refused(ValueError, "op 'band' is not defined", lambda: comm.all_reduce(here, "band"))
        if not devices.is_emulated():  # there every tensor is the device's
            refused(ValueError, "input is on cuda", lambda: comm.all_reduce(here, out=there))
            refused(ValueError, "input is on CPU", lambda: comm.all_reduce(there, out=here))
            refused(ValueError, "element 1 is on CPU", lambda: comm.all_reduce([here, there]))
        if not devices.is_emulated() and torch.cuda.device_count() > 1:
            index = (torch.cuda.current_device() + 1) % torch.cuda.device_count()
            other = torch.ones(7, device=f"cuda:{index}")
            refused(ValueError, f"the tensors are on cuda:{index}", lambda: comm.all_reduce(other))
            refused(ValueError, "element 1 is on", lambda: comm.all_reduce([here, other]))
        # What an algorithm has not is the same on all ranks.
        for way, dtype in (("nccl", torch.int16), ("nccl", torch.bool), ("nccl", torch.float8_e4m3fn)):
            if way in comm._c.device_algorithms(KINDS["all_reduce"]):
                with raises(pycomm.ScheduleError, "NCCL has no max of"):
                    comm.all_reduce(torch.ones(7, device=device).to(dtype), "max", algorithm=way)
                right()


@pytest.mark.parametrize("size", RANKS)
def test_refusals_are_told_to_all_ranks(size: int) -> None:
    run_ranks(size, refusals, timeout=120)


def host_on_one_rank(rank: int, size: int) -> None:
    device = devices.take()
    with pycomm.init(timeout=60) as comm, pytest.raises(pycomm.MismatchError, match="on CUDA"):
        comm.all_reduce(torch.ones(7, device=device if rank == 0 else "cpu"))


@needs_streams
def test_the_host_on_one_rank_and_a_gpu_on_another() -> None:
    run_ranks(2, host_on_one_rank, timeout=120)


def uncapturable(rank: int, size: int) -> None:
    device = devices.take()
    with pycomm.init(timeout=60) as comm:
        x = torch.ones(7, device=device)
        side = torch.cuda.Stream(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")
            with raises(ValueError, "the first call of a communicator on CUDA cannot be captured"):
                comm.all_reduce(x)
            graph.capture_end()
        check(comm.all_reduce(x).cpu(), torch.full((7,), float(size)), "after the capture")


@needs_streams
def test_a_first_call_is_not_captured() -> None:
    run_ranks(2, uncapturable, timeout=120)


def of_expandable_segments(rank: int, size: int) -> None:
    """Memory that CUDA's IPC cannot share: it is staged."""
    device = devices.take()
    with pycomm.init(timeout=60) as comm:
        for way in ways(comm, device, "all_reduce"):
            for count in (1_003, 5_000_011):
                x = values(rank, count, torch.float32).to(device)
                want = expected("sum", [values(q, count, torch.float32) for q in range(size)])
                check(comm.all_reduce(x, algorithm=way).cpu(), want, way, count)


@needs_streams
@pytest.mark.parametrize("size", RANKS)
def test_memory_of_expandable_segments(size: int) -> None:
    segments = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    run_ranks(size, of_expandable_segments, env=segments, timeout=240)
