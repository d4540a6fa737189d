"""What loading did to the weights, step by step: the rows of level ``stage`` in one table."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from reconcile.report import Level, Reason, Report, Row, Verdict
from reconcile_reports.wording import number, one_line, percent, plural, real

HEADER = (
    "step",
    "weights",
    "not right",
    "fell back",
    "least SNR",
    "changed",
    "largest change",
    "saturating",
)
"""Columns of the table."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step over all weights; a loss is against the step before it."""

    name: str
    weights: int
    wrong: int
    """Weights whose values after the step are not the reference's."""
    fell_back: tuple[tuple[str, int], ...]
    """Reasons for which the step does not happen, each with the number of weights."""
    sqnr_db: float | None
    """Least signal-to-noise ratio; infinite where nothing changed."""
    changed: float | None
    """Largest share of elements that changed."""
    max_rel: float | None
    """Largest relative change of an element."""
    saturating: float | None
    """Largest share of groups with a clamped element; None where nothing is clamped by rule."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The texts of `HEADER`."""
        loss = "none" if self.sqnr_db == math.inf else f"{number(self.sqnr_db)} dB"
        shares = [None if v is None else percent(v) for v in (self.changed, self.saturating)]
        return (
            self.name,
            str(self.weights),
            str(self.wrong),
            str(sum(count for _, count in self.fell_back)),
            "-" if self.sqnr_db is None else loss,
            shares[0] or "-",
            number(self.max_rel),
            shares[1] or "-",
        )


def steps(report: Report) -> list[Step]:
    """Every step in the order in which it came; ``resolve.3`` is a step of an expert's weight."""
    found: dict[str, list[Row]] = {}
    for row in report.rows:
        if row.level is Level.STAGE:
            found.setdefault(one_line(row.check).partition(".")[0], []).append(row)
    return [_step(name, rows) for name, rows in found.items()]


def lines(report: Report) -> list[str]:
    """One line for each step, for plain text."""
    return [_line(step) for step in steps(report)]


def _line(step: Step) -> str:
    name, _, _, _, loss, changed, largest, saturating = step.cells
    said = [plural(step.weights, "weight")]
    if step.wrong:
        said.append(f"{step.wrong} not right")
    said += [f"{count} fell back ({reason})" for reason, count in step.fell_back]
    if step.sqnr_db == math.inf:
        said.append("nothing lost")
    elif step.sqnr_db is not None:
        said.append(f"at least {loss}, up to {changed} changed, by up to {largest}")
    if step.saturating is not None:
        said.append(f"up to {saturating} of groups saturate")
    return f"{name:<11} {'; '.join(said)}"


def _step(name: str, rows: list[Row]) -> Step:
    def largest(key: str, sign: int = 1) -> float | None:
        values = [value for row in rows if (value := real(row.stats.get(key))) is not None]
        return sign * max(sign * value for value in values) if values else None

    fell_back = Counter(one_line(row.text) for row in rows if row.reason is Reason.FELL_BACK)
    return Step(
        name=name,
        weights=len(rows),
        wrong=sum(row.verdict is not Verdict.PASS for row in rows) - fell_back.total(),
        fell_back=tuple(fell_back.items()),
        sqnr_db=largest("sqnr_db", -1),
        changed=largest("changed_share"),
        max_rel=largest("max_rel"),
        saturating=largest("saturating_share"),
    )
