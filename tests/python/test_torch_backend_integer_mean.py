"""ReduceOp.AVG of integers through torch.distributed: the sum, divided, without its fraction (as NCCL's)."""

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from torch_backend_ranks import world

pytestmark = pytest.mark.timeout(60)
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def mean(values: list[torch.Tensor]) -> torch.Tensor:
    """In float64, which holds these sums exactly."""
    return (torch.stack(values).double().sum(0) / len(values)).trunc().to(values[0].dtype)


def averages(rank: int, size: int) -> None:
    avg = dist.ReduceOp.AVG
    with world(rank, size):
        for dtype in INTEGERS:
            low = 0 if dtype is torch.uint8 else -20
            every = [torch.arange(low, 21, dtype=dtype) * 2 % 37 + r for r in range(size)]
            every = [e[: len(e) // size * size] for e in every]
            expected, mine = mean(every), every[rank]
            part = expected.chunk(size)[rank]

            t = mine.clone()
            dist.all_reduce(t, avg)
            assert torch.equal(t, expected), (dtype, t, expected)
            t = torch.stack([mine, mine], dim=1)[:, 0]  # not contiguous
            assert dist.all_reduce(t, avg, async_op=True).wait() and torch.equal(t, expected)
            t = mine.clone()  # divided once, however often and in whatever way it is asked for
            work = dist.all_reduce(t, avg, async_op=True)
            [from_future] = work.get_future().wait()
            assert work.is_completed() and work.wait() and work.wait() and work.is_success()
            assert from_future is t and torch.equal(t, expected)
            t = mine.clone()
            work = dist.all_reduce(t, avg, async_op=True)
            while not work.is_completed():
                pass
            assert torch.equal(t, expected)

            t = mine.clone()
            dist.reduce(t, dst=1, op=avg)
            assert rank != 1 or torch.equal(t, expected)
            out = torch.empty_like(part)
            dist.reduce_scatter_tensor(out, mine, avg)
            assert torch.equal(out, part)
            dist.reduce_scatter(out.zero_(), list(mine.chunk(size)), avg)
            assert torch.equal(out, part)
            with torch.profiler.profile():
                dist.all_reduce(mine, avg)
            assert torch.equal(mine, expected)

        several = [torch.tensor([rank]), torch.tensor([rank, 7])]
        dist.all_reduce_coalesced(several, avg)
        assert [t.tolist() for t in several] == [[(size - 1) // 2], [(size - 1) // 2, 7]]
        fraction = torch.tensor([float(rank)])  # of floats it stays
        dist.all_reduce(fraction, avg)
        assert fraction.item() == (size - 1) / 2


@pytest.mark.parametrize("size", [2, 3])
def test_averages_of_integers(size):
    run_ranks(size, averages)
