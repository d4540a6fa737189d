"""The table of all rows: plain HTML that reads without a script and stays small.

A row takes about 300 bytes, so that 10,000 of them make a page of 3 MB. Sources of limits are
long and few: the table names each by a number.
"""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup, escape

from reconcile.report import Report, Row, Verdict
from reconcile_reports import summary
from reconcile_reports.summary import RanAs
from reconcile_reports.wording import cut, number, one_line, shape

FOLDED = 400
"""More rows than this are folded away until the reader asks."""
_LONGEST = 240
"""Characters of a row's sentence; of many rows fewer."""


@dataclass(frozen=True, slots=True)
class Source:
    """One origin of limits."""

    number: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class RowsTable:
    """Markup of the body, and what stands above and below it."""

    body: Markup
    sources: tuple[Source, ...]
    ran_as: tuple[RanAs, ...]
    """Ways in which rows were computed; one of them needs no column."""
    levels: tuple[str, ...]
    checks: tuple[str, ...]


def rows_table(report: Report, shown: dict[int, int]) -> RowsTable:
    """The rows of a report; ``shown`` leads from a row to the detail that shows it in full."""
    sources: dict[tuple[str, str], Source] = {}
    for row in report.rows:
        if row.limits is not None:
            key = (row.limits.kind, row.limits.source)
            sources.setdefault(key, Source(len(sources) + 1, *map(one_line, key)))
    ways = dict.fromkeys(summary.ran_as(row) for row in report.rows)
    numbers = {way: at + 1 for at, way in enumerate(ways)}
    longest = _LONGEST if len(report.rows) <= 2000 else _LONGEST // 3
    lines = [
        _row(report, index, row, shown.get(index), sources, numbers, longest)
        for index, row in enumerate(report.rows)
    ]
    return RowsTable(
        body=Markup("\n".join(lines)),
        sources=tuple(sources.values()),
        ran_as=tuple(ways),
        levels=tuple(level.value for level in summary.levels(report)),
        checks=tuple(dict.fromkeys(one_line(row.check) for row in report.rows)),
    )


def _row(
    report: Report,
    index: int,
    row: Row,
    detail: int | None,
    sources: dict[tuple[str, str], Source],
    ways: dict[RanAs, int],
    longest: int,
) -> str:
    source = sources[row.limits.kind, row.limits.source] if row.limits else None
    verdict = row.verdict.value + (f" {row.reason.value}" if row.reason else "")
    if index in report.allowed_rows:
        verdict += ", allowed"
    said = cut(one_line(row.text), longest) if row.verdict is not Verdict.PASS else ""
    cells = [
        f'<a href="#detail-{detail}">{index}</a>' if detail is not None else str(index),
        escape(row.level.value),
        None,
        escape(one_line(row.check)),
        shape(row.shape),
        escape(one_line(row.pass_)),
        escape(verdict),
        escape(number(row.utilisation)),
        escape(number(row.stats.get("max_abs"))),
        escape(number(row.stats.get("nmse"))),
        escape(number(row.stats.get("max_ulp"))),
        f"{escape(source.kind)}&nbsp;{source.number}" if source else "-",
    ]
    if len(ways) > 1:
        cells.append(str(ways[summary.ran_as(row)]))
    name = f'<th scope="row">{escape(one_line(row.tap))}</th>'
    written = "".join(name if cell is None else f"<td>{cell}</td>" for cell in cells)
    return f'<tr id="row-{index}" class="{row.verdict.value}">{written}<td>{escape(said)}</td></tr>'
