"""Runs torch's own tests of torch.distributed, which ship in the torch wheel, on pycomm or on gloo.

    python tests/python/torch_backend_suite.py pycomm|gloo [-k WORD] [--size 3] [--on-cpu]

Every test runs in processes of its own, forked from this one (torch_suite.py does that). torch's module reads
the backend's name once, from the environment, and its decorators skip by that name. Here it is imported with
the name "gloo", so that both backends get gloo's tests, and is then given the name asked for.

Which of the tests that torch skips run all the same, on both backends:

* ``OPENED``: skipped for the backend's name or a size of at least 8 ranks, though they need neither;
* with ``--on-cpu``: those that torch writes for GPUs, and only those, on the CPU: torch_suite.prepare puts
  stand-ins in the place of what asks for a device.

Nothing of a test is changed, except that torch's lists of the backends whose profiler events are checked get
the name "pycomm" as well (so more is checked, not less).

Prints a line for each test: its name, "passed", "skipped" or "failed" and why, and after " | torch: " the
reasons for which torch skips it with gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch_suite

SMALL = "torch runs it on 8 ranks or more"
GPU = "torch runs it on GPUs"
OPENED = {
    SMALL: "groups of ranks 1 and 2 need three",
    "Only MPI supports CPU all_to_all_single": "gloo has had it for long",
    "Only MPI supports all_to_all": "pycomm has it",
    "Test is failing, see https://github.com/pytorch/pytorch/pull/113620": "it passes on a CPU",
}
_PROFILED = [f"{kind}PROFILING_SUPPORTED_BACKENDS" for kind in ("", "CUDA_", "SEND_RECV_")]


def _reason(reason: str) -> Callable[[Any], Any]:
    """A decorator that notes why torch would skip the test."""

    def decorator(test: Any) -> Any:
        test.__reasons__ = [*getattr(test, "__reasons__", []), reason]
        return test

    return decorator


def _reason_if(condition: bool, reason: str) -> Callable[[Any], Any]:
    if re.search("CUDA|NCCL|Nccl", reason):
        reason = GPU
    return _reason(reason) if condition else lambda test: test


@contextlib.contextmanager
def noted_reasons(size: int) -> Iterator[None]:
    """While torch's module is imported: its decorators note their reasons and skip nothing."""
    from torch.testing._internal import common_distributed, common_utils

    needs_gpu = _reason(GPU)
    replaced = {
        (common_utils, "skip_but_pass_in_sandcastle"): _reason,
        (common_utils, "skip_but_pass_in_sandcastle_if"): _reason_if,
        (common_distributed, "skip_if_no_gpu"): needs_gpu,
        (common_distributed, "skip_if_lt_x_gpu"): lambda *_, **__: needs_gpu,
        (common_distributed, "nccl_skip_if_lt_x_gpu"): lambda *_, **__: needs_gpu,
        (common_distributed, "skip_if_small_worldsize"): _reason_if(size < 8, SMALL),
        (common_distributed, "skip_if_odd_worldsize"): _reason_if(size % 2 == 1, "needs even many ranks"),
        (unittest, "skip"): _reason,
        (unittest, "skipIf"): _reason_if,
    }
    before = {key: getattr(*key) for key in replaced}
    for (module, name), value in replaced.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


def load(backend: str, size: int, on_cpu: bool) -> Any:
    """torch's module of tests, for this backend."""
    import torch

    torch.set_num_threads(1)
    if on_cpu:
        torch_suite.prepare(size)
        torch_suite.choose("torchs")
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(size), TEMP_DIR=tempfile.gettempdir())
    os.environ["INIT_METHOD"] = "file://"  # torch_suite.run_rank gives each test a file of its own
    with contextlib.redirect_stderr(io.StringIO()), noted_reasons(size):
        suite = torch_suite.load()
    os.environ["BACKEND"] = suite.BACKEND = backend
    if backend == "pycomm":
        import pycomm.torch_backend.group  # noqa: F401 (here once, and not in every rank)

        for name in _PROFILED:
            getattr(suite, name).append(backend)
    return suite


def reasons(suite: Any) -> dict[str, list[str]]:
    """Every test of the module, and why torch skips it with gloo."""
    base = suite.DistributedTest._DistTestBase
    names = sorted(n for n in dir(base) if n.startswith("test_"))
    return {name: getattr(getattr(base, name), "__reasons__", []) for name in names}


def runs(why: list[str], on_cpu: bool) -> bool:
    """Whether a test that torch skips for these reasons runs here."""
    if on_cpu:
        return GPU in why and not any("world size" in reason or "even many" in reason for reason in why)
    return all(reason in OPENED for reason in why)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backend", choices=("pycomm", "gloo"))
    parser.add_argument("-k", default="", help="only tests whose name has this in it")
    parser.add_argument("--names", nargs="*", help="only these tests")
    parser.add_argument("--without", nargs="*", default=[], help="names of tests to leave out")
    parser.add_argument("--size", type=int, default=3)
    parser.add_argument("--on-cpu", action="store_true", help="torch's GPU tests, on the CPU")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--log", default=os.devnull, help="where the ranks' output goes")
    options = parser.parse_args()
    suite = load(options.backend, options.size, options.on_cpu)
    for name, why in reasons(suite).items():
        if options.k not in name or name in options.without or (options.names and name not in options.names):
            continue
        if options.on_cpu != (GPU in why):
            continue
        # The one question at run time whether the backend is gloo: which devices a model of theirs goes to.
        suite.BACKEND = "gloo" if name.startswith("test_accumulate_gradients") else options.backend
        verdict = f"skipped {why[0]}" if why else ""
        if runs(why, options.on_cpu):
            log = Path(options.log)
            if options.log != os.devnull:
                with log.open("a") as file:
                    print(f"\n===== {name}", file=file)
            verdict = torch_suite.run_test(
                suite, name, options.size, options.timeout, log, backend=options.backend, meet=True
            )
        print(name, verdict, *(["| torch:", "; ".join(why)] if why else []), flush=True)


if __name__ == "__main__":
    sys.exit(main())
