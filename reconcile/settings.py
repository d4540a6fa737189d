"""Settings of the process that decide about everybody's numbers; a kernel must leave them alone.

A kernel that has the processor flush subnormals, or loads a library that does, changes the
arithmetic of the reference that judges it, and so passes where it should not.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_ONE, _HALF, _ULP = 1.0, 0.5, sys.float_info.epsilon
"""Operands of the probes below; constant expressions would be folded by the compiler."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of the process."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


def _subnormals() -> str:
    return "kept" if sys.float_info.min * _HALF > 0 else "flushed to zero"


def _rounding() -> str:
    """How the processor rounds, from the sums of 1 and parts of an ulp."""
    above, below = _ONE + 0.75 * _ULP, _ONE + 0.25 * _ULP
    if above == _ONE:
        return "toward zero" if -_ONE - 0.75 * _ULP == -_ONE else "down"
    return "to nearest" if below == _ONE else "up"


def _set_rounding(name: str) -> None:
    """Back to nearest, whose code is 0 everywhere (C99's fesetround)."""
    if name == "to nearest":
        ctypes.CDLL(None).fesetround(0)


_ARITHMETIC = (
    Setting(
        "what the processor does with subnormals",
        _subnormals,
        lambda name: torch.set_flush_denormal(name != "kept"),
    ),
    Setting("how the processor rounds", _rounding, _set_rounding),
)
SETTINGS = (
    Setting("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting(
        "torch's float32 matmul precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    *_ARITHMETIC,
)


@contextmanager
def own_arithmetic() -> Iterator[None]:
    """Subnormals kept and rounding to nearest in the block, whatever was left behind by others.

    A library that was compiled for speed may change both when it is loaded; the reference must
    not be computed so.
    """
    before = [setting.read() for setting in _ARITHMETIC]
    for setting, wanted in zip(_ARITHMETIC, ("kept", "to nearest"), strict=True):
        if setting.read() != wanted:
            setting.write(wanted)
    try:
        yield
    finally:
        for setting, was in zip(_ARITHMETIC, before, strict=True):
            if setting.read() != was:
                setting.write(was)


@contextmanager
def settings_kept() -> Iterator[list[str]]:
    """Undo changes of the settings when the block ends, also by an exception.

    Yields:
        a list that says, after the block, what had been changed.
    """
    before = [setting.read() for setting in SETTINGS]
    changed: list[str] = []
    try:
        yield changed
    finally:
        for setting, was in zip(SETTINGS, before, strict=True):
            if (now := setting.read()) != was:
                changed.append(f"changed {setting.name} from {was} to {now} for everybody")
                setting.write(was)
