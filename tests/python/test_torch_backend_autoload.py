"""An installed pycomm is found by torch itself: a script needs the backend's name, no ``import pycomm``."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(
        not hasattr(torch, "_import_device_backends"), reason="torch < 2.5 looks for no installed backends"
    ),
]
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("pycomm", store=dist.HashStore(), rank=0, world_size=1)
t = torch.ones(2)
dist.all_reduce(t)
print(dist.get_backend(), t.tolist())
"""


def test_torch_finds_the_backend_of_an_installed_pycomm(tmp_path):
    project = (ROOT / "pyproject.toml").read_text()
    [entry] = re.findall(r'^\[project\.entry-points\."torch\.backends"\]\n(.*)$', project, re.MULTILINE)
    # What pip would install, beside the source tree on the path.
    installed = tmp_path / "pycomm_collectives-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: pycomm-collectives\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[torch.backends]\n{entry.replace(chr(34), '')}\n")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout == "pycomm [1.0, 1.0]\n", done.stderr
