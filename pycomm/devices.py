"""The CUDA devices that tensors may be on here: whether there are any, which is this rank's, and its clock.

Where CUDA is emulated (tests/cuda_on_cpu) all tensors are the host's: ``PYCOMM_EMULATED_DEVICE=rank`` has the
collectives take them to be on the emulated device of the rank's number, and wait for it. Times mean nothing
there; the clock is then the host's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pycomm import _C, arguments

_DRIVER = Path("/proc/driver/nvidia")


def is_emulated() -> bool:
    """Whether this build's CUDA is the tests' emulation."""
    return _C.cuda.build() == "emulated"


def why_none() -> str:
    """Why no tensor can be on a CUDA device in this process, and what to do; "" when one can."""
    if _C.cuda.build() == "off":
        return "this pycomm was built without CUDA; build it where nvcc is (docs/cuda.md)"
    if is_emulated():
        if os.environ.get("PYCOMM_EMULATED_DEVICE") is None:
            return "CUDA is emulated in this pycomm; set PYCOMM_EMULATED_DEVICE=rank"
        return ""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) was built without CUDA; install torch's CUDA build"
    if _C.cuda.device_count() == 0 or not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        more = "" if hidden is None else f"; CUDA_VISIBLE_DEVICES is {hidden!r}"
        return f"no GPU or no driver was found (pycomm topo says which){more}"
    return ""


def prepare() -> str:
    """``why_none()``, in programs of our own that start ranks: an emulated device is of its rank's number."""
    if is_emulated():
        os.environ.setdefault("PYCOMM_EMULATED_DEVICE", "rank")
    return why_none()


def count() -> int:
    """Devices of this process; 0 where there are none."""
    return 0 if why_none() else _C.cuda.device_count()


def local_rank() -> int:
    """This rank's number on its host, as torchrun, mpirun or srun says; else its rank; else 0."""
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def take() -> torch.device:
    """Makes the device of the host's ``local_rank()``-th rank torch's current one; too few are shared.

    Returns:
        The device on which tensors are made: the CPU where CUDA is emulated.

    Raises:
        RuntimeError: there is none.
    """
    if why := why_none():
        raise RuntimeError(f"no CUDA device: {why}")
    if is_emulated():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank() % count())
    torch.cuda.set_device(device)
    return device


def named(name: str, device: Any) -> torch.device:
    """The device on which tensors are made that are on the CUDA device ``device`` to a collective.

    Args:
        name: of the argument, for errors.
        device: as torch has it; without a number: torch's current one.

    Raises:
        TypeError: it is no device. ValueError: not CUDA, or none is here.
    """
    where = arguments.device_of(name, device)
    if where.type != "cuda":
        raise ValueError(f"{name} must be a CUDA device, got {where}")
    if why := why_none():
        raise ValueError(f"{name} is {where}, but there is no CUDA device: {why}")
    if is_emulated():
        return torch.device("cpu")
    return torch.device("cuda", arguments.cuda_index(name, where))


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Seconds that ``device`` needs for what ``run`` puts on torch's current stream; waits for its end."""
    if device.type == "cpu":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    stream = torch.cuda.current_stream(device)
    event: Any = torch.cuda.Event
    first, last = event(enable_timing=True), event(enable_timing=True)
    first.record(stream)
    run()
    last.record(stream)
    last.synchronize()
    milliseconds: float = first.elapsed_time(last)
    return milliseconds / 1e3


def facts() -> dict[str, str]:
    """Names of this machine's GPUs, versions of driver and NCCL; "unknown" what cannot be told.

    Asks neither CUDA nor NVML, so that a process may still fork: the driver's files in /proc, and the NCCL
    that calls go through, which need not be torch's.
    """
    if is_emulated():
        return {"gpu": "emulated", "driver": "emulated", "nccl": "emulated"}
    nccl = _C.cuda.nccl_version() or "unknown"
    return {"gpu": _gpu_names(_DRIVER), "driver": _driver_version(_DRIVER), "nccl": nccl}


def _gpu_names(driver: Path) -> str:
    """As ``NVIDIA H200``; several kinds with " + " between."""
    names = set()
    for file in driver.glob("gpus/*/information"):
        lines = file.read_text(errors="replace").splitlines()
        names |= {line.partition(":")[2].strip() for line in lines if line.startswith("Model:")}
    return " + ".join(sorted(names)) or "unknown"


def _driver_version(driver: Path) -> str:
    """The word 580.65.06 of "NVRM version: NVIDIA UNIX … Kernel Module  580.65.06  Wed …"."""
    try:
        first = (driver / "version").read_text(errors="replace").partition("\n")[0]
    except OSError:
        return "unknown"
    numbers = [word for word in first.split() if word.replace(".", "").isdigit() and "." in word]
    return numbers[0] if numbers else "unknown"
