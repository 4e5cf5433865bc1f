"""What a machine is made of: processors, NUMA nodes, GPUs, network interfaces, and the paths between them.

Facts are frozen dataclasses. This module reads those of the kernel (``/sys``, ``/proc``) with a `Reader`, of
which the root can be any folder; those of the GPUs come from NVML (``pycomm.topology_nvml``), and `gather`
puts both together. A fact that cannot be had is None and listed in ``Topology.unknown`` with the reason.

Paths have the names that ``nvidia-smi topo -m`` gives them, from near to far:

- ``NV<n>``  n NVLinks, straight or through NVSwitch
- ``PIX``    at most one PCIe switch
- ``PXB``    several PCIe switches, no host bridge
- ``PHB``    a PCIe host bridge (the processor)
- ``NODE``   several host bridges of one NUMA node
- ``SYS``    the link between NUMA nodes

Between two GPUs NVML says which it is. Between a GPU and a network interface it follows from where their
folders lie under ``/sys/devices``, as in NCCL's topology detection. The NUMA node and the processors of a GPU
are the kernel's as well: ``nvmlDeviceGetNumaNodeId`` is about GPUs whose *memory* is a NUMA node.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = [
    "Cpu",
    "Gpu",
    "Gpus",
    "LEVELS",
    "Nic",
    "NumaNode",
    "Reader",
    "Topology",
    "Unknown",
    "closest",
    "gather",
    "pci_path",
]

#: The paths over PCIe and between processors, from near to far.
LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True)
class Unknown:
    """A fact that could not be had."""

    what: str  #: "memory"
    whose: str  #: "GPU 3"
    why: str  #: "Not Supported"


@dataclass(frozen=True)
class Cpu:
    """The processors of the machine."""

    model: str | None
    sockets: int | None
    online: str | None  #: as the kernel writes lists: "0-31,64-95"


@dataclass(frozen=True)
class NumaNode:
    """A part of the memory, with the processors that are near to it."""

    index: int
    cpus: str  #: "" for memory without processors
    memory_bytes: int | None
    distances: tuple[int, ...]  #: to every node in their order; 10 is itself


@dataclass(frozen=True)
class Gpu:
    """One GPU; ``index`` is NVML's, in the order of PCI addresses, whatever CUDA_VISIBLE_DEVICES says."""

    index: int
    name: str | None
    pci: str | None  #: "0000:07:00.0", as /sys has it
    uuid: str | None
    memory_bytes: int | None
    compute_capability: str | None  #: "9.0"
    numa_node: int | None = None
    cpus: str | None = None  #: "0-31": those of its NUMA node


@dataclass(frozen=True)
class Gpus:
    """All GPUs and what lies between them; ``missing`` says why there are none, and is "" where there are."""

    missing: str
    driver: str | None = None
    cuda: str | None = None  #: the newest CUDA that the driver serves: "13.0"
    devices: tuple[Gpu, ...] = ()
    paths: tuple[tuple[str | None, ...], ...] = ()  #: [i][j]: "NV18", "PIX" …; "X" for itself
    #: [i][j]: whether i may read and write j's memory: "OK", or nvidia-smi's code (CNS, GNS, TNS, DR, NS, U);
    #: "OK/NS" where reading and writing differ.
    peer_access: tuple[tuple[str | None, ...], ...] = ()
    unknown: tuple[Unknown, ...] = ()


@dataclass(frozen=True)
class Nic:
    """A network interface that is a device; virtual ones (lo, bridges, veth) are none."""

    name: str
    pci: str | None
    numa_node: int | None
    speed_mbit: int | None  #: Mbit/s
    state: str  #: the kernel's word: "up", "down" …
    rdma: tuple[str, ...] = ()  #: its RDMA devices: "mlx5_0"
    gpu_paths: tuple[str | None, ...] = ()  #: to each GPU, one of `LEVELS`


@dataclass(frozen=True)
class Topology:
    """The whole machine."""

    host: str
    cpu: Cpu
    numa: tuple[NumaNode, ...]
    gpus: Gpus
    nics: tuple[Nic, ...]
    virtual: tuple[str, ...]  #: names of the interfaces that are no device
    unknown: tuple[Unknown, ...]


