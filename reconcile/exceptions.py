"""Errors that the user can mend; every one ends the command line with exit code 3.

A message says what was expected, what came, where, and what to do. Anything else that
escapes is an internal error (exit code 4).
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ReconcileError(Exception):
    """Bad input or configuration."""


class ConfigError(ReconcileError):
    """A case file or an option that cannot be used."""


class ContractError(ConfigError, ValueError):
    """A contract that promises something no bound is known for."""


class CheckpointError(ReconcileError):
    """A checkpoint that is missing, truncated, incomplete or not what its config declares."""


class FormatError(ReconcileError):
    """Codes, scales or shapes that do not fit their declared number format."""


class KernelError(ReconcileError):
    """A kernel that is not known, cannot be loaded or does not run on this machine."""


class BuildError(KernelError):
    """A native source that did not compile."""


class TapError(ReconcileError):
    """A tap that names no module or port of the model, or that never fired."""


class TraceError(ReconcileError):
    """A trace that is incomplete, unreadable, or of another model."""


LONG = 320
"""Characters of a list of names that are still read; of a longer list the nearest are shown."""
NEAREST = 4
"""Names that are shown of a longer list."""


def nearest(name: str, known: Iterable[str], how: str = "") -> str:
    """The hint that ends an unknown-name message: the nearest known name, and all or some of them.

    Args:
        name: what is not known.
        known: the names that are; all are listed where they are few.
        how: how to list all, said where they are many.

    >>> nearest("kernal", ["kernel", "engine"])
    'did you mean "kernel"? Known: engine, kernel'
    >>> nearest("x", [])
    'none is known'
    >>> nearest("l7.dwn", [f"l{n}.{part}" for n in range(99) for part in ("up", "down")], "see x")
    'did you mean "l7.down"? Near it, of 198: l97.down, l87.down, l79.down; see x'
    """
    names = sorted(known)
    if not names:
        return "none is known"
    close = get_close_matches(name, names, n=1)
    hint = f'did you mean "{close[0]}"? ' if close else ""
    if len(listed := ", ".join(names)) <= LONG:
        return f"{hint}Known: {listed}"
    similar = [n for n in get_close_matches(name, names, n=NEAREST, cutoff=0.0) if n not in close]
    what = "Near it, of" if close else "Nearest of"
    return f"{hint}{what} {len(names)}: {', '.join(similar)}{f'; {how}' if how else ''}"
