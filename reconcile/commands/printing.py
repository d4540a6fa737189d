"""Standard output that a verdict does not depend on: no reader, no characters, no exception.

A reader that has seen enough (``| head``) closes the pipe, and a terminal may lack a character of
a module's name. Neither is a fault of the tool, so the exit code stays that of the verdict.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class _Stream:
    """A text stream that swallows what nobody reads; everything else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write; after the reader is gone, nowhere."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._to_nowhere()
            return len(text)

    def flush(self) -> None:
        """Flush; after the reader is gone, nowhere."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._to_nowhere()

    def _to_nowhere(self) -> None:
        """The descriptor too: the interpreter flushes it once more at its end."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def printing(*, follow: bool = False) -> Iterator[None]:
    """Print safely inside; ``follow``: a closed pipe is raised, for what would run on for ever."""
    before = sys.stdout
    if hasattr(before, "reconfigure"):
        before.reconfigure(errors="backslashreplace")
    if not follow:
        sys.stdout = _Stream(before)
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = before