def closest(paths: tuple[str | None, ...]) -> tuple[int, ...]:
    """The GPUs at the nearest level of ``paths``; several where they are equally near.

    Example:
        >>> closest(("SYS", "PIX", "PXB", "PIX"))
        (1, 3)
    """
    known = [LEVELS.index(path) for path in paths if path is not None]
    return tuple(i for i, path in enumerate(paths) if path is not None and LEVELS.index(path) == min(known))


def pci_path(a: tuple[str, ...], b: tuple[str, ...], same_node: bool | None) -> str | None:
    """How two PCI devices reach each other, from their folders under /sys/devices.

    A device below a switch is: host bridge, root port, the switch's upstream port, its downstream port, the
    device. So two devices of one switch differ in the last two folders only.

    Args:
        a: The folders of the one: ``("pci0000:00", "0000:00:01.0", …)``.
        b: Those of the other.
        same_node: Whether both are of one NUMA node; None where that is not known.

    Returns:
        One of `LEVELS`; None where only the NUMA nodes could tell, and they are not known.

    Source: https://docs.nvidia.com/deploy/nvidia-smi (the legend of ``topo -m``); NCCL, src/graph/topo.cc.

    Example:
        >>> pci_path(("pci0000:00", "up", "down0", "gpu"), ("pci0000:00", "up", "down1", "nic"), None)
        'PIX'
    """
    common = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        common += 1
    if common == 0:
        return None if same_node is None else "NODE" if same_node else "SYS"
    if common == 1:
        return "PHB"
    return "PIX" if max(len(a), len(b)) - common <= 2 else "PXB"


