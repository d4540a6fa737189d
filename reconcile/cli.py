"""The command line. Exit codes: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 bad input, 4 internal error."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
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


class _Parser(argparse.ArgumentParser):
    """argparse whose usage errors are bad input (3), not its own exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(ExitCode.BAD_INPUT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    options.command_line = shlex.join(["reconcile", *(arguments or sys.argv[1:])])
    try:
        code: int = options.handler(options)
    except ReconcileError as error:
        if options.debug:
            traceback.print_exc()
        _say(f"reconcile: {error}")
        return ExitCode.BAD_INPUT
    except KeyboardInterrupt:
        _say("reconcile: interrupted; nothing was reported")
        return ExitCode.INTERNAL
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.INTERNAL
    except BaseException as error:  # noqa: BLE001 - the last line of defence: 4, not 1 or 0
        if options.debug:
            traceback.print_exc()
        _say(f"reconcile: internal error: {type(error).__name__}: {error} (--debug shows where)")
        return ExitCode.INTERNAL
    return code


def _say(text: str) -> None:
    """Print to standard error; where nobody reads it any more, the exit code still stands."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="reconcile",
        description=(
            "Layer-by-layer numerical reconciliation of quantised kernels against a PyTorch "
            "reference."
        ),
        epilog="Exit codes: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 bad input, 4 internal error.",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    return parser
