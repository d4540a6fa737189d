"""``reconcile explain``: one tap of a run, what explains it, and a call that reproduces it."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

import torch

from reconcile.commands import run
from reconcile.commands.common import chosen_case, command, path_argument
from reconcile.commands.output import load_report
from reconcile.diagnosis.linear import Failure
from reconcile.diagnosis.reproducer import write_reproducer
from reconcile.exceptions import ConfigError
from reconcile.explain import explain, explain_row, taps
from reconcile.gate.snapshots import load, run_again
from reconcile.grouped import GroupedWeight
from reconcile.replay import Prepared
from reconcile.report import ExitCode, Level, Report, Row, Verdict
from reconcile.session import Session
from reconcile.tracing.trace import Tap


def add(commands: Any) -> None:  # noqa: ANN401
    """Register the command."""
    parser = command(commands, "explain", _explain, "one tap of a run: causes, limits, elements")
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="run directory")
    parser.add_argument(
        "tap",
        nargs="?",
        metavar="TAP",
        help="module path, with or without :port; without it: lists every tap",
    )
    parser.add_argument(
        "--snapshot", type=Path, metavar="FILE", help="run a kept failing call again instead"
    )
    parser.add_argument(
        "--reproducer",
        type=path_argument,
        metavar="DIR",
        help="write the smallest failing call of the op: one script and one safetensors file",
    )


def _explain(options: argparse.Namespace) -> int:
    if (options.snapshot is None) != (options.run is not None):
        raise ConfigError("explain needs RUN and TAP, or --snapshot FILE alone")
    if options.snapshot is not None:
        return _again(options.snapshot)
    report = load_report(options.run)
    if options.tap is None:
        if options.reproducer is not None:
            raise ConfigError("--reproducer needs RUN and TAP: the failing op to reproduce")
        print(taps(report))
        return ExitCode.PASS
    print(explain(report, options.tap))
    if options.reproducer is not None:
        print(f"reproducer: {_reproduce(report, options.tap, options.reproducer)}")
    return ExitCode.PASS


def _again(path: Path) -> int:
    """Run a kept call again; the exit code is that of the verdict now."""
    snapshot = load(path)
    report, same = run_again(snapshot)
    facts = snapshot.facts
    print(f"{facts.tap} {facts.check}, {facts.kernel} on {facts.engine}, kept {facts.created}")
    print(f"then: {facts.text}")
    print(f"now:  {report.verdict.value}; the output has {'' if same else 'not '}the bits kept")
    print("\n\n".join(explain_row(row) for row in report.rows))
    return report.exit_code


def _reproduce(report: Report, tap: str, directory: Path) -> Path:
    """Load the case that the report's command names, and shrink the op's failing call."""
    row = _failing(report, tap)
    options = _overrides(report.command)
    if options.kernel:  # the row has the whole path: the command's may start from elsewhere
        options.kernel = row.kernel
    case = chosen_case(options)
    module = Tap.parse(row.tap).module
    plans = Session(case).plans(case)
    plan = next((p for p in plans if row.kernel in (p.config.kernel, p.kernel.name)), None)
    if plan is None:
        kernels = ", ".join(p.config.kernel for p in plans)
        raise ConfigError(f"the run's kernel {row.kernel} is none of the case's now: {kernels}")
    weight = plan.checkpoint.weights[module]
    if isinstance(weight, GroupedWeight) or plan.engine is None:
        raise ConfigError(f"{module}: a reproducer is written for a plain linear that runs here")
    kernel, engine = plan.kernel, plan.engine
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(max(1, row.shape[0]), weight.shape[1], generator=generator).to(plan.dtype)
    failure = Failure(
        weight=weight,
        contract=plan.arithmetic,
        x=rows,
        y=rows,
        prepare=lambda given: Prepared.attempt(kernel, engine, given, plan.dtype),
    )
    return write_reproducer(failure, plan.config.kernel, engine.name, directory)


def _failing(report: Report, tap: str) -> Row:
    for row in report.rows:
        named = tap in (row.tap, row.tap.partition(":")[0])
        if named and row.level is Level.OP and row.verdict is Verdict.FAIL and row.shape:
            return row
    raise ConfigError(f"{tap}: no op fails there; a reproducer is of one failing op")


def _overrides(line: str) -> argparse.Namespace:
    """Case, kernel and engine of the command that wrote the report."""
    words = shlex.split(line)
    if words[:2] != ["reconcile", "run"]:
        raise ConfigError(f"the report was not written by `reconcile run` but by {line!r}")
    parser = argparse.ArgumentParser(add_help=False)
    run.add(parser.add_subparsers())
    return parser.parse_args(words[1:])
