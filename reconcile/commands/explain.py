"""``reconcile explain``: one tap of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from reconcile.commands.common import command
from reconcile.commands.output import load_report
from reconcile.exceptions import ConfigError
from reconcile.explain import explain, explain_row
from reconcile.report import ExitCode
from reconcile.snapshots import load, run_again


def add(commands: Any) -> None:  # noqa: ANN401
    """Register the command."""
    parser = command(commands, "explain", _explain, "one tap of a run: limits, worst elements")
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="run directory")
    parser.add_argument("tap", nargs="?", metavar="TAP", help="module path, with or without :port")
    parser.add_argument(
        "--snapshot", type=Path, metavar="FILE", help="run a kept failing call again instead"
    )


def _explain(options: argparse.Namespace) -> int:
    if (options.snapshot is None) != (options.run is not None and options.tap is not None):
        raise ConfigError("explain needs RUN and TAP, or --snapshot FILE alone")
    if options.snapshot is not None:
        return _again(options.snapshot)
    report = load_report(options.run)
    print(explain(report, options.tap))
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
