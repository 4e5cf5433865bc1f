"""Dropout masks and random streams: the generator's published vectors, one mask for every degree."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.utils.checkpoint import checkpoint

import pycomm.tensor_parallel as tp
from pycomm.tensor_parallel.philox import _merged, keep_mask, words
from pycomm.tensor_parallel.shards import even
from ranks import run_ranks

pytestmark = pytest.mark.timeout(200)
CPU = torch.device("cpu")


def test_words_are_philox4x32_10() -> None:
    """Random123's kat_vectors, philox4x32 10: those with upper counter words of zero."""
    assert words(torch.arange(4), 0).tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    # The third vector's generator, in Python's integers, for counters of 64 bits.
    for number, seed in ((0, 5), (2**34 + 7, 2**63 - 1), (2**62 - 1, 0x299F31D0A4093822)):
        counter = [(number >> 2) & 0xFFFFFFFF, number >> 34, 0, 0]
        key = [seed & 0xFFFFFFFF, seed >> 32]
        for _ in range(10):
            a, b = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
            high_a, high_b = a >> 32 ^ counter[3] ^ key[1], b >> 32 ^ counter[1] ^ key[0]
            counter = [high_b, b & 0xFFFFFFFF, high_a, a & 0xFFFFFFFF]
            key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
        assert words(torch.tensor(number), seed).item() == counter[number & 3]


@settings(max_examples=60)
@given(st.data())
def test_the_kernel_and_torchs_operations_keep_the_same(data: Any) -> None:
    whole = data.draw(st.lists(st.integers(1, 9), min_size=0, max_size=4))
    start = [data.draw(st.integers(0, n - 1)) for n in whole]
    sizes = [data.draw(st.integers(0, n - a)) for n, a in zip(whole, start, strict=True)]
    seed, p = data.draw(st.integers(0, 2**63 - 1)), data.draw(st.sampled_from([0.0, 0.1, 0.5, 0.999, 1.0]))
    numbers = torch.arange(math.prod(whole)).view(whole)
    for d, (a, n) in enumerate(zip(start, sizes, strict=True)):
        numbers = numbers.narrow(d, a, n)
    want = words(numbers, seed) >= round(p * 2**32)
    assert torch.equal(keep_mask(sizes, whole, start, seed, p, CPU), want)


def test_neighbouring_uncut_dimensions_are_one_run() -> None:
    assert _merged([2, 3, 4], [12, 4, 1]) == ([24], [1])
    assert _merged([2, 2, 4], [12, 4, 1]) == ([2, 8], [12, 1])
    assert _merged([], []) == ([], [])


def test_a_mask_is_as_random_as_it_should_be() -> None:
    """Means within five standard deviations, also of pairs of neighbours, rows and seeds."""
    n, p = 200_000, 0.3
    masks = [keep_mask([n], [n], [0], seed, p, CPU).double() for seed in (1, 2, 2**40)]
    for mask in masks:
        assert abs(mask.mean().item() - 0.7) < 5 * math.sqrt(0.21 / n)
        pairs = (mask[1:] * mask[:-1]).mean().item()
        assert abs(pairs - 0.49) < 5 * math.sqrt(0.49 * 0.51 / n) * 1.5
    for a, b in pairwise(masks):
        assert abs((a * b).mean().item() - 0.49) < 5 * math.sqrt(0.49 * 0.51 / n)


CUTS = (((5, 3, 2), 0), ((3, 7), 1), ((2, 2, 5), -1))


class Inside(torch.nn.Module):
    """An unmodified module with a dropout of its own, as an attention has."""

    p = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, self.p, self.training)


