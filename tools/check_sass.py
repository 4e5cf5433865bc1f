"""Fails when the machine code of the CUDA kernels is not what their sources promise; no GPU is needed.

For every kernel and architecture in FILE (an object or a library; build/*/libpycomm_cuda.a has all), from
NVIDIA's cuobjdump:

- no spills: no local memory and no stack (STACK and LOCAL of the resource usage are 0)
- registers at most what __launch_bounds__ leaves for the blocks that it names
- 128-bit loads and stores of global memory in every kernel that streams tensors
- in kernels that wait for peers: flags are read and written with system scope, there is a fence of that scope
  and an invalidation of the first-level cache, and nothing is read as if it never changed
- no fused multiply-add of numbers: the sources round twice (docs/numerics.md). Looked for in the PTX, where a
  division is still one instruction; in machine code it is made of fused steps

Run: python tools/check_sass.py FILE. Prints a line per fault and exits with 1; with 2 when FILE holds no
kernel or cuobjdump is missing (`pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`, or CUDA_HOME).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
MAX_BYTES = 10 << 20
"""Of the whole FILE."""

MAX_REGISTERS = {
    "reduce_kernel": 196,
    "cast_kernel": 64,
    "copy_kernel": 64,
    "encode_kernel": 80,
    "decode_kernel": 64,
}
"""65,536 registers a multiprocessor, 256 threads a block: 64 leave room for 4 blocks, 80 for 3. The sums of
training hold all that they load in registers: one block, and 196 are what nvcc 13.0 takes."""
MAX_REGISTERS_ELSE = 128
"""Blocks of kernels that wait for peers have 512 threads, one block a multiprocessor."""

STREAMS = (
    "reduce_kernel",
    "cast_kernel",
    "copy_kernel",
    "norm_kernel",
    "encode_kernel",
    "decode_kernel",
    "decode_reduce_kernel",
    "peer_reduce_kernel",
    "peer_copy_kernel",
)
PEERS = ("peer_reduce_kernel", "peer_copy_kernel")
READS_ONLY = ("norm_kernel",)
READS_CODES = ("decode_kernel",)
"""A lane reads the codes of the 16 bytes that it writes: 4 or 8 bytes."""
WIDE_LOAD = re.compile(r"\bLDG?\.E\.(?:\w+\.)*128\b")
WIDE_STORE = re.compile(r"\bSTG?\.E\.(?:\w+\.)*128\b")
NEEDED_BY_PEERS = {
    "load of a flag with system scope": re.compile(r"\bLDG?\.E\.64\.STRONG\.SYS\b"),
    "store of a flag with system scope": re.compile(r"\bSTG?\.E\.64\.STRONG\.SYS\b"),
    "fence of system scope": re.compile(r"\bMEMBAR\.(?:SC|ALL)\.SYS\b"),
    "invalidation of the first-level cache": re.compile(r"\bCCTL\.IVALL\b"),
}
NEVER_CHANGES = re.compile(r"\bLDG?\.E\.(?:\w+\.)*CONSTANT\b")
FUSED = re.compile(r"\bfma\.")

USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
ARCH = re.compile(r"^arch = (sm_\d+)")


@dataclass
class Kernel:
    """What cuobjdump says of one kernel for one architecture."""

    arch: str
    name: str
    registers: int = -1
    stack: int = -1
    local: int = -1
    code: list[str] = field(default_factory=list)


def cuobjdump() -> str:
    """The tool's path, from CUDA_HOME, PATH, or the wheel nvidia-cuda-cuobjdump of this Python."""
    places = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places += Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin")
    if path := shutil.which(
        "cuobjdump", path=os.pathsep.join(map(str, [*places, os.environ.get("PATH", "")]))
    ):
        return path
    print(
        "check_sass: cuobjdump was not found: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm (which "
        "it calls), or set CUDA_HOME",
        file=sys.stderr,
    )
    raise SystemExit(2)


def dump(tool: str, option: str, file: Path) -> Iterator[str]:
    done = subprocess.run([tool, option, str(file)], capture_output=True, text=True)
    if done.returncode:
        print(f"check_sass: cuobjdump {option} {file}: {done.stderr.strip()}", file=sys.stderr)
        raise SystemExit(2)
    yield from done.stdout.splitlines()


