"""``pycomm topo``: the GPUs of this machine, the paths between them, and what is near to what.

    pycomm topo
    pycomm topo --json

The facts are ``pycomm.topology``'s. A machine without GPUs, or without their driver, is told what is missing
and sees the rest; that is no failure. "-" stands for what is not known, and a line below the tables says why.
Behind it comes which algorithm serves which size of CUDA tensors: what ``pycomm tune --device cuda`` has kept
here, or the built-in choice.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pycomm import topology, topology_nvml
from pycomm.cli import selection, units
from pycomm.cli.output import console, print_json
from pycomm.topology import Gpu, Gpus, Nic, Topology, Unknown

__all__ = ["as_dict", "show", "topo"]

_PATH_WORDS = (
    "NV<n>: n NVLinks; PIX: at most one PCIe switch; PXB: several PCIe switches; PHB: a PCIe host bridge; "
    "NODE: several host bridges of one NUMA node; SYS: between NUMA nodes"
)
_ACCESS_WORDS = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "DR": "disabled by a registry key of the driver",
    "NS": "not supported",
    "U": "unknown to NVML",
}


def topo(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Prints GPUs, NVLink and PCIe paths, peer access, NUMA nodes and network interfaces of this machine."""
    machine = topology.gather(topology_nvml.look())
    tables = selection.kept()
    if as_json:
        built_in = selection.built_in()
        print_json({**as_dict(machine), "decision_tables": tables, "built_in_table": built_in})
        return
    show(machine, console())
    for told in tables:
        selection.show(told, console())
    if not tables and selection.built_in():
        selection.show_built_in(console())


def as_dict(machine: Topology) -> dict[str, Any]:
    """What ``--json`` prints: the dataclasses' fields, and for each network interface its closest GPUs."""
    facts = asdict(machine)
    for nic, told in zip(machine.nics, facts["nics"], strict=True):
        told["closest_gpus"] = topology.closest(nic.gpu_paths)
    del facts["gpus"]["unknown"]  # they are among the machine's
    return facts


def show(machine: Topology, out: Console) -> None:
    """Prints the tables that people read."""
    _line(out, f"{machine.host}: {_cpu_text(machine)}")
    _show_numa(machine, out)
    if machine.gpus.missing:
        _line(out, f"No GPUs are shown: {machine.gpus.missing}")
    else:
        _show_gpus(machine.gpus, out)
    _show_nics(machine, out)
    for line in _footnotes(machine.unknown):
        _line(out, line)


def _line(out: Console, text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=Text(title), title_justify="left")


def _cell(value: Any) -> Text:
    return Text("-" if value is None or value == "" else str(value))


def _add(table: Table, *values: Any) -> None:
    table.add_row(*(_cell(value) for value in values))


def _cpu_text(machine: Topology) -> str:
    cpu = machine.cpu
    sockets = "" if cpu.sockets is None else f", {cpu.sockets} socket{'s' if cpu.sockets != 1 else ''}"
    return f"{cpu.model or 'processor without a name'}{sockets}, CPUs {cpu.online or '-'}"


def _show_numa(machine: Topology, out: Console) -> None:
    if not machine.numa:
        return
    numbers = [str(node.index) for node in machine.numa]
    table = _table("NUMA nodes", "node", "CPUs", "memory", *(f"distance to {n}" for n in numbers))
    for node in machine.numa:
        memory = None if node.memory_bytes is None else units.bytes_text(node.memory_bytes)
        distances = [*node.distances, *[None] * (len(numbers) - len(node.distances))]
        _add(table, node.index, node.cpus or "none", memory, *distances)
    out.print(table)


def _show_gpus(gpus: Gpus, out: Console) -> None:
    title = f"GPUs: driver {gpus.driver or '-'}, which serves CUDA up to {gpus.cuda or '-'}"
    columns = ("GPU", "name", "PCI address", "UUID", "memory", "compute", "NUMA node", "CPUs")
    table = _table(title, *columns)
    for gpu in gpus.devices:
        memory = None if gpu.memory_bytes is None else units.bytes_text(gpu.memory_bytes)
        row = (gpu.name, gpu.pci, _short(gpu.uuid), memory, gpu.compute_capability, gpu.numa_node, gpu.cpus)
        _add(table, gpu.index, *row)
    out.print(table)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        _line(out, f"CUDA_VISIBLE_DEVICES is {visible!r}: programs started here see these, numbered anew")
    if len(gpus.devices) < 2:
        return
    out.print(_matrix("Paths between GPUs", gpus.devices, gpus.paths))
    _line(out, _PATH_WORDS)
    out.print(
        _matrix("Peer access: may the row's GPU use the column's memory", gpus.devices, gpus.peer_access)
    )
    codes = {code for row in gpus.peer_access for cell in row if cell for code in cell.split("/")}
    for code in sorted(codes & set(_ACCESS_WORDS)):
        _line(out, f"{code}: {_ACCESS_WORDS[code]}")


def _short(uuid: str | None) -> str | None:
    """The first eight digits, which CUDA_VISIBLE_DEVICES takes as well."""
    return None if uuid is None else uuid[: len("GPU-") + 8]


def _matrix(title: str, devices: tuple[Gpu, ...], cells: tuple[tuple[str | None, ...], ...]) -> Table:
    table = _table(title, "", *(f"GPU {gpu.index}" for gpu in devices))
    for gpu, row in zip(devices, cells, strict=True):
        _add(table, f"GPU {gpu.index}", *row)
    return table


def _show_nics(machine: Topology, out: Console) -> None:
    virtual = f"virtual, and so left out: {', '.join(machine.virtual)}" if machine.virtual else ""
    if not machine.nics:
        _line(out, f"No network interface is a device{f' ({virtual})' if virtual else ''}")
        return
    gpus = machine.gpus.devices
    columns = ["interface", "RDMA", "PCI address", "NUMA node", "speed", "state"]
    if gpus:
        columns += ["closest GPU", *(f"GPU {gpu.index}" for gpu in gpus)]
    table = _table("Network interfaces", *columns)
    for nic in machine.nics:
        near = [_closest_text(nic), *nic.gpu_paths] if gpus else []
        rdma = ", ".join(nic.rdma) or "no"
        _add(table, nic.name, rdma, nic.pci, nic.numa_node, _speed_text(nic), nic.state, *near)
    out.print(table)
    if virtual:
        _line(out, virtual)


def _closest_text(nic: Nic) -> str | None:
    near = topology.closest(nic.gpu_paths)
    return ", ".join(map(str, near)) if near else None


def _speed_text(nic: Nic) -> str | None:
    if nic.speed_mbit is None:
        return None
    return f"{nic.speed_mbit / 1000:g} Gbit/s" if nic.speed_mbit >= 1000 else f"{nic.speed_mbit} Mbit/s"


def _footnotes(unknown: Iterable[Unknown]) -> list[str]:
    """A line for each fact and reason, with all those of whom it is not known."""
    whose: dict[tuple[str, str], list[str]] = {}
    for fact in unknown:
        whose.setdefault((fact.what, fact.why), []).append(fact.whose)
    return [f"-: {what} of {', '.join(names)}: {why}" for (what, why), names in whose.items()]
