"""How large buckets are when nobody says so: from what was measured, the same on all ranks."""

import math

import pytest
import torch
from torch import nn

import pycomm
from pycomm.ddp.bucket_size import LEAST, MOST, wanted_bytes
from ranks import run_ranks

MIB = 1 << 20


def exposed(latency_s, s_per_byte, n_bytes, bucket):
    """The model of pycomm/ddp/bucket_size.py."""
    return latency_s * n_bytes / bucket + s_per_byte * bucket


@pytest.mark.parametrize("n_bytes", [3 * MIB, 64 * MIB, 5 << 30])
@pytest.mark.parametrize("latency_s", [1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("s_per_byte", [1e-11, 1e-9, 1e-8])
def test_no_other_power_of_two_exposes_less(latency_s, s_per_byte, n_bytes):
    chosen = wanted_bytes(latency_s, s_per_byte, n_bytes, "async")
    candidates = [1 << e for e in range(int(math.log2(LEAST)), int(math.log2(MOST)) + 1)]
    assert chosen in candidates
    best = min(exposed(latency_s, s_per_byte, n_bytes, c) for c in candidates)
    # rounding in the logarithm is within sqrt(2) of the best, where the model is flat
    assert exposed(latency_s, s_per_byte, n_bytes, chosen) <= 1.07 * best


def test_after_backward_one_bucket_holds_everything():
    for n_bytes in (0, 1, MIB, 5 * MIB, 3 << 30):
        assert wanted_bytes(1e-6, 1e-9, n_bytes, "end") >= n_bytes
    assert wanted_bytes(0.0, 0.0, 5 * MIB, "async") == LEAST


def chosen(rank, size, overlap, cap, init_sync=True):
    net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])  # 6 MiB
    ddp = pycomm.DistributedDataParallel(
        net, communicator=pycomm.init(), overlap=overlap, bucket_cap_mb=cap, init_sync=init_sync
    )
    ddp(torch.ones(1, 512)).sum().backward()
    return ddp.bucket_bytes_cap, [bucket["bytes"] for bucket in ddp.stats()["buckets"]]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_choose_alike(size, tmp_path):
    measuring = {"PYCOMM_TUNE": "auto", "PYCOMM_CACHE_DIR": str(tmp_path)}
    for overlap in ("async", "end"):
        found = run_ranks(size, chosen, overlap, None, env=measuring)
        assert all(one == found[0] for one in found)
        cap, buckets = found[0]
        assert LEAST <= cap <= MOST
        assert math.log2(cap).is_integer()
        assert sum(buckets) == 6 * 4 * (512 * 512 + 512)
        if overlap == "end":
            assert len(buckets) == 1


def test_what_is_given_holds_and_nothing_is_measured_where_it_must_not():
    (cap, buckets), _ = run_ranks(2, chosen, "async", 2)
    assert cap == 2 * MIB
    assert max(buckets) <= 2 * MIB
    assert run_ranks(2, chosen, "end", None, env={"PYCOMM_TUNE": "off"})[0][0] == 25 * MIB
    assert run_ranks(2, chosen, "end", None, False)[0][0] == 25 * MIB
    assert run_ranks(1, chosen, "end", None)[0] == (25 * MIB, [])
