"""``reconcile explain``: one tap of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from reconcile.commands.common import command
from reconcile.commands.output import load_report
from reconcile.explain import explain
from reconcile.report import ExitCode


def add(commands: Any) -> None:  # noqa: ANN401
    """Register the command."""
    parser = command(commands, "explain", _explain, "one tap of a run: limits, worst elements")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("tap", metavar="TAP", help="module path, with or without :port")


def _explain(options: argparse.Namespace) -> int:
    report = load_report(options.run)
    print(explain(report, options.tap))
    return ExitCode.PASS
