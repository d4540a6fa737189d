"""What this machine's processor and operating system let a program use."""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

from reconcile.exceptions import BuildError
from reconcile.kernel import Support
from reconcile.native import NativeLibrary

AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512_vbmi", "fma", "avx512_bf16", "zmm registers")
"""What engine ``avx512_bf16`` needs, named as in /proc/cpuinfo; the last is the system's part."""
AMX = ("amx_tile", "amx_bf16", "tile registers")
"""What engine ``amx`` needs besides."""

_FOLDER = Path(__file__).parent
LIBRARY = NativeLibrary(
    name="amx_fp8-cpu", sources=(_FOLDER / "cpu.cpp",), headers=(_FOLDER / "cpu.h",)
)


def missing(wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Those of ``wanted`` that this machine lacks."""
    present = dict(zip((*AVX512, *AMX), _bits(), strict=True))
    return tuple(name for name in wanted if not present[name])


@functools.cache
def _bits() -> tuple[bool, ...]:
    bits = LIBRARY.load().reconcile_cpu_features()
    return tuple(bool(bits >> place & 1) for place in range(len(AVX512) + len(AMX)))


def avx512_bf16() -> Support:
    """Whether the vector instructions of the kernel run here."""
    return _support(AVX512, "AVX-512 with BF16 and VBMI")


def amx() -> Support:
    """Whether the tiles are real: CPUID has them, the system saves them, and gives them to us.

    Asks Linux for the permission to use them (``arch_prctl``), which a process needs once.
    """
    support = _support((*AVX512, *AMX), "AMX with BF16")
    if not support:
        return support
    error = LIBRARY.load().reconcile_cpu_request_tiles()
    if error:
        return Support(
            False,
            f"the processor has AMX, but the system refuses its tiles: {os.strerror(error)} "
            "(arch_prctl ARCH_REQ_XCOMP_PERM)",
        )
    return support


def _support(wanted: tuple[str, ...], what: str) -> Support:
    here = (platform.system(), platform.machine())
    if here != ("Linux", "x86_64"):
        return Support(False, f"needs Linux on x86_64, this is {' on '.join(here)}")
    compiler = LIBRARY.available()
    if not compiler:
        return compiler
    try:
        lacking = missing(wanted)
    except BuildError as error:
        return Support(False, str(error))
    if lacking:
        return Support(False, f"this processor has no {what}: it lacks {', '.join(lacking)}")
    return Support(True, f"{what}; {compiler.reason}")
