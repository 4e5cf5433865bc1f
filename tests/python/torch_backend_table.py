"""Runs torch's tests on gloo and on pycomm and writes the table of both: ``make test-torch``.

    python tests/python/torch_backend_table.py [--sizes 3 4] [--only rpc] [--write PAGE]

``--only rpc`` runs the tests of RPC alone and puts their table into the page.

Fails (status 1) when a test that gloo passes does not pass on pycomm, or one fails that is not explained in
``EXPLAINED``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: What errors say of tests that need a GPU, or NCCL.
GPU_ONLY = (
    "only work with GPU modules",
    "NCCL built in",
    "doesn't support events",
    "Cannot access accelerator",
    "torch.cuda.Stream",
)
#: Tests that fail on both backends for another reason.
EXPLAINED = {
    "test_DistributedDataParallel": "the stand-in for torch.cuda sets no seeds, so its two models differ",
    "test_ddp_compile_static_graph": "Dynamo stumbles over the stand-ins for torch.cuda",
    "test_ddp_device": "compares the number of a GPU",
    "test_ddp_has_finalized": "torch: failing, pytorch/issues/102751; needs NCCL's asynchronous errors",
    "test_ddp_hook_pickling_powerSGD": "loads a pickle with weights_only, which torch refuses",
    "test_ddp_logging_data_gpu": "compares the number of a GPU",
    "test_ddp_profiling_execution_trace": "asserts that the backend is NCCL",
    "test_nccl_high_priority_stream": "makes a group of NCCL",
}
#: Large models for hundreds of steps: many minutes on a CPU, on any backend.
LONG = ("test_ddp_uneven_inputs", "test_ddp_grad_div_uneven_inputs")
RPC = "RPC, distributed autograd, and DDP under them"
HARNESS = """\
## What ships without test cases

These are the only test cases in the wheel. The other files of its suites, in `torch/testing/_internal`, are
what tests are made of: models, base classes and comparisons. Tests of ours, named
`tests/python/test_torch_backend_*`, use them, with values checked against one process:

| file | for | tests of ours |
|---|---|---|
| `distributed/_tensor/common_dtensor.py` | DTensor, tensor parallel | `dtensor` |
| `common_fsdp.py` | FSDP1, FSDP2 | `fsdp` |
| `common_distributed.py`, `distributed/fake_pg.py` | c10d | `groups`, `coalescing`, `join` |
| `distributed/checkpoint_utils.py`, `common_state_dict.py` | checkpoints | `users`; not used |
| `distributed/_shard/` | ShardedTensor, before DTensor | none |

Of the suites of pipelining and of context parallel nothing ships; tests of ours are `users` and
`context_parallel`. On the CPU torch's `context_parallel` runs, with any backend, for `SDPBackend.MATH`
without a causal mask only. Torch refuses the rest itself: `NotImplementedError: Operator
aten._scaled_dot_product_flash_attention_for_cpu.default does not have a sharding strategy registered`, and
for MATH with `is_causal=True` `RuntimeError: aten.add.Tensor got mixed torch.Tensor and DTensor`. The ring of
keys and values, which stands for attention on a GPU, is tested with the CPU's kernel.

"""
HEAD = """\
# torch's own tests of torch.distributed, on gloo and on pycomm

Written by `make test-torch`, which runs the test cases that ship in torch's wheel (torch {version}, on the
CPU) with both backends, each test in processes of its own: `distributed_test` at world sizes {sizes}
(`tests/python/torch_backend_suite.py` says how, and which of the tests that torch skips for a backend's name
are run all the same, on both), then RPC, distributed autograd and DDP under them
(`tests/python/torch_backend_rpc_suite.py`).

"torch skips it" is torch's reason with gloo. Tests for GPUs run on the CPU, with stand-ins for what asks for
a device; those that cannot work so fail on both backends. Left out, since they take many minutes on a CPU:
{long}.

"""


def verdicts_of(script: str, backend: str, *options: str) -> dict[str, tuple[str, str]]:
    """What a script of tests prints: each test's verdict, and what stands behind " | "."""
    command = [sys.executable, str(HERE / script), backend, *options]
    env = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1", "PYCOMM_TUNE": "off"}
    verdicts = {}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(backend, line, end="", flush=True)
            name, verdict = line.strip().split(" ", 1)
            verdict, _, note = verdict.partition(" | ")
            verdicts[name] = verdict, note
    if process.returncode != 0 or not verdicts:
        raise SystemExit(f"the run on {backend} ended with status {process.returncode}")
    return verdicts


def run(backend: str, size: int, on_cpu: bool) -> dict[str, tuple[str, str]]:
    """Each test's verdict, and why torch skips it."""
    options = ["--size", str(size), "--without", *LONG, *(["--on-cpu"] if on_cpu else [])]
    found = verdicts_of("torch_backend_suite.py", backend, *options)
    return {name: (verdict, note.removeprefix("torch: ")) for name, (verdict, note) in found.items()}


