"""One case: load, capture both sides, judge, report."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from reconcile import registry
from reconcile.capture import reference_cache
from reconcile.capture.candidate import CALLS, capture_candidate
from reconcile.capture.plan import Plan, Progress, make_plan
from reconcile.capture.reference import capture_reference
from reconcile.capture.threads import few_threads
from reconcile.case import Case, GateConfig, load_case
from reconcile.diagnosis.run import attached, diagnosed, keep
from reconcile.exceptions import ConfigError, TraceError, nearest
from reconcile.exits import exits_refused
from reconcile.gate import accepted
from reconcile.gate.requirements import allowance, required_not_run
from reconcile.gate.snapshots import Album, failing_calls
from reconcile.judging.funnel import coverage, funnel
from reconcile.judging.sides import pair
from reconcile.layout import LayoutConfig
from reconcile.model import Checkpoint
from reconcile.plan_record import scope
from reconcile.report import LEVELS, Coverage, Provenance, Report, Row, Verdict
from reconcile.tracing.trace import Trace

Finding = tuple[tuple[Row, ...], Coverage, tuple[Provenance, ...]]
"""Rows, coverage and provenance of one candidate."""


class Session:
    """A case whose checkpoint and reference stay loaded, so that a candidate runs again quickly."""

    def __init__(
        self, case: Case | Path | str | None = None, *, reference_folder: Path | None = None
    ) -> None:
        """Read the case.

        Args:
            case: a case, a file, or an embedded one by name; None is the default one.
            reference_folder: where traces of the reference are kept for other processes; see
                `reconcile.capture.reference_cache`.
        """
        if not isinstance(case, Case):
            case = load_case(registry.case_file(case))
        self.case = case
        self._checkpoint: Checkpoint | None = None
        self._references: dict[Any, Trace] = {}
        self._folder = reference_folder
        self.album = Album()
        """Failing calls of the last run; the command line writes them beside the report."""

    @exits_refused()
    def run(
        self,
        *,
        kernel: str | None = None,
        engine: str | None = None,
        levels: Iterable[str] | None = None,
        only: str = "*",
        fail_fast: bool = False,
        command: str = "reconcile.run",
        progress: Progress = lambda _: None,
    ) -> Report:
        """Reconcile every candidate of the case.

        Args:
            kernel: stands in for the case's kernel; the path of a file starts from the working
                directory, as on the command line.
            engine: stands in for the case's engine.
            levels: levels to run, of ``op``, ``module``, ``model``.
            only: glob that restricts the candidates' modules.
            fail_fast: end after the first level at which something fails.
            command: what the report gives as the command line.
            progress: called once per unit of work.

        Raises:
            ReconcileError: bad input or configuration; a kernel's faults are rows.
        """
        started = time.perf_counter()
        case = override(self.case, kernel=kernel, engine=engine, levels=levels)
        gate = case.gate
        if gate.accepted is not None:
            file = case.base / gate.accepted
            accepted.load(file)  # what is wrong with it is said before the work
            gate = replace(gate, accepted=file)
        findings = []
        self.album = Album()
        notices = list(_restrictions(case, only))
        plans = self.plans(case, only)
        for plan in plans:
            notices += plan.routes
            with few_threads(plan.size):
                reference = self._reference(plan, command, progress)
                finding = _judge_candidate(
                    plan, reference, command, progress, fail_fast, self.album
                )
            findings.append(finding)
            if fail_fast and any(row.verdict is Verdict.FAIL for row in finding[0]):
                break
        notices += self.album.notices()
        report = assemble(case.case.name, findings, gate, command, started, tuple(notices))
        return replace(report, scope=scope([plan.record() for plan in plans]))

    @exits_refused()
    def plans(self, case: Case, only: str = "*", candidate: str | None = None) -> list[Plan]:
        """The candidates of ``case``, resolved; ConfigError for an unknown ``candidate``."""
        chosen = [item for item in case.candidate if candidate in (None, item.name)]
        if not chosen:
            names = [item.name for item in case.candidate]
            raise ConfigError(f"no candidate {candidate!r}: {nearest(str(candidate), names)}")
        checkpoint = self.checkpoint()
        return [make_plan(case, item, checkpoint, only) for item in chosen]

    def checkpoint(self) -> Checkpoint:
        """The case's checkpoint, read once."""
        if self._checkpoint is None:
            model = self.case.model
            path = registry.checkpoint(model.checkpoint, self.case.base)
            self._checkpoint = registry.model_source().load(
                path, model.load_rule, _layout(self.case)
            )
        return self._checkpoint

    def _reference(self, plan: Plan, command: str, progress: Progress) -> Trace:
        asked = (plan.prompts, plan.asked)
        key = (plan.dtype, plan.reference_dtype, plan.contract, plan.modules, asked)
        if key not in self._references:
            self._references[key] = self._kept_reference(plan, command, progress)
        return self._references[key]

    def _kept_reference(self, plan: Plan, command: str, progress: Progress) -> Trace:
        """The kept trace where there is one, else a fresh one, which is kept."""
        if self._folder is None:
            return capture_reference(plan, command, progress)
        kept = reference_cache.load(self._folder, plan)
        if kept is None:
            kept = capture_reference(plan, command, progress)
            reference_cache.save(self._folder, plan, kept)
        return kept


