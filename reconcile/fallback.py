"""Whether a kernel's own code computed a result, or other code did in its place.

A candidate that ran the reference's code passes everything, so a fallback must never look like the
kernel. A kernel says it with `fell_back`; one that counts its launches is not asked to be believed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_SAID: ContextVar[list[str] | None] = ContextVar("reconcile_fallbacks", default=None)


def fell_back(reason: str) -> None:
    """Say that other code than the kernel computes the result of the call in progress.

    Cheap, and without effect outside a run of this package, so that a route may call it where it
    serves. The rows of the call become INCONCLUSIVE ``fell_back``, whatever its numbers are.
    """
    said = _SAID.get()
    if said is not None:
        said.append(reason)


class Watch:
    """What a kernel said and started during one call."""

    def __init__(self, kernel: object) -> None:
        """Count from now."""
        self.said: list[str] = []
        self._kernel = kernel
        self._before = self._launches()

    def _launches(self) -> int | None:
        count = getattr(self._kernel, "launches", None)
        return count if isinstance(count, int) else None

    @property
    def fallback(self) -> str:
        """Why the result is not the kernel's; empty where it is."""
        if self.said:
            return "; ".join(dict.fromkeys(self.said))
        if self._before is not None and self._launches() == self._before:
            return "the kernel's own count of launches did not rise: other code computed this"
        return ""


@contextmanager
def watching(kernel: object) -> Iterator[Watch]:
    """Collect what `fell_back` is told in the block, and whether ``kernel.launches`` rises."""
    watch = Watch(kernel)
    token = _SAID.set(watch.said)
    try:
        yield watch
    finally:
        _SAID.reset(token)
