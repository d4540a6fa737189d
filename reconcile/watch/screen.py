"""What ``reconcile watch`` shows: one live screen on a terminal, one line a verdict elsewhere."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from reconcile.explain import explain
from reconcile.report import Report, Verdict, because, describe
from reconcile.watch.watcher import Event

KEYS = "e explain   r report   o op only   a all levels   space again   q quit"
_HISTORY = 8
_SHOWN = 10
_STYLE = {Verdict.PASS: "bold green", Verdict.FAIL: "bold red", Verdict.INCONCLUSIVE: "bold yellow"}


@dataclass(slots=True)
class State:
    """What is on the screen."""

    case: str
    levels: tuple[str, ...]
    cause: str = "start"
    """Why the current check runs."""
    running: bool = True
    seconds: float = 0.0
    report: Report | None = None
    """The newest verdict."""
    error: str = ""
    changed: list[str] = field(default_factory=list)
    """Rows whose verdict is another than in the check before."""
    built: float | None = None
    note: str = ""
    explained: bool = False
    history: list[str] = field(default_factory=list)

    def take(self, event: Event) -> None:
        """Show what a check found out."""
        self.seconds, self.running = event.seconds, not event.final
        self.built = event.built if event.built is not None else self.built
        if event.error:
            self.error = event.error
        if event.report is not None:
            self.report, self.error = event.report, ""
        if event.report is not None or event.error:
            self.history.append(self.line(event))

    def line(self, event: Event) -> str:
        """One line about a verdict or an error."""
        clock = f"{datetime.now():%H:%M:%S}"
        if event.report is None:
            first = event.error.splitlines()[0] if event.error else "nothing"
            return f"{clock}  {event.seconds:5.1f} s  no verdict: {first}"
        report = event.report
        levels = sorted({row.level.value for row in report.rows} - {"weight", "stage"})
        said = [", ".join(levels) or "nothing compared", f"{len(report.rows)} rows"]
        said += [report.scope.of_modules] if report.scope and report.scope.of_modules else []
        return (
            f"{clock}  {event.seconds:5.1f} s  {report.verdict.value} ({'; '.join(said)}) after "
            f"{self.cause}"
        )


class PlainScreen:
    """Lines for a pipe or a log."""

    def show(self, state: State) -> None:
        """Nothing moves in a log; see `add`."""

    def add(self, state: State, event: Event) -> None:
        """The lines of one event."""
        if event.report is None and not event.error:
            return
        lines = [state.line(event), *_failing(state)]
        if state.built is not None and event.report is not None:
            lines[0] += f" (building {state.built:.1f} s)"
        if event.error:
            lines += event.error.splitlines()
        print("\n".join([*lines, *state.changed[:_SHOWN]]), flush=True)

    def key(self) -> str:
        """A log has no keys."""
        return ""


class LiveScreen:
    """The live screen; made by `screen`."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, state: State) -> None:
        """Draw the state."""
        self._live.update(_screen(state))

    def add(self, state: State, event: Event) -> None:  # noqa: ARG002 - it is in the state
        """Draw the state after an event."""
        self.show(state)

    def key(self) -> str:
        """The key that was pressed, empty where none was."""
        ready, _, _ = select.select([sys.stdin], [], [], 0)
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""


Screen = PlainScreen | LiveScreen


@contextmanager
def screen() -> Iterator[Screen]:
    """The live screen where input and output are a terminal, else plain lines."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield PlainScreen()
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        with Live(console=Console(), screen=True, auto_refresh=False) as live:
            live.auto_refresh = False
            yield LiveScreen(live)
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _screen(state: State) -> RenderableType:
    parts: list[RenderableType] = [_head(state)]
    if state.error:
        parts.append(Panel(Text(state.error), title="no verdict", border_style="red"))
    if lines := _failing(state):
        parts.append(Panel(Text("\n".join(lines)), title="first failing", border_style="red"))
    if state.explained and state.report is not None:
        parts.append(Panel(Text(_explained(state.report)), title="explained"))
    if state.changed:
        more = len(state.changed) - _SHOWN
        rest = [f"... and {more} more"] if more > 0 else []
        parts.append(Panel(Text("\n".join([*state.changed[:_SHOWN], *rest])), title="changed rows"))
    parts.append(Panel(Text("\n".join(reversed(state.history[-_HISTORY:]))), title="history"))
    if state.note:
        parts.append(Text(state.note))
    parts.append(Text(KEYS, style="dim"))
    return Group(*parts)


def _head(state: State) -> RenderableType:
    table = Table.grid(padding=(0, 3))
    report = state.report
    verdict = "..." if report is None else report.verdict.value
    style = "bold" if report is None else _STYLE[report.verdict]
    doing = f"checking {state.seconds:.1f} s" if state.running else f"{state.seconds:.1f} s"
    built = f"built in {state.built:.1f} s" if state.built is not None else ""
    levels = ", ".join(state.levels) or "all levels"
    table.add_row(Text(verdict, style=style), escape(state.case), levels, doing, built)
    if report is not None:
        counts = ", ".join(f"{n} {name}" for name, n in report.counts().items() if n)
        engines = sorted({f"{r.kernel} on {r.engine}" for r in report.rows if r.engine})
        emulated = any(row.execution == "emulated" for row in report.rows)
        table.add_row("", counts, "; ".join(engines), "emulated" if emulated else "", "")
    return table


def _failing(state: State) -> list[str]:
    """The first failing rows with their diagnosis."""
    if state.report is None or state.error:
        return []
    lines = []
    for row in list(state.report.failures())[:3]:
        lines.append(describe(row))
        lines += [f"  because: {because(row)}" for _ in row.diagnosis[:1]]
    return lines


def _explained(report: Report) -> str:
    first = report.first_divergence
    return explain(report, first.tap) if first else "nothing fails"
