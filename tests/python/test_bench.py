"""The parts of pycomm.bench: options, exact inputs against torch, buffers, the memory probe."""

import functools
import math

import pytest
import torch

from pycomm import _C, CommTimeoutError
from pycomm.bench import Options, parse_size
from pycomm.bench.buffers import Contents, Memory, Slots, n_slots_for
from pycomm.bench.collectives import Shape, bus_factor, shape_of
from pycomm.bench.exact import PREMUL_FACTOR, expected, inputs
from pycomm.bench.options import COLLECTIVES, DTYPES, format_size

# ---- sizes and shapes -------------------------------------------------------------------------------


def test_sizes_are_written_as_in_nccl_tests() -> None:
    assert [parse_size(s) for s in ("4", "64K", "1.5M", "1g", "2 KiB", "3MB")] == [
        4, 65536, 3 << 19, 1 << 30, 2048, 3 << 20,
    ]  # fmt: skip
    assert [format_size(n) for n in (6, 1024, 1536, 64 << 20, 1 << 30)] == ["6", "1K", "1536", "64M", "1G"]
    for bad in ("", "x", "-4", "4T", "1..5K"):
        with pytest.raises(ValueError, match="expected a number of bytes"):
            parse_size(bad)


def test_the_sweep_ends_at_the_largest_size() -> None:
    assert Options(min_bytes=4, max_bytes=100, factor=3).sizes() == [4, 12, 36]
    assert Options(min_bytes=8, max_bytes=8).sizes() == [8]
    assert Options.from_json(Options(peers=("gloo",), op="max").to_json()) == Options(
        peers=("gloo",), op="max"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("collective", "all_reduced"), ("dtype", "float31"), ("op", "mean"), ("peers", ("nccl",)),
        ("buffers", ("gpu",)), ("min_bytes", 0), ("max_bytes", 1), ("factor", 1), ("ranks", 0),
        ("n_iters", 0), ("n_warmup", -1), ("root", -1), ("max_seconds", 0.0), ("max_seconds", math.nan),
    ],
)  # fmt: skip
def test_bad_options_are_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field.rstrip('s')}.* .*expected"):
        Options(**{field: value})  # type: ignore[arg-type]


def test_counts_and_bus_factors_are_those_of_nccl_tests() -> None:
    def counts(collective: str) -> tuple[int, int, int]:
        shape = shape_of(collective, 96, 4, n_ranks=3, rank=1, root=0)
        return shape.count, shape.n_in, shape.n_out

    assert (
        counts("all_reduce") == counts("broadcast") == counts("reduce") == counts("sendrecv") == (24, 24, 24)
    )
    assert counts("reduce_scatter") == counts("scatter") == (8, 24, 8)
    assert counts("all_gather") == counts("gather") == (8, 8, 24)
    assert counts("all_to_all") == (8, 24, 24)
    assert shape_of("all_gather", 4, 4, 3, 0, 0).n_out == 3  # never less than one element for each rank
    factors = {name: bus_factor(name, 4) for name in COLLECTIVES}
    assert factors == {
        "all_reduce": 1.5, "reduce_scatter": 0.75, "all_gather": 0.75, "broadcast": 1.0, "reduce": 1.0,
        "gather": 0.75, "scatter": 0.75, "all_to_all": 0.75, "sendrecv": 1.0,
    }  # fmt: skip


# ---- exact inputs -----------------------------------------------------------------------------------


def _shapes(collective: str, n_ranks: int, n_bytes: int, dtype: torch.dtype) -> list[Shape]:
    root = n_ranks - 1
    return [shape_of(collective, n_bytes, dtype.itemsize, n_ranks, rank, root) for rank in range(n_ranks)]


