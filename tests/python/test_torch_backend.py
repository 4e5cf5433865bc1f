"""torch.distributed on pycomm: the values of every collective and transfer, with all dtypes.

Inputs and expected values are those of cases.py: exact, and computed by torch in float64 or int64.
"""

import pytest
import torch
import torch.distributed as dist

import cases
from cases import check, values
from ranks import run_ranks
from torch_backend_ranks import OPS, world

pytestmark = pytest.mark.timeout(60)

#: Moved, never reduced: what the engine has no kernels for goes as bytes.
MOVED = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def moved_values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype not in MOVED:
        return values(rank, count, dtype)
    raw = (torch.arange(count * 8) * 37 + 11 * rank) % 120  # of every one of these no NaN
    return raw.to(torch.uint8).view(dtype)[:count]


def reductions(rank: int, size: int) -> None:
    with world(rank, size):
        for op, dtypes in cases.DEFINED.items():
            torchs = dist._make_nccl_premul_sum(cases.FACTOR) if op == "premul_sum" else OPS[op]
            for dtype in dtypes:
                if dtype in cases.COMPLEX and op not in ("sum", "avg"):
                    continue  # torch refuses these
                inputs = [values(r, 13 * size, dtype, op) for r in range(size)]
                want = cases.expected(op, inputs)
                got = inputs[rank].clone()
                dist.all_reduce(got, torchs)
                check(got, want, "all_reduce", op, dtype)
                got = inputs[rank].clone()
                dist.reduce(got, size - 1, torchs)
                check(got, want if rank == size - 1 else inputs[rank], "reduce", op, dtype)
                if dtype in cases.COMPLEX:
                    continue
                got = torch.zeros(13, dtype=dtype)
                dist.reduce_scatter_tensor(got, inputs[rank], torchs)
                check(got, want.chunk(size)[rank], "reduce_scatter_tensor", op, dtype)
                dist.reduce_scatter(got.zero_(), list(inputs[rank].chunk(size)), torchs)
                check(got, want.chunk(size)[rank], "reduce_scatter", op, dtype)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_reductions(n):
    run_ranks(n, reductions)


def moves(rank: int, size: int) -> None:
    with world(rank, size):
        for dtype in (*cases.DTYPES, *MOVED):
            parts = [moved_values(r, 6, dtype) for r in range(size)]
            whole = torch.cat([p.view(torch.uint8) for p in parts]).view(dtype)
            mine = parts[rank].view(2, 3)
            got = [torch.zeros(2, 3, dtype=dtype) for _ in range(size)]
            dist.all_gather(got, mine)
            for r in range(size):
                check(got[r], parts[r], "all_gather", dtype)
            one = torch.zeros(2 * size, 3, dtype=dtype)
            dist.all_gather_into_tensor(one, mine)
            check(one, whole, "all_gather_into_tensor", dtype)
            got = [torch.zeros(2, 3, dtype=dtype) for _ in range(size)]
            dist.gather(mine, got if rank == 0 else None, 0)
            for r in range(size if rank == 0 else 0):
                check(got[r], parts[r], "gather", dtype)
            out = torch.zeros(6, dtype=dtype)
            dist.scatter(out, [p.clone() for p in parts] if rank == size - 1 else None, size - 1)
            check(out, parts[rank], "scatter", dtype)
            out = parts[rank].clone()
            dist.broadcast(out, size - 1)
            check(out, parts[size - 1], "broadcast", dtype)
            # the q-th block of rank r is [r, q] in every element, as bytes
            blocks = [moved_values(10 * rank + q, 4, dtype) for q in range(size)]
            outs = [torch.zeros(4, dtype=dtype) for _ in range(size)]
            dist.all_to_all(outs, blocks)
            for r in range(size):
                check(outs[r], moved_values(10 * r + rank, 4, dtype), "all_to_all", dtype)
            if dtype in MOVED and dtype.itemsize > 1:
                continue  # torch has no cat for them
            flat = torch.cat([b.view(torch.uint8) for b in blocks]).view(dtype)
            single = torch.zeros(4 * size, dtype=dtype)
            dist.all_to_all_single(single, flat)
            for r in range(size):
                check(single[4 * r : 4 * r + 4], outs[r], "all_to_all_single", dtype)
            peer = (rank + 1) % size
            if size > 1:
                out, work = torch.zeros(6, dtype=dtype), dist.isend(parts[rank], peer, tag=5)
                assert dist.recv(out, (rank - 1) % size, tag=5) == (rank - 1) % size
                work.wait()
                check(out, parts[(rank - 1) % size], "send and recv", dtype)


