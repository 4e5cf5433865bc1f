"""What ``pycomm topo`` reads of the kernel: NUMA nodes and network interfaces, on trees made for the test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pycomm.topology import Gpu, Gpus, NumaNode, Reader, Unknown, closest, gather, pci_path


class Tree:
    """A /sys and a /proc, made file by file."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "sys/devices").mkdir(parents=True)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def link(self, name: str, target: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.relpath(self.root / target, path.parent))

    def node(self, index: int, cpus: str, memory_kb: int, distances: str) -> None:
        folder = f"sys/devices/system/node/node{index}"
        self.write(f"{folder}/cpulist", cpus)
        self.write(
            f"{folder}/meminfo", f"Node {index} MemTotal:       {memory_kb} kB\nNode {index} MemFree: 1 kB"
        )
        self.write(f"{folder}/distance", distances)

    def device(self, place: str, node: int, cpus: str = "") -> str:
        """A PCI device at ``place`` below /sys/devices; its address."""
        address = place.rpartition("/")[2]
        self.write(f"sys/devices/{place}/numa_node", str(node))
        self.write(f"sys/devices/{place}/local_cpulist", cpus)
        self.link(f"sys/bus/pci/devices/{address}", f"sys/devices/{place}")
        return address

    def interface(self, name: str, place: str | None, state: str = "up", speed: str | None = None) -> None:
        """A network interface of the device at ``place``; None: a virtual one."""
        folder = f"sys/devices/{place}/net/{name}" if place else f"sys/devices/virtual/net/{name}"
        self.write(f"{folder}/operstate", state)
        if speed is not None:
            self.write(f"{folder}/speed", speed)
        if place:
            self.link(f"{folder}/device", f"sys/devices/{place}")
        self.link(f"sys/class/net/{name}", folder)


def gpu(index: int, pci: str | None) -> Gpu:
    return Gpu(index, "a GPU", pci, None, None, None)


def gpus(*addresses: str | None) -> Gpus:
    return Gpus(missing="", devices=tuple(gpu(i, pci) for i, pci in enumerate(addresses)))


