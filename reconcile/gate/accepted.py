"""Accepted errors: a run may not become worse than what was accepted, even inside its limits.

`accept` takes the errors of a report, with the reason of whoever accepts them; the file is small
JSON, one row a line, sorted and rounded, to be reviewed and merged like source. A case names it,

    [gate]
    accepted = "my-case.accepted.json"
    margin = 1.25

and `ratchet` makes a PASS whose error exceeds accepted x margin a FAIL with reason ``ratchet``.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from reconcile.exceptions import ConfigError
from reconcile.numbers.limits import ratchet_limits, share_of_limits
from reconcile.report import Reason, Report, Row, Verdict
from reconcile.tracing.trace import write_atomically

SCHEMA = 1
STATISTICS = ("max_abs", "nmse", "worst_row_nmse")
"""What is accepted of a row; statistics that it lacks are left out."""
DIGITS = 3
"""Significant digits that are kept, rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Errors that somebody accepted, and for what."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    case: str
    checkpoint_sha256: str
    inputs_sha256: str
    """Hash over the fingerprints of the passes: other prompts are another comparison."""
    why: str
    created: str
    """UTC time of the accepted run."""
    command: str
    rows: dict[str, dict[str, float]]
    """By `key`: statistic to accepted value."""

    def subject(self) -> tuple[str, str, str]:
        """What the numbers are about; they hold for nothing else."""
        return self.case, self.checkpoint_sha256, self.inputs_sha256


_ACCEPTED = TypeAdapter(Accepted)


def accept(report: Report, why: str) -> Accepted:
    """The errors of a report as accepted ones.

    Raises:
        ConfigError: no reason, or a verdict other than PASS (a FAIL by the ratchet alone is what
            a reason is asked for).
    """
    if not why.strip():
        raise ConfigError("accepting errors needs a reason: --why TEXT")
    refused = [
        row
        for index, row in enumerate(report.rows)
        if row.verdict is not Verdict.PASS
        and row.reason is not Reason.RATCHET
        and index not in report.allowed_rows
    ]
    worse = any(row.reason is Reason.RATCHET for row in report.rows)
    if refused or (report.verdict is not Verdict.PASS and not worse):
        where = f", first {refused[0].tap} {refused[0].check}" if refused else ""
        raise ConfigError(f"a run that is {report.verdict.value} is not accepted{where}")
    case, checkpoint, inputs = _subject(report)
    rows = {
        name: {statistic: _rounded_up(float(row.stats[statistic])) for statistic in _gated(row)}
        for name, row in zip(keys(report.rows), report.rows, strict=True)
        if _gated(row)
    }
    return Accepted(
        case=case,
        checkpoint_sha256=checkpoint,
        inputs_sha256=inputs,
        why=why.strip(),
        created=report.created,
        command=report.command,
        rows=rows,
    )


def ratchet(report: Report, accepted: Accepted, margin: float) -> Report:
    """The report with every PASS that is worse than accepted x margin made a FAIL.

    What the file and the run do not have in common is counted in the notices, and so are rows
    that became better by more than the margin.

    Raises:
        ConfigError: accepted for another case, checkpoint or prompts, or no row in common.
    """
    _same_subject(accepted.subject(), _subject(report), "this run")
    names = keys(report.rows)
    known = [accepted.rows.get(name) for name in names]
    if not any(known):
        raise ConfigError("the accepted errors have no row in common with this run: accept again")
    rows = tuple(
        _judged(row, errors, accepted, margin) if errors else row
        for row, errors in zip(report.rows, known, strict=True)
    )
    better = sum(
        _is_better(row, errors, margin) for row, errors in zip(rows, known, strict=True) if errors
    )
    counts = {
        "rows are held to errors accepted earlier": sum(map(bool, known)),
        "rows are better by more than the margin; accept the run to keep that": better,
        "rows with errors are not among the accepted ones": sum(
            not errors and bool(_gated(row)) for row, errors in zip(report.rows, known, strict=True)
        ),
        "accepted rows are not in this run": len(set(accepted.rows) - set(names)),
    }
    said = tuple(f"ratchet: {count} {text}" for text, count in counts.items() if count)
    return replace(report, rows=rows, notices=(*report.notices, *said))


