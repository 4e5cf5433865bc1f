"""Runs torch's own DistributedDataParallel tests, which ship in the torch wheel, with either wrapper.

    python tests/python/torch_suite.py ours|torchs [-k WORD] [--size 2] [--timeout 60]

Every test runs in processes of its own, forked from this one, with gloo as the torch backend. Most of them
are written for GPUs; here the decorators that would skip them are opened, and what asks for a device gets the
CPU, for both wrappers alike. So what passes with torch's wrapper is what passes on a CPU with gloo, and is
the measure.

Prints one line for a test: its name, "passed", "skipped" or "failed", and the last line of the error.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import inspect
import io
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = re.compile(r"DistributedDataParallel|\bddp\b|_ddp", re.IGNORECASE)
DEVICES = ("cuda", "xpu", "hpu")


def is_device(value: Any) -> bool:
    import torch

    if isinstance(value, torch.device):
        return value.type in DEVICES
    return isinstance(value, str) and value.split(":")[0] in DEVICES


def prepare(size: int) -> None:
    """Opens torch's test module to a machine without GPUs."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.testing._internal import common_distributed as common

    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(size), TEMP_DIR=tempfile.mkdtemp(prefix="torch-suite-"))
    common.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
    common.skip_if_no_gpu = lambda test: test
    cuda: Any = torch.cuda
    cuda.set_device = cuda.synchronize = cuda.manual_seed = cuda.manual_seed_all = lambda *_, **__: None
    cuda.device_count = lambda: size
    cuda.current_device = lambda: 0
    tensor, module = torch.Tensor, torch.nn.Module
    tensor.cuda = module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    plain_to = module.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and (isinstance(args[0], int) or is_device(args[0])):
            args = args[1:]
        if "device" in kwargs and not isinstance(kwargs["device"], str):
            kwargs.pop("device")
        return plain_to(self, *args, **kwargs) if args or kwargs else self

    module.to = to  # type: ignore[method-assign, assignment]

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            device = kwargs.get("device")
            if is_device(device) or (isinstance(device, int) and not isinstance(device, bool)):
                kwargs["device"] = "cpu"
            is_to = getattr(func, "__name__", "") == "to" and len(args) > 1 and not isinstance(args[1], bool)
            if is_to and (is_device(args[1]) or isinstance(args[1], int)):
                args = (args[0], "cpu", *args[2:])
            return func(*args, **kwargs)

    OnCpu().__enter__()


def choose(which: str) -> None:
    """Puts the wrapper in torch's place; device_ids mean nothing here."""
    import torch

    theirs = torch.nn.parallel.DistributedDataParallel
    base: Any = theirs
    if which == "ours":
        import pycomm

        base = pycomm.DistributedDataParallel

    class OnCpu(base):  # type: ignore[misc]
        def __init__(self, module: Any, device_ids: Any = None, output_device: Any = None, *a: Any, **k: Any):
            super().__init__(module, None, None, *a, **k)

    OnCpu.__name__ = OnCpu.__qualname__ = "DistributedDataParallel"
    OnCpu.__module__ = "torch.nn.parallel.distributed"  # where pickle finds it
    torch.nn.parallel.DistributedDataParallel = OnCpu  # type: ignore[misc]
    torch.nn.parallel.distributed.DistributedDataParallel = OnCpu  # type: ignore[misc]


def load() -> Any:
    return importlib.import_module("torch.testing._internal.distributed.distributed_test")


def find(suite: Any, word: str) -> list[str]:
    """Tests of DDP: those whose name or source says so."""
    base = suite.DistributedTest._DistTestBase
    names = []
    for name in sorted(n for n in dir(base) if n.startswith("test_") and word in n):
        with contextlib.suppress(OSError, TypeError):
            if WORDS.search(name) or WORDS.search(inspect.getsource(inspect.unwrap(getattr(base, name)))):
                names.append(name)
    return names


def verdict_of(test: Callable[[], Any]) -> str:
    """ "passed", "skipped WHY" or "failed WHY", as this rank sees it."""
    try:
        test()
    except unittest.SkipTest as why:
        return f"skipped {why}"
    except SystemExit as code:
        return f"skipped with code {code.code}"
    except BaseException as error:
        traceback.print_exc()
        text = (str(error).strip().splitlines() or [""])[0]
        return f"failed {type(error).__name__}: {text}"
    return "passed"


def run_rank(
    suite: Any, name: str, rank: int, size: int, folder: Path, backend: str = "gloo", meet: bool = False
) -> str:
    """One rank's verdict."""
    import torch.distributed as dist

    class Test(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def runTest(self) -> None: ...

    test = Test("runTest")
    test.rank, test.file_name = rank, str(folder / "rendezvous")
    os.environ["TEMP_DIR"] = str(folder)
    (folder / "barrier").mkdir(exist_ok=True)
    (folder / "test_dir").mkdir(exist_ok=True)
    (folder / "init_dir").mkdir(exist_ok=True)
    suite.INIT_METHOD = f"file://{folder}/again"
    store = dist.FileStore(test.file_name, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    verdict = verdict_of(getattr(test, name))
    if meet and verdict == "passed":
        # As torch's own runner: a rank that leaves early is news to those that still wait for something.
        with contextlib.suppress(RuntimeError):
            suite.Barrier.sync(size)
    return verdict


def run_test(
    suite: Any,
    name: str,
    size: int,
    timeout: float,
    log: Path,
    *,
    backend: str = "gloo",
    meet: bool = False,
) -> str:
    """The worst of all ranks' verdicts."""

    def rank_of(rank: int, folder: Path) -> str:
        return run_rank(suite, name, rank, size, folder, backend, meet)

    return in_ranks(rank_of, size, timeout, log)


def in_ranks(run: Callable[[int, Path], str], size: int, timeout: float, log: Path) -> str:
    """The worst verdict of ``run(rank, folder)``, called in ``size`` processes forked from this one."""
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as made:
        folder = Path(made)
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                with open(log, "a") as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                faulthandler.dump_traceback_later(0.9 * timeout)  # to the log, of one that does not end
                verdict = run(rank, folder)
                sys.stdout.flush()
                (folder / f"verdict{rank}").write_text(verdict)
                os._exit(0)
            children.append(child)
        deadline = time.monotonic() + timeout
        waiting = set(children)
        while waiting and time.monotonic() < deadline:
            for child in list(waiting):
                if os.waitpid(child, os.WNOHANG)[0]:
                    waiting.discard(child)
            time.sleep(0.01)
        for child in waiting:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        verdicts = []
        for rank in range(size):
            file = folder / f"verdict{rank}"
            verdicts.append(file.read_text() if file.exists() else f"failed rank {rank} did not end")
    verdicts.sort(key=lambda v: ("failed", "skipped", "passed").index(v.split()[0]))
    return verdicts[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", choices=("ours", "torchs"))
    parser.add_argument("-k", default="", help="only tests whose name has this in it")
    parser.add_argument("--without", nargs="*", default=[], help="names of tests to leave out")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--log", default=os.devnull, help="where the ranks' output goes")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    prepare(options.size)
    choose(options.which)
    with contextlib.redirect_stderr(io.StringIO()):
        suite = load()
    for name in (n for n in find(suite, options.k) if n not in options.without):
        verdict = run_test(suite, name, options.size, options.timeout, Path(options.log))
        if verdict.endswith("did not end"):  # on a busy machine, gloo's rendezvous may be what took too long
            verdict = run_test(suite, name, options.size, options.timeout, Path(options.log))
        print(name, verdict, flush=True)


if __name__ == "__main__":
    main()