def run(case: Case | Path | str | None = None, **options: Any) -> Report:  # noqa: ANN401
    """Reconcile a case once: ``Session(case).run(**options)``.

    Args:
        case: a case, the path of a case file, an embedded case's name, or None for the default.
        options: see `Session.run`.
    """
    return Session(case).run(**options)


def override(
    case: Case,
    *,
    kernel: str | None = None,
    engine: str | None = None,
    levels: Iterable[str] | None = None,
    seed: int | None = None,
) -> Case:
    """The case with what a caller gave in place of its own; None leaves it.

    A kernel that takes the place of the case's is also the one that the gate requires. The path of
    its file starts from the working directory; one in a case file starts from that file.
    """
    if kernel is not None:
        kernel = _from_here(kernel, case)
        case = case.with_candidate(kernel=kernel)
        required = tuple(dict.fromkeys(kernel for _ in case.gate.require))
        case = replace(case, gate=replace(case.gate, require=required))
    if engine is not None:
        case = case.with_candidate(engine=engine)
    if levels is not None:
        case = replace(case, levels=replace(case.levels, run=_levels(levels)))
    return case if seed is None else replace(case, seed=seed)


def _from_here(kernel: str, case: Case) -> str:
    """A kernel's name with the path of its file made absolute."""
    place, _, attribute = kernel.rpartition(":")
    path, beside = Path(place).resolve(), case.base / place
    if place and not path.is_file() and beside.is_file():
        raise ConfigError(
            f"{path}: no such file; paths start from the working directory. The case's folder has "
            f"{beside}: give that path"
        )
    registry.check_kernel_name(kernel)
    return f"{path}:{attribute}" if place.endswith(".py") else kernel


def _levels(wanted: Iterable[str]) -> tuple[Any, ...]:
    chosen, known = list(wanted), [level.value for level in LEVELS]
    for level in chosen:
        if level not in known:
            raise ConfigError(f"level {level!r}: {nearest(level, known)}")
    if not chosen:
        raise ConfigError("no level is given: nothing would be compared")
    return tuple(level for level in known if level in chosen)


def compare_traces(
    reference: Trace, candidates: Sequence[Trace], command: str = "reconcile.compare_traces"
) -> Report:
    """The report of traces that the two halves of a capture wrote; needs no kernel or model."""
    started = time.perf_counter()
    if not candidates:
        raise ConfigError("nothing to compare: no candidate trace was given")
    try:
        records = [pair(reference, candidate).record for candidate in candidates]
        record = records[0]
        findings = [_finding(reference, candidate) for candidate in candidates]
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise TraceError(
            f"a trace is damaged or was edited: {type(error).__name__}: {error}"
        ) from error
    report = assemble(record.case, findings, record.gate, command, started)
    return replace(report, scope=scope(records))


