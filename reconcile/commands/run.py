"""``reconcile run``: the main job."""

from __future__ import annotations

import argparse
from typing import Any

from reconcile.commands.common import (
    add_overrides,
    chosen_case,
    command,
    config_help,
    progress_bar,
    seed_argument,
)
from reconcile.commands.output import add_output, chosen_formats, finish
from reconcile.session import Session


def add(commands: Any) -> None:  # noqa: ANN401
    """Register the command."""
    parser = command(commands, "run", _run, "reconcile a case; without CONFIG, the default one")
    parser.add_argument("config", nargs="?", help=config_help())
    add_overrides(parser)
    parser.add_argument("--level", help="levels to run, e.g. op,module,model")
    parser.add_argument("--seed", type=seed_argument, help="seed of the random perturbations")
    parser.add_argument("--fail-fast", action="store_true", help="stop after the first bad level")
    add_output(parser)


def _run(options: argparse.Namespace) -> int:
    chosen_formats(options.format)
    case = chosen_case(options)
    session = Session(case)
    with progress_bar(case) as progress:
        report = session.run(
            only=options.only,
            fail_fast=options.fail_fast,
            command=options.command_line,
            progress=progress,
        )
    return finish(report, options, session.album)
