"""Where a failure is in prefill alone, or in decode alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reconcile.report import Level, Row, Verdict

PHASES = ("prefill", "decode")


def with_phase(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows, the first failing one with the phase that alone is wrong, if one is."""
    place = next((i for i, row in enumerate(rows) if row.verdict is Verdict.FAIL), None)
    if place is None or rows[place].level not in (Level.MODULE, Level.MODEL):
        return tuple(rows)
    row, said = rows[place], phase_alone(rows, rows[place])
    if not said or not row.diagnosis:
        return tuple(rows)
    first = replace(row.diagnosis[0], text=f"{row.diagnosis[0].text}; {said}")
    row = replace(row, diagnosis=(first, *row.diagnosis[1:]))
    return (*rows[:place], row, *rows[place + 1 :])


def phase_alone(rows: Sequence[Row], row: Row) -> str:
    """In words, which phase passes and which fails, of the rows of one tap and check; or empty."""
    alike = [r for r in rows if (r.tap, r.check, r.level) == (row.tap, row.check, row.level)]
    failing = {_phase(r) for r in alike if r.verdict is Verdict.FAIL}
    passing = {_phase(r) for r in alike if r.verdict is Verdict.PASS}
    for right, wrong in (PHASES, PHASES[::-1]):
        if failing == {wrong} and right in passing:
            return f"{right} is right, only {wrong} is wrong"
    return ""


def _phase(row: Row) -> str:
    phase = row.pass_.partition("-")[0]
    return phase if phase in PHASES else ""
