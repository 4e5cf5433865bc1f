"""Runs the other tests that ship in the torch wheel: RPC, distributed autograd, and DDP under them.

    python tests/python/torch_backend_rpc_suite.py pycomm|gloo [-k WORD] [--names CLASS.TEST …]

Besides distributed_test the wheel has test cases only in torch.testing._internal.distributed's ``rpc``,
``rpc.jit``, ``rpc.examples``, ``nn.api`` and ``ddp_under_dist_autograd_test``. RPC itself goes through
torch's TensorPipe agent, whatever the backend; of interest here are the tests that make a process group next
to it (DDP with remote embeddings, barriers, ``new_group``). They say ``backend="gloo"``, and get the one
asked for.

Every test runs in processes of its own, forked from this one, as many as it asks for (4 or 6). Prints a line
for each: its name, "passed", "skipped" or "failed" and why, and " | group" when it made a process group.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch_suite

MARK = "made-a-group"


def load(faulty: bool) -> dict[str, Any]:
    """torch's classes of tests for the CPU, for the agent TensorPipe or for the one that injects faults.

    Importing the latter makes the enum of agents anew, so the former's tests come first.
    """
    package = "torch.testing._internal.distributed"
    with contextlib.redirect_stderr(io.StringIO()):
        suites = importlib.import_module(f"{package}.rpc_utils")
        if faulty:
            name, kinds = "Faulty", suites.FAULTY_AGENT_TESTS
        else:
            name, kinds = "TensorPipe", [*suites.GENERIC_TESTS, *suites.TENSORPIPE_TESTS]
        fixture = importlib.import_module(f"{package}.rpc.{name.lower()}_rpc_agent_test_fixture")
    made = suites.generate_tests("", getattr(fixture, f"{name}RpcAgentTestFixture"), kinds, __name__)
    globals().update(made)  # where pickle finds them
    return dict(made)


def use(backend: str) -> None:
    """``init_process_group("gloo")`` makes a group of this backend, and leaves a mark that it did."""
    import torch.distributed as dist

    theirs = dist.init_process_group

    @functools.wraps(theirs)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        assert not args and kwargs["backend"] == "gloo", "torch's tests have changed"
        Path(os.environ["TEMP_DIR"], MARK).touch()
        theirs(**kwargs | {"backend": backend})

    dist.init_process_group = init_process_group


def tests(classes: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """(name, class, name of the method) of every test."""
    for title, kind in classes.items():
        for name in sorted(n for n in dir(kind) if n.startswith("test_")):
            yield f"{title}.{name}", kind, name


def run(kind: Any, name: str, timeout: float, log: Path) -> str:
    """The worst of all ranks' verdicts, and whether the test made a group."""

    def rank_of(rank: int, folder: Path) -> str:
        os.environ["TEMP_DIR"] = str(folder)
        test = kind(name)
        test.rank, test.file_name = rank, str(folder / "rendezvous")
        verdict = torch_suite.verdict_of(getattr(test, name))
        return verdict + (" | group" if (folder / MARK).exists() else "")

    return torch_suite.in_ranks(rank_of, kind(name).world_size, timeout, log)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backend", choices=("pycomm", "gloo"))
    parser.add_argument("-k", default="", help="only tests whose name has this in it")
    parser.add_argument("--names", nargs="*", help="only these tests")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--log", default=os.devnull, help="where the ranks' output goes")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    use(options.backend)
    if options.backend == "pycomm":
        import pycomm.torch_backend.group  # noqa: F401 (here once, and not in every rank)
    for faulty in (False, True):
        for title, kind, name in tests(load(faulty)):
            if options.k in title and (options.names is None or title in options.names):
                if options.log != os.devnull:
                    with Path(options.log).open("a") as file:
                        print(f"\n===== {title}", file=file)
                print(title, run(kind, name, options.timeout, Path(options.log)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
