"""The repository as seen with another build's extension, for tests that run on it."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def make_tree(build: Path) -> Path:
    """BUILD/python: links to what the tests use, the package with the extension of `build` in it."""
    tree = build / "python"
    shutil.rmtree(tree, ignore_errors=True)
    package = tree / "pycomm"
    package.mkdir(parents=True)
    for path in (ROOT / "pycomm").iterdir():
        if path.suffix not in (".so", ".pyd") and path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    (extension,) = build.glob("_C.*.so")
    (package / extension.name).symlink_to(extension)
    for name in ("tests", "bench", "docs", "examples", "csrc", "tools", "README.md"):
        (tree / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "pyproject.toml", tree)  # pytest's root is where it lies
    return tree