def _judge_candidate(
    plan: Plan,
    reference: Trace,
    command: str,
    progress: Progress,
    fail_fast: bool,
    album: Album,
) -> Finding:
    """Capture and compare; with ``fail_fast`` level by level, until one fails."""
    steps = [plan.case.levels.run]
    if fail_fast:
        steps = [plan.case.levels.run[: i + 1] for i in range(len(plan.case.levels.run))]
    for levels in steps:
        trace = capture_candidate(plan, reference, command, progress, levels)
        rows, covered, sources = _finding(reference, trace, levels)
        finding = diagnosed(plan, reference, trace, rows), covered, sources
        if any(row.verdict is Verdict.FAIL for row in finding[0]):
            for call in failing_calls(plan, reference, trace, rows):
                album.add(call)
            break
    return finding


def keep_diagnoses(plan: Plan, reference: Trace, candidate: Trace) -> None:
    """Judge a candidate's trace while kernel and model are here, and keep in it what explains it.

    So a comparison elsewhere gives the rows that `run` gives.
    """
    rows, _, _ = _finding(reference, candidate)
    keep(candidate, diagnosed(plan, reference, candidate, rows))


def _finding(reference: Trace, candidate: Trace, levels: tuple[str, ...] | None = None) -> Finding:
    sides = pair(reference, candidate)
    if levels is not None:
        sides = replace(sides, record=replace(sides.record, levels=levels))
    rows = attached(candidate, funnel(sides))
    sources = (reference.provenance, candidate.provenance)
    return rows, coverage(sides, rows), tuple(source for source in sources if source)


def _restrictions(case: Case, only: str) -> tuple[str, ...]:
    """What the caller or the case changed; a reader must see it beside the verdict."""
    notices = [f"restricted to modules {only}"] if only != "*" else []
    if case.model.load_rule is not None:
        notices.append(
            f"weights after the load rule {case.model.load_rule}, not as they are stored"
        )
    if set(case.levels.run) != {level.value for level in LEVELS}:
        notices.append(f"restricted to level {', '.join(case.levels.run)}")
    return tuple(notices)


def assemble(
    name: str,
    findings: Sequence[Finding],
    gate: GateConfig,
    command: str,
    started: float,
    notices: tuple[str, ...] = (),
) -> Report:
    """One report of all candidates, with the gate applied."""
    rows = tuple(row for found, _, _ in findings for row in found)
    uses = {index: use for index, row in enumerate(rows) if (use := allowance(row, gate))}
    sources = [source for _, _, found in findings for source in found]
    report = Report(
        case=name,
        rows=rows,
        coverage=_total_coverage(findings),
        provenance=tuple(s for i, s in enumerate(sources) if s not in sources[:i]),
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - started, 3),
        notices=(*notices, *_calls(sources), *_notices(rows)),
        required_coverage=gate.coverage,
        required=gate.require,
        required_not_run=required_not_run(rows, gate.require),
        allowed=tuple(f"{rows[i].tap} {rows[i].check}: {use}" for i, use in uses.items()),
        allowed_rows=frozenset(uses),
    )
    if gate.accepted is None:
        return report
    return accepted.ratchet(report, accepted.load(gate.accepted), gate.margin)


def _total_coverage(findings: Sequence[Finding]) -> Coverage:
    """Of all candidates; where there are several, a missing module says whose it is."""
    parts = [found for _, found, _ in findings]
    sides = [f" ({sources[-1].side})" if sources else "" for _, _, sources in findings]
    whose = sides if len(parts) > 1 else [""] * len(parts)
    return Coverage(
        expected=sum(part.expected for part in parts),
        compared=sum(part.compared for part in parts),
        missing=tuple(
            f"{name}{who}" for part, who in zip(parts, whose, strict=True) for name in part.missing
        ),
    )


def _calls(sources: Sequence[Provenance]) -> tuple[str, ...]:
    """How often each candidate's kernel ran in the model, where that was counted by phase."""
    said = (note for source in sources for note in source.notes if note.startswith(CALLS))
    return tuple(dict.fromkeys(said))


def _notices(rows: Sequence[Row]) -> tuple[str, ...]:
    emulated = sorted(
        {f"{row.kernel} on {row.engine}" for row in rows if row.execution == "emulated"}
    )
    return tuple(f"emulated, not run on its hardware: {name}" for name in emulated)


def _layout(case: Case) -> LayoutConfig | None:
    """The layout that the case declares, its paths from the directory of the case."""
    layout = case.model.layout
    if layout is None or layout.config is None:
        return layout
    return replace(layout, config=case.base / layout.config)
