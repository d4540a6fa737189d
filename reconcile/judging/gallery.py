"""Which rows of a report are looked at closely."""

from __future__ import annotations

from dataclasses import replace

from reconcile.judging.examine import Block, examine
from reconcile.judging.judge import Finding
from reconcile.report import Level, Verdict

MOST_FAILING = 40
"""Failing rows that are looked at; one look adds about 13 kB to the report."""
LARGEST_PASSING = 1 << 20
"""Elements of the largest passing row that is looked at; a failing one may cost more."""


class Gallery:
    """Chooses, row after row in the order of the report, and looks.

    Chosen are the first failing row of each tap and check, at most `MOST_FAILING`, and of the
    others each whose utilisation is the largest of its level so far: so the passing row nearest
    to its limit is among them, for about ln(n) looks.
    """

    def __init__(self) -> None:
        """Nothing has been seen yet."""
        self._failing: set[tuple[Level, str, str]] = set()
        self._used: dict[Level, float] = {}

    def look(
        self, level: Level, tap: str, check: str, finding: Finding, block: Block = None
    ) -> Finding:
        """The finding, with evidence where it is one of the rows that matter."""
        if finding.pair is None or finding.evidence is not None:
            return finding
        failed = finding.reason is not None and finding.reason.verdict is Verdict.FAIL
        wanted = self._is_new(level, tap, check) if failed else self._is_record(level, finding)
        return replace(finding, evidence=examine(finding.pair, block)) if wanted else finding

    def _is_new(self, level: Level, tap: str, check: str) -> bool:
        if len(self._failing) >= MOST_FAILING or (level, tap, check) in self._failing:
            return False
        self._failing.add((level, tap, check))
        return True

    def _is_record(self, level: Level, finding: Finding) -> bool:
        used, pair = finding.utilisation, finding.pair
        if finding.reason is not None or used is None or not used > self._used.get(level, 0.0):
            return False
        if pair is None or pair.candidate.numel() > LARGEST_PASSING:
            return False
        self._used[level] = used
        return True
