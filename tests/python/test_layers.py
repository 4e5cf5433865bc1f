"""tools/check_layers.py: this repository passes, and each rule is broken once on purpose."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "check_layers.py"

CLEAN = {
    "csrc/base/status.h": "#include <string>\n",
    "csrc/base/dtype.h": "",
    "csrc/schedule/step.h": '#include "base/status.h"\n',
    "csrc/kernels/reduce.h": '#include "base/dtype.h"\n',
    "csrc/transport/shm.h": '#include <sys/socket.h>\n#include "base/status.h"\n',
    "csrc/bucket/bucket.h": "",
    "csrc/engine/engine.h": '#include "schedule/step.h"\n#include "base/dtype.h"\n',
    "csrc/engine/cuda/a.cc": '#include <cuda_runtime_api.h>\n#include "engine/engine.h"\n',
    "csrc/bind/module.cc": '#include <pybind11/pybind11.h>\n#include "engine/engine.h"\n',
    "pycomm/__init__.py": "from pycomm.errors import CommError\n",
    "pycomm/errors.py": "class CommError(RuntimeError): ...\n",
    "pycomm/communicator.py": "from . import errors\n",
    "pycomm/cli/__init__.py": "from pycomm.cli.bench import bench\n",
    "pycomm/cli/bench.py": "import pycomm.communicator\n",
}


def check(root: Path) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, str(TOOL), str(root)], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_this_repository_depends_one_way() -> None:
    assert check(ROOT) == (0, ["layers: csrc/ and pycomm/ depend one way only"])


def test_a_clean_tree_passes(tmp_path: Path) -> None:
    write(tmp_path, CLEAN)
    assert check(tmp_path)[0] == 0


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("csrc/base/a.h", '#include "schedule/step.h"', "csrc/base/a.h:1: .*base/ may use nothing only"),
        ("csrc/schedule/a.cc", '\n#include "kernels/reduce.h"', "csrc/schedule/a.cc:2: .*may use base only"),
        ("csrc/bucket/a.cc", '#include "engine/engine.h"', "bucket/ may use base only"),
        ("csrc/engine/a.cc", '#include "bind/module.cc"', "engine/ may use base, bucket, kernels, schedule"),
        (
            "csrc/engine/a.cc",
            "#include <cuda_runtime_api.h>",
            "but only bind/ and folders named cuda may",
        ),
        ("csrc/engine/a.cc", "#include <Python.h>", "includes Python.h, which engine/ may not know"),
        ("csrc/kernels/a.cc", "#include <pybind11/pybind11.h>", "which kernels/ may not know"),
        ("csrc/bind/a.cc", "#  include <torch/extension.h>", "nothing in csrc/ may know torch"),
        ("csrc/base/a.cc", "#include <ATen/ATen.h>", "nothing in csrc/ may know torch"),
        ("csrc/schedule/a.cc", "#include <sys/socket.h>", "which schedule/ may not know"),
        ("csrc/schedule/a.cc", "#include <cuda_runtime.h>", "which schedule/ may not know"),
        ("csrc/transport/a.cc", '#include "base/dtype.h"', "which transport/ may not know"),
        ("csrc/base/a.cc", '#include "status.h"', 'write "folder/file.h"'),
        ("csrc/util/a.h", "", "csrc/util/a.h:1: not in one of the folders base,"),
        ("pycomm/errors.py", "import pycomm.communicator", "errors.py:1: .*below all"),
        ("pycomm/errors.py", "def f():\n    from pycomm import communicator", "errors.py:2: .*below all"),
        ("pycomm/ddp.py", "def f():\n    import pycomm.cli.bench", "ddp.py:2: .*only the command line"),
        ("pycomm/ddp.py", "from .cli import bench", "ddp.py:1: imports pycomm.cli.bench, but only"),
    ],
)
def test_a_broken_rule_is_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    write(tmp_path, CLEAN | {name: text})
    status, lines = check(tmp_path)
    assert status == 1
    assert any(re.search(said, line) for line in lines), lines


def test_a_cycle_is_named_and_a_late_import_is_none(tmp_path: Path) -> None:
    a, b = "from pycomm import b\n", "import pycomm.c\n"
    write(tmp_path, CLEAN | {"pycomm/a.py": a, "pycomm/b.py": b, "pycomm/c.py": "from .a import x\n"})
    status, lines = check(tmp_path)
    assert status == 1
    assert lines == ["pycomm/a.py:1: import cycle pycomm.a -> pycomm.b -> pycomm.c -> pycomm.a"]
    write(tmp_path, {"pycomm/c.py": "def f():\n    from .a import x\n"})
    assert check(tmp_path)[0] == 0
    late = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import x\n"
    write(tmp_path, {"pycomm/c.py": late})
    assert check(tmp_path)[0] == 0
