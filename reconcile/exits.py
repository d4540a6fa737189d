"""A kernel may not end the program: the exit code is the verdict's, not the kernel's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from reconcile.exceptions import KernelError


@contextmanager
def exits_refused() -> Iterator[None]:
    """Turn ``sys.exit`` of a kernel's own code into an error; usable as a decorator.

    What a kernel does in ``prepare`` and ``apply`` is judged; this is for everything else that is
    asked of it (``engines``, ``contract``, ``can_implement``, ...). ``sys.exit(0)`` there would
    end a run with the code of a PASS and without a report.

    Raises:
        KernelError: in place of SystemExit.
    """
    try:
        yield
    except SystemExit as stop:
        raise KernelError(
            f"the kernel called sys.exit({stop.code!r}): it must return or raise, the exit code "
            "of a run is its verdict's"
        ) from stop
