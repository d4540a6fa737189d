"""``reconcile capture``: the trace of one side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from reconcile.capture.candidate import capture_candidate
from reconcile.capture.plan import Plan
from reconcile.capture.reference import capture_reference
from reconcile.capture.threads import few_threads
from reconcile.case import Case
from reconcile.commands.common import (
    add_choices,
    add_overrides,
    chosen_case,
    command,
    config_help,
    path_argument,
    progress_bar,
)
from reconcile.exceptions import ConfigError
from reconcile.report import ExitCode
from reconcile.session import Session, keep_diagnoses
from reconcile.tracing.trace import Trace


def add(commands: Any) -> None:  # noqa: ANN401
    """Register the command."""
    parser = command(commands, "capture", _capture, "write the trace of one side")
    parser.add_argument("config", help=config_help())
    parser.add_argument("--side", required=True, choices=("reference", "candidate"))
    parser.add_argument("--inputs", type=Path, metavar="REF", help="the reference's trace")
    parser.add_argument("-o", "--output", type=path_argument, required=True, help="trace directory")
    parser.add_argument("--candidate", help="which candidate, where the case has several")
    add_overrides(parser)
    add_choices(parser)


def _capture(options: argparse.Namespace) -> int:
    case = chosen_case(options)
    if options.side == "candidate" and options.inputs is None:
        raise ConfigError("capture --side candidate needs --inputs REF, the reference's trace")
    if options.side == "reference" and options.inputs is not None:
        raise ConfigError("capture --side reference takes no --inputs")
    if (options.output / "manifest.json").exists():
        raise ConfigError(f"{options.output} already holds a trace; give another directory")
    plan = _one_plan(case, options)
    with progress_bar(case) as progress, few_threads(plan.size):
        if options.side == "reference":
            trace = capture_reference(plan, options.command_line, progress)
        else:
            reference = Trace.load(options.inputs)
            trace = capture_candidate(plan, reference, options.command_line, progress)
            if plan.engine is not None:
                keep_diagnoses(plan, reference, trace)
    trace.save(options.output)
    print(f"{options.side} trace of {len(trace.passes)} passes: {options.output}")
    if plan.engine is None and options.side == "candidate":
        print(f"the kernel did not run here: {plan.not_run}", file=sys.stderr)
        return ExitCode.INCONCLUSIVE
    return ExitCode.PASS


def _one_plan(case: Case, options: argparse.Namespace) -> Plan:
    found = Session(case).plans(case, options.only, options.candidate)
    if len(found) > 1:
        names = ", ".join(plan.config.name for plan in found)
        raise ConfigError(f"the case has several candidates: choose one with --candidate: {names}")
    return found[0]
