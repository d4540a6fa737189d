"""The command line. Exit codes: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 bad input, 4 internal error."""

from __future__ import annotations

import argparse
import errno
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from reconcile.commands import (
    accept,
    bench,
    capture,
    compare,
    diff,
    explain,
    inspect,
    kernels,
    merge,
    report,
    run,
    selftest,
    snapshots,
    watch,
)
from reconcile.commands.printing import printing
from reconcile.exceptions import ReconcileError
from reconcile.report import ExitCode

COMMANDS = (
    run,
    inspect,
    watch,
    capture,
    compare,
    explain,
    report,
    diff,
    accept,
    merge,
    snapshots,
    kernels,
    bench,
    selftest,
)
"""Modules of the commands, in the order of ``--help``."""


_NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
"""What the system says of a place that cannot be written; no fault of the tool."""
_PLACES = "free or choose other places: --out, RECONCILE_CACHE, TMPDIR"


class _Parser(argparse.ArgumentParser):
    """argparse whose usage errors are bad input (3), not its own exit code 2."""

    def error(self, message: str) -> NoReturn:
        _say(f"{self.format_usage()}{self.prog}: {message}")
        raise SystemExit(ExitCode.BAD_INPUT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    options.command_line = shlex.join(["reconcile", *(arguments or sys.argv[1:])])
    try:
        with printing(follow=options.command == "watch"):
            code: int = options.handler(options)
    except ReconcileError as error:
        if options.debug:
            traceback.print_exc()
        _say(f"reconcile: {error}")
        return ExitCode.BAD_INPUT
    except KeyboardInterrupt:
        _say("reconcile: interrupted; nothing was reported")
        return ExitCode.INTERNAL
    except BrokenPipeError:  # of a command that follows files: nobody reads it any more
        return ExitCode.INTERNAL
    except BaseException as error:  # noqa: BLE001 - the last line of defence: 4, not 1 or 0
        if options.debug:
            traceback.print_exc()
        if isinstance(error, OSError) and error.errno in _NO_PLACE:
            _say(f"reconcile: cannot write{_at(error)}: {error.strerror}; {_PLACES}")
            return ExitCode.BAD_INPUT
        _say(f"reconcile: internal error: {type(error).__name__}: {error} (--debug shows where)")
        return ExitCode.INTERNAL
    return code


def _at(error: OSError) -> str:
    return "" if error.filename is None else f" {error.filename}"


def _say(text: str) -> None:
    """Print to standard error; where nobody reads it any more, the exit code still stands."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _version() -> str:
    try:
        return version("reconcile-numerics")
    except PackageNotFoundError:
        return "(not installed)"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="reconcile",
        description=(
            "Layer-by-layer numerical reconciliation of quantised kernels against a PyTorch "
            "reference."
        ),
        epilog="Exit codes: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 bad input, 4 internal error.",
    )
    parser.add_argument("--version", action="version", version=f"reconcile {_version()}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    return parser
