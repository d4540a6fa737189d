"""One report from runs of one case on several machines, each with the kernels that it has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from reconcile.exceptions import ConfigError
from reconcile.gate.requirements import required_not_run
from reconcile.report import Coverage, Reason, Report, Row, Verdict


def merge(reports: Sequence[Report], require: Iterable[str] = ()) -> Report:
    """The rows of all runs, held to the requirements of all.

    A row that says that a kernel did not run here is left out where another run compared the same
    tap with that kernel; everything else is kept, so a FAIL anywhere is a FAIL.

    Args:
        reports: of one case and one checkpoint, none restricted to some modules or levels.
        require: kernels (``kernel`` or ``kernel@engine``) that must have run somewhere, besides
            those that the runs themselves require.

    Raises:
        ConfigError: nothing to merge, or runs that do not belong together.
    """
    _check(reports)
    rows: list[Row] = []
    allowed: set[int] = set()
    left_out = 0
    for report in reports:
        for index, row in enumerate(report.rows):
            if _ran_elsewhere(row, reports):
                left_out += 1
            elif row not in rows:
                if index in report.allowed_rows:
                    allowed.add(len(rows))
                rows.append(row)
    required = tuple(dict.fromkeys([*(k for r in reports for k in r.required), *require]))
    notices = [notice for report in reports for notice in report.notices]
    if len(files := _hashes(reports, "case file")) > 1:
        notices.append(f"the runs are of different versions of the case file: {', '.join(files)}")
    if left_out:
        notices.append(f"{left_out} rows did not run on one machine and were compared on another")
    sources = [source for report in reports for source in report.provenance]
    return replace(
        reports[0],
        rows=tuple(rows),
        coverage=_coverage([report.coverage for report in reports]),
        provenance=tuple(source for i, source in enumerate(sources) if source not in sources[:i]),
        command="reconcile merge",
        created=max(report.created for report in reports),
        seconds=sum(report.seconds for report in reports),
        notices=tuple(dict.fromkeys([f"merged from {len(reports)} runs", *notices])),
        required_coverage=max(report.required_coverage for report in reports),
        required=required,
        required_not_run=required_not_run(rows, required),
        allowed=tuple(dict.fromkeys(use for report in reports for use in report.allowed)),
        allowed_rows=frozenset(allowed),
    )


def _check(reports: Sequence[Report]) -> None:
    if not reports:
        raise ConfigError("nothing to merge: no run was given")
    for report in reports:
        restricted = [text for text in report.notices if text.startswith("restricted to")]
        if restricted:
            raise ConfigError(
                f"a run that is {restricted[0]} is no part of a merge: what it left out would "
                "be missed by nobody"
            )
    for what, values in (
        ("case", {report.case for report in reports}),
        ("checkpoint", {_checkpoint(report) for report in reports}),
        ("number of expected modules", {report.coverage.expected for report in reports}),
    ):
        if len(values) > 1:
            shown = ", ".join(sorted(str(value)[:16] for value in values))
            raise ConfigError(f"the runs differ in their {what}: {shown}")
    if len(inputs := _hashes(reports, "inputs")) > 1:
        raise ConfigError(
            f"the runs differ in their prompts, by the sha256 of the token ids: {', '.join(inputs)}"
        )


def _hashes(reports: Sequence[Report], what: str) -> list[str]:
    """What the runs found of the files whose name in the provenance begins so."""
    sides = [side for report in reports for side in report.provenance]
    named = [(name, value[:16]) for side in sides for name, value in side.hashes.items()]
    return sorted({value for name, value in named if name.startswith(what)})


def _checkpoint(report: Report) -> str:
    return ",".join(sorted({source.checkpoint_sha256 for source in report.provenance}))


def _ran_elsewhere(row: Row, reports: Sequence[Report]) -> bool:
    """Whether a row of a kernel that did not run is answered by another run."""
    if row.reason is not Reason.NOT_RUN:
        return False
    place = (row.level, row.tap, row.kernel)
    return any(
        (other.level, other.tap, other.kernel) == place
        and other.verdict is not Verdict.INCONCLUSIVE
        for report in reports
        for other in report.rows
    )


def _coverage(parts: Sequence[Coverage]) -> Coverage:
    """A module is missing if every run misses it."""
    missing = set.intersection(*(set(part.missing) for part in parts))
    listed = tuple(name for name in parts[0].missing if name in missing)
    best = max(part.compared for part in parts)
    compared = max(best, parts[0].expected - len(listed)) if _named(parts) else best
    return Coverage(expected=parts[0].expected, compared=compared, missing=listed)


def _named(parts: Sequence[Coverage]) -> bool:
    """Whether every module that was not compared is named."""
    return all(part.compared + len(part.missing) == part.expected for part in parts)
