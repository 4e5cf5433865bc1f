"""Builds the extension pycomm._C by driving CMake and ninja; all metadata is in pyproject.toml.

Objects are kept in build/<python>-<machine>, so that a second build is quick. So is a copy of pybind11's
headers: in an isolated build cmake, ninja and pybind11 live in a temporary folder that is gone the next
time, and other paths would compile every file again that includes them. CMake's cache holds such paths,
too, and is not kept.
PYCOMM_EXTENSION=OFF installs the Python files only (the Makefile does this: it builds the extension itself).
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

SOURCE = Path(__file__).resolve().parent


def tool(name: str) -> str:
    """The path of cmake or ninja, from PATH or beside this Python; an error that says what to install."""
    if path := shutil.which(name, path=f"{os.environ.get('PATH', '')}:{Path(sys.executable).parent}"):
        return path
    raise SystemExit(f"pycomm: {name} was not found: run `pip install {name}`, or build with pip's isolation")


def run(what: str, *command: str) -> None:
    """Runs a command whose own output says what went wrong, if anything did."""
    if status := subprocess.run(command).returncode:
        raise SystemExit(f"pycomm: {what} failed with status {status}; its message is above")


def pybind11_config(build: Path) -> Path:
    """The folder of pybind11's CMake files: of a copy in ``build``, where pip installed pybind11."""
    try:
        import pybind11
    except ModuleNotFoundError:
        raise SystemExit("pycomm: pybind11 was not found: run `pip install pybind11`") from None
    package, config = Path(pybind11.__file__).parent, Path(pybind11.get_cmake_dir())
    if not config.is_relative_to(package):
        return config
    copy = build / f"pybind11-{pybind11.__version__}"
    if not copy.exists():
        shutil.rmtree(build / "pybind11", ignore_errors=True)  # of a build that was interrupted
        shutil.copytree(package, build / "pybind11")
        (build / "pybind11").rename(copy)
    return copy / config.relative_to(package)


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        build = SOURCE / "build" / f"{sys.implementation.cache_tag}-{platform.machine()}"
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        options = [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DPython_EXECUTABLE={sys.executable}"]
        options += [f"-Dpybind11_DIR={pybind11_config(build)}", "-DCMAKE_BUILD_TYPE=Release"]
        run("CMake", tool("cmake"), "-S", str(SOURCE), "-B", str(build), "-G", "Ninja", *options)
        run("the compiler", tool("cmake"), "--build", str(build), "--target", "_C")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(build / target.name, target)


class FreshPython(build_py):
    def run(self) -> None:  # a module deleted since the last build must not come back in the wheel
        shutil.rmtree(Path(self.build_lib) / "pycomm", ignore_errors=True)
        super().run()


extensions = [] if os.environ.get("PYCOMM_EXTENSION") == "OFF" else [Extension("pycomm._C", sources=[])]
setup(ext_modules=extensions, cmdclass={"build_ext": CMakeBuild, "build_py": FreshPython})
