"""What ``reconcile run`` prints: plain text, verdict first."""

from __future__ import annotations

import textwrap

from reconcile.report import Report, Row, Verdict
from reconcile_reports import summary
from reconcile_reports.wording import cut, number, one_line, plural, shape

FILENAME: str | None = None
"""The text goes to the terminal, not to a file."""

SHOWN = 20
"""Lines of a list before it is cut."""

WIDTH = 100
"""Columns; a line is longer only where a single word is."""

_LABEL = 18
"""Columns of the label before a line's text."""

_LEAST = 24
"""Characters of a failing row's sentence that are shown however long its name is."""


def render(report: Report) -> str:
    """The report as plain text, at most 100 columns wide where its names allow it."""
    lines = [
        *_wrapped(f"{report.verdict.value}: {one_line(report.case)}: {summary.headline(report)}"),
        *_divergence(report),
        *_labelled("emulated", summary.emulated(report)),
        "",
        *_counts(report),
        *_labelled("coverage", [summary.coverage_text(report), *_missing(report)]),
        *_labelled("worst utilisation", _worst(report)),
        *_labelled("ran as", _ran_as(report)),
        *_labelled("notice", [one_line(text) for text in report.notices]),
        *_labelled("required, not run", [one_line(name) for name in report.required_not_run]),
        *_labelled("allowed", [one_line(text) for text in report.allowed]),
        *_labelled("time", [f"{report.seconds:.1f} s"]),
        *_rows("failing", [item.row for item in summary.failing(report)]),
        *_rows("inconclusive", [item.row for item in summary.open_rows(report)]),
    ]
    return "\n".join(lines) + "\n"


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _labelled(label: str, texts: list[str]) -> list[str]:
    """Texts behind a label, wrapped and aligned; nothing where there are none."""
    labels = [label] + [""] * (len(texts) - 1)
    indent = " " * _LABEL
    return [
        line
        for name, text in zip(labels, texts, strict=False)
        for line in _wrapped(f"{name:<{_LABEL}}{text}", indent)
    ]


def _divergence(report: Report) -> list[str]:
    row = summary.first_divergence(report)
    if row is None:
        return _labelled("first divergence", ["none"])
    where = f"{one_line(row.tap)}  ({row.level.value}, {one_line(row.check)}, {shape(row.shape)})"
    details = [f"{row.reason}: {summary.seen(row)}", _limits(row), *_cause(row)]
    return _labelled("first divergence", [where, *filter(None, details)])


def _cause(row: Row) -> list[str]:
    return [f"cause: {text}" for text in summary.causes(row)[:1]]


def _limits(row: Row) -> str:
    parts = [summary.seen_and_limit(row)]
    if row.utilisation is not None:
        parts.append(f"utilisation {number(row.utilisation)}")
    return ", ".join(filter(None, parts))


def _counts(report: Report) -> list[str]:
    if not report.rows:
        return _labelled("compared", ["nothing"])
    return _labelled(
        "compared",
        [
            f"{level.value:<7}" + "  ".join(f"{by_verdict[v]:>5} {v.value}" for v in Verdict)
            for level, by_verdict in summary.counts_by_level(report).items()
        ],
    )


def _missing(report: Report) -> list[str]:
    missing = [one_line(name) for name in report.coverage.missing]
    return [f"missing: {name}" for name in missing[:SHOWN]] + _more(missing)


def _more(items: list[str]) -> list[str]:
    return [f"... and {len(items) - SHOWN} more"] if len(items) > SHOWN else []


def _worst(report: Report) -> list[str]:
    return [
        f"{level.value:<7}{number(row.utilisation):>8} of its limit  {one_line(row.tap)} "
        f"{one_line(row.check)}"
        for level, row in summary.most_used(report).items()
    ]


def _ran_as(report: Report) -> list[str]:
    return [f"{ran.text} ({plural(n, 'row')})" for ran, n in summary.labels(report).items()]


def _rows(title: str, rows: list[Row]) -> list[str]:
    if not rows:
        return []
    lines = [_line(row, count) for row, count in _alike(rows)]
    return ["", f"{plural(len(rows), f'{title} row')}", *lines[:SHOWN], *_more(lines)]


def _alike(rows: list[Row]) -> list[tuple[Row, int]]:
    """Rows that differ only in their pass as the first of them and their number, in order."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.reason, row.level, row.tap, row.check, row.shape), []).append(row)
    return [(group[0], len(group)) for group in groups.values()]


def _line(row: Row, count: int = 1) -> str:
    """A row on one line, and how many others are like it; its sentence is cut to fit."""
    times = f" ({count} passes)" if count > 1 else ""
    dimensions = f" {shape(row.shape)}" if row.shape else ""
    where = one_line(f"{row.level.value} {row.tap} {row.check}{dimensions}{times}")
    head = f"  {row.reason}  {where}: "
    return head + cut(summary.seen(row), max(WIDTH - len(head), _LEAST))
