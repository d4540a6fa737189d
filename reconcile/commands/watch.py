"""``reconcile watch``: check again whenever a kernel's source changes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from reconcile.commands.common import (
    add_choices,
    add_overrides,
    chosen_case,
    command,
    config_help,
)
from reconcile.commands.output import FORMATS, run_directory, write_report
from reconcile.exceptions import ReconcileError
from reconcile.report import ExitCode, Report
from reconcile.watch.files import FileWatcher
from reconcile.watch.screen import Screen, State, screen
from reconcile.watch.watcher import Checker, Event, changed_rows, watched_files

_PAUSE = 0.05
"""Seconds between two looks at keys and files while nothing runs."""


def add(commands: Any) -> None:  # noqa: ANN401
    """Register the command."""
    parser = command(
        commands, "watch", _watch, "check a case again whenever its kernel changes, in seconds"
    )
    parser.add_argument("config", nargs="?", help=config_help())
    add_overrides(parser)
    add_choices(parser)
    parser.add_argument(
        "--checks", type=int, default=0, metavar="N", help="end after N checks; 0: with q"
    )


def _watch(options: argparse.Namespace) -> int:
    watcher = FileWatcher()
    try:
        with screen() as shown:
            last = _Loop(lambda: _checker(options), watcher, shown, options.checks).run()
    finally:
        watcher.close()
    return ExitCode.INCONCLUSIVE if last is None else last.exit_code


def _checker(options: argparse.Namespace) -> Checker:
    """Of the case as its files are now, with the overrides of the command line."""
    return Checker(chosen_case(options), only=options.only)


class _Loop:
    """Check, wait for a change or a key, check again."""

    def __init__(
        self, read: Callable[[], Checker], watcher: FileWatcher, shown: Screen, checks: int
    ) -> None:
        self.read, self.watcher, self.shown, self.left = read, watcher, shown, checks
        self.checker = read()
        self.state = State(case=self.checker.case.case.name, levels=())
        self.sources: tuple[Path, ...] = ()
        self.previous: Report | None = None
        self.pending: set[Path] = set()
        """Changed files that no check has seen."""

    def run(self) -> Report | None:
        """The report of the last check, None where it gave none; Ctrl-C ends it as q does."""
        with suppress(KeyboardInterrupt):
            self._watch()
        unfinished = self.state.running or self.state.error
        return None if unfinished else self.state.report

    def _watch(self) -> None:
        again = True
        while again:
            self.left -= self._check()
            if self.left == 0:
                break
            again = self._wait()

    def _check(self) -> bool:
        """Whether a check ran to its end; one of files that changed meanwhile is given up."""
        self.state.running, self.state.built, self.state.error = True, None, ""
        events = self.checker.check(self.state.levels)
        try:
            for event in events:
                self._take(event)
                if self._interrupted():
                    return False
        finally:
            events.close()  # type: ignore[attr-defined]
        if self.state.report is not None:
            self.previous = self.state.report
        return True

    def _take(self, event: Event) -> None:
        if event.sources:
            self.sources = event.sources
        self.watcher.follow(watched_files(self.checker.case, self.sources))
        if event.report is not None:
            self.state.changed = changed_rows(self.previous, event.report)
        self.state.take(event)
        self.shown.add(self.state, event)

    def _interrupted(self) -> bool:
        """Whether a file changed meanwhile, so that this check is about something old."""
        self.pending |= self.watcher.changed()
        return bool(self.pending)

    def _wait(self) -> bool:
        """Wait for a change or a key; False to end."""
        while True:
            self.pending |= self.watcher.changed()
            if self.pending:
                return self._after_change()
            key = self.shown.key()
            if key == "q":
                return False
            if key and self._pressed(key):
                return True
            time.sleep(_PAUSE)

    def _after_change(self) -> bool:
        files, self.pending = self.pending, set()
        self.state.cause = ", ".join(sorted(file.name for file in files))
        if not files <= {source.resolve() for source in self.sources}:  # the case, its prompts
            try:
                self.checker = self.read()
            except ReconcileError as error:
                event = Event(seconds=0.0, final=True, error=str(error))
                self._take(event)
                return self._wait()
        return True

    def _pressed(self, key: str) -> bool:
        """Whether a key asks for another check."""
        state = self.state
        state.cause = "a key"
        if key == "e":
            state.explained = not state.explained
        elif key == "r" and state.report is not None:
            directory = run_directory(state.report.case)
            write_report(state.report, directory, FORMATS)
            state.note = f"report written: {directory / 'report.html'}"
        elif key in ("o", "a", " "):
            if key != " ":
                state.levels = ("op",) if key == "o" else ()
            return True
        self.shown.show(state)
        return False
