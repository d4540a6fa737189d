"""One case: load, capture both sides, judge, report."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path

from reconcile import registry
from reconcile.capture import Progress, capture_candidate, capture_reference
from reconcile.case import Case, GateConfig, load_case
from reconcile.exceptions import ConfigError, nearest
from reconcile.funnel import coverage, funnel, pair
from reconcile.plan import Plan, make_plan
from reconcile.report import Coverage, Level, Provenance, Reason, Report, Row, Verdict
from reconcile.trace import Trace


def run(
    case: Case | Path | str | None = None,
    *,
    only: str = "*",
    fail_fast: bool = False,
    command: str = "reconcile.run",
    progress: Progress = lambda _: None,
) -> Report:
    """Reconcile every candidate of a case.

    Args:
        case: a case, the path of a case file, or None for the embedded case.
        only: glob that restricts the candidates' modules.
        fail_fast: end after the first level at which something fails.
        command: what the report gives as the command line.
        progress: called once per unit of work.

    Raises:
        ReconcileError: bad input or configuration; a kernel's faults are rows, not exceptions.
    """
    started = time.perf_counter()
    loaded = _case(case)
    findings = []
    for plan in plans(loaded, only):
        reference = capture_reference(plan, command, progress)
        findings.append(_judge_candidate(plan, reference, command, progress, fail_fast))
        if fail_fast and any(row.verdict is Verdict.FAIL for row in findings[-1][0]):
            break
    return assemble(loaded.case.name, findings, loaded.gate, command, started)


def compare_traces(
    reference: Trace, candidates: Sequence[Trace], command: str = "reconcile.compare_traces"
) -> Report:
    """The report of traces that `capture_reference` and `capture_candidate` made."""
    started = time.perf_counter()
    findings = []
    record = None
    for candidate in candidates:
        sides = pair(reference, candidate)
        record = sides.record
        rows = funnel(sides)
        findings.append((rows, coverage(sides, rows), _provenance(reference, candidate)))
    if record is None:
        raise ConfigError("nothing to compare: no candidate trace was given")
    return assemble(record.case, findings, record.gate, command, started)


def plans(case: Case, only: str = "*", candidate: str | None = None) -> Iterable[Plan]:
    """The candidates of a case, resolved; ConfigError for an unknown ``candidate``."""
    chosen = [item for item in case.candidate if candidate in (None, item.name)]
    if not chosen:
        names = [item.name for item in case.candidate]
        raise ConfigError(f"no candidate {candidate!r}: {nearest(str(candidate), names)}")
    checkpoint = registry.model_source().load(case.base / case.model.checkpoint)
    return [make_plan(case, item, checkpoint, only) for item in chosen]


Finding = tuple[tuple[Row, ...], Coverage, tuple[Provenance, ...]]
"""Rows, coverage and provenance of one candidate."""


def _judge_candidate(
    plan: Plan, reference: Trace, command: str, progress: Progress, fail_fast: bool
) -> Finding:
    if fail_fast:
        for levels in (("op",), ("op", "module")):
            part = capture_candidate(plan, reference, command, progress, levels)
            finding = _finding(reference, part, levels)
            if any(row.verdict is Verdict.FAIL for row in finding[0]):
                return finding
    return _finding(reference, capture_candidate(plan, reference, command, progress))


def _finding(reference: Trace, candidate: Trace, levels: tuple[str, ...] | None = None) -> Finding:
    sides = pair(reference, candidate)
    if levels is not None:
        kept = tuple(level for level in sides.record.levels if level in levels)
        sides = replace(sides, record=replace(sides.record, levels=kept))
    rows = funnel(sides)
    return rows, coverage(sides, rows), _provenance(reference, candidate)


def _case(case: Case | Path | str | None) -> Case:
    if isinstance(case, Case):
        return case
    return load_case(registry.embedded_case() if case is None else case)


def _provenance(*traces: Trace) -> tuple[Provenance, ...]:
    return tuple(trace.provenance for trace in traces if trace.provenance is not None)


def assemble(
    name: str, findings: Sequence[Finding], gate: GateConfig, command: str, started: float
) -> Report:
    """One report of all candidates, with the gate applied."""
    rows = tuple(row for found, _, _ in findings for row in found)
    uses = {index: use for index, row in enumerate(rows) if (use := _allowance(row, gate))}
    sources = [source for _, _, found in findings for source in found]
    return Report(
        case=name,
        rows=rows,
        coverage=_total_coverage([found for _, found, _ in findings]),
        provenance=tuple(s for i, s in enumerate(sources) if s not in sources[:i]),
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - started, 3),
        notices=_notices(rows),
        required_coverage=gate.coverage,
        required_not_run=_required_not_run(rows, gate),
        allowed=tuple(f"{rows[i].tap} {rows[i].check}: {use}" for i, use in uses.items()),
        allowed_rows=frozenset(uses),
    )


def _allowance(row: Row, gate: GateConfig) -> str | None:
    """The reason text of the first allowance that covers an INCONCLUSIVE row."""
    if row.verdict is not Verdict.INCONCLUSIVE:
        return None
    for entry in gate.allow_inconclusive:
        if fnmatchcase(row.tap, entry.tap) and fnmatchcase(row.kernel, entry.kernel):
            return entry.reason
    return None


def _total_coverage(parts: Sequence[Coverage]) -> Coverage:
    return Coverage(
        expected=sum(part.expected for part in parts),
        compared=sum(part.compared for part in parts),
        missing=tuple(name for part in parts for name in part.missing),
    )


def _required_not_run(rows: Sequence[Row], gate: GateConfig) -> tuple[str, ...]:
    """Required kernels that have no compared op, or that did not run where they should."""
    bad = []
    for name in gate.require:
        ops = [row for row in rows if row.kernel == name and row.level is Level.OP]
        ran = any(row.stats for row in ops)
        declined = any(row.reason in (Reason.NOT_RUN, Reason.FELL_BACK) for row in ops)
        if not ran or declined:
            bad.append(name)
    return tuple(bad)


def _notices(rows: Sequence[Row]) -> tuple[str, ...]:
    emulated = sorted(
        {f"{row.kernel} on {row.engine}" for row in rows if row.execution == "emulated"}
    )
    return tuple(f"emulated, not run on its hardware: {name}" for name in emulated)