_REDUCE = {
    "sum": lambda a, b: a + b,
    "avg": lambda a, b: a + b,
    "premul_sum": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": lambda a, b: a & b,
    "bor": lambda a, b: a | b,
    "bxor": lambda a, b: a ^ b,
}


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5, 17])
@pytest.mark.parametrize("dtype_name", [d for d in DTYPES if d != "bool"])
def test_reductions_are_exact_in_the_dtype_itself(dtype_name: str, n_ranks: int) -> None:
    """Adding up in the dtype, one rank after the other, gives the expected value, which float64 gives too."""
    dtype = getattr(torch, dtype_name)
    integral, is_complex = not (dtype.is_floating_point or dtype.is_complex), dtype.is_complex
    shapes = _shapes("all_reduce", n_ranks, 3000 * dtype.itemsize, dtype)
    wide = torch.int64 if integral else torch.complex128 if is_complex else torch.float64
    for op, combine in _REDUCE.items():
        if (op in ("band", "bor", "bxor") and not integral) or (op in ("min", "max") and is_complex):
            continue
        if op in ("avg", "premul_sum") and integral:
            continue
        tensors = [inputs(shape, op, dtype) for shape in shapes]
        total = functools.reduce(combine, [t.to(wide) for t in tensors])
        if op == "avg":
            assert torch.equal(total.to(dtype).to(wide), total)  # the sum itself rounds nowhere
            total = total / n_ranks
        if op == "premul_sum":
            total = total * PREMUL_FACTOR
        for shape in shapes:
            want = expected(shape, op, dtype)
            assert want is not None and want.dtype == dtype
            assert torch.equal(want.view(torch.uint8), total.to(dtype).view(torch.uint8)), (op, shape.rank)
        if op == "sum":
            stepwise = functools.reduce(lambda a, b, d=dtype: (a.to(wide) + b.to(wide)).to(d), tensors)
            assert torch.equal(stepwise.to(wide), total)
            assert n_ranks == 1 or not torch.equal(total, total.roll(1)) or dtype_name.startswith("float8")


@pytest.mark.parametrize("op", ["sum", "product", "min", "max", "band", "bor", "bxor"])
def test_bool_sums_are_or_and_products_and(op: str) -> None:
    shapes = _shapes("all_reduce", 3, 2000, torch.bool)
    tensors = [inputs(shape, op, torch.bool) for shape in shapes]
    by_name = {"sum": torch.logical_or, "max": torch.logical_or, "bor": torch.logical_or,
               "product": torch.logical_and, "min": torch.logical_and, "band": torch.logical_and,
               "bxor": torch.logical_xor}  # fmt: skip
    want = functools.reduce(by_name[op], tensors)
    got = expected(shapes[1], op, torch.bool)
    assert got is not None and torch.equal(got, want)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_expected_results_are_those_of_the_definition(collective: str) -> None:
    """From all ranks' inputs, with torch.cat and sums, as MPI defines each collective."""
    n, dtype = 3, torch.int64
    shapes = _shapes(collective, n, 3 * 1700 * 8, dtype)
    sent, root, count = [inputs(s, "sum", dtype) for s in shapes], shapes[0].root, shapes[0].count
    assert all(len(x) == shapes[0].n_in for x in sent)
    total = sum(sent) if len({len(x) for x in sent}) == 1 else None
    for rank, shape in enumerate(shapes):
        mine = slice(rank * count, (rank + 1) * count)
        want = {
            "all_reduce": lambda: total,
            "reduce": lambda r=rank: total if r == root else None,
            "reduce_scatter": lambda m=mine: total[m],
            "all_gather": lambda: torch.cat(sent),
            "gather": lambda r=rank: torch.cat(sent) if r == root else None,
            "scatter": lambda m=mine: sent[root][m],
            "broadcast": lambda: sent[root],
            "all_to_all": lambda m=mine: torch.cat([x[m] for x in sent]),
            "sendrecv": lambda r=rank: sent[(r - 1) % n],
        }[collective]()
        got = expected(shape, "sum", dtype)
        assert (got is None) == (want is None)
        assert got is None or torch.equal(got, want)


# ---- buffers ----------------------------------------------------------------------------------------


def _memory(n_bytes: int) -> Memory:
    return Memory(
        "ordinary", *(torch.zeros(Memory.n_bytes_for(n_bytes), dtype=torch.uint8) for _ in range(2))
    )


