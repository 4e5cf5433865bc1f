"""``pycomm topo``: its tables and its JSON from facts, and this machine as it is."""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pycomm import _C, cache_files
from pycomm.cli import app
from pycomm.cli.topo import as_dict, show
from pycomm.topology import Cpu, Gpu, Gpus, Nic, NumaNode, Topology, Unknown, closest

_ROOT = Path(__file__).resolve().parents[2]
_GIB = 2**30


def gpu(index: int, bus: int, node: int | None, name: str = "NVIDIA H100 80GB HBM3") -> Gpu:
    uuid = f"GPU-{index:08x}-0000-1111-2222-333333333333"
    cpus = None if node is None else ("0-55,112-167", "56-111,168-223")[node]
    return Gpu(index, name, f"0000:{bus:02x}:00.0", uuid, 80 * _GIB, "9.0", node, cpus)


def nodes(*cpus: str) -> tuple[NumaNode, ...]:
    apart = len(cpus)
    return tuple(
        NumaNode(i, text, 1024 * _GIB, tuple(10 if i == j else 21 for j in range(apart)))
        for i, text in enumerate(cpus)
    )


def dgx() -> Topology:
    """Eight GPUs on NVSwitch, four to a processor, and an interface beside each."""
    near = [
        tuple("PIX" if i == j else "NODE" if i // 4 == j // 4 else "SYS" for j in range(8)) for i in range(8)
    ]
    return Topology(
        host="dgx",
        cpu=Cpu("Intel(R) Xeon(R) Platinum 8480C", 2, "0-223"),
        numa=nodes("0-55,112-167", "56-111,168-223"),
        gpus=Gpus(
            missing="",
            driver="580.65.06",
            cuda="13.0",
            devices=tuple(gpu(i, 0x10 + 16 * i, i // 4) for i in range(8)),
            paths=tuple(tuple("X" if i == j else "NV18" for j in range(8)) for i in range(8)),
            peer_access=tuple(tuple("X" if i == j else "OK" for j in range(8)) for i in range(8)),
        ),
        nics=tuple(
            Nic(f"ibp{i}", f"0000:{0x11 + 16 * i:02x}:00.0", i // 4, 400_000, "up", (f"mlx5_{i}",), near[i])
            for i in range(8)
        ),
        virtual=("docker0", "lo"),
        unknown=(),
    )


def pcie() -> Topology:
    """Four GPUs without NVLink, two to a processor; of the last some facts are not known."""
    last = Gpu(3, "NVIDIA L40S", "0000:b1:00.0", None, None, "8.9", None, None)
    names = ("NVIDIA L40S",) * 3
    return Topology(
        host="box",
        cpu=Cpu(None, 2, "0-63"),
        numa=nodes("0-31", "32-63"),
        gpus=Gpus(
            missing="",
            driver="550.54.15",
            cuda="12.4",
            devices=(gpu(0, 0x31, 0, names[0]), gpu(1, 0x32, 0, names[1]), gpu(2, 0xB0, 1, names[2]), last),
            paths=(
                ("X", "PIX", "SYS", None),
                ("PIX", "X", "SYS", None),
                ("SYS", "SYS", "X", "PHB"),
                (None, None, "PHB", "X"),
            ),
            peer_access=(
                ("X", "OK", "TNS", "NS"),
                ("OK", "X", "CNS", "NS"),
                ("TNS", "CNS", "X", "OK/NS"),
                (None, "NS", "OK", "X"),
            ),
        ),
        nics=(
            Nic("eno1", "0000:19:00.0", 0, 10_000, "up", (), ("PHB", "PHB", "SYS", "SYS")),
            Nic("eno2", "0000:19:00.1", 0, None, "down", (), ("PHB", "PHB", "SYS", None)),
            Nic("usb0", None, None, 100, "up", (), (None, None, None, None)),
        ),
        virtual=(),
        unknown=(
            Unknown("memory", "GPU 3", "Not Supported"),
            Unknown("UUID", "GPU 3", "Not Supported"),
            Unknown("path", "GPU 0 and GPU 3", "Unknown Error"),
            Unknown("path", "GPU 1 and GPU 3", "Unknown Error"),
        ),
    )


def text_of(machine: Topology) -> str:
    out = io.StringIO()
    show(machine, Console(file=out, width=160))
    return out.getvalue()


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of the table below that title."""
    body = text[text.index(title) :].split("└")[0]
    lines = [line for line in body.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_a_box_with_nvswitch() -> None:
    text = text_of(dgx())
    assert text.splitlines()[0] == "dgx: Intel(R) Xeon(R) Platinum 8480C, 2 sockets, CPUs 0-223"
    assert "GPUs: driver 580.65.06, which serves CUDA up to 13.0" in text
    shown = rows(text, "GPUs: driver")
    assert len(shown) == 8
    name = "NVIDIA H100 80GB HBM3"
    assert shown[5] == ["5", name, "0000:60:00.0", "GPU-00000005", "80 GiB", "9.0", "1", "56-111,168-223"]
    paths = rows(text, "Paths between GPUs")
    assert paths == [[f"GPU {i}", *("X" if i == j else "NV18" for j in range(8))] for i in range(8)]
    access = rows(text, "Peer access")
    assert access == [[f"GPU {i}", *("X" if i == j else "OK" for j in range(8))] for i in range(8)]
    nics = rows(text, "Network interfaces")
    near = ["SYS"] * 4 + ["NODE", "NODE", "PIX", "NODE"]
    assert nics[6] == ["ibp6", "mlx5_6", "0000:71:00.0", "1", "400 Gbit/s", "up", "6", *near]
    assert "virtual, and so left out: docker0, lo" in text
    assert "\n-: " not in text and "not supported" not in text


def test_a_box_without_nvlink_and_with_gaps() -> None:
    text = text_of(pcie())
    assert text.splitlines()[0] == "box: processor without a name, 2 sockets, CPUs 0-63"
    assert rows(text, "NUMA nodes") == [
        ["0", "0-31", "1 TiB", "10", "21"],
        ["1", "32-63", "1 TiB", "21", "10"],
    ]
    assert rows(text, "GPUs: driver")[3] == ["3", "NVIDIA L40S", "0000:b1:00.0", "-", "-", "8.9", "-", "-"]
    assert rows(text, "Paths between GPUs")[2:] == [
        ["GPU 2", "SYS", "SYS", "X", "PHB"],
        ["GPU 3", "-", "-", "PHB", "X"],
    ]
    assert rows(text, "Peer access")[2:] == [
        ["GPU 2", "TNS", "CNS", "X", "OK/NS"],
        ["GPU 3", "-", "NS", "OK", "X"],
    ]
    for line in (
        "CNS: the chipset does not support it",
        "TNS: the topology does not support it",
        "NS: not supported",
        "-: memory of GPU 3: Not Supported",
        "-: path of GPU 0 and GPU 3, GPU 1 and GPU 3: Unknown Error",
    ):
        assert line in text.splitlines()
    assert rows(text, "Network interfaces") == [
        ["eno1", "no", "0000:19:00.0", "0", "10 Gbit/s", "up", "0, 1", "PHB", "PHB", "SYS", "SYS"],
        ["eno2", "no", "0000:19:00.1", "0", "-", "down", "0, 1", "PHB", "PHB", "SYS", "-"],
        ["usb0", "no", "-", "-", "100 Mbit/s", "up", "-", "-", "-", "-", "-"],
    ]


def test_json_has_the_same_facts() -> None:
    machine = pcie()
    document = json.loads(json.dumps(as_dict(machine)))
    assert [nic.pop("closest_gpus") for nic in document["nics"]] == [[0, 1], [0, 1], []]
    told = document["gpus"]["devices"][3]
    assert told["memory_bytes"] is None and told["pci"] == "0000:b1:00.0"
    assert document["gpus"]["paths"] == [list(row) for row in machine.gpus.paths]
    assert document["gpus"]["peer_access"] == [list(row) for row in machine.gpus.peer_access]
    assert document["unknown"][2] == {"what": "path", "whose": "GPU 0 and GPU 3", "why": "Unknown Error"}
    assert document["numa"][1] == {
        "index": 1,
        "cpus": "32-63",
        "memory_bytes": 1024 * _GIB,
        "distances": [21, 10],
    }
    assert [row["uuid"] for row in as_dict(dgx())["gpus"]["devices"]] == [g.uuid for g in dgx().gpus.devices]


def test_one_gpu_has_no_matrix() -> None:
    machine = dgx()
    alone = Gpus("", "580.65.06", "13.0", machine.gpus.devices[:1], (("X",),), (("X",),))
    text = text_of(Topology("one", machine.cpu, machine.numa, alone, (), ("lo",), ()))
    assert "Paths between" not in text and "NVIDIA H100" in text
    assert "No network interface is a device (virtual, and so left out: lo)" in text


def test_closest_is_the_nearest_level_that_is_there() -> None:
    assert closest(()) == () and closest((None, None)) == ()
    assert closest(("SYS", None, "NODE", "SYS")) == (2,)
    assert closest(("PHB", "PHB")) == (0, 1)


def test_kept_choices_for_cuda_tensors_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOMM_CACHE_DIR", str(tmp_path))
    facts = {"gpu": "NVIDIA H100", "driver": "580.65.06", "nccl": "2.27.3"}
    selection = {
        "all_reduce": [[4096, "peer_one_shot"], [2**64 - 1, "nccl"]],
        "reduce": [[2**64 - 1, "nccl"]],
    }
    content = {**facts, "ranks": 8, "hosts": 1, "selection": selection}
    file = cache_files.cuda_file(facts, 1, 8)
    cache_files.save(file, cache_files.CUDA_FORMAT, content)
    shown = CliRunner().invoke(app, ["topo"])
    assert shown.exit_code == 0, shown.output
    title = "CUDA tensors, 8 ranks: NVIDIA H100, driver 580.65.06, NCCL 2.27.3"
    assert rows(shown.output, title) == [
        ["all_reduce", "4 KiB", "peer_one_shot"],
        ["", "any size", "nccl"],
        ["reduce", "any size", "nccl"],
    ]
    [told] = json.loads(CliRunner().invoke(app, ["topo", "--json"]).output)["decision_tables"]
    assert told["table"]["all_reduce"][0] == {"max_bytes": 4096, "algorithm": "peer_one_shot"}
    assert told["file"] == str(file) and told["nccl"] == "2.27.3"


@pytest.mark.parametrize("has_cuda", [True, False])
def test_where_nothing_is_kept_the_built_in_choice_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_cuda: bool
) -> None:
    monkeypatch.setenv("PYCOMM_CACHE_DIR", str(tmp_path))
    table = {"all_reduce": [(1 << 20, "peer"), (2**64 - 1, "nccl")]} if has_cuda else {}
    monkeypatch.setattr(_C.cuda, "built_in_selection", lambda: table)
    shown = CliRunner().invoke(app, ["topo"])
    assert shown.exit_code == 0, shown.output
    title = "CUDA tensors: nothing was measured on this machine, so calls take the built-in choice"
    assert (title in shown.output) == has_cuda
    told = json.loads(CliRunner().invoke(app, ["topo", "--json"]).output)
    assert told["decision_tables"] == []
    if has_cuda:
        whole = next(line for line in shown.output.splitlines() if line.startswith(title))
        assert rows(shown.output, whole) == [["all_reduce", "1 MiB", "peer"], ["", "any size", "nccl"]]
        assert told["built_in_table"]["all_reduce"][1] == {"max_bytes": 2**64 - 1, "algorithm": "nccl"}
    else:
        assert told["built_in_table"] == {}


@pytest.mark.parametrize("table", [[1], {"selection": {}}, {"selection": 3, "ranks": 8}])
def test_a_damaged_kept_choice_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: object
) -> None:
    monkeypatch.setenv("PYCOMM_CACHE_DIR", str(tmp_path))
    file = cache_files.cuda_file({"gpu": "a", "driver": "b", "nccl": "c"}, 1, 2)
    cache_files.save(file, cache_files.CUDA_FORMAT, table)
    with pytest.warns(RuntimeWarning, match="ignoring the selection cache"):
        assert json.loads(CliRunner().invoke(app, ["topo", "--json"]).stdout)["decision_tables"] == []


def test_this_machine() -> None:
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    command = [sys.executable, "-m", "pycomm.cli", "topo"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0 and shown.stderr == "", shown.stderr
    told = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, timeout=60)
    document = json.loads(told.stdout)
    assert document["host"] == platform.node() and shown.stdout.startswith(platform.node())
    assert document["cpu"]["online"] == Path("/sys/devices/system/cpu/online").read_text().strip()
    interfaces = {nic["name"] for nic in document["nics"]} | set(document["virtual"])
    assert interfaces == {entry.name for entry in Path("/sys/class/net").iterdir() if entry.is_dir()}
    gpus = document["gpus"]
    if gpus["devices"]:
        assert gpus["missing"] == "" and "GPU 0" in shown.stdout
    else:
        assert f"No GPUs are shown: {gpus['missing']}" in shown.stdout
    assert isinstance(document["decision_tables"], list)
    assert bool(document["built_in_table"]) == (_C.cuda.build() != "off")