@pytest.fixture
def two_sockets(tmp_path: Path) -> Tree:
    """Two processors. The first: a switch with GPU 0, GPU 1 and ens0 below; a second root port with eno1.
    The second: a host bridge with GPU 2, another with GPU 3 and ens1 behind two switches."""
    tree = Tree(tmp_path)
    tree.node(0, "0-3,8-11", 1024, "10 21")
    tree.node(1, "4-7,12-15", 2048, "21 10")
    for cpu in range(16):
        tree.write(f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", str(cpu // 4 % 2))
    tree.write("sys/devices/system/cpu/online", "0-15")
    tree.write(
        "proc/cpuinfo", "processor\t: 0\nmodel name\t: A Processor\nprocessor\t: 1\nmodel name\t: A Processor"
    )
    switch = "pci0000:00/0000:00:01.0/0000:01:00.0"
    tree.device(f"{switch}/0000:02:00.0/0000:03:00.0", 0, "0-3,8-11")
    tree.device(f"{switch}/0000:02:01.0/0000:04:00.0", 0, "0-3,8-11")
    tree.device(f"{switch}/0000:02:02.0/0000:05:00.0", 0)
    tree.interface("ens0", f"{switch}/0000:02:02.0/0000:05:00.0", speed="400000")
    tree.write(f"sys/devices/{switch}/0000:02:02.0/0000:05:00.0/infiniband/mlx5_0/node_type", "1: CA")
    tree.device("pci0000:00/0000:00:02.0/0000:06:00.1", 0)
    tree.interface("eno1", "pci0000:00/0000:00:02.0/0000:06:00.1", state="down", speed="-1")
    tree.device("pci0000:80/0000:80:01.0/0000:81:00.0", 1, "4-7,12-15")
    far = "pci0000:c0/0000:c0:01.0/0000:c1:00.0"
    tree.device(f"{far}/0000:c2:00.0/0000:c3:00.0", 1, "4-7,12-15")
    deeper = f"{far}/0000:c2:01.0/0000:c4:00.0/0000:c5:00.0/0000:c6:00.0"
    tree.device(deeper, 1)
    tree.interface("ens1", deeper, speed="100000")
    tree.interface("lo", None, state="unknown")
    tree.interface("docker0", None)
    tree.write("sys/class/net/bonding_masters", "bond0")  # a file among the interfaces
    return tree


_FOUR = ("0000:03:00.0", "0000:04:00.0", "0000:81:00.0", "0000:c3:00.0")


def test_processors_and_nodes(two_sockets: Tree) -> None:
    machine = gather(gpus(), Reader(two_sockets.root))
    assert (machine.cpu.model, machine.cpu.sockets, machine.cpu.online) == ("A Processor", 2, "0-15")
    assert machine.numa == (
        NumaNode(0, "0-3,8-11", 1024 * 1024, (10, 21)),
        NumaNode(1, "4-7,12-15", 2048 * 1024, (21, 10)),
    )


def test_gpus_get_the_node_and_the_processors_of_their_device(two_sockets: Tree) -> None:
    machine = gather(gpus(*_FOUR), Reader(two_sockets.root))
    assert [g.numa_node for g in machine.gpus.devices] == [0, 0, 1, 1]
    assert [g.cpus for g in machine.gpus.devices] == ["0-3,8-11"] * 2 + ["4-7,12-15"] * 2


def test_interfaces_and_the_gpus_near_to_them(two_sockets: Tree) -> None:
    machine = gather(gpus(*_FOUR), Reader(two_sockets.root))
    eno1, ens0, ens1 = machine.nics
    assert (eno1.name, ens0.name, ens1.name) == ("eno1", "ens0", "ens1")
    assert machine.virtual == ("docker0", "lo")
    assert (ens0.pci, ens0.numa_node, ens0.speed_mbit, ens0.state) == ("0000:05:00.0", 0, 400_000, "up")
    assert ens0.rdma == ("mlx5_0",) and ens1.rdma == ()
    assert ens0.gpu_paths == ("PIX", "PIX", "SYS", "SYS") and closest(ens0.gpu_paths) == (0, 1)
    assert eno1.gpu_paths == ("PHB", "PHB", "SYS", "SYS")
    assert ens1.gpu_paths == ("SYS", "SYS", "NODE", "PXB") and closest(ens1.gpu_paths) == (3,)
    assert machine.unknown == (Unknown("speed", "eno1", "the interface is down"),)


def test_what_the_kernel_does_not_know_is_told(tmp_path: Path) -> None:
    """A virtual machine: one node, -1 for every device, an interface of virtio, one of another bus."""
    tree = Tree(tmp_path)
    tree.node(0, "0-1", 4096, "10")
    tree.device("pci0000:00/0000:00:05.0", -1, "0-1")
    tree.device("pci0000:00/0000:00:03.0", -1)
    tree.interface("eth0", "pci0000:00/0000:00:03.0/virtio2", speed="-1")
    tree.interface("eth1", "vmbus/one", speed="40000")
    machine = gather(gpus("0000:00:05.0", None), Reader(tree.root))
    eth0, eth1 = machine.nics
    assert (eth0.pci, eth0.numa_node, eth0.speed_mbit) == ("0000:00:03.0", None, None)
    assert eth0.gpu_paths == ("PHB", None)
    assert (eth1.pci, eth1.speed_mbit, eth1.gpu_paths) == (None, 40_000, (None, None))
    assert [(fact.what, fact.whose) for fact in machine.unknown] == [
        ("NUMA node", "GPU 0"),
        ("NUMA node", "eth0"),
        ("speed", "eth0"),
        ("path", "eth0 to GPU 1"),
        ("PCI address", "eth1"),
        ("path", "eth1 to GPU 0"),
        ("path", "eth1 to GPU 1"),
    ]


def test_an_empty_tree_is_told_too(tmp_path: Path) -> None:
    machine = gather(gpus(), Reader(tmp_path))
    assert (machine.cpu.model, machine.cpu.sockets, machine.cpu.online) == (None, None, None)
    assert machine.numa == () and machine.nics == ()
    assert [fact.what for fact in machine.unknown] == ["NUMA nodes"]


def test_paths_by_the_folders() -> None:
    bridge = ("pci0000:00",)
    assert pci_path((*bridge, "a"), (*bridge, "b"), None) == "PHB"  # both on the root bus
    assert pci_path((*bridge, "p", "u", "d0", "a"), (*bridge, "p", "u", "d1", "b"), None) == "PIX"
    assert pci_path((*bridge, "p", "f.0"), (*bridge, "p", "f.1"), None) == "PIX"  # functions of one card
    assert pci_path((*bridge, "p", "u", "d0", "a"), (*bridge, "p", "u", "d1", "v", "e", "b"), True) == "PXB"
    assert pci_path((*bridge, "a"), ("pci0000:80", "b"), True) == "NODE"
    assert pci_path((*bridge, "a"), ("pci0000:80", "b"), False) == "SYS"
    assert pci_path((*bridge, "a"), ("pci0000:80", "b"), None) is None