def masks(rank: int, size: int) -> list[torch.Tensor]:
    """For each of CUTS two masks of this rank's part; then what all ranks must have alike."""
    tp.model_parallel_manual_seed(11)
    found = []
    for shape, dim in CUTS:
        part = even(shape[dim], size)
        x = part.take(torch.ones(shape, dtype=torch.float64), dim, rank).clone().requires_grad_()
        layer = tp.ParallelDropout(0.4, sharded={dim: None})
        first, second = layer(x), layer(x)
        first.sum().backward()
        assert x.grad is not None and torch.equal(x.grad, first.detach())
        found += [first.detach(), second.detach()]
        layer.eval()
        assert layer(x) is x
    with tp.get_rng_tracker().fork():
        own = torch.rand(3)
    with tp.get_rng_tracker().fork():
        assert not torch.equal(torch.rand(3), own)
    inside = tp.parallelize_module(Inside(), None, tp.ForkRandom(lambda module: module.p))
    dropped = inside(torch.ones(40))
    assert not torch.equal(inside(torch.ones(40)), dropped)
    for mine in (own, dropped):  # differ between ranks
        everyones = torch.empty(size, *mine.shape)
        tp.communicator_of().all_gather(everyones, mine)
        assert len({tuple(row) for row in everyones.tolist()}) == size
    return [*found, tp.dropout(torch.ones(4, 5), 0.4), torch.rand(2)]


def test_masks_are_those_of_one_process() -> None:
    [alone] = run_ranks(1, masks)
    for n in (2, 3, 4):
        found = run_ranks(n, masks)
        for i, (_, dim) in enumerate(CUTS):
            assert not torch.equal(alone[2 * i], alone[2 * i + 1])  # two layers
            for k in (2 * i, 2 * i + 1):
                assert torch.equal(torch.cat([f[k] for f in found], dim), alone[k])
        for f in found:
            assert torch.equal(f[-2], alone[-2]) and torch.equal(f[-1], alone[-1])


def recomputed(rank: int, size: int) -> None:
    def block(t: torch.Tensor) -> torch.Tensor:
        t = tp.dropout(t, 0.5, sharded={0: None}).square()
        with tp.get_rng_tracker().fork():
            t = torch.nn.functional.dropout(t, 0.5)
        return tp.dropout(t, 0.5, sharded={0: None}).square()

    results = []
    for kind in (None, False, True):
        tp.model_parallel_manual_seed(3)
        x = torch.full((64,), 1.5, requires_grad=True)
        out = block(x) if kind is None else checkpoint(block, x, use_reentrant=kind)
        out.sum().backward()
        results.append((out.detach(), x.grad, torch.rand(1)))
    for got in results[1:]:
        for a, b in zip(got, results[0], strict=True):
            assert a is not None and b is not None and torch.equal(a, b)

    def seeded(t: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return tp.dropout(t, 0.5, sharded={0: (1, 4)}).square()

    values = torch.rand(2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(seeded, (values,)) and torch.autograd.gradgradcheck(seeded, (values,))
    states = tp.get_rng_tracker().get_states()
    tp.get_rng_tracker().reset()
    with pytest.raises(ValueError, match="no stream 'model-parallel-rng'; there are none: call"):
        tp.get_rng_tracker().fork().__enter__()
    tp.get_rng_tracker().set_states(states)
    with pytest.raises(ValueError, match="there is a stream 'model-parallel-rng' already"):
        tp.get_rng_tracker().add("model-parallel-rng", 1)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), tp.get_rng_tracker().fork():
        raise ZeroDivisionError
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(after, torch.get_rng_state())  # one draw, also after an exception
    for bad in (-0.1, 1.5):
        with pytest.raises(ValueError, match="p must be in"):
            tp.dropout(x, bad)
    with pytest.raises(ValueError, match="no dimension 3"):
        tp.dropout(x, 0.5, sharded={3: (0, 1)})
    with pytest.raises(ValueError, match="cannot begin at 1 of 64"):
        tp.dropout(x, 0.5, sharded={0: (1, 64)})


def test_recomputation_repeats_masks_and_streams() -> None:
    run_ranks(2, recomputed)