def cell(text: str) -> str:
    """A verdict that fits a cell of the table."""
    word, _, why = text.partition(" ")
    why = why.replace("|", "/").replace("\n", " ")
    why = re.sub(r"\[(enforce fail at )?/\S+\] ?| at 0x[0-9a-f]+", "", why)  # where gloo was built; addresses
    return word if word != "failed" or not why else f"{word}: {why[:90]}"


def section(title: str, gloo: dict[str, tuple[str, str]], ours: dict[str, tuple[str, str]]) -> str:
    """The table of one run."""

    def count(verdicts: dict[str, tuple[str, str]]) -> str:
        words = [verdict.split()[0] for verdict, _ in verdicts.values()]
        return ", ".join(f"{words.count(word)} {word}" for word in ("passed", "failed", "skipped"))

    lines = [f"## {title}", "", f"gloo: {count(gloo)}. pycomm: {count(ours)}.", ""]
    lines += ["| test | torch skips it | gloo | pycomm |", "|---|---|---|---|"]
    for name, (verdict, why) in ours.items():
        why = "; ".join(dict.fromkeys(why.split("; "))).replace("|", "/")
        lines.append(f"| {name} | {why[:100]} | {cell(gloo[name][0])} | {cell(verdict)} |")
    return "\n".join([*lines, ""])


def rpc_section() -> tuple[str, list[str]]:
    """The table of RPC, and what is wrong in it.

    Tests that make no process group are run on gloo's side only, where there is nothing of gloo in them.
    """
    gloo = verdicts_of("torch_backend_rpc_suite.py", "gloo")
    names = [name for name, (_, note) in gloo.items() if note == "group"]
    ours = verdicts_of("torch_backend_rpc_suite.py", "pycomm", "--names", *names)
    rest = [verdict for name, (verdict, _) in gloo.items() if name not in ours]
    counts = ", ".join(
        f"{sum(v.startswith(word) for v in rest)} {word}" for word in ("passed", "failed", "skipped")
    )
    text = section(RPC, {n: (gloo[n][0], "") for n in ours}, {n: (v, "") for n, (v, _) in ours.items()})
    text += f"\nThe other {len(rest)} tests make no process group: {counts}.\n"
    return text, worse(gloo, ours)


def is_explained(name: str, verdict: str) -> bool:
    """Whether a test that fails or is skipped does so for a known reason."""
    return verdict.startswith("skipped") or name in EXPLAINED or any(text in verdict for text in GPU_ONLY)


def worse(gloo: dict[str, tuple[str, str]], ours: dict[str, tuple[str, str]]) -> list[str]:
    """What must not be: gloo passes and pycomm does not, or pycomm fails without an explanation."""
    return [
        f"{name}: gloo {gloo[name][0]}, pycomm {verdict}"
        for name, (verdict, _) in ours.items()
        if verdict != "passed" and (gloo[name][0] == "passed" or not is_explained(name, verdict))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="*", default=[3, 4])
    parser.add_argument("--write", type=Path, help="the page with the table")
    parser.add_argument(
        "--only", choices=("rpc",), help="run these tests alone, and keep the rest of the page"
    )
    options = parser.parse_args()
    import torch

    wrong: list[str] = []
    if options.only == "rpc":
        before, _, after = options.write.read_text().partition(f"## {RPC}\n")
        after = after[after.index("\n## ") + 1 :]
        text, wrong = rpc_section()
        page = f"{before}{text}\n{after}"
    else:
        page, wrong = whole_page(torch.__version__, options.sizes)
    if options.write:
        options.write.write_text(page)
    for text in wrong:
        print("WRONG:", text)
    return 1 if wrong else 0


def whole_page(version: str, sizes: list[int]) -> tuple[str, list[str]]:
    """All of it, and what is wrong in it."""
    page = HEAD.format(version=version, sizes=" and ".join(map(str, sizes)), long=", ".join(LONG))
    wrong = []
    for on_cpu in (False, True):
        for size in sizes:
            gloo, ours = run("gloo", size, on_cpu), run("pycomm", size, on_cpu)
            title = "Tests for GPUs, on the CPU" if on_cpu else "Tests for the CPU"
            page += section(f"{title}, {size} ranks", gloo, ours) + "\n"
            wrong += [f"{size} ranks, {text}" for text in worse(gloo, ours)]
    text, more = rpc_section()
    page += f"{text}\n{HARNESS}## Why tests fail on both\n\n| test | why |\n|---|---|\n"
    page += "".join(f"| {name} | {why} |\n" for name, why in EXPLAINED.items())
    return page, wrong + more


if __name__ == "__main__":
    sys.exit(main())
