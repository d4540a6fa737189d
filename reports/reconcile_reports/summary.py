"""What a report says, as plain data: the questions that every renderer answers.

No markup here and no layout: a renderer decides how to write the answers down.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from reconcile.report import Diagnosis, Level, Reason, Report, Row, Verdict
from reconcile_reports.wording import (
    layer,
    number,
    number_beside,
    numbers,
    one_line,
    percent,
    plural,
    real,
)

_SEVERITY = {Verdict.PASS: 0, Verdict.INCONCLUSIVE: 1, Verdict.FAIL: 2}


@dataclass(frozen=True, slots=True)
class Indexed:
    """A row with its place in the report."""

    index: int
    row: Row


@dataclass(frozen=True, slots=True)
class Gated:
    """One limited statistic of a row."""

    name: str
    seen: object
    """The measured value; None where the row has none."""
    limit: float | None
    """The largest accepted value; None for a statistic without limit."""

    @property
    def seen_text(self) -> str:
        """The measured value, in enough digits to tell it from its limit."""
        return number(self.seen) if self.limit is None else number_beside(self.seen, self.limit)

    @property
    def limit_text(self) -> str:
        """The limit, in enough digits to tell it from the measured value."""
        return number_beside(self.limit, self.seen)


@dataclass(frozen=True, slots=True)
class RanAs:
    """What computed a row's candidate, and how."""

    kernel: str
    engine: str
    implementation: str
    execution: str
    fidelity: str

    @property
    def text(self) -> str:
        """In words, empty where the row names no engine."""
        labels = ", ".join(filter(None, (self.implementation, self.execution, self.fidelity)))
        name = " on ".join(filter(None, (self.kernel, self.engine)))
        return one_line(f"{name}: {labels}" if name and labels else name or labels)


def indexed(report: Report) -> list[Indexed]:
    """Every row with its index."""
    return [Indexed(index, row) for index, row in enumerate(report.rows)]


def levels(report: Report) -> list[Level]:
    """The levels that have rows, in funnel order."""
    present = {row.level for row in report.rows}
    return [level for level in Level if level in present]


def at_level(report: Report, level: Level) -> list[Indexed]:
    """The rows of one level, in order."""
    return [item for item in indexed(report) if item.row.level is level]


def counts_by_level(report: Report) -> dict[Level, dict[Verdict, int]]:
    """Rows by level and verdict; every verdict is present."""
    counts = Counter((row.level, row.verdict) for row in report.rows)
    return {
        level: {verdict: counts[level, verdict] for verdict in Verdict} for level in levels(report)
    }


def failing(report: Report) -> list[Indexed]:
    """The rows that fail, in order."""
    return [item for item in indexed(report) if item.row.verdict is Verdict.FAIL]


def inconclusive(report: Report) -> list[Indexed]:
    """The inconclusive rows, allowed ones too, in order."""
    return [item for item in indexed(report) if item.row.verdict is Verdict.INCONCLUSIVE]


def open_rows(report: Report) -> list[Indexed]:
    """The inconclusive rows that the gate does not allow."""
    return [item for item in inconclusive(report) if item.index not in report.allowed_rows]


