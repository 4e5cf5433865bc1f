"""Fails when a folder of csrc/ or a module of pycomm/ uses what lies above it.

In csrc/ the includes run one way: base <- {schedule, kernels, transport, bucket} <- engine <- bind.
Schedules and buckets see neither sockets nor CUDA, kernels no sockets, transports no dtypes, only bind/ sees
Python, and nothing sees torch (so the build needs no torch, and one binary survives its upgrades). What needs
CUDA lies in folders named cuda (and in bind/), which a build without CUDA leaves out.

In pycomm/ modules that are imported when another is imported form no cycle, errors.py and the extension use
nothing of the package but errors.py, and nobody but the command line imports pycomm.cli.

Run: python tools/check_layers.py [ROOT]. Prints one line per violation, "file:line: what", and exits with 1.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

LEAVES = frozenset({"schedule", "kernels", "transport", "bucket"})
MAY_USE = {
    "base": frozenset[str](),
    **{leaf: frozenset({"base"}) for leaf in LEAVES},
    "engine": LEAVES | {"base"},
    "bind": LEAVES | {"base", "engine"},
}
"""For each folder of csrc/: the folders, beside itself, whose headers it may include."""

TORCH = re.compile(r"(torch|ATen|c10|caffe2)/")
PYTHON = re.compile(r"Python\.h|pybind11/|numpy/|structmember\.h")
SOCKETS = re.compile(r"sys/(socket|un|epoll)\.h|netinet/|arpa/|netdb\.h")
CUDA = re.compile(r"cuda|nccl")
DTYPE = re.compile(r"base/dtype\.h")

FORBIDDEN = {
    "base": [PYTHON, SOCKETS, CUDA],
    "schedule": [PYTHON, SOCKETS, CUDA],
    "kernels": [PYTHON, SOCKETS],
    "transport": [PYTHON, DTYPE],
    "bucket": [PYTHON, SOCKETS, CUDA],
    "engine": [PYTHON],
    "bind": [],
}
"""For each folder: headers that it may not include; torch's are refused in all of them."""

INCLUDE = re.compile(r'\s*#\s*include\s*([<"])([^>"]+)[>"]')


def check_cpp(root: Path) -> Iterator[str]:
    """Yields a line for each include in ROOT/csrc that breaks the rules above."""
    csrc = root / "csrc"
    for path in sorted(csrc.rglob("*")):
        if path.suffix not in {".h", ".cc", ".cu", ".cuh", ".inc"}:
            continue
        folder = path.relative_to(csrc).parts[0]
        if folder not in MAY_USE:
            yield f"{path.relative_to(root)}:1: not in one of the folders {', '.join(MAY_USE)}"
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if match := INCLUDE.match(line):
                where = f"{path.relative_to(root)}:{number}"
                for complaint in check_include(csrc, folder, match[1] == '"', match[2]):
                    yield f"{where}: {complaint}"
                in_cuda = folder == "bind" or "cuda" in path.relative_to(csrc).parts
                if not in_cuda and (CUDA.match(match[2]) or "cuda" in match[2].split("/")[:-1]):
                    yield f"{where}: includes {match[2]}, but only bind/ and folders named cuda may know CUDA"


def check_include(csrc: Path, folder: str, quoted: bool, header: str) -> Iterator[str]:
    """Yields what is wrong with a file of ``folder`` including ``header``."""
    if TORCH.match(header):
        yield f"includes {header}, but nothing in csrc/ may know torch"
    if any(pattern.match(header) for pattern in FORBIDDEN[folder]):
        yield f"includes {header}, which {folder}/ may not know"
    if not quoted:
        return
    target = header.partition("/")[0]
    if not (csrc / header).is_file():
        yield f'includes "{header}", which is not a file in csrc/ (write "folder/file.h")'
    elif target != folder and target not in MAY_USE[folder]:
        allowed = ", ".join(sorted(MAY_USE[folder])) or "nothing"
        yield f"includes {header}, but {folder}/ may use {allowed} only"


def module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str, bool]]:
    """Yields (line, dotted name, at import time) for each import; names may end in an attribute.

    Imports under ``if TYPE_CHECKING:`` never run and are left out.
    """

    def visit(node: ast.AST, at_import: bool) -> Iterator[tuple[int, str, bool]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, at_import
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")
            keep = len(base) - node.level + (1 if is_package else 0)
            prefix = ".".join([*base[:keep], *filter(None, [node.module])]) if node.level else node.module
            for alias in node.names:
                yield node.lineno, f"{prefix}.{alias.name}", at_import
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for other in node.orelse:
                yield from visit(other, at_import)
        else:
            inner = at_import and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inner)

    yield from visit(tree, True)


def check_python(root: Path) -> Iterator[str]:
    """Yields a line for each import in ROOT/pycomm that breaks the rules above."""
    paths = {module_name(root, path): path for path in sorted((root / "pycomm").rglob("*.py"))}
    loads: dict[str, dict[str, int]] = {module: {} for module in paths}
    for module, path in paths.items():
        tree = ast.parse(path.read_text(), str(path))
        for line, name, at_import in imports(tree, module, path.name == "__init__.py"):
            target = name if name in paths else name.rpartition(".")[0]
            if target not in paths or target == module:
                continue
            where = f"{path.relative_to(root)}:{line}"
            if is_cli(target) and not is_cli(module):
                yield f"{where}: imports {target}, but only the command line may know itself"
            if module == "pycomm.errors":
                yield f"{where}: imports {target}, but errors.py stands below all of pycomm"
            if at_import:
                loads[module].setdefault(target, line)
    for cycle in cycles(loads):
        first = cycle[0]
        line = loads[first][cycle[1 % len(cycle)]]
        yield f"{paths[first].relative_to(root)}:{line}: import cycle {' -> '.join([*cycle, first])}"


def is_cli(module: str) -> bool:
    return module == "pycomm.cli" or module.startswith("pycomm.cli.")


def cycles(loads: dict[str, dict[str, int]]) -> Iterator[list[str]]:
    """Yields each cycle that a depth-first walk of the import graph meets, starting at its smallest module.

    That Python imports a package before its submodules is no edge here.
    """
    done: set[str] = set()
    found: set[tuple[str, ...]] = set()

    def walk(module: str, trail: list[str]) -> Iterator[list[str]]:
        if module in trail:
            cycle = trail[trail.index(module) :]
            start = cycle.index(min(cycle))
            cycle = cycle[start:] + cycle[:start]
            if tuple(cycle) not in found:
                found.add(tuple(cycle))
                yield cycle
            return
        if module in done:
            return
        for target in loads[module]:
            yield from walk(target, [*trail, module])
        done.add(module)

    for module in loads:
        yield from walk(module, [])


def main(argv: list[str]) -> int:
    root = Path(argv[1]) if len(argv) > 1 else Path(__file__).resolve().parents[1]
    complaints = [*check_cpp(root), *check_python(root)]
    for complaint in complaints:
        print(complaint)
    if not complaints:
        print("layers: csrc/ and pycomm/ depend one way only")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