def read_kernels(file: Path) -> dict[tuple[str, str], Kernel]:
    """All kernels in the file, by architecture and mangled name."""
    tool = cuobjdump()
    kernels: dict[tuple[str, str], Kernel] = {}
    arch, current = "", None
    for line in dump(tool, "--dump-resource-usage", file):
        if match := ARCH.match(line):
            arch = match[1]
        elif match := re.match(r"\s*Function\s+(\S+?):$", line):
            current = kernels.setdefault((arch, match[1]), Kernel(arch, match[1]))
        elif current and (match := USAGE.search(line)):
            current.registers, current.stack, current.local = int(match[1]), int(match[2]), int(match[4])
            current = None
    current = None
    for line in dump(tool, "--dump-sass", file):
        if match := ARCH.match(line):
            arch, current = match[1], None
        elif match := re.match(r"\s*Function\s*:\s*(\S+)$", line):
            current = kernels.setdefault((arch, match[1]), Kernel(arch, match[1]))
        elif current:
            current.code.append(line)
    return kernels


def faults(kernel: Kernel) -> Iterator[str]:
    """What is wrong with one kernel, in words."""
    kind = next((k for k in STREAMS if re.search(rf"\d{k}", kernel.name)), "")
    code = "\n".join(kernel.code)
    if kernel.registers < 0 or not kernel.code:
        yield "cuobjdump shows no resources or no code"
        return
    if kernel.stack or kernel.local:
        yield f"spills: {kernel.stack} bytes of stack, {kernel.local} of local memory"
    if kernel.registers > (limit := MAX_REGISTERS.get(kind, MAX_REGISTERS_ELSE)):
        yield f"{kernel.registers} registers, at most {limit} are allowed"
    if kind and kind not in READS_CODES and not WIDE_LOAD.search(code):
        yield "no 128-bit load"
    if kind and kind not in READS_ONLY and not WIDE_STORE.search(code):
        yield "no 128-bit store"
    if kind in PEERS:
        yield from (f"no {what}" for what, pattern in NEEDED_BY_PEERS.items() if not pattern.search(code))
        if NEVER_CHANGES.search(code):
            yield "a load through the cache for data that never changes"


def fused_entries(file: Path) -> tuple[int, list[str]]:
    """How many kernels the PTX in the file has, and those with a fused multiply-add."""
    n_entries, fused = 0, []
    for line in dump(cuobjdump(), "--dump-ptx", file):
        if match := re.search(r"\.entry\s+(\w+)", line):
            n_entries += 1
            name = match[1]
        elif n_entries and FUSED.search(line) and name not in fused:
            fused.append(name)
    return n_entries, fused


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: check_sass.py FILE", file=sys.stderr)
        return 2
    file = Path(sys.argv[1])
    kernels = read_kernels(file)
    if not kernels:
        print(f"check_sass: {file} holds no CUDA kernel (was it built with PYCOMM_CUDA=on?)", file=sys.stderr)
        return 2
    wrong = 0
    found = {
        arch: [k for k in kernels.values() if k.arch == arch]
        for arch in sorted({k.arch for k in kernels.values()})
    }
    for arch in ARCHITECTURES:
        if arch not in found:
            print(f"{arch}: no kernel for it; there are: {', '.join(found)}")
            wrong += 1
    for kernel in kernels.values():
        for fault in faults(kernel):
            print(f"{kernel.arch} {kernel.name}: {fault}")
            wrong += 1
    n_entries, fused = fused_entries(file)
    if not n_entries:
        print(f"{file}: no PTX to look for fused multiply-adds in")
        wrong += 1
    for name in fused:
        print(f"{name}: a fused multiply-add")
        wrong += 1
    if (size := file.stat().st_size) > MAX_BYTES:
        print(f"{file}: {size / 2**20:.1f} MiB, at most {MAX_BYTES / 2**20:.0f} are allowed")
        wrong += 1
    for arch, of_arch in found.items():
        most = max(of_arch, key=lambda k: k.registers)
        print(f"{arch}: {len(of_arch)} kernels, at most {most.registers} registers")
    print(
        f"{file.name}: {size / 2**20:.1f} MiB; {wrong} faults"
        if wrong
        else f"{file.name}: {size / 2**20:.1f} MiB, all as promised"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
