"""What the processor can do, as Linux reports it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def lacking(wanted: Iterable[str]) -> tuple[str, ...]:
    """Those of ``wanted`` that the processor does not have; all of them where nothing is said."""
    have = _flags(CPUINFO)
    return tuple(name for name in wanted if name not in have)


@functools.cache
def _flags(source: Path) -> frozenset[str]:
    """Names of the instruction sets of the first processor; empty where Linux does not say."""
    try:
        text = source.read_text(errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()
