"""What ``reconcile run`` prints: plain text, verdict first, in the order of the page."""

from __future__ import annotations

import textwrap

from reconcile.report import Report, Row, Verdict
from reconcile_reports import loading, story, summary
from reconcile_reports.wording import cut, number, one_line, plural, shape

FILENAME: str | None = None
"""The text goes to the terminal, not to a file."""

SHOWN = 20
"""Lines of a list before it is cut."""

WIDTH = 100
"""Columns; no line is longer."""

_LABEL = 18
"""Columns of the label before a line's text."""

_LEAST = 12
"""Characters of a failing row's sentence that are shown however long its name is."""

_LEAST_NAME = 24
"""Characters of a tap that are shown however long the rest is."""


def render(report: Report) -> str:
    """The report as plain text, at most 100 columns wide."""
    said = story.sentence(report).replace("`", "")
    lines = [
        *wrapped(f"{report.verdict.value}: {one_line(report.subject)}: {said}"),
        *labelled("in all", [summary.headline(report)]),
        *labelled("M tried", list(filter(None, [summary.m_tried(report)]))),
        *labelled("emulated", summary.emulated(report)),
        *_divergence(report),
        "",
        *_counts(report),
        *labelled("loading", loading.lines(report)),
        *labelled("coverage", [summary.coverage_text(report), *_missing(report)]),
        *labelled("worst utilisation", _worst(report)),
        *labelled("ran as", _ran_as(report)),
        *labelled("not checked", _few(story.not_checked(report))),
        *labelled("notice", _few([one_line(text) for text in story.notices(report)])),
        *labelled("required, not run", [one_line(name) for name in report.required_not_run]),
        *labelled("allowed", _few([one_line(text) for text in report.allowed])),
        *labelled("time", [f"{report.seconds:.1f} s"]),
        *_rows("failing", [item.row for item in summary.failing(report)]),
        *_rows("inconclusive", [item.row for item in summary.open_rows(report)]),
    ]
    return "\n".join(lines) + "\n"


def wrapped(text: str, indent: str = "") -> list[str]:
    """Lines of at most `WIDTH` columns; a longer word is broken."""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def middle(text: str, width: int) -> str:
    """``text`` in at most ``width`` characters: beginning and end of a long one.

    The end of a tap says more than its beginning.

    >>> middle("model.layers.11.mlp.down_proj:out", 24), middle("short", 24)
    ('model...lp.down_proj:out', 'short')
    """
    if len(text) <= width:
        return text
    kept = max(width - 3, 0)
    return f"{text[: kept // 4]}...{text[len(text) - (kept - kept // 4) :]}"[:width]


def labelled(label: str, texts: list[str]) -> list[str]:
    """Texts behind a label, wrapped and aligned; nothing where there are none."""
    labels = [label] + [""] * (len(texts) - 1)
    indent = " " * _LABEL
    return [
        line
        for name, text in zip(labels, texts, strict=False)
        for line in wrapped(f"{name:<{_LABEL}}{text}", indent)
    ]


def _divergence(report: Report) -> list[str]:
    row = summary.first_divergence(report)
    if row is None:
        return labelled("first divergence", ["none"])
    where = f"{one_line(row.tap)}  ({row.level.value}, {one_line(row.check)}, {shape(row.shape)})"
    details = [f"{row.reason}: {summary.seen(row)}", _limits(row), *_cause(row)]
    return labelled("first divergence", [where, *filter(None, details)])


def _cause(row: Row) -> list[str]:
    found = summary.fitted(row)
    titles = [story.role(item) for item in found]
    shown = zip(titles, summary.causes(row), strict=True)
    return [f"{title}: {text}" for title, text in list(shown)[:3]]


def _limits(row: Row) -> str:
    parts = [summary.seen_and_limit(row)]
    if row.utilisation is not None and not (row.limits and "utilisation" in row.limits.bounds):
        parts.append(f"utilisation {number(row.utilisation)}")
    return ", ".join(filter(None, parts))


def _counts(report: Report) -> list[str]:
    if not report.rows:
        return labelled("compared", ["nothing"])
    return labelled(
        "compared",
        [
            f"{level.value:<7}" + "  ".join(f"{by_verdict[v]:>5} {v.value}" for v in Verdict)
            for level, by_verdict in summary.counts_by_level(report).items()
        ],
    )


def _missing(report: Report) -> list[str]:
    missing = [one_line(name) for name in report.coverage.missing]
    return [f"missing: {name}" for name in missing[:SHOWN]] + _more(missing)


def _few(items: list[str]) -> list[str]:
    return items[:SHOWN] + _more(items)


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
    lines = [_line(row, count) for row, count in summary.alike(rows)]
    return ["", f"{plural(len(rows), f'{title} row')}", *lines[:SHOWN], *_more(lines)]


def _line(row: Row, count: int = 1) -> str:
    """A row on one line, and how many others are like it; its sentence is cut to fit."""
    times = f" ({count} passes)" if count > 1 else ""
    dimensions = f" {shape(row.shape)}" if row.shape else ""
    before, after = f"  {row.reason}  {row.level.value} ", f" {one_line(row.check)}"
    rest = cut(f"{after}{dimensions}{times}: ", WIDTH - len(before) - _LEAST_NAME)
    room = max(WIDTH - len(before) - len(rest) - _LEAST, _LEAST_NAME)
    head = before + middle(one_line(row.tap), room) + rest
    return head + cut(summary.seen(row), max(WIDTH - len(head), 0))
