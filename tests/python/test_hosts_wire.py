"""Compression between hosts: bounds, bits, error feedback, what is refused, bytes, and DDP on top of it.

Expected values are float64 sums; the bound is that of docs/numerics.md. Blocks of 256 elements lie somewhere
in the vector, so a block's largest magnitude is bounded by that of all elements less than 256 away.
"""

from __future__ import annotations

import itertools
import math
import zlib
from typing import Any

import pytest
import torch
from hosts_network import enter, network, sent_bytes
from test_ddp_compression import Dots
from torch import nn

import pycomm
import pycomm.hosts
from cases import bits, check, raises
from hosts_ranks import join, meet
from ranks import run_ranks

PLACEMENTS: dict[str, list[int]] = {
    "2x1": [0, 1],
    "3x1": [0, 1, 2],
    "2x2": [0, 0, 1, 1],
    "1+2": [0, 1, 1],
    "2+1+2, mixed": [0, 1, 0, 2, 2],
}
BY_PLACEMENT = pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS.keys())
CODES = ("fp16", "bf16", "fp8", "int8")
U = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-4, "int8": 0.0}
F = {"fp16": 2.0**-38, "bf16": 2.0**-132, "fp8": 2.0**-17, "int8": 1 / 254}
CODE_BYTES = {"fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}
SIZES = (0, 1, 255, 257, 70_001, 2_200_013)  # the last: slices, and tiles of the hierarchy


def inputs(size: int, n: int, seed: int = 0) -> list[torch.Tensor]:
    """Magnitudes over five decades, with a signed zero and whole blocks of zeros in between."""
    found = []
    for rank in range(size):
        generator = torch.Generator().manual_seed(100 * seed + rank)
        x = torch.randn(n, generator=generator) * 10 ** (torch.rand(n, generator=generator) * 5 - 4)
        x[2::1001] = -0.0
        x[1024:2048] = 0
        found.append(x)
    return found


def near(x: torch.Tensor) -> torch.Tensor:
    """For each element, the largest magnitude within any 256 neighbours that it belongs to, or more."""
    n = x.numel()
    if n == 0:
        return x
    by_block = nn.functional.pad(x.abs(), (256, 256 - n % 256 + 256)).view(-1, 256).amax(1)
    return by_block.unfold(0, 3, 1).amax(1).repeat_interleave(256)[:n]


def host_sums(vectors: list[torch.Tensor], placement: list[int]) -> list[torch.Tensor]:
    """What each host has to give, in float64."""
    hosts = range(max(placement) + 1)
    return [
        torch.stack([v.double() for v, h in zip(vectors, placement, strict=True) if h == host]).sum(0)
        for host in hosts
    ]


def bound(
    code: str, vectors: list[torch.Tensor], placement: list[int], n_codings: float = 2.1
) -> torch.Tensor:
    """On the error of a sum (docs/numerics.md), 2.1 for all_reduce, 1 for reduce_scatter."""
    sums = host_sums(vectors, placement)
    a = sum((s.abs() for s in sums), torch.zeros(()).double())
    m = sum((near(s) for s in sums), torch.zeros(()).double())
    magnitudes = torch.stack([v.double().abs() for v in vectors]).sum(0)
    rounding = 2.0**-24 * (len(vectors) + 3) * magnitudes + 2.0**-22 * (m if code == "int8" else 0 * a)
    return n_codings * (U[code] * a + F[code] * m) + rounding + 2.0**-98


def check_bound(
    got: torch.Tensor, code: str, given: list[torch.Tensor], placement: list[int], divisor: int = 1
) -> None:
    """An all_reduce's sum, divided; low precision is rounded once more, at the end."""
    exact = torch.stack(given).double().sum(0) / divisor
    allowed = bound(code, given, placement) / divisor
    if got.dtype is not torch.float32:
        info = torch.finfo(got.dtype)
        allowed = allowed * (1 + info.eps) + info.eps / 2 * exact.abs() + info.smallest_normal
    excess = (got.double() - exact).abs() - allowed
    assert bool((excess <= 0).all()), (code, len(got), placement, float(excess.max()))


def reduce_all(rank: int, size: int, placement: list[int], dtype: torch.dtype) -> list[int]:
    """Every code that makes ``dtype`` smaller, on every size; what came, as checksums."""
    sums = []
    with join(rank, placement) as comm:
        for n in SIZES:
            given = [x.to(dtype) for x in inputs(size, n)]
            for code in CODES:
                if CODE_BYTES[code] >= dtype.itemsize:
                    continue
                got = comm.all_reduce(given[rank].clone(), compression=code)
                if rank == 0:  # the others have the same bits
                    check_bound(got, code, given, placement)
                if n == 70_001:
                    forms_agree(comm, code, given, got, placement)
                sums.append(zlib.crc32(bytes(bits(got).numpy())))
    return sums


def forms_agree(
    comm: pycomm.Communicator, code: str, given: list[torch.Tensor], want: torch.Tensor, placement: list[int]
) -> None:
    """The other ways of making a call have its bits; the average has its bound, too."""
    mine = given[comm.rank]
    n, dtype = mine.numel(), mine.dtype
    out = torch.empty_like(mine)
    comm.all_reduce(mine, out=out, compression=code)
    check(out, want, comm.rank, "out of place")
    pieces = [p.clone() for p in mine.split([1, 30_000, 0, n - 30_001])]
    comm.all_reduce(pieces, compression=code)
    check(torch.cat(pieces), want, comm.rank, "a list")
    wide = torch.zeros(n, 2, dtype=dtype)
    wide[:, 1] = mine
    comm.all_reduce(wide[:, 1], compression=code, async_op=True).wait()
    check(wide[:, 1], want, comm.rank, "strided, asynchronous")
    assert not bool(wide[:, 0].any())
    average = comm.all_reduce(mine.clone(), "avg", compression=code)
    if dtype is torch.float32:
        check(average, want / comm.size, comm.rank, "avg")
    check_bound(average, code, given, placement, comm.size)
    half = comm.all_reduce(mine.clone(), ("premul_sum", 0.5), compression=code)
    check_bound(half, code, given, placement, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
@BY_PLACEMENT
def test_all_reduce(placement: list[int], dtype: torch.dtype) -> None:
    found = run_ranks(len(placement), reduce_all, placement, dtype, timeout=110)
    assert all(sums == found[0] for sums in found)
    assert len(found[0]) == len(SIZES) * (4 if dtype is torch.float32 else 2)


def parted(rank: int, size: int, placement: list[int]) -> list[int]:
    sums = []
    with join(rank, placement) as comm:
        for code, each in itertools.product(CODES, (0, 1, 300, 150_001)):
            counts = [each + (q % 2) * min(each, 7) for q in range(size)]
            n = sum(counts)
            given = inputs(size, n, 1)
            exact = torch.stack(given).double().sum(0)
            # Shares are cut from blocks of ranks, so neighbours in a code need not be neighbours here.
            m = sum(float(s.abs().max()) if n else 0.0 for s in host_sums(given, placement))
            allowed = bound(code, given, placement, 1.0) + (F[code] + 2.0**-22) * m
            part = comm.reduce_scatter(
                torch.empty(counts[rank]), given[rank], counts=counts, compression=code
            )
            mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
            assert bool(((part.double() - exact[mine]).abs() <= allowed[mine]).all()), (code, each)

            parts = [x[: counts[q]] for q, x in enumerate(given)]
            whole = torch.cat(parts)
            feedback = pycomm.ErrorFeedback()
            got = comm.all_gather(
                torch.empty(n), parts[rank], counts=counts, compression=code, error_feedback=feedback
            )
            m = float(whole.abs().max()) if n else 0.0
            assert bool(((got - whole).abs() <= U[code] * whole.abs() + (F[code] + 2.0**-22) * m).all())
            assert feedback.residual is not None
            assert feedback.residual.numel() == n
            sums.append(zlib.crc32(bytes(bits(got).numpy())))
            low = [p.bfloat16() for p in parts]
            if CODE_BYTES[code] == 1:
                got = comm.all_gather(
                    torch.empty(n, dtype=torch.bfloat16), low[rank], counts=counts, compression=code
                )
                error = (got.float() - torch.cat(low).float()).abs()
                allowed = (U[code] + 2.0**-8) * whole.abs() * 1.1 + (F[code] + 2.0**-9) * m
                assert bool((error <= allowed).all())
                sums.append(zlib.crc32(bytes(bits(got).numpy())))
    return sums


@BY_PLACEMENT
def test_reduce_scatter_and_all_gather(placement: list[int]) -> None:
    found = run_ranks(len(placement), parted, placement, timeout=110)
    assert all(sums == found[0] for sums in found)


def not_finite(rank: int, size: int, placement: list[int]) -> None:
    with join(rank, placement) as comm:
        for code, feedback in itertools.product(CODES, (None, pycomm.ErrorFeedback())):
            if feedback is not None:
                feedback.reset()
            for odd in (math.inf, -math.inf, math.nan):
                x = torch.full((300_000,), 2.0)
                if rank == size - 1:
                    x[[7, 200_000]] = odd
                comm.all_reduce(x, compression=code, error_feedback=feedback)
                assert not bool(x[[7, 200_000]].isfinite().any())
                rest = x[x.isfinite()]
                assert rest.numel() >= x.numel() - 2 * 256
                assert bool((rest == 2.0 * size).all())
            x = torch.full((300_000,), 2.0)  # and nothing is left of them
            comm.all_reduce(x, compression=code, error_feedback=feedback)
            assert bool((x == 2.0 * size).all())


@pytest.mark.parametrize("name", ["2x1", "3x1", "1+2"])
def test_what_is_not_finite_arrives_on_all_ranks_and_harms_its_block_only(name: str) -> None:
    run_ranks(len(PLACEMENTS[name]), not_finite, PLACEMENTS[name])


def call_coded(
    comm: pycomm.Communicator,
    collective: str,
    x: torch.Tensor,
    counts: list[int],
    code: str,
    feedback: pycomm.ErrorFeedback | None,
) -> torch.Tensor:
    """The result of one call, all of it or this rank's part."""
    how: dict[str, Any] = {"compression": code, "error_feedback": feedback}
    if collective == "all_reduce":
        return comm.all_reduce(x.clone(), **how)
    return comm.reduce_scatter(torch.empty(counts[comm.rank]), x, counts=counts, **how)


def fed_back(rank: int, size: int, placement: list[int]) -> None:
    n, n_calls = 70_001, 30
    counts = [n - 100 * (size - 1), *[100] * (size - 1)]
    given = inputs(size, n, 2)
    exact = torch.stack(given).double().sum(0)
    sums = host_sums(given, placement)
    m = sum(float(s.abs().max()) for s in sums)
    a = torch.stack(sums).abs().sum(0)
    with join(rank, placement) as comm:
        for code, collective in itertools.product(CODES, ("all_reduce", "reduce_scatter")):
            begin = 0 if collective == "all_reduce" else sum(counts[:rank])
            mine = slice(begin, n if collective == "all_reduce" else begin + counts[rank])
            feedback = pycomm.ErrorFeedback()
            with_it = torch.zeros(n, dtype=torch.float64)[mine]
            without = with_it.clone()
            for _ in range(n_calls):
                with_it += call_coded(comm, collective, given[rank], counts, code, feedback)
                without += call_coded(comm, collective, given[rank], counts, code, None)
            # What is sent is larger by what was lost: the error of one call, and n_calls float32 roundings.
            allowed = 2.5 * (U[code] * (a + U[code] * a) + F[code] * m) + n_calls * 2.0**-22 * (a + m)
            error = (with_it - n_calls * exact[mine]).abs()
            assert bool((error <= allowed[mine]).all()), (code, collective)
            if rank == 0:
                assert float((without - n_calls * exact[mine]).abs().max()) > 5 * float(error.max())
            saved = feedback.state_dict()
            after = call_coded(comm, collective, given[rank], counts, code, feedback)
            other = pycomm.ErrorFeedback()
            other.load_state_dict(saved)
            again = call_coded(comm, collective, given[rank], counts, code, other)
            check(again, after, rank, "from a checkpoint")


@pytest.mark.parametrize("name", ["2x1", "3x1", "2x2", "1+2"])
def test_error_feedback(name: str) -> None:
    run_ranks(len(PLACEMENTS[name]), fed_back, PLACEMENTS[name], timeout=110)


def differs(rank: int, size: int, placement: list[int], mine: list[str | None]) -> None:
    comm = join(rank, placement)
    comm.barrier()
    meet(rank, size, "begin")  # not in the barrier any more, where it would be told too
    names = [f"compression {c}" for c in mine if c is not None]
    with raises(pycomm.MismatchError, "all_reduce", *names):
        comm.all_reduce(torch.ones(1000), compression=mine[rank])
        comm.barrier()
    meet(rank, size, "end")


@pytest.mark.parametrize("placement", [[0, 1], [0, 1, 1], [0, 0]], ids=["2x1", "1+2", "one host"])
def test_ranks_that_differ_are_told(placement: list[int]) -> None:
    for last in (None, "fp8"):
        mine = [*["int8"] * (len(placement) - 1), last]
        run_ranks(len(placement), differs, placement, mine)


def refused(rank: int, size: int, placement: list[int]) -> None:
    x, n = torch.ones(10), len(set(placement))
    with join(rank, placement) as comm:

        def refuses(kind: type[Exception], *parts: str, **how: Any) -> None:
            tensor = how.pop("tensor", x)
            with raises(kind, "all_reduce", *parts):
                comm.all_reduce(tensor.clone(), **how)

        refuses(ValueError, "compression must be one of 'fp16', 'bf16', 'fp8', 'int8'", "'int4'",
                compression="int4")  # fmt: skip
        refuses(ValueError, "compression='int8'", "'max'", compression="int8", op="max")
        refuses(ValueError, "float64", compression="fp8", tensor=x.double())
        refuses(ValueError, "int32", compression="fp8", tensor=x.int())
        refuses(ValueError, "compression='fp16' makes float32 smaller, got bfloat16", compression="fp16",
                tensor=x.bfloat16())  # fmt: skip
        refuses(ValueError, "give compression as well", error_feedback=pycomm.ErrorFeedback())
        refuses(TypeError, "must be a pycomm.ErrorFeedback", compression="int8", error_feedback=x)
        if n > 1:
            refuses(ValueError, "deterministic=True", "'int8'", compression="int8", deterministic=True)
            refuses(ValueError, "'direct'", "'ring'", compression="int8", algorithm="ring")
            other = pycomm.ErrorFeedback(torch.zeros(9))
            refuses(ValueError, "9 elements", "10", compression="int8", error_feedback=other)
            comm.all_reduce(x.clone(), compression="int8", algorithm="direct")
        with raises(TypeError, "broadcast", "compression"):
            comm.broadcast(x, compression="int8")
        assert comm.all_reduce(torch.ones(3)).tolist() == [float(size)] * 3


@pytest.mark.parametrize("placement", [[0, 1], [0, 1, 1], [0, 0]], ids=["2x1", "1+2", "one host"])
def test_what_is_refused(placement: list[int]) -> None:
    run_ranks(len(placement), refused, placement)


def on_one_host(rank: int, size: int) -> None:
    with join(rank, [0] * size) as comm:
        x = inputs(size, 70_001)
        feedback = pycomm.ErrorFeedback()
        for code, dtype, deterministic in itertools.product(
            CODES, (torch.float32, torch.bfloat16), (False, True)
        ):
            if CODE_BYTES[code] >= dtype.itemsize:
                continue
            want = comm.all_reduce(x[rank].to(dtype), deterministic=deterministic)
            got = comm.all_reduce(
                x[rank].to(dtype), deterministic=deterministic, compression=code, error_feedback=feedback
            )
            check(got, want, rank, code)
        assert feedback.residual is None


def test_on_one_host_nothing_changes() -> None:
    run_ranks(3, on_one_host)


def count_bytes(rank: int, size: int, placement: list[int]) -> None:
    """What this process sends, against the closed form."""
    nets = []
    make = pycomm.hosts._C.Net

    def kept(*args: Any) -> Any:
        nets.append(make(*args))
        return nets[-1]

    pycomm.hosts._C.Net = kept  # type: ignore[misc]  # the same object, which the communicator hides
    n_hosts, n = max(placement) + 1, 6 * (1 << 18)  # divides into 2, 3 hosts, slices and blocks
    with join(rank, placement) as comm:
        (net,) = nets
        for code in CODES:
            x = torch.ones(n)
            comm.all_reduce(x, compression=code)  # connections are there
            comm.barrier()
            meet(rank, size, f"before-{code}")
            before = net.bytes_sent
            meet(rank, size, f"go-{code}")
            comm.all_reduce(x, compression=code)
            meet(rank, size, f"done-{code}")
            sent = net.bytes_sent - before
            n_owners = size // n_hosts
            wire = n * CODE_BYTES[code] + n // 256 * 4
            least = 2 * (n_hosts - 1) / n_hosts * wire / n_owners
            assert least <= sent <= 1.01 * least + 4096, (code, sent, least)
            comm.barrier()


@pytest.mark.parametrize("name", ["2x1", "3x1", "2x2"])
def test_bytes_sent(name: str) -> None:
    run_ranks(len(PLACEMENTS[name]), count_bytes, PLACEMENTS[name])


def on_interface(rank: int, size: int, hosts: list[str]) -> int:
    placement, n = [0, 0, 1, 1], 3 << 19
    enter(hosts[placement[rank]])
    with join(rank, placement, PYCOMM_SOCKET_IFNAME="") as comm:
        x = torch.ones(n)
        comm.all_reduce(x, compression="int8")
        comm.barrier()
        meet(rank, size, "before")
        before = sent_bytes()
        meet(rank, size, "go")
        comm.all_reduce(x, compression="int8")
        meet(rank, size, "done")
        sent = sent_bytes() - before
        comm.barrier()
    return sent


def test_bytes_on_the_interface() -> None:
    wire = (3 << 19) * (1 + 4 / 256)
    with network(2) as hosts:
        for sent in run_ranks(4, on_interface, hosts, timeout=60):
            assert wire <= sent <= 1.06 * wire, (sent, wire)


# ---- DistributedDataParallel ----------------------------------------------------------------------------


def average(
    rank: int, size: int, placement: list[int], code: str, feedback: bool, overlap: str, weighted: bool
) -> list[torch.Tensor]:
    """Gradients that are exactly given tensors, averaged in three steps."""
    lengths = [1000, 1, 37, 90_000]
    with join(rank, placement) as comm:
        net = Dots(lengths)
        ddp = pycomm.DistributedDataParallel(
            net, communicator=comm, compression=code, error_feedback=feedback, overlap=overlap,
            bucket_cap_mb=0.1, gradient_as_bucket_view=feedback,
        )  # fmt: skip
        weights = [1.0 + r if weighted else 1.0 for r in range(size)]
        found = []
        for step in range(3):
            net.zero_grad()
            given = [x.split(lengths) for x in inputs(size, sum(lengths), step)]
            if weighted:
                with ddp.weighted(weights[rank]):
                    ddp(given[rank]).backward()
            else:
                ddp(given[rank]).backward()
            got = torch.cat([w.grad for w in net.weights])
            scaled = [torch.cat(g) * w / sum(weights) for g, w in zip(given, weights, strict=True)]
            exact = torch.stack(scaled).double().sum(0)
            sums = host_sums(scaled, placement)
            a = torch.stack(sums).abs().sum(0)
            # Buckets have the parameters in another order, so a block's neighbours are not known here.
            m = sum(float(s.abs().max()) for s in sums)
            allowed = 2.1 * (U[code] * a + F[code] * m) + 2.0**-21 * (a + m) + 2.0**-98
            factor = 1 if not feedback or step == 0 else 2.2  # what was lost before is sent, too
            assert bool(((got.double() - exact).abs() <= factor * allowed + U[code] * m * (step > 0)).all())
            found.append(got)
        state = ddp.error_feedback_state_dict()
        if feedback:
            ddp.load_error_feedback_state_dict(state)
            assert any(bool(r.any()) for r in state.values()) or rank == 2  # 1 + 2: no owner
    return found


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("placement", [[0, 0, 1, 1], [0, 1, 1]], ids=["2x2", "1+2"])
def test_ddp_is_within_the_bound(placement: list[int], code: str) -> None:
    for feedback, overlap, weighted in ((False, "async", False), (True, "end", True), (True, "async", False)):
        found = run_ranks(len(placement), average, placement, code, feedback, overlap, weighted)
        for other in found[1:]:
            for got, first in zip(other, found[0], strict=True):
                check(got, first, "the same bits on every rank")


def exact_inside(rank: int, size: int) -> None:
    """Ranks of one host that cancel each other lose nothing: a million, minus a million and 1, is 1."""
    with join(rank, [0, 0, 1, 1]) as comm:
        big = 2.0**14 * torch.arange(1.0, 513.0)
        mine = [big, 1 - big, torch.zeros(512), torch.ones(512)][rank]
        net = Dots([512])
        ddp = pycomm.DistributedDataParallel(net, communicator=comm, compression="int8")
        ddp([mine]).backward()
        assert net.weights[0].grad.tolist() == [0.5] * 512


def test_ddp_is_in_full_precision_inside_a_host() -> None:
    run_ranks(4, exact_inside)


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def converge(rank: int, size: int, code: str | None) -> float:
    """The loss after 100 steps of regression on this rank's own data, of the mean over ranks."""
    with join(rank, [0, 0, 1, 1]) as comm:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(64, 20, generator=generator)
        y = torch.stack([x[:, :5].sum(1).sin(), x[:, 5:9].prod(1)], 1)
        net = model()
        wrapped = pycomm.DistributedDataParallel(
            net, communicator=comm, compression=code, error_feedback=code is not None, bucket_cap_mb=0.1
        )
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
        for _ in range(100):
            optimizer.zero_grad()
            (wrapped(x) - y).square().mean().backward()
            optimizer.step()
        loss = (net(x) - y).square().mean().detach()
        return float(comm.all_reduce(loss.reshape(1), "avg"))


def test_ddp_with_feedback_converges_as_without_compression() -> None:
    start = 1.2  # about the variance of y
    plain = run_ranks(4, converge, None, timeout=60)[0]
    assert plain < start / 3
    for code in ("int8", "fp8"):
        assert run_ranks(4, converge, code, timeout=60)[0] < 1.1 * plain + 0.005, code


def deterministic(rank: int, size: int, placement: list[int]) -> torch.Tensor:
    with join(rank, placement) as comm:
        comm.deterministic = True
        net = Dots([3000])
        ddp = pycomm.DistributedDataParallel(net, communicator=comm, compression="int8")
        ddp([inputs(size, 3000)[rank]]).backward()
        return net.weights[0].grad


def test_ddp_in_the_deterministic_order_has_the_bits_of_one_host() -> None:
    one = run_ranks(4, deterministic, [0] * 4)[0]
    for got in run_ranks(4, deterministic, [0, 0, 1, 1]):
        check(got, one)