class Reader:
    """Reads /sys and /proc below ``root``; what is not there, or cannot be read, is None.

    Example:
        >>> Reader(Path("/")).text("proc/version")[:5]
        'Linux'
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def text(self, name: str) -> str | None:
        """The file's text without its end of line. A speed of an interface that is down cannot be read."""
        try:
            return (self.root / name).read_text().strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """The file's number; None also for -1, with which the kernel says that it does not know."""
        text = self.text(name)
        return int(text) if text is not None and text.isdecimal() else None

    def names(self, name: str) -> list[str]:
        """What is in the folder, sorted, numbers by their value."""
        try:
            found = [entry.name for entry in (self.root / name).iterdir()]
        except OSError:
            return []
        return sorted(found, key=lambda s: [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", s)])

    def device_folders(self, link: str) -> tuple[str, ...]:
        """Where a device lies under /sys/devices, down to its last PCI address; () for one that has none."""
        try:
            place = (self.root / link).resolve(strict=True).relative_to((self.root / "sys/devices").resolve())
        except (OSError, ValueError):
            return ()
        last = [i for i, part in enumerate(place.parts) if _ADDRESS.fullmatch(part)]
        return place.parts[: last[-1] + 1] if last else ()

    def cpu(self) -> Cpu:
        """The processors; ``model`` as /proc/cpuinfo names it (arm64's has no name)."""
        info = self.text("proc/cpuinfo") or ""
        model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
        folder = "sys/devices/system/cpu"
        packages = {
            self.text(f"{folder}/{name}/topology/physical_package_id")
            for name in self.names(folder)
            if re.fullmatch(r"cpu\d+", name)
        } - {None}
        return Cpu(model[1] if model else None, len(packages) or None, self.text(f"{folder}/online"))

    def numa(self) -> tuple[NumaNode, ...]:
        """Every node; none where the kernel was built without NUMA."""
        folder = "sys/devices/system/node"
        return tuple(
            self._node(int(name[4:]), f"{folder}/{name}")
            for name in self.names(folder)
            if re.fullmatch(r"node\d+", name)
        )

    def _node(self, index: int, folder: str) -> NumaNode:
        total = re.search(r"MemTotal:\s*(\d+) kB", self.text(f"{folder}/meminfo") or "")
        distances = tuple(int(d) for d in (self.text(f"{folder}/distance") or "").split())
        cpus = self.text(f"{folder}/cpulist") or ""
        return NumaNode(index, cpus, int(total[1]) * 1024 if total else None, distances)


def _same_node(a: int | None, b: int | None, nodes: tuple[NumaNode, ...]) -> bool | None:
    if len(nodes) == 1:
        return True
    return None if a is None or b is None else a == b


def _placed(gpu: Gpu, reader: Reader) -> Gpu:
    """With its NUMA node and processors."""
    if gpu.pci is None:
        return gpu
    folder = f"sys/bus/pci/devices/{gpu.pci}"
    return replace(
        gpu,
        numa_node=reader.number(f"{folder}/numa_node"),
        cpus=reader.text(f"{folder}/local_cpulist") or None,
    )


def _nic(name: str, gpus: tuple[Gpu, ...], nodes: tuple[NumaNode, ...], reader: Reader) -> Nic:
    folder = f"sys/class/net/{name}"
    folders = reader.device_folders(f"{folder}/device")
    pci = folders[-1] if folders else None
    node = reader.number(f"sys/bus/pci/devices/{pci}/numa_node") if pci else None
    paths: list[str | None] = []
    for gpu in gpus:
        other = reader.device_folders(f"sys/bus/pci/devices/{gpu.pci}") if gpu.pci else ()
        known = bool(folders and other)
        paths.append(pci_path(folders, other, _same_node(node, gpu.numa_node, nodes)) if known else None)
    return Nic(
        name=name,
        pci=pci,
        numa_node=node,
        speed_mbit=reader.number(f"{folder}/speed") or None,
        state=reader.text(f"{folder}/operstate") or "unknown",
        rdma=tuple(reader.names(f"{folder}/device/infiniband")),
        gpu_paths=tuple(paths),
    )


def _kernel_unknown(numa: tuple[NumaNode, ...], gpus: Gpus, nics: tuple[Nic, ...]) -> Iterator[Unknown]:
    """What the kernel did not say of devices."""
    if not numa:
        yield Unknown("NUMA nodes", "the machine", "the kernel shows none (/sys/devices/system/node)")
    for gpu in gpus.devices:
        if gpu.pci is not None and gpu.numa_node is None:
            yield Unknown("NUMA node", f"GPU {gpu.index}", "the kernel does not know it (-1)")
        if gpu.pci is not None and gpu.cpus is None:
            yield Unknown("CPUs", f"GPU {gpu.index}", "the kernel shows no local_cpulist of it")
    for nic in nics:
        if nic.pci is None:
            yield Unknown("PCI address", nic.name, "it is no PCI device")
        elif nic.numa_node is None:
            yield Unknown("NUMA node", nic.name, "the kernel does not know it (-1)")
        if nic.speed_mbit is None:
            why = "the driver does not say" if nic.state == "up" else f"the interface is {nic.state}"
            yield Unknown("speed", nic.name, why)
        for gpu, path in zip(gpus.devices, nic.gpu_paths, strict=True):
            if path is None:
                yield Unknown("path", f"{nic.name} to GPU {gpu.index}", "where they lie is not known")


def gather(gpus: Gpus, reader: Reader | None = None) -> Topology:
    """The machine, with these GPUs.

    Args:
        gpus: From ``pycomm.topology_nvml.look``; their NUMA nodes and processors are filled in here.
        reader: Of the machine's files; None: of this machine.

    Example:
        >>> machine = gather(Gpus(missing="nobody looked"))
        >>> machine.gpus.devices, machine.cpu.online is not None
        ((), True)
    """
    reader = reader or Reader()
    numa = reader.numa()
    gpus = replace(gpus, devices=tuple(_placed(gpu, reader) for gpu in gpus.devices))
    # A regular file beside the interfaces (bonding_masters) is none.
    names = [
        name for name in reader.names("sys/class/net") if (reader.root / "sys/class/net" / name).is_dir()
    ]
    real = [name for name in names if (reader.root / "sys/class/net" / name / "device").exists()]
    nics = tuple(_nic(name, gpus.devices, numa, reader) for name in real)
    return Topology(
        host=platform.node(),
        cpu=reader.cpu(),
        numa=numa,
        gpus=gpus,
        nics=nics,
        virtual=tuple(name for name in names if name not in real),
        unknown=(*gpus.unknown, *_kernel_unknown(numa, gpus, nics)),
    )
