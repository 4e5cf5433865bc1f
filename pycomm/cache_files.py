"""The files in which measured tables are kept: where they are, read with a warning, written in one step.

A file is JSON, {"format": number, "table": …}. torch is not needed here.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def folder() -> Path:
    """``PYCOMM_CACHE_DIR``, or the user's cache folder."""
    root = os.environ.get("PYCOMM_CACHE_DIR")
    if root is None:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "pycomm")
    return Path(root)


def plain(text: str) -> str:
    """``text`` as a part of a file's name."""
    return "".join(c if c.isalnum() else "_" for c in text)


def load(path: Path, version: int) -> Any:
    """The table in the file; None when there is none for this version, or it cannot be read."""
    try:
        content = json.loads(path.read_text())
        return content["table"] if content["format"] == version else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        ignored(path, error)
        return None


def ignored(path: Path | str, error: Exception) -> None:
    """Warns: a damaged cache costs a second of measuring, not a job."""
    warnings.warn(f"pycomm: ignoring the selection cache {path}: {error}", RuntimeWarning, stacklevel=2)


def save(path: Path, version: int, table: Any) -> None:
    """Atomic: a reader sees the old file or the new one. A read-only home costs the next job a second."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as f:
            json.dump({"format": version, "table": table}, f, indent=1)
        os.replace(f.name, path)
    except OSError as error:
        warnings.warn(
            f"pycomm: the selection table was not cached in {path}: {error}", RuntimeWarning, stacklevel=2
        )


#: Of the tables of ``pycomm.tuning_cuda``.
CUDA_FORMAT = 1


def cuda_file(facts: Mapping[str, str], n_hosts: int, n_ranks: int) -> Path:
    """The file for as many ranks on as many hosts with these GPUs, this driver and this NCCL."""
    name = "-".join(plain(facts[key]) for key in ("gpu", "driver", "nccl"))
    return folder() / f"cuda-v{CUDA_FORMAT}-{name}-{n_hosts}hosts-{n_ranks}ranks.json"


def cuda_tables() -> list[dict[str, Any]]:
    """What ``pycomm.tuning_cuda`` has kept here, the newest first, each with its ``file``."""
    files = sorted(
        folder().glob(f"cuda-v{CUDA_FORMAT}-*.json"), key=lambda f: f.stat().st_mtime_ns, reverse=True
    )
    found = []
    for file in files:
        content = load(file, CUDA_FORMAT)
        try:
            if content is not None:
                found.append({**content, "file": str(file)})
        except TypeError as error:
            ignored(file, error)
    return found
