"""``reconcile accept``: keep a run's errors as the accepted ones."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from reconcile.commands.common import command, path_argument
from reconcile.commands.output import load_report
from reconcile.gate import accepted
from reconcile.report import ExitCode


def add(commands: Any) -> None:  # noqa: ANN401
    """Register the command."""
    parser = command(
        commands, "accept", _accept, "keep a run's errors: later runs may not be worse (ratchet)"
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--why", required=True, metavar="TEXT", help="the reason; mandatory")
    parser.add_argument(
        "-o",
        "--output",
        type=path_argument,
        metavar="FILE",
        help="default: CASE.accepted.json; the case names it as [gate] accepted",
    )


def _accept(options: argparse.Namespace) -> int:
    found = accepted.accept(load_report(options.run), options.why)
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", found.case).strip(".-") or "case"
    path = options.output or Path(f"{safe}.accepted.json")
    accepted.save(found, path)
    print(f"errors of {len(found.rows)} rows accepted: {path}")
    return ExitCode.PASS