def alike(rows: list[Row]) -> list[tuple[Row, int]]:
    """Rows that differ only in their pass as the first of them and their number, in order."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.reason, row.level, row.tap, row.check, row.shape), []).append(row)
    return [(group[0], len(group)) for group in groups.values()]


def ran_as(row: Row) -> RanAs:
    """The labels of one row."""
    return RanAs(row.kernel, row.engine, row.implementation, row.execution, row.fidelity)


def labels(report: Report) -> dict[RanAs, int]:
    """How rows were computed, with the number of rows, in order of appearance."""
    ran = [row for row in report.rows if row.reason is not Reason.NOT_RUN]
    return dict(Counter(ran_as(row) for row in ran if ran_as(row).text))


def emulated(report: Report) -> list[str]:
    """One sentence for each emulated engine."""
    rows = plural(len(report.rows), "row")
    return [
        f"{count} of {rows} ran on {one_line(ran.engine) or 'an unnamed engine'}: instructions, "
        f"grid or operators were executed by software, not by the hardware{_details(ran)}"
        for ran, count in labels(report).items()
        if ran.execution == "emulated"
    ]


def _details(ran: RanAs) -> str:
    named = {
        "kernel": ran.kernel,
        "implementation": ran.implementation,
        "fidelity": ran.fidelity,
    }
    words = ", ".join(f"{name} {one_line(value)}" for name, value in named.items() if value)
    unknown = "; the hardware's own order of operations is not documented"
    return (f" ({words})" if words else "") + (unknown if ran.fidelity == "semantic" else "")


def severity(item: Indexed) -> tuple[int, float]:
    """Sort key: verdict first, then utilisation; NaN counts as the largest."""
    return _SEVERITY[item.row.verdict], utilisation_key(item.row)


def utilisation_key(row: Row) -> float:
    """Utilisation as a sort key: none is the smallest, NaN the largest."""
    value = row.utilisation
    if value is None:
        return -math.inf
    return math.inf if math.isnan(value) else value


def worst_per_tap(report: Report) -> list[Indexed]:
    """The worst row of each tap within its level, in order of first appearance."""
    worst: dict[tuple[Level, str], Indexed] = {}
    for item in indexed(report):
        key = (item.row.level, item.row.tap)
        if key not in worst or severity(item) > severity(worst[key]):
            worst[key] = item
    return list(worst.values())


def most_used(report: Report) -> dict[Level, Row]:
    """The row with the largest utilisation of each level that has one.

    A result of other code than the kernel uses nothing of the kernel's limit.
    """
    found: dict[Level, Row] = {}
    for level in levels(report):
        rows = [
            item.row
            for item in at_level(report, level)
            if item.row.utilisation is not None and item.row.reason is not Reason.FELL_BACK
        ]
        if rows:
            found[level] = max(rows, key=utilisation_key)
    return found


def gated(row: Row) -> list[Gated]:
    """The statistics that have a limit."""
    bounds = row.limits.bounds if row.limits else {}
    return [Gated(name, row.stats.get(name), bound) for name, bound in bounds.items()]


def statistics(row: Row) -> list[Gated]:
    """Every statistic, the limited ones first."""
    limited = gated(row)
    names = {item.name for item in limited}
    return limited + [
        Gated(name, value, None) for name, value in row.stats.items() if name not in names
    ]


def seen_and_limit(row: Row) -> str:
    """The limited statistics in one line, e.g. ``max_abs 0.5 (limit 0.25)``."""
    return ", ".join(
        f"{one_line(item.name)} {item.seen_text} (limit {item.limit_text})" for item in gated(row)
    )


def seen(row: Row) -> str:
    """The sentence of a row; never empty."""
    return visible_or(row.text, "no limit was exceeded" if row.reason is None else row.reason)


def visible_or(text: str, otherwise: str) -> str:
    """``text`` on one line, or ``otherwise`` where nothing is left of it."""
    return one_line(text) or otherwise


def fitted(row: Row) -> list[Diagnosis]:
    """The fitted explanations: causes, what comes on top of them, then what fits less well."""
    order = ("cause", "also", "runner_up")
    return sorted(
        row.diagnosis, key=lambda item: (order.index(item.role), -(real(item.explains) or 0.0))
    )


def causes(row: Row) -> list[str]:
    """The fitted explanations, best first, one sentence each."""
    return [
        f"{visible_or(item.text, one_line(item.name))} ({one_line(item.name)} explains "
        f"{percent(item.explains)} of {'the rest' if item.role == 'also' else 'the error'})"
        for item in fitted(row)
    ]


def first_divergence(report: Report) -> Row | None:
    """The row of the first divergence."""
    found = report.first_divergence
    return None if found is None else report.rows[found.row]


def coverage_text(report: Report) -> str:
    """Coverage in one line."""
    coverage = report.coverage
    if coverage.expected <= 0:
        return "no module was expected to be compared: coverage says nothing"
    share = percent(coverage.compared / coverage.expected)
    required = percent(report.required_coverage)
    scope = report.scope
    whole = f"; the model has {scope.of}" if scope and scope.modules < scope.of else ""
    return (
        f"{coverage.compared} of {plural(coverage.expected, 'expected module')} compared "
        f"({share}; required {required}){whole}"
    )


def m_tried(report: Report) -> str:
    """The numbers of rows with which the ops were called; empty where no op was called."""
    tried = {kernel: numbers(sizes) for kernel, sizes in report.m_tried.items()}
    if len(set(tried.values())) <= 1:
        return next(iter(tried.values()), "")
    return "; ".join(f"{one_line(kernel) or '-'}: {sizes}" for kernel, sizes in tried.items())


def run_findings(report: Report) -> list[str]:
    """What keeps the whole run from passing although no row may say so."""
    findings = []
    if not report.rows:
        findings.append("nothing was compared")
    if report.rows and not report.covered:
        findings.append(coverage_text(report))
    if report.required_not_run:
        names = ", ".join(map(one_line, report.required_not_run))
        findings.append(f"required but not run on everything it can implement: {names}")
    if report.rows and all(row.verdict is Verdict.INCONCLUSIVE for row in report.rows):
        findings.append("no comparison passed")
    return findings


def headline(report: Report) -> str:
    """The verdict in one sentence, without the word itself."""
    total = plural(len(report.rows), "comparison")
    if report.verdict is Verdict.FAIL:
        return f"{len(failing(report))} of {total} failed"
    if report.verdict is Verdict.PASS:
        return f"{_passed(report)}{_allowed(report)}"
    findings = run_findings(report)
    if left := len(open_rows(report)):
        findings.append(f"{left} of {total} inconclusive")
    return "; ".join(findings)


def _passed(report: Report) -> str:
    passed = report.counts()[Verdict.PASS.value]
    total = len(report.rows)
    share = "all" if passed == total > 1 else f"{passed} of"
    return f"{share} {plural(total, 'comparison')} passed"


def _allowed(report: Report) -> str:
    allowed = len(inconclusive(report))
    return f"; {allowed} inconclusive, allowed by the gate" if allowed else ""


def when(report: Report) -> str:
    """Time and duration of the run."""
    return one_line(f"{report.created or 'time not recorded'}, {report.seconds:.1f} s")


def layer_marks(taps: list[str]) -> list[tuple[int, str]]:
    """Positions in ``taps`` where another layer begins, with its number.

    >>> layer_marks(["m.0.a:out", "m.0.b:out", "m.1.a:out", "head:out"])
    [(0, '0'), (2, '1')]
    """
    numbers = [layer(tap) for tap in taps]
    previous = [None, *numbers[:-1]]
    pairs = enumerate(zip(numbers, previous, strict=True))
    return [(at, now) for at, (now, before) in pairs if now is not None and now != before]
