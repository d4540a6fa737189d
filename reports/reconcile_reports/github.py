"""Annotations of a GitHub workflow: the verdict and the first rows that are not PASS.

GitHub shows at most ten annotations of a step, and takes each as one line of standard output
(docs.github.com, "Workflow commands").
"""

from __future__ import annotations

from reconcile.report import Report, Row, Verdict, because, describe
from reconcile_reports import story

FILENAME: str | None = None
"""The text goes to standard output."""

MOST = 10
"""Annotations of one step that are shown."""


def render(report: Report) -> str:
    """One workflow command a line; empty for a PASS."""
    if report.verdict is Verdict.PASS:
        return ""
    bad = [
        row
        for index, row in enumerate(report.rows)
        if row.verdict is not Verdict.PASS and index not in report.allowed_rows
    ]
    bad.sort(key=lambda row: row.verdict is not Verdict.FAIL)
    first = _command("error", f"reconcile: {report.subject}", story.sentence(report))
    return "\n".join([first, *map(_annotation, bad[: MOST - 1])]) + "\n"


def _annotation(row: Row) -> str:
    kind = "error" if row.verdict is Verdict.FAIL else "warning"
    text = describe(row)
    if row.diagnosis:
        text += f"\nbecause: {because(row)}"
    return _command(kind, f"{row.level.value} {row.tap}", text)


def _command(kind: str, title: str, text: str) -> str:
    return f"::{kind} title={_escaped(title, ':,')}::{_escaped(text)}"


def _escaped(text: str, more: str = "") -> str:
    """Percent signs and line ends, in a property ``:`` and ``,`` too."""
    for character in f"%\r\n{more}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text
