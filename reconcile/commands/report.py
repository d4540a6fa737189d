"""``reconcile report``: render a run's report again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from reconcile.commands.common import command
from reconcile.commands.output import FORMATS, chosen_formats, load_report, write_report


def add(commands: Any) -> None:  # noqa: ANN401
    """Register the command."""
    parser = command(commands, "report", _report, "render a run's report again")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--format", default=",".join(FORMATS), help="html,json,junit,markdown")


def _report(options: argparse.Namespace) -> int:
    report = load_report(options.run)
    directory = options.run.parent if options.run.is_file() else options.run
    written = write_report(report, directory, chosen_formats(options.format))
    print("\n".join(str(path) for path in written))
    return report.exit_code
