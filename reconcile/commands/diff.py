"""``reconcile diff``: what a change did to every row."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from reconcile import registry
from reconcile.commands.common import command
from reconcile.commands.output import load_report
from reconcile.diff import difference
from reconcile.exceptions import ConfigError
from reconcile.tracing.trace import write_atomically


def add(commands: Any) -> None:  # noqa: ANN401
    """Register the command."""
    parser = command(
        commands,
        "diff",
        _diff,
        "what a change did to every row; exit code 1: something fails that did not",
    )
    parser.add_argument("before", type=Path, metavar="RUN_A", help="run directory before")
    parser.add_argument("after", type=Path, metavar="RUN_B", help="run directory after")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write diff.html and diff.md there (default: RUN_B)"
    )


def _diff(options: argparse.Namespace) -> int:
    found = difference(load_report(options.before), load_report(options.after))
    after: Path = options.after
    directory = options.out or (after.parent if after.is_file() else after)
    written = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("html", "markdown"):
            render, filename = registry.diff_reporter(name)
            if filename is not None:
                write_atomically(directory / filename, render(found))
                written.append(directory / filename)
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error}; give --out DIR") from error
    render, _ = registry.diff_reporter("terminal")
    print(render(found).rstrip())
    print("\n".join(f"diff: {path}" for path in written))
    return found.exit_code
