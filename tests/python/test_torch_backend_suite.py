"""torch's own tests of torch.distributed on pycomm: some of every kind of call; all with make test-torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
NAMES = [
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_complex",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_full_group_max",
    "test_all_reduce_full_group_min",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_all_to_all_complex",
    "test_all_to_all_single_unequal_split",
    "test_barrier_group",
    "test_barrier_timeout_full_group",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_group",
    "test_DistributedDataParallelCPU",
    "test_gather_checks",
    "test_isend_autograd_profiler",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_wait_all_ranks",
    "test_reduce_group_product",
    "test_scatter_object_list",
    "test_send_recv_any_source_torch_profiler",
    "test_sparse_all_reduce_sum",
]


RPC_NAMES = ["DdpComparisonTest.test_ddp_comparison", "DdpUnderDistAutogradTest.test_backward_ddp_inside"]


@pytest.mark.timeout(180)
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the names are of torch 2.13's tests")
@pytest.mark.parametrize(
    ("script", "names"), [("torch_backend_suite.py", NAMES), ("torch_backend_rpc_suite.py", RPC_NAMES)]
)
def test_torchs_tests_pass_on_pycomm(script, names, tmp_path):
    pytest.importorskip("expecttest", reason="torch's test module needs it: pip install expecttest")
    log = tmp_path / "log"
    command = [sys.executable, str(HERE / script), "pycomm", "--log", str(log)]
    done = subprocess.run(
        [*command, "--names", *names],
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1", "PYCOMM_TUNE": "off"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    verdicts = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    failed = {name: verdict for name, verdict in verdicts.items() if not verdict.startswith("passed")}
    assert not failed, f"{failed}\n{log.read_text(errors='replace')[-4000:]}"
    assert set(verdicts) == set(names)
