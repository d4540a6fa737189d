"""``summary.md``: a summary for a pull request or the page of a CI job, in the page's order."""

from __future__ import annotations

import re

from reconcile.report import Report, Row, Verdict
from reconcile_reports import loading, story, summary
from reconcile_reports.wording import cut, number, one_line, plural, shape

FILENAME: str | None = "summary.md"
"""Name of the file in a run directory."""

LINES = 60
"""Most lines of the text."""

SHOWN = 12
"""Failing rows that are shown; rows that differ in their pass only are one."""

FEW = 4
"""Entries of the other lists."""


def render(report: Report) -> str:
    """The summary as GitHub-flavoured Markdown."""
    blocks = [
        f"## {report.verdict.value}: {escape(report.subject)}",
        f"**{_ticked(story.sentence(report))}**",
        f"{_sentence(summary.headline(report))}{_tried(report)} Exit code {report.exit_code}; "
        f"{escape(summary.when(report))}.",
        _emulated(report),
        _divergence(report),
        _counts(report),
        _loading(report),
        _failing(report),
        _coverage(report),
        _bullets("Not checked", [escape(text) for text in story.not_checked(report)]),
        _inconclusive(report),
        _notes(report),
        _labels(report),
        f"Command: {code(report.command)}" if report.command else "",
    ]
    lines = "\n\n".join(filter(None, blocks)).splitlines()
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], "... more in report.html"]
    return "\n".join(lines) + "\n"


def _ticked(text: str) -> str:
    """A sentence whose parts between backticks are code."""
    parts = text.split("`")
    return "".join(code(part) if at % 2 else _kept(part) for at, part in enumerate(parts))


def _kept(part: str) -> str:
    """`escape` that keeps a blank at either end."""
    inner = escape(part)
    return f"{' ' if part[:1] == ' ' else ''}{inner}{' ' if part[-1:] == ' ' and inner else ''}"


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


def _tried(report: Report) -> str:
    tried = summary.m_tried(report)
    return f" M tried: {escape(tried)}." if tried else ""


def _bullets(title: str, lines: list[str]) -> str:
    """A titled list, cut after ``FEW`` lines; empty where there are none."""
    if not lines:
        return ""
    shown = [f"- {line}" for line in lines[:FEW]]
    if len(lines) > FEW:
        shown.append(f"- ... and {len(lines) - FEW} more")
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
    if row.utilisation is not None and not (row.limits and "utilisation" in row.limits.bounds):
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


def _loading(report: Report) -> str:
    """What loading did to the weights, where a kernel shows it."""
    found = loading.steps(report)
    if not found:
        return ""
    return _table(list(loading.HEADER), [[escape(cell) for cell in step.cells] for step in found])


def _failing(report: Report) -> str:
    rows = [item.row for item in summary.failing(report)]
    if not rows:
        return ""
    groups = summary.alike(rows)
    lines = [
        [
            row.level.value,
            code(row.tap),
            code(row.check) + (f" ({count} passes)" if count > 1 else ""),
            shape(row.shape),
            str(row.reason),
            number(row.utilisation),
            escape(cut(summary.seen(row), 160)),
            escape(cause.name) if (cause := next(iter(story.explanations(row)), None)) else "-",
        ]
        for row, count in groups[:SHOWN]
    ]
    header = ["level", "tap", "check", "shape", "reason", "utilisation", "seen", "cause"]
    more = f"\n\n... and {len(groups) - SHOWN} more failing rows" if len(groups) > SHOWN else ""
    return f"### {plural(len(rows), 'failing row')}\n\n{_table(header, lines)}{more}"


def _inconclusive(report: Report) -> str:
    rows = [item.row for item in summary.open_rows(report)]
    lines = [
        f"{code(row.tap)}, {_check(row)}{f' ({count} passes)' if count > 1 else ''}: "
        f"{row.reason}, {escape(cut(summary.seen(row), 120))}"
        for row, count in summary.alike(rows)
    ]
    return _bullets(plural(len(rows), "inconclusive row"), lines)


def _coverage(report: Report) -> str:
    text = f"**Coverage:** {escape(summary.coverage_text(report))}"
    missing = _bullets("Not compared", [code(name) for name in report.coverage.missing])
    return "\n\n".join(filter(None, (text, missing)))


def _notes(report: Report) -> str:
    required = [f"required, but not run: {code(name)}" for name in report.required_not_run]
    allowed = [f"allowed inconclusive: {escape(text)}" for text in report.allowed]
    return _bullets("Notices", [*required, *map(escape, story.notices(report)), *allowed])


def _labels(report: Report) -> str:
    lines = [
        f"{escape(ran.text)} ({plural(count, 'row')})"
        for ran, count in summary.labels(report).items()
    ]
    return _bullets("Ran as", lines)