@pytest.mark.parametrize("n", [1, 3])
def test_moves_of_every_dtype(n):
    run_ranks(n, moves)


def uneven(rank: int, size: int) -> None:
    with world(rank, size):
        counts = [3 * r for r in range(size)]  # rank 0 has nothing
        parts = [values(r, counts[r], torch.float32) for r in range(size)]
        got = [torch.full((c,), -1.0) for c in counts]
        dist.all_gather(got, parts[rank])
        for r in range(size):
            check(got[r], parts[r], "all_gather, uneven")
        inputs = [[values(10 * r + q, counts[q], torch.int32) for q in range(size)] for r in range(size)]
        out = torch.zeros(counts[rank], dtype=torch.int32)
        dist.reduce_scatter(out, inputs[rank])
        if counts[rank]:
            check(out, sum(inputs[r][rank] for r in range(size)), "reduce_scatter, uneven")
        # all_to_all_single of rows: rank r sends (r + q) % 3 rows to rank q
        sends = [(rank + q) % 3 for q in range(size)]
        given = torch.arange(sum(sends) * 2).reshape(-1, 2) + 1000 * rank
        got_rows = torch.zeros(sum(sends), 2, dtype=torch.int64)  # (r + q) % 3 is symmetric
        dist.all_to_all_single(got_rows, given, sends, sends)
        want = []
        for r in range(size):
            theirs = [(r + q) % 3 for q in range(size)]
            rows = torch.arange(sum(theirs) * 2).reshape(-1, 2) + 1000 * r
            want.append(rows.split(theirs)[rank])
        check(got_rows, torch.cat(want), "all_to_all_single, uneven")
        for nothing in (torch.empty(0), torch.empty(0, 5), torch.empty(3, 0)):
            dist.all_reduce(nothing)
            dist.broadcast(nothing, 0)
            dist.all_gather([nothing.clone() for _ in range(size)], nothing)
            dist.all_gather_into_tensor(torch.empty(size * nothing.shape[0], *nothing.shape[1:]), nothing)
        layouts(rank, size)
        point_to_point(rank, size)
        objects(rank, size)
        coalesced(rank, size)


def layouts(rank: int, size: int) -> None:
    want = sum(values(r, 24, torch.float32) for r in range(size)).view(4, 6)
    for make in (
        lambda t: t.t().contiguous().t(),  # columns
        lambda t: torch.stack([t, t])[1],
        lambda t: torch.cat([t, t], 1)[:, :6],  # a gap between rows
        lambda t: t.clone().requires_grad_(),
        lambda t: torch.nn.Parameter(t.clone()),
    ):
        given = make(values(rank, 24, torch.float32).view(4, 6))
        strides = given.stride()
        dist.all_reduce(given)
        assert given.stride() == strides and given.grad_fn is None
        check(given, want, "all_reduce of strides", strides)
    spread = torch.zeros(6, 4).t()
    dist.broadcast(spread.copy_(want) if rank == 0 else spread, 0)
    check(spread, want, "broadcast into strides")
    negated = torch.full((3,), 1 + 2j).conj().imag  # lazily, and every second element of its memory
    assert negated.is_neg()
    out = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(out, negated)
    for t in out:
        assert t.tolist() == [-2.0] * 3