@pytest.mark.parametrize("n_bytes", [4, 100, 4096, 65536, 65540, 1 << 20])
@pytest.mark.parametrize("place", ["out", "in"])
def test_dirtying_rewrites_every_slot_and_wrong_elements_are_counted(n_bytes: int, place: str) -> None:
    shape = shape_of("all_reduce", n_bytes, 4, 2, 1, 0)
    slots = Slots(_memory(n_bytes), Contents(shape, "sum", torch.float32, n_slots_for(n_bytes)), place)
    want = expected(shape, "sum", torch.float32)
    assert len(slots.pairs) == n_slots_for(n_bytes)
    assert want is not None
    slots.dirty()
    for data, out in slots.pairs:
        assert torch.equal(data, inputs(shape, "sum", torch.float32))
        assert (data.data_ptr() == out.data_ptr()) == (place == "in")
        assert data.data_ptr() % 64 == slots.pairs[0][0].data_ptr() % 64
    if place == "out":
        assert slots.n_wrong() == len(slots.pairs) * shape.n_out  # poison is never right
    for _, out in slots.pairs:
        out.copy_(want)
    assert slots.n_wrong() == 0
    slots.pairs[-1][1][-1] += 1
    slots.pairs[0][1][0] = math.nan
    assert slots.n_wrong() == (
        1 if n_bytes == 65540 + 1 or (shape.n_out == 1 and len(slots.pairs) == 1) else 2
    )
    slots.dirty()
    assert torch.equal(slots.pairs[0][0], inputs(shape, "sum", torch.float32))
    slots.zero()
    assert not any(data.any() for data, _ in slots.pairs)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_in_place_the_own_block_lies_within_the_larger_buffer(collective: str) -> None:
    shape = shape_of(collective, 3 * 80, 4, 3, 2, 0)
    slots = Slots(_memory(240), Contents(shape, "sum", torch.float32, 1), "in")
    slots.dirty()
    data, out = slots.pairs[0]
    small, large = (data, out) if collective == "all_gather" else (out, data)
    assert small.data_ptr() == large.data_ptr() + 2 * 80
    assert torch.equal(data, inputs(shape, "sum", torch.float32))


# ---- the probe --------------------------------------------------------------------------------------


def test_the_probe_refuses_what_would_leave_a_segment() -> None:
    probe = _C.Probe(rank=0, n_ranks=2, n_bytes=4096)
    with pytest.raises(ValueError, match="rank 1 is not attached"):
        probe.plan([([(1, 0)], [(0, 0)], 1)])
    for offset, n_elems in ((4096, 1), (2, 1), (0, 1025), (8192, 0)):
        with pytest.raises(ValueError, match="leave a segment of 4096 bytes"):
            probe.plan([([(0, offset)], [(0, 0)], n_elems)])
    with pytest.raises(ValueError, match="at least one source"):
        probe.plan([([], [(0, 0)], 1)])
    with pytest.raises(ValueError, match="attached once"):
        probe.attach(0, probe.fd)
    larger = _C.Probe(1, 2, 8192)
    with pytest.raises(ValueError, match="one size for all"):
        probe.attach(1, larger.fd)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        _C.Probe(2, 2, 4096)


def test_a_rank_that_does_not_come_is_a_timeout_error() -> None:
    probe, other = _C.Probe(0, 2, 4096), _C.Probe(1, 2, 4096)
    probe.attach(1, other.fd)
    probe.set_timeout(0.05)
    with pytest.raises(CommTimeoutError, match="rank 1 did not arrive"):
        probe.exchange()


@pytest.mark.parametrize("n_src", [1, 2, 3, 4])
@pytest.mark.parametrize("n_dst", [1, 2, 3, 4])
@pytest.mark.parametrize("n_elems", [0, 1, 31, 32, 1000])
def test_moves_add_all_sources_into_all_destinations(n_src: int, n_dst: int, n_elems: int) -> None:
    probe = _C.Probe(0, 1, 8 * 4096)
    data = torch.frombuffer(probe, dtype=torch.float32).view(8, 1024)
    data.copy_(torch.randint(-50, 50, data.shape))
    before = data.clone()
    source, target = [(0, 4096 * i) for i in range(n_src)], [(0, 4096 * (4 + i)) for i in range(n_dst)]
    probe.run(probe.plan([(source, target, n_elems)]))
    after = before.clone()
    after[4 : 4 + n_dst, :n_elems] = before[:n_src, :n_elems].sum(0)
    assert torch.equal(data, after)
