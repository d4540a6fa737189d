"""``reconcile run``: the main job."""

from __future__ import annotations

import argparse
from typing import Any

from reconcile.commands.common import (
    add_choices,
    add_overrides,
    chosen_case,
    command,
    config_help,
    progress_bar,
)
from reconcile.commands.output import add_output, check_output, finish, forget
from reconcile.report import ExitCode
from reconcile.session import Session


def add(commands: Any) -> None:  # noqa: ANN401
    """Register the command."""
    parser = command(commands, "run", _run, "reconcile a case; without CONFIG, the default one")
    parser.add_argument("config", nargs="?", help=config_help())
    add_overrides(parser)
    add_choices(parser)
    parser.add_argument("--fail-fast", action="store_true", help="stop after the first bad level")
    parser.add_argument(
        "--list", action="store_true", help="print the modules that would be compared, and end"
    )
    add_output(parser)


def _run(options: argparse.Namespace) -> int:
    check_output(options)
    case = chosen_case(options)
    session = Session(case)
    if options.list:
        return _list(session, options.only)
    if options.out:
        forget(options.out)
    with progress_bar(case) as progress:
        report = session.run(
            only=options.only,
            fail_fast=options.fail_fast,
            command=options.command_line,
            progress=progress,
        )
    return finish(report, options, session.album)


def _list(session: Session, only: str) -> int:
    """Print each candidate's modules: what ``--only`` is matched with, and what it leaves."""
    for plan in session.plans(session.case, only):
        of = len(plan.checkpoint.weights)
        print(f"{plan.config.name}: {len(plan.modules)} of {of} modules with a weight to judge")
        print("\n".join(f"  {module}" for module in plan.modules))
    return ExitCode.PASS
