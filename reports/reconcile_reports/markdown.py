"""``summary.md``: a short summary for the page of a CI job."""

from __future__ import annotations

import re

from reconcile.report import Report, Row, Verdict
from reconcile_reports import summary
from reconcile_reports.wording import number, one_line, plural, shape

FILENAME: str | None = "summary.md"
"""Name of the file in a run directory."""

SHOWN = 20
"""Rows and names that a list shows before it is cut."""


def render(report: Report) -> str:
    """The summary as GitHub-flavoured Markdown."""
    blocks = [
        f"## {report.verdict.value}: {escape(report.case)}",
        f"{_sentence(summary.headline(report))} Exit code {report.exit_code}; "
        f"{escape(summary.when(report))}.",
        _emulated(report),
        _divergence(report),
        _counts(report),
        _failing(report),
        _inconclusive(report),
        _coverage(report),
        _notes(report),
        _labels(report),
        f"Command: {code(report.command)}" if report.command else "",
    ]
    return "\n\n".join(filter(None, blocks)) + "\n"


def escape(text: str) -> str:
    r"""``text`` on one line as plain text: no markup, link, mention or HTML is left in it.

    >>> escape("a|b <i> `c`\n@d")
    'a&#124;b &#60;i&#62; &#96;c&#96; &#64;d'
    """
    return re.sub(
        r"[\\`*{}\[\]<>&|#!~@$]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])|:(?=//)|(?<=www)\.",
        lambda found: f"&#{ord(found.group())};",
        one_line(text),
    )


def code(text: str) -> str:
    """``text`` as a code span; as plain text where a code span could not hold it.

    >>> code("layers.0.down_proj:out"), code("a`b"), code("")
    ('`layers.0.down_proj:out`', 'a&#96;b', '-')
    """
    line = one_line(text)
    if not line:
        return "-"
    return f"`{line}`" if re.fullmatch(r"[^`|<>&\\]+", line) else escape(line)


def _sentence(text: str) -> str:
    line = escape(text)
    return f"{line[:1].upper()}{line[1:]}."


def _bullets(title: str, lines: list[str]) -> str:
    """A titled list, cut after ``SHOWN`` lines; empty where there are none."""
    if not lines:
        return ""
    shown = [f"- {line}" for line in lines[:SHOWN]]
    if len(lines) > SHOWN:
        shown.append(f"- ... and {len(lines) - SHOWN} more")
    return "\n".join([f"### {title}", "", *shown])


def _table(header: list[str], lines: list[list[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _emulated(report: Report) -> str:
    return "\n".join(f"> **emulated:** {escape(line)}" for line in summary.emulated(report))


def _divergence(report: Report) -> str:
    row = summary.first_divergence(report)
    if row is None:
        return "**First divergence:** none"
    lines = [
        f"**First divergence:** {code(row.tap)}, {_check(row)}: {escape(summary.seen(row))}",
        _limits(row),
        *map(escape, summary.causes(row)[:1]),
    ]
    return "  \n".join(filter(None, lines))


def _check(row: Row) -> str:
    return f"{row.level.value} {code(row.check)}"


def _limits(row: Row) -> str:
    parts = [summary.seen_and_limit(row)]
    if row.utilisation is not None:
        parts.append(f"utilisation {number(row.utilisation)}")
    return escape(", ".join(filter(None, parts)))


def _counts(report: Report) -> str:
    if not report.rows:
        return "Nothing was compared."
    lines = [
        [level.value, *(str(by_verdict[verdict]) for verdict in Verdict)]
        for level, by_verdict in summary.counts_by_level(report).items()
    ]
    total = report.counts()
    lines.append(["all", *(str(total[verdict.value]) for verdict in Verdict)])
    return _table(["level", *(verdict.value for verdict in Verdict)], lines)


def _failing(report: Report) -> str:
    rows = [item.row for item in summary.failing(report)]
    if not rows:
        return ""
    lines = [
        [
            row.level.value,
            code(row.tap),
            code(row.check),
            shape(row.shape),
            str(row.reason),
            number(row.utilisation),
            escape(summary.seen(row)),
        ]
        for row in rows[:SHOWN]
    ]
    header = ["level", "tap", "check", "shape", "reason", "utilisation", "seen"]
    more = f"\n\n... and {len(rows) - SHOWN} more failing rows" if len(rows) > SHOWN else ""
    return f"### {plural(len(rows), 'failing row')}\n\n{_table(header, lines)}{more}"


def _inconclusive(report: Report) -> str:
    rows = [item.row for item in summary.open_rows(report)]
    lines = [
        f"{code(row.tap)}, {_check(row)}: {row.reason}, {escape(summary.seen(row))}" for row in rows
    ]
    return _bullets(plural(len(rows), "inconclusive row"), lines)


def _coverage(report: Report) -> str:
    text = f"**Coverage:** {escape(summary.coverage_text(report))}"
    missing = _bullets("Not compared", [code(name) for name in report.coverage.missing])
    return "\n\n".join(filter(None, (text, missing)))


def _notes(report: Report) -> str:
    required = [f"required, but not run: {code(name)}" for name in report.required_not_run]
    allowed = [f"allowed inconclusive: {escape(text)}" for text in report.allowed]
    return _bullets("Notices", [*required, *map(escape, report.notices), *allowed])


def _labels(report: Report) -> str:
    lines = [
        f"{escape(ran.text)} ({plural(count, 'row')})"
        for ran, count in summary.labels(report).items()
    ]
    return _bullets("Ran as", lines)
