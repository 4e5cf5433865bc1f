"""Tests of Python on emulated devices: `python tests/cuda_on_cpu/run_python.py BUILD [pytest's arguments]`.

BUILD holds the extension of PYCOMM_CUDA=emulated. Every CPU tensor that a rank gives to a collective is then
taken to lie on the device of its rank's number, and goes through the CUDA engine: the same tests, with the
same expected values, as on the CPU. BUILD/python becomes a tree like the repository's, in which the package
has that extension.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from python_tree import make_tree

MODULES = """
  collectives reductions async deterministic tensors tensors_refused refusals groups faults shrink
  hosts_calls hosts_deterministic hosts_faults
  cuda_calls tuning_cuda bench_cuda cuda_kernels
  ddp ddp_backwards ddp_codes ddp_compression ddp_emulated ddp_models ddp_options ddp_random ddp_sparse
  ddp_sync_batch_norm tp_regions
"""

# What CUDA means differently, by reason.
LEFT_OUT = {
    "hundreds of thousands of calls, each of which starts threads here": [
        "test_collectives.py::test_call_numbers_wrap_around",
    ],
    "looks at a tensor without a wait, behind a barrier, which is the hosts'": [
        "test_async.py::test_dropping_a_work",
    ],
    "the message names the algorithm, which on CUDA is chosen after all have come": [
        "test_async.py::test_the_timeout_of_the_call_itself",
        "test_faults.py::test_a_stopped_rank_is_named",
    ],
    "sets the CPU engine's tables and tiles": [
        "test_deterministic.py::test_tiles_sizes_and_lists",
        "test_groups.py::test_selection_tables_are_inherited",
    ],
    "every algorithm by name, and NCCL has not every dtype": [
        "test_reductions.py::test_every_algorithm_by_name",
        "test_reductions.py::test_rounded_sums_are_the_same_bits_on_every_rank",
    ],
    "communicators of one device whose calls come in another order on each rank": [
        "test_groups.py::test_many_communicators_are_independent",
        "test_hosts_calls.py::test_several_communicators_at_once",
        "test_hosts_calls.py::test_as_on_one_host[independent]",
    ],
    "counts what travels over TCP; on CUDA the data travel over NCCL": [
        "test_hosts_deterministic.py::test_the_bytes_are_those_that_verify_computes",
    ],
    "an algorithm over NCCL keeps the order wherever the ranks are": [
        "test_hosts_deterministic.py::test_an_algorithm_that_cannot_is_refused",
    ],
}


def main(build: Path, arguments: list[str]) -> int:
    tree = make_tree(build)
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "CUDA_ON_CPU_DEVICES": "64",
        "PYCOMM_EMULATED_DEVICE": "rank",
        "PYCOMM_DEVICE_ARENA": str(1 << 20),
        "PYCOMM_NCCL_LIB": str(build / "tests/cuda_on_cpu/nccl/libnccl.so.2"),
    }
    modules = [f"tests/python/test_{name}.py" for name in MODULES.split()]
    modules.append("tests/gpu/test_communicator.py")
    left_out = [f"--deselect=tests/python/{name}" for names in LEFT_OUT.values() for name in names]
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", *left_out, *(arguments or ["-n", "2"])]
    if not any(a.startswith("tests/") for a in arguments):
        command += modules
    return subprocess.run(command, cwd=tree, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
