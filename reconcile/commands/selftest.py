"""``reconcile selftest``: the harness judged by faults with known answers."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from reconcile.commands.common import command, path_argument
from reconcile.exceptions import ConfigError
from reconcile.report import ExitCode
from reconcile.selftest.ratchet import accepted, read_ratchet, violations, write_ratchet
from reconcile.selftest.run import Outcome, run_suite
from reconcile.selftest.suite import SUBSETS, Suite, default_folder, load_suite
from reconcile.selftest.table import rates, to_dict, to_text
from reconcile.tracing.trace import write_atomically


def add(commands: Any) -> None:  # noqa: ANN401
    """Register the command."""
    parser = command(commands, "selftest", _selftest, "judge the harness by known faults")
    parser.add_argument("--subset", choices=SUBSETS, default="quick", help="seeds and slow mutants")
    parser.add_argument("--only", default="*", metavar="GLOB", help="only these ids")
    parser.add_argument("--json", type=path_argument, metavar="FILE", help="write the table here")
    parser.add_argument("--jobs", type=_jobs, default=1, help="processes")
    parser.add_argument("--suite", type=path_argument, help="folder (default tests/mutants)")
    parser.add_argument("--accept", metavar="REASON", help="make this outcome the ratchet")


def _selftest(options: argparse.Namespace) -> int:
    started = time.monotonic()
    folder: Path = options.suite or default_folder()
    if not folder.is_dir():
        raise ConfigError(f"--suite: {folder} is no directory")
    whole = options.only == "*" and options.subset == "full"
    if options.accept is not None and not (whole and options.accept.strip()):
        raise ConfigError("--accept needs a reason, and the whole suite: --subset full, no --only")
    suite = load_suite(folder).select(options.subset, options.only)
    outcome = _run(suite, options.subset, options.jobs)
    table, ratchet = rates(outcome), read_ratchet(folder)
    if options.accept is not None:
        ratchet = accepted(outcome, table, ratchet, options.accept)
        write_ratchet(folder, ratchet)
    found = violations(outcome, table, ratchet, whole=whole)
    seconds = time.monotonic() - started
    if options.json is not None:
        body = to_dict(outcome, found, seconds, options.subset)
        write_atomically(options.json, json.dumps(body, indent=2) + "\n")
    print(to_text(outcome, ratchet, found, seconds))
    return ExitCode.FAIL if found else ExitCode.PASS


def _run(suite: Suite, subset: str, jobs: int) -> Outcome:
    quiet = not sys.stderr.isatty() or "CI" in os.environ
    total = len(suite.mutants) + len(suite.variants)
    with tqdm(total=total, disable=quiet, desc="selftest", leave=False) as bar:

        def step(name: str) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        return run_suite(suite, subset, jobs, step)


def _jobs(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError("expected a number of processes")
    return int(text)
