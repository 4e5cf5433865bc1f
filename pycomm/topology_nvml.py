"""The GPUs of this machine, as NVIDIA's management library (NVML) shows them; for ``pycomm.topology``.

NVML is called through ``nvidia-ml-py`` (module pynvml; the extras cu12 and cu13 bring it). It needs the
driver but neither CUDA nor a context on a device, shows every GPU whatever CUDA_VISIBLE_DEVICES says, and
numbers them in the order of PCI addresses. A function that fails for one fact leaves that fact unknown, with
NVML's words.

NVLinks are counted as torch counts them for its symmetric memory: a link whose far end is a GPU belongs to
that pair; links whose far end is an NVSwitch reach every other GPU on switches, with the smaller of the two
numbers.

Source: https://docs.nvidia.com/deploy/nvml-api.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from pycomm.topology import Gpu, Gpus, Unknown

__all__ = ["look"]

#: nvmlGpuTopologyLevel_t -> nvidia-smi's name.
_LEVEL = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
#: nvmlGpuP2PStatus_t -> nvidia-smi's code.
_STATUS = {0: "OK", 1: "CNS", 2: "GNS", 3: "TNS", 4: "DR", 5: "NS", 6: "U"}
#: nvmlGpuP2PCapsIndex_t. Not pynvml's names: its NVML_P2P_CAPS_INDEX_READ is the tuple (0,).
_READ, _WRITE = 0, 1
#: nvmlIntNvLinkDeviceType_t.
_TO_GPU, _TO_SWITCH = 0x00, 0x02
#: nvmlReturn_t of asking for a link that a GPU does not have.
_NO_SUCH_LINK = frozenset({2, 3})  # INVALID_ARGUMENT, NOT_SUPPORTED

_LOADED = "/proc/driver/nvidia/version"


class _Nvml:
    """pynvml, with a list of what it could not say."""

    def __init__(self, pynvml: Any) -> None:
        self.py = pynvml
        self.unknown: list[Unknown] = []

    def ask(self, what: str, whose: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """The answer; None, and a line in ``unknown``, where there is none."""
        try:
            return function(*arguments)
        except self.py.NVMLError as error:
            self.unknown.append(Unknown(what, whose, str(error)))
            return None


def look() -> Gpus:
    """The GPUs of this machine, the paths between them, and who may reach whose memory.

    Returns:
        With ``missing`` set, and nothing else but perhaps the driver, where there are none: because the
        package is not installed, no driver library was found, the driver is not loaded, or has no device.

    Example:
        >>> from pycomm import topology_nvml
        >>> gpus = topology_nvml.look()
        >>> bool(gpus.devices) != bool(gpus.missing)
        True
    """
    try:
        import pynvml
    except ImportError:
        driver = "there is a driver" if os.path.exists(_LOADED) else f"no driver is loaded either ({_LOADED})"
        return Gpus(
            missing="the Python package nvidia-ml-py is not installed: "
            f"pip install 'pycomm-collectives[cu13]' (or [cu12]); {driver}"
        )
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Gpus(missing=_why_none(pynvml, error))
    try:
        return _look(_Nvml(pynvml))
    finally:
        pynvml.nvmlShutdown()


def _why_none(pynvml: Any, error: Any) -> str:
    if error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return (
            "no driver library: libnvidia-ml.so.1 was not found; install NVIDIA's driver "
            "(a container gets it from its host: docker run --gpus all)"
        )
    if error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
        return (
            "there is a driver library, but the kernel has no NVIDIA driver loaded, or no device for it: "
            "see lspci -d 10de: and dmesg"
        )
    if error.value == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "the driver library is of another version than the loaded driver: restart the machine"
    return f"NVML did not start: {error}"


def _look(nvml: _Nvml) -> Gpus:
    py = nvml.py
    driver = nvml.ask("driver", "the machine", py.nvmlSystemGetDriverVersion)
    cuda = nvml.ask("CUDA version", "the machine", py.nvmlSystemGetCudaDriverVersion_v2)
    cuda_text = None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}"
    count = nvml.ask("number of GPUs", "the machine", py.nvmlDeviceGetCount)
    if not count:
        missing = f"the driver {driver or '(version unknown)'} is there, but no device"
        return Gpus(missing, driver, cuda_text, unknown=tuple(nvml.unknown))
    # A GPU that has fallen off the bus has no handle: it stays in the list, with nothing known of it.
    handles = [nvml.ask("handle", f"GPU {i}", py.nvmlDeviceGetHandleByIndex, i) for i in range(count)]
    devices = tuple(_gpu(nvml, i, handle) for i, handle in enumerate(handles))
    return Gpus(
        missing="",
        driver=driver,
        cuda=cuda_text,
        devices=devices,
        paths=_paths(nvml, handles, devices),
        peer_access=_peer_access(nvml, handles),
        unknown=tuple(nvml.unknown),
    )


def _address(pci: Any) -> str:
    """As /sys writes it; NVML's own busId has eight digits of domain. A GPU is function 0."""
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"