def save(accepted: Accepted, path: Path) -> None:
    """Write the file, one row a line.

    Raises:
        ConfigError: the file is there and is about another case, checkpoint or prompts.
    """
    if path.exists():
        _same_subject(load(path).subject(), accepted.subject(), "the run")
    body: dict[str, Any] = {"schema": SCHEMA} | _ACCEPTED.dump_python(accepted, mode="json")
    rows = body.pop("rows")
    head = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in body.items()]
    lines = [f"  {json.dumps(name)}: {json.dumps(rows[name])}" for name in sorted(rows)]
    text = "\n".join(["{", *head, ' "rows": {', ",\n".join(lines), " }", "}"])
    try:
        write_atomically(path, f"{text}\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def load(path: Path) -> Accepted:
    """Read what `save` wrote.

    Raises:
        ConfigError: missing, unreadable, or not accepted errors.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file of accepted errors; make it with `reconcile accept`"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: unreadable: {error}") from error
    if not isinstance(body, dict) or body.pop("schema", None) != SCHEMA:
        raise ConfigError(f"{path}: expected accepted errors of schema {SCHEMA}")
    try:
        accepted = _ACCEPTED.validate_json(json.dumps(body), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {place}: {first['msg']}") from None
    wrong = [v for row in accepted.rows.values() for v in row.values() if not 0 <= v < math.inf]
    if wrong:
        raise ConfigError(f"{path}: expected finite errors of at least 0, got {wrong[0]}")
    return accepted


def keys(rows: Sequence[Row]) -> list[str]:
    """A name for each row that is the same in every run of a case; equal ones are numbered."""
    seen: Counter[str] = Counter()
    names = []
    for row in rows:
        shape = "x".join(map(str, row.shape))
        parts = (row.level.value, row.tap, row.check, shape, row.pass_, row.kernel, row.engine)
        name = " ".join(part for part in parts if part)
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return names


def _gated(row: Row) -> tuple[str, ...]:
    """The statistics of a row that can be held to."""
    values = {name: row.stats.get(name) for name in STATISTICS}
    return tuple(
        name
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    )


def _judged(row: Row, errors: dict[str, float], accepted: Accepted, margin: float) -> Row:
    missing = [name for name in errors if name not in _gated(row)]
    if row.verdict is not Verdict.PASS:
        return row
    if missing:
        text = f"accepted with {', '.join(missing)}, which this run does not have"
        return replace(row, verdict=Verdict.FAIL, reason=Reason.RATCHET, text=text)
    bounds = {name: value * margin for name, value in errors.items()}
    limits = ratchet_limits(bounds, bounds, f"{accepted.why} ({accepted.created}), x {margin:g}")
    share, worst = share_of_limits(row.stats, limits)
    if share <= 1:
        return row
    text = (
        f"{worst} {row.stats[worst]:.3g} is more than {margin:g} x the accepted {errors[worst]:.3g}"
    )
    return replace(
        row,
        verdict=Verdict.FAIL,
        reason=Reason.RATCHET,
        text=text,
        limits=limits,
        utilisation=share,
    )


def _is_better(row: Row, errors: dict[str, float], margin: float) -> bool:
    return all(
        name in _gated(row) and float(row.stats[name]) * margin < value
        for name, value in errors.items()
    )


def _subject(report: Report) -> tuple[str, str, str]:
    hashes = sorted({source.checkpoint_sha256 for source in report.provenance})
    passes = sorted({row.pass_ for row in report.rows if row.pass_})
    inputs = sha256("\n".join(passes).encode()).hexdigest()
    return report.case, ",".join(hashes), inputs


def _same_subject(accepted: tuple[str, str, str], found: tuple[str, str, str], what: str) -> None:
    for name, one, other in zip(("case", "checkpoint", "prompts"), accepted, found, strict=True):
        if one != other:
            shown = f"{one[:16]!r}, {what} has {other[:16]!r}"
            raise ConfigError(
                f"the accepted errors are those of another {name} ({shown}): remove the file and "
                "accept again"
            )


def _rounded_up(value: float) -> float:
    """``value`` in few digits, never below it."""
    if value == 0 or not math.isfinite(value):
        return value
    shown = float(f"{value:.{DIGITS - 1}e}")
    if shown >= value:
        return shown
    step = 10.0 ** (math.floor(math.log10(value)) - DIGITS + 1)
    return float(f"{value + step:.{DIGITS - 1}e}")
