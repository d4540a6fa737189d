"""What nvcc says about a CUDA source: registers, spills and shared memory of every kernel.

No GPU is needed: `ptxas` reports it while it compiles. Occupancy follows from these numbers and the
limits of a multiprocessor (CUDA C++ Programming Guide, "Compute Capabilities").
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from reconcile.exceptions import BuildError
from reconcile.native import FLAGS, NativeLibrary, find_nvcc, run_compiler

ARCHITECTURES = ("sm_80", "sm_90")
"""GPU generations that are reported: A100 and H100."""
SHARED_BYTES = {"sm_80": 164 << 10, "sm_90": 228 << 10}
"""Shared memory of a multiprocessor."""
REGISTERS, WARPS, BLOCKS, WARP = 65536, 64, 32, 32
"""Limits of a multiprocessor of these generations."""
_FOR_A_LIBRARY = ("-arch=all-major", "-cudart", "static", "-Xcompiler", "-fPIC", "-shared")
_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(sm_\d+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resources of one kernel on one architecture."""

    kernel: str
    """The compiler's (mangled) name."""
    architecture: str
    registers: int
    """Per thread."""
    stack: int
    """Bytes per thread."""
    spill_stores: int
    """Bytes per thread; 0: every value stays in registers."""
    spill_loads: int
    shared: int
    """Static bytes per block."""

    def occupancy(self, threads: int) -> float:
        """Share of a multiprocessor's warps that can be resident with blocks of ``threads``."""
        warps = -(-threads // WARP)
        per_warp = -(-self.registers * WARP // 256) * 256  # allocated 256 at a time
        by_registers = REGISTERS // (per_warp * warps) if self.registers else BLOCKS
        shared = self.shared + 1024 if self.shared else 0  # 1 KB is the system's
        by_shared = SHARED_BYTES[self.architecture] // shared if shared else BLOCKS
        return min(BLOCKS, WARPS // warps, by_registers, by_shared) * warps / WARPS


def usage(library: NativeLibrary, architecture: str) -> tuple[Usage, ...]:
    """Compile the sources of a CUDA library for one architecture, and read the report.

    Raises:
        BuildError: no nvcc, or a source that does not compile.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError(f"{library.name}: {library.available().reason}")
    flags = [flag for flag in FLAGS["cuda"] if flag not in _FOR_A_LIBRARY]
    found: list[Usage] = []
    with tempfile.TemporaryDirectory() as folder:
        for source in library.sources:
            cubin = Path(folder) / f"{source.stem}.cubin"
            told = ("-cubin", f"-arch={architecture}", "-Xptxas", "-v", "-o", str(cubin))
            done = run_compiler((*nvcc, *flags, *library.flags, *told, str(source)), library.name)
            found += parse(done.stdout + done.stderr)
    return tuple(found)


def parse(text: str) -> list[Usage]:
    """The kernels of a report of ``ptxas -v``, by name."""
    found: dict[str, Usage] = {}
    name, architecture, spills = "", "", (0, 0, 0)
    for line in text.splitlines():
        if match := _ENTRY.search(line):
            name, architecture, spills = match[1], match[2], (0, 0, 0)
        elif match := _SPILLS.search(line):
            spills = (int(match[1]), int(match[2]), int(match[3]))
        elif name and (match := _USED.search(line)):
            shared = re.search(r"(\d+) bytes smem", line)
            found[name] = Usage(
                kernel=name,
                architecture=architecture,
                registers=int(match[1]),
                stack=spills[0],
                spill_stores=spills[1],
                spill_loads=spills[2],
                shared=int(shared[1]) if shared else 0,
            )
    return sorted(found.values(), key=lambda item: item.kernel)


def usage_text(found: tuple[Usage, ...], threads: int) -> str:
    """One line for each kernel."""
    return "\n".join(
        f"{item.architecture} {item.kernel}: {item.registers} registers, {item.stack} bytes stack, "
        f"spills {item.spill_stores}/{item.spill_loads} bytes (stores/loads), {item.shared} bytes "
        f"shared, occupancy {item.occupancy(threads):.0%} with {threads} threads a block"
        for item in found
    )
