"""Two traces tap by tap, where nothing but the tensors is known.

This is the comparison for traces that were recorded by hand or by other tools. A case that
captured both of its sides is judged by the funnel, which knows contracts and baselines.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from reconcile.case import Tolerance
from reconcile.contract import UNIT_ROUNDOFF
from reconcile.diagnosis.traces import explained
from reconcile.judging.gallery import Gallery
from reconcile.judging.judge import Finding, judge_fixed, unfit
from reconcile.judging.sides import to_row
from reconcile.numbers.limits import FIXED_ATTENTION, FIXED_TOLERANCE
from reconcile.report import Coverage, Level, Reason, Report, Row
from reconcile.tracing.mapping import Rule, map_trace
from reconcile.tracing.trace import Pass, Tap, Trace


def compare(
    reference: Trace,
    candidate: Trace,
    *,
    limits: Mapping[str, Tolerance] | None = None,
    mapping: Iterable[Rule] = (),
    kind: str = "chained",
) -> Report:
    """Compare every tap of every pass; what only one side has is INCONCLUSIVE.

    Args:
        reference: the trusted run.
        candidate: the run under test.
        limits: tolerances by tap glob, the first match counts. Without one: rtol = atol = 1e-3,
            attention 1e-2, never tighter than one ulp of the candidate's dtype.
        mapping: rules from the candidate's taps to the reference's.
        kind: which passes are compared.

    Raises:
        TraceError: two passes of one side have the same inputs, or a mapping does not fit.
    """
    started = time.perf_counter()
    ours = map_trace(candidate, mapping).select(kind)
    theirs = reference.select(kind)
    rows: list[Row] = []
    gallery = Gallery()
    for key in dict.fromkeys([*theirs, *ours]):
        rows += _rows(key, ours.get(key), theirs.get(key), limits or {}, gallery)
    both = {key: (ours[key].tensors, theirs[key].tensors) for key in theirs if key in ours}
    rows = explained(rows, both)
    names = list(dict.fromkeys(row.tap for row in rows))
    missing = tuple(dict.fromkeys(row.tap for row in rows if row.reason is Reason.NOT_COMPARED))
    return Report(
        case="compare",
        rows=tuple(rows),
        coverage=Coverage(expected=len(names), compared=len(names) - len(missing), missing=missing),
        command="reconcile.compare",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - started, 3),
    )


def _rows(
    key: str,
    ours: Pass | None,
    theirs: Pass | None,
    limits: Mapping[str, Tolerance],
    gallery: Gallery,
) -> list[Row]:
    c: Mapping[str, Tensor] = ours.tensors if ours else {}
    r: Mapping[str, Tensor] = theirs.tensors if theirs else {}

    def judged(tap: str) -> Finding:
        return gallery.look(Level.MODULE, tap, "chained", _finding(tap, c, r, limits))

    return [
        to_row(Level.MODULE, Tap.parse(tap), "chained", key, judged(tap))
        for tap in dict.fromkeys([*r, *c])
        if not _are_equal_codes([side[tap] for side in (r, c) if tap in side])
    ]


def _are_equal_codes(sides: list[Tensor]) -> bool:
    """Whether a tap holds integers, equal where both sides have it: token ids, positions, masks.

    Such a tap gives no row; one that differs, or that holds complex numbers, does.
    """
    if any(side.is_floating_point() or side.is_complex() for side in sides):
        return False
    return len(sides) == 1 or torch.equal(*sides)


def _finding(
    tap: str, c: Mapping[str, Tensor], r: Mapping[str, Tensor], limits: Mapping[str, Tolerance]
) -> Finding:
    if tap not in c or tap not in r:
        side = "reference" if tap in r else "candidate"
        return Finding({}, reason=Reason.NOT_COMPARED, text=f"only the {side} has this tap")
    if (early := unfit(c[tap], r[tap])) is not None:
        return early
    if c[tap].numel() and c[tap].data_ptr() == r[tap].data_ptr():
        text = "both sides are one piece of memory: a capture kept a reference, not a copy"
        return Finding({}, reason=Reason.CAPTURE_INVALID, text=text)
    return judge_fixed(c[tap], r[tap], _tolerance(tap, c[tap], limits))


def _tolerance(tap: str, candidate: Tensor, limits: Mapping[str, Tolerance]) -> Tolerance:
    for glob, tolerance in limits.items():
        if fnmatchcase(tap, glob):
            return tolerance
    dtype = str(candidate.dtype).removeprefix("torch.")
    attention = "attn" in tap or "attention" in tap
    number = max(FIXED_ATTENTION if attention else FIXED_TOLERANCE, 2 * UNIT_ROUNDOFF[dtype])
    what = "attention" if attention else "tensors"
    source = f"default for {what} without contract or baseline; one ulp of {dtype} at least"
    return Tolerance(atol=number, rtol=number, source=source)
