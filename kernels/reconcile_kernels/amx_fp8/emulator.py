"""The emulator of tile instructions: installed on request, counted, and taken away again."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reconcile.exceptions import KernelError
from reconcile.kernel import Support
from reconcile.native import NativeLibrary
from reconcile_kernels.amx_fp8 import features

KINDS = ("ldtilecfg", "sttilecfg", "tilerelease", "tilezero", "tileload", "tilestore", "tdpbf16ps")
"""What it executes and counts; ``tileload`` is TILELOADD and TILELOADDT1."""

_FOLDER = Path(__file__).parent
LIBRARY = NativeLibrary(
    name="tile_emulator",
    sources=(_FOLDER / "tile_emulator.cpp",),
    headers=(_FOLDER / "cpu.h",),
    flags=("-mavx512f", "-mfma", "-pthread"),
)


def supported() -> Support:
    """Whether tiles can be, and need to be, emulated here."""
    if features.amx():
        return Support(False, "AMX is real here: nothing is emulated")
    support = features.avx512_bf16()
    if not support:
        return support
    return Support(True, f"tile instructions are executed by software; {support.reason}")


class _Users:
    """How many are inside; the handler is process-wide and goes when the last one leaves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def enter(self) -> None:
        with self._lock:
            if self._count == 0:
                status = _library().tile_emulator_install()
                if status:
                    reason = "AMX is real here" if status == 1 else "SIGILL cannot be taken"
                    raise KernelError(f"the tile emulator was not installed: {reason}")
            self._count += 1

    def leave(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0 and _library().tile_emulator_remove():
                raise KernelError(
                    "the tile emulator cannot be removed: another SIGILL handler was installed "
                    "above it and must be removed first"
                )


_USERS = _Users()


@contextmanager
def emulated_tiles() -> Iterator[None]:
    """Tile instructions run inside, on every thread; outside they end the process as before.

    May be nested and used by several threads at once.

    Raises:
        KernelError: the tiles are real here, or another handler lies above ours on leaving.
    """
    _USERS.enter()
    try:
        yield
    finally:
        _USERS.leave()


def executed() -> dict[str, int]:
    """Instructions that the emulator has executed in this process so far, by name."""
    counts = (ctypes.c_uint64 * len(KINDS))()
    known = _library().tile_emulator_counts(counts)
    assert known == len(KINDS)
    return dict(zip(KINDS, counts, strict=True))


@functools.cache
def _library() -> ctypes.CDLL:
    return LIBRARY.load()