def point_to_point(rank: int, size: int) -> None:
    if rank == 0:  # of any source: whoever comes first, and tags keep messages apart
        seen = {}
        for _ in range(size - 1):
            got = torch.zeros(2)
            source = dist.recv(got, tag=1)
            seen[source] = got.tolist()
        assert seen == {r: [r, 10.0 * r] for r in range(1, size)}
        work = dist.irecv(late := torch.zeros(1), tag=2)
        assert work is not None
        work.wait()
        assert work._source_rank() == late.item() == size - 1
    else:
        dist.send(torch.tensor([rank, 10.0 * rank]), 0, tag=1)
        if rank == size - 1:
            dist.send(torch.tensor([float(rank)]), 0, tag=2)
    right, left = (rank + 1) % size, (rank - 1) % size
    batch = [torch.full((4,), -1.0) for _ in range(2)]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, batch[0], left),
            dist.P2POp(dist.isend, torch.full((4,), float(rank)), right),
            dist.P2POp(dist.isend, torch.full((4,), rank + 0.5), right),
            dist.P2POp(dist.irecv, batch[1], left),
        ]
    )
    for work in works:
        work.wait()
    assert batch[0].tolist() == [left] * 4 and batch[1].tolist() == [left + 0.5] * 4


def objects(rank: int, size: int) -> None:
    mine = {"rank": rank, "text": "x" * (10 + 1000 * rank), "tensor": torch.full((2,), rank)}
    everyone: list = [None] * size
    dist.all_gather_object(everyone, mine)
    assert [o["rank"] for o in everyone] == list(range(size))
    assert [len(o["text"]) for o in everyone] == [10 + 1000 * r for r in range(size)]
    gathered: list | None = [None] * size if rank == 1 else None
    dist.gather_object(mine, gathered, 1)
    assert gathered is None or [int(o["tensor"][0]) for o in gathered] == list(range(size))
    sent = [mine, "second"] if rank == 1 else [None, None]
    dist.broadcast_object_list(sent, 1)
    assert sent[0]["rank"] == 1 and sent[1] == "second"
    out: list = [None]
    dist.scatter_object_list(out, [f"for {r}" for r in range(size)] if rank == 0 else None, 0)
    assert out == [f"for {rank}"]
    if size > 1:
        dist.send_object_list([mine], 1) if rank == 0 else None
        if rank == 1:
            dist.recv_object_list(out, 0)
            assert out[0]["rank"] == 0


def coalesced(rank: int, size: int) -> None:
    def inputs(r: int) -> list[torch.Tensor]:
        return [values(r, c, d) for c, d in ((5, torch.float32), (7, torch.float64), (0, torch.float32))]

    for asynchronous in (False, True):
        mine = inputs(rank)
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            for t in mine:
                dist.all_reduce(t)
        if asynchronous:
            manager.wait()
        for i, t in enumerate(mine):
            check(t, sum(inputs(r)[i] for r in range(size)), "coalesced all_reduce", i)
        outs = [torch.zeros(3 * size), torch.zeros(4 * size)]
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            for out in outs:
                dist.all_gather_into_tensor(out, torch.full((out.numel() // size,), float(rank)))
        if asynchronous:
            manager.wait()
        for out in outs:
            assert out.view(size, -1)[:, 0].tolist() == list(range(size))
        outs = [torch.zeros(3), torch.zeros(4)]
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            for out in outs:
                dist.reduce_scatter_tensor(out, torch.ones(out.numel() * size))
        if asynchronous:
            manager.wait()
        for out in outs:
            assert out.tolist() == [size] * out.numel()
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]  # [rank][tensor]
    dist.all_gather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((3,), rank + 0.5)])
    assert [[t[0].item() for t in row] for row in lists] == [[r, r + 0.5] for r in range(size)]
    both = [torch.ones(2), torch.full((3,), float(rank))]
    dist.all_reduce_coalesced(both, dist.ReduceOp.MAX)
    assert both[1].tolist() == [size - 1] * 3
    some = torch.sparse_coo_tensor([[rank, 2]], [1.0, 2.0], (size + 2,))
    dist.all_reduce(some)
    dense = torch.zeros(size + 2)
    for r in range(size):
        dense[r] += 1
        dense[2] += 2
    check(some.to_dense(), dense, "sparse all_reduce")


@pytest.mark.parametrize("n", [2, 4])
def test_sizes_layouts_transfers_objects_and_coalescing(n):
    run_ranks(n, uneven)
