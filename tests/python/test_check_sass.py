"""tools/check_sass.py finds what it looks for, in the words of cuobjdump."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "check_sass.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_sass", TOOL)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_sass"] = module
    spec.loader.exec_module(module)
    return module


LOAD = "        /*0150*/                   LDG.E.128 R8, desc[UR4][R2.64] ;"
STORE = "        /*0250*/                   STG.E.128 desc[UR4][R2.64], R8 ;"
NARROW = "        /*0150*/                   LDG.E.64 R8, desc[UR4][R2.64] ;"
NAME = "_ZN6pycomm4cuda13reduce_kernelINS0_7ProductINS0_7Float16EEELi2EEEvNS1_5TableE"


@pytest.mark.parametrize(
    ("change", "code", "fault"),
    [
        ({}, [LOAD, STORE], None),
        ({}, [NARROW, STORE], "no 128-bit load"),
        ({}, [LOAD], "no 128-bit store"),
        ({"stack": 8}, [LOAD, STORE], "spills: 8 bytes of stack, 0 of local memory"),
        ({"local": 4}, [LOAD, STORE], "spills: 0 bytes of stack, 4 of local memory"),
        ({"registers": 256}, [LOAD, STORE], "256 registers, at most 196 are allowed"),
        ({"registers": -1}, [LOAD, STORE], "cuobjdump shows no resources or no code"),
        ({}, [], "cuobjdump shows no resources or no code"),
    ],
)
def test_faults(tool: ModuleType, change: dict[str, int], code: list[str], fault: str | None) -> None:
    usage = {"registers": 40, "stack": 0, "local": 0, **change}
    kernel = tool.Kernel("sm_90", NAME, code=code, **usage)
    assert list(tool.faults(kernel)) == ([fault] if fault else [])


PEERS_CODE = [
    LOAD,
    STORE,
    "        /*0150*/                   LDG.E.64.STRONG.SYS R8, desc[UR4][R2.64] ;",
    "        /*0150*/                   CCTL.IVALL ;",
    "        /*0150*/                   MEMBAR.ALL.SYS ;",
    "        /*0150*/                   STG.E.64.STRONG.SYS desc[UR4][R2.64], R8 ;",
]


@pytest.mark.parametrize(
    ("left_out", "fault"),
    [
        ("LDG.E.64.STRONG", "no load of a flag with system scope"),
        ("STG.E.64.STRONG", "no store of a flag with system scope"),
        ("MEMBAR", "no fence of system scope"),
        ("CCTL", "no invalidation of the first-level cache"),
        ("nothing", None),
    ],
)
def test_peers_meet_with_system_scope(tool: ModuleType, left_out: str, fault: str | None) -> None:
    code = [line for line in PEERS_CODE if left_out not in line]
    kernel = tool.Kernel("sm_90", NAME.replace("13reduce", "18peer_reduce"), 40, 0, 0, code)
    assert list(tool.faults(kernel)) == ([fault] if fault else [])


def test_peers_read_nothing_as_if_it_never_changed(tool: ModuleType) -> None:
    code = [*PEERS_CODE, LOAD.replace("128", "128.CONSTANT")]
    kernel = tool.Kernel("sm_90", NAME.replace("13reduce", "18peer_reduce"), 40, 0, 0, code)
    assert list(tool.faults(kernel)) == ["a load through the cache for data that never changes"]


def test_a_cast_may_use_fewer_registers_than_a_reduction(tool: ModuleType) -> None:
    kernel = tool.Kernel("sm_90", NAME.replace("reduce", "cast"), 65, 0, 0, [LOAD, STORE])
    assert list(tool.faults(kernel)) == ["65 registers, at most 64 are allowed"]


def test_fused_multiply_adds_are_found_in_the_ptx(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ptx = """
.visible .entry sums(
\tadd.rn.f32 \t%f3, %f1, %f2;
.visible .entry contracts(
\tfma.rn.f32 \t%f4, %f1, %f2, %f3;
\tfma.rn.f32 \t%f5, %f1, %f2, %f3;
"""
    monkeypatch.setattr(tool, "cuobjdump", lambda: "cuobjdump")
    monkeypatch.setattr(tool, "dump", lambda _tool, _option, _file: iter(ptx.splitlines()))
    assert tool.fused_entries(Path("x")) == (2, ["contracts"])


def test_reads_cuobjdump(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = f"arch = sm_80\n Function {NAME}:\n  REG:72 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:3980"
    sass = f"arch = sm_80\n\t\tFunction : {NAME}\n\t.headerflags\n{LOAD}\n{STORE}\n"
    monkeypatch.setattr(tool, "cuobjdump", lambda: "cuobjdump")
    monkeypatch.setattr(
        tool, "dump", lambda _tool, option, _file: iter((usage if "usage" in option else sass).splitlines())
    )
    kernels = tool.read_kernels(Path("x"))
    kernel = kernels["sm_80", NAME]
    assert (kernel.registers, kernel.stack, kernel.local) == (72, 0, 0)
    assert list(tool.faults(kernel)) == []