def _gpu(nvml: _Nvml, index: int, handle: Any) -> Gpu:
    if handle is None:
        return Gpu(index, None, None, None, None, None)
    py, whose = nvml.py, f"GPU {index}"
    pci = nvml.ask("PCI address", whose, py.nvmlDeviceGetPciInfo, handle)
    memory = nvml.ask("memory", whose, py.nvmlDeviceGetMemoryInfo, handle)
    capability = nvml.ask("compute capability", whose, py.nvmlDeviceGetCudaComputeCapability, handle)
    return Gpu(
        index=index,
        name=nvml.ask("name", whose, py.nvmlDeviceGetName, handle),
        pci=None if pci is None else _address(pci),
        uuid=nvml.ask("UUID", whose, py.nvmlDeviceGetUUID, handle),
        memory_bytes=None if memory is None else int(memory.total),
        compute_capability=None if capability is None else f"{capability[0]}.{capability[1]}",
    )


def _links(nvml: _Nvml, index: int, handle: Any) -> tuple[dict[str, int], int]:
    """The NVLinks that are up: how many to each GPU, by PCI address, and how many to switches."""
    py, to_gpus, to_switches = nvml.py, dict[str, int](), 0
    for link in range(py.NVML_NVLINK_MAX_LINKS):
        whose = f"link {link} of GPU {index}"
        try:
            if not py.nvmlDeviceGetNvLinkState(handle, link):
                continue
        except py.NVMLError as error:
            if error.value in _NO_SUCH_LINK:
                continue
            nvml.unknown.append(Unknown("NVLink state", whose, str(error)))
            continue
        far = nvml.ask("NVLink's far end", whose, py.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if far == _TO_SWITCH:
            to_switches += 1
        elif far == _TO_GPU:
            pci = nvml.ask("NVLink's far end", whose, py.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
            if pci is not None:
                to_gpus[_address(pci)] = to_gpus.get(_address(pci), 0) + 1
        elif far is not None:
            nvml.unknown.append(Unknown("NVLink's far end", whose, f"neither GPU nor switch (type {far})"))
    return to_gpus, to_switches


def _paths(nvml: _Nvml, handles: list[Any], gpus: tuple[Gpu, ...]) -> tuple[tuple[str | None, ...], ...]:
    n = len(handles)
    links = [_links(nvml, i, h) if h is not None else ({}, 0) for i, h in enumerate(handles)]
    paths: list[list[str | None]] = [["X" if i == j else None for j in range(n)] for i in range(n)]
    for i in range(n):
        for j in range(i + 1, n):
            if handles[i] is None or handles[j] is None:
                continue
            n_links = links[i][0].get(gpus[j].pci or "", 0) + min(links[i][1], links[j][1])
            paths[i][j] = paths[j][i] = f"NV{n_links}" if n_links else _level(nvml, i, j, handles)
    return tuple(tuple(row) for row in paths)


def _level(nvml: _Nvml, i: int, j: int, handles: list[Any]) -> str | None:
    whose = f"GPU {i} and GPU {j}"
    level = nvml.ask("path", whose, nvml.py.nvmlDeviceGetTopologyCommonAncestor, handles[i], handles[j])
    if level is not None and level not in _LEVEL:
        nvml.unknown.append(Unknown("path", whose, f"NVML's level {level} has no name here"))
    return _LEVEL.get(level)


def _peer_access(nvml: _Nvml, handles: list[Any]) -> tuple[tuple[str | None, ...], ...]:
    n = len(handles)
    return tuple(tuple("X" if i == j else _access(nvml, i, j, handles) for j in range(n)) for i in range(n))


def _access(nvml: _Nvml, i: int, j: int, handles: list[Any]) -> str | None:
    if handles[i] is None or handles[j] is None:
        return None
    codes = []
    for index in (_READ, _WRITE):
        status = nvml.ask(
            "peer access",
            f"GPU {i} to GPU {j}",
            nvml.py.nvmlDeviceGetP2PStatus,
            handles[i],
            handles[j],
            index,
        )
        if status is None:
            return None
        codes.append(_STATUS.get(status, "U"))
    return codes[0] if codes[0] == codes[1] else "/".join(codes)
