"""Which failing rows of a check are diagnosed, and which share a diagnosis."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from reconcile.diagnosis.engine import NONE_FITS
from reconcile.diagnosis.linear import NOT_DIAGNOSED, NUMERIC, Failure, diagnose_failure
from reconcile.report import Diagnosis, Reason, Row

MOST = 3
"""Distinct failures of one check that are diagnosed."""
SECONDS = 4.0
"""Processor time for all of them; the first one always has its turn."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A failure, and what makes it like others."""

    failure: Failure
    kind: Hashable
    """Failures of one kind have one diagnosis."""
    broader: Hashable = None
    """The kind whose diagnosis, where it names a cause, also holds for this one."""


def with_diagnoses(
    rows: Sequence[Row], failed: Sequence[Failed | None]
) -> tuple[list[Row], list[str]]:
    """Rows with the diagnoses of their failures, and what was left out, for a notice.

    Args:
        rows: in the order in which they are reported.
        failed: for each row its failure, or None where there is nothing to fit.
    """
    known: dict[Hashable, tuple[Diagnosis, ...]] = {}
    done, left = [], 0
    started = time.process_time()
    for row, item in zip(rows, failed, strict=True):
        if item is None or row.reason not in NUMERIC:
            done.append(row)
            continue
        kind = item.broader if _names_a_cause(known.get(item.broader, ())) else item.kind
        if kind not in known and _in_budget(len(known), time.process_time() - started):
            shown = row.text if row.reason is Reason.UNWRITTEN else ""
            known[kind] = diagnose_failure(replace(item.failure, unwritten=shown))
        left += kind not in known
        done.append(replace(row, diagnosis=known.get(kind, ())))
    notes = [f"not diagnosed: {left} further failing rows"] if left else []
    return done, notes


def _names_a_cause(found: tuple[Diagnosis, ...]) -> bool:
    return bool(found) and found[0].name not in (NONE_FITS, NOT_DIAGNOSED)


def _in_budget(count: int, seconds: float) -> bool:
    return count == 0 or (count < MOST and seconds < SECONDS)
