"""tests/gpu with the extension of a build: `python tests/gpu/run_python.py BUILD [pytest's arguments]`.

BUILD was configured with PYCOMM_CUDA=on and this Python, whose torch must have CUDA. `make test-gpu` runs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from python_tree import make_tree


def main(build: Path, arguments: list[str]) -> int:
    import torch

    if not torch.cuda.is_available():
        print(
            f"tests/gpu: torch {torch.__version__} of {sys.executable} has no GPU: install a build of torch "
            "with CUDA there, or name a Python that has one: make test-gpu GPU_PYTHON=python3",
            file=sys.stderr,
        )
        return 1
    tree = make_tree(build)
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-ra", "tests/gpu", *arguments]
    return subprocess.run(command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
