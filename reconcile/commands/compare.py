"""``reconcile compare``: a report from traces; needs no kernel."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from reconcile.commands.common import command
from reconcile.commands.output import add_output, check_output, finish
from reconcile.session import compare_traces
from reconcile.tracing.trace import Trace


def add(commands: Any) -> None:  # noqa: ANN401
    """Register the command."""
    parser = command(commands, "compare", _compare, "report from traces; needs no kernel")
    parser.add_argument("reference", type=Path, metavar="REF")
    parser.add_argument("candidates", type=Path, nargs="+", metavar="CAND")
    add_output(parser)


def _compare(options: argparse.Namespace) -> int:
    check_output(options)
    reference = Trace.load(options.reference)
    candidates = [Trace.load(path) for path in options.candidates]
    return finish(compare_traces(reference, candidates, options.command_line), options)
