"""What the gate of a case asks of the rows, beside their verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from reconcile.case import GateConfig
from reconcile.report import Level, Reason, Row, Verdict


def allowance(row: Row, gate: GateConfig) -> str | None:
    """The reason text of the first allowance that covers an INCONCLUSIVE row."""
    if row.verdict is not Verdict.INCONCLUSIVE:
        return None
    for entry in gate.allow_inconclusive:
        if fnmatchcase(row.tap, entry.tap) and fnmatchcase(row.kernel, entry.kernel):
            return entry.reason
    return None


def required_not_run(rows: Sequence[Row], require: Iterable[str]) -> tuple[str, ...]:
    """Required kernels that have no compared op, or that did not run where they should.

    Args:
        rows: of all candidates.
        require: ``kernel``, or ``kernel@engine`` where it is the engine that must have run.
    """
    bad = []
    for name in require:
        kernel, _, engine = name.partition("@")
        ops = [
            row
            for row in rows
            if row.kernel == kernel and row.level is Level.OP and engine in ("", row.engine)
        ]
        ran = any(row.stats for row in ops)
        declined = any(row.reason in (Reason.NOT_RUN, Reason.FELL_BACK) for row in ops)
        if not ran or declined:
            bad.append(name)
    return tuple(bad)
