"""The funnel as one table: a line for each layer, a column for each op and module in it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from reconcile.report import Level, Report, Row, Verdict
from reconcile_reports import story, summary
from reconcile_reports.summary import Indexed
from reconcile_reports.wording import number, one_line, plural

MOST_LINES = 200
"""Lines of a table; a report of more kinds of taps shows the worst."""
_STEPS = (0.1, 0.25, 0.5, 0.75)
"""Upper ends of the colour classes ``u0`` ... of a passing cell."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The worst row of one place in the funnel."""

    index: int
    """Of the row."""
    css: str
    text: str
    label: str
    """The same for a reader who does not see the table."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its level and what is in it."""

    level: str
    name: str


@dataclass(frozen=True, slots=True)
class Map:
    """One table of the funnel."""

    title: str
    columns: tuple[Column, ...]
    lines: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    """(name of the line, a cell for each column)."""


def maps(report: Report) -> list[Map]:
    """The layers; what stands outside them; the whole model.

    A report about one tap, such as that of a single linear, has a column for each check instead.
    """
    inside: list[Indexed] = []
    outside: list[Indexed] = []
    single = len({row.tap for row in report.rows}) == 1
    for item in summary.indexed(report):
        placed = _layer(item.row.tap) is not None and item.row.level is not Level.MODEL
        (inside if placed and not single else outside).append(item)
    found = []
    if inside:
        found.append(_layers(report, inside))
    if outside:
        found.append(_others(report, outside))
    return found


def _layer(tap: str) -> tuple[str, str] | None:
    """(number, place inside the layer) of a tap: ``("3", "mlp.down_proj")``.

    >>> _layer("m.layers.3.mlp.down_proj:out"), _layer("m.layers.3:out"), _layer("lm_head:out")
    (('3', 'mlp.down_proj'), ('3', ''), None)
    """
    found = re.match(r"(?:[^:]*?\.)?(\d+)(?:\.([^:]*))?:", tap)
    return (found.group(1), found.group(2) or "") if found else None


def _layers(report: Report, items: list[Indexed]) -> Map:
    cells: dict[str, dict[Column, Indexed]] = {}
    columns: dict[Column, None] = {}
    for item in items:
        place = _layer(item.row.tap)
        assert place is not None
        column = _column(item.row, place[1])
        columns[column] = None
        _keep_worst(cells.setdefault(place[0], {}), column, item)
    ordered = sorted(columns, key=lambda column: list(Level).index(Level(column.level)))
    lines = [
        (f"layer {one_line(layer)}", _cells(report, found, ordered, f"layer {layer}"))
        for layer, found in cells.items()
    ]
    title = f"{plural(len(lines), 'layer')}: weights, ops, then modules"
    return Map(title, tuple(ordered), tuple(lines[:MOST_LINES]))


def _column(row: Row, inside: str) -> Column:
    """All weights of a layer share a column; a layer's own output is ``whole layer``."""
    if row.level is Level.WEIGHT:
        return Column(row.level.value, "weights")
    return Column(row.level.value, one_line(inside) or "whole layer")


def _others(report: Report, items: list[Indexed]) -> Map:
    """Taps outside the layers, a column for each check."""
    cells: dict[str, dict[Column, Indexed]] = {}
    columns: dict[Column, None] = {}
    for item in items:
        column = Column(item.row.level.value, one_line(item.row.check))
        line = item.row.tap if item.row.level is not Level.MODEL else "model"
        columns[column] = None
        _keep_worst(cells.setdefault(one_line(line), {}), column, item)
    ordered = list(columns)
    lines = [(line, _cells(report, found, ordered, line)) for line, found in cells.items()]
    title = "Outside the layers, by check" if len(lines) > 1 else "By check"
    return Map(title, tuple(ordered), tuple(lines[:MOST_LINES]))


def _keep_worst(cells: dict[Column, Indexed], column: Column, item: Indexed) -> None:
    if column not in cells or summary.severity(item) > summary.severity(cells[column]):
        cells[column] = item


def _cells(
    report: Report, found: dict[Column, Indexed], columns: Iterable[Column], line: str
) -> tuple[Cell | None, ...]:
    return tuple(
        _cell(report, found[column], f"{one_line(line)}, {column.name}")
        if column in found
        else None
        for column in columns
    )


def _cell(report: Report, item: Indexed, place: str) -> Cell:
    row = item.row
    target = story.cause_of(report, row)
    text, css = _shown(row)
    return Cell(
        index=item.index if target is None else target,
        css=css,
        text=text,
        label=f"{place}: {text}" + ("" if target is None else ", to its cause"),
    )


def _shown(row: Row) -> tuple[str, str]:
    """Text and colour class of a cell."""
    used = row.utilisation
    share = "" if used is None else _two(used)
    if row.verdict is Verdict.FAIL:
        over = share if used is not None and not used <= 1 else str(row.reason)
        return f"✕ {over}", "FAIL"
    if row.verdict is Verdict.INCONCLUSIVE:
        return str(row.reason), "blocked" if row.reason == "blocked" else "INCONCLUSIVE"
    if used is None:
        return "✓", "u0"
    return share, f"u{sum(used > step for step in _STEPS)}"


def _two(value: float) -> str:
    """Two digits, for a narrow cell; above 1 never 1."""
    if math.isnan(value) or math.isinf(value):
        return number(value)
    if 0 < value < 0.001:
        return f"{value:.0e}".replace("e-0", "e-")
    text = f"{value:.2g}".replace("e+0", "e").replace("e+", "e")
    return number(value) if float(text) == 1.0 != value else text
