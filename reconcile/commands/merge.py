"""``reconcile merge``: one report from runs on several machines."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from reconcile.commands.common import command
from reconcile.commands.output import add_output, check_output, finish, load_report
from reconcile.gate.merge import merge


def add(commands: Any) -> None:  # noqa: ANN401
    """Register the command."""
    parser = command(
        commands,
        "merge",
        _merge,
        "one report from runs on several machines; not PASS where a required kernel ran nowhere",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run directories")
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="KERNEL[@ENGINE]",
        help="must have run somewhere, besides what the case requires; may be repeated",
    )
    add_output(parser)


def _merge(options: argparse.Namespace) -> int:
    check_output(options)
    return finish(merge([load_report(path) for path in options.runs], options.require), options)
