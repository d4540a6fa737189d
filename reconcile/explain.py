"""One tap of a report in words: verdicts, why this limit, and the worst elements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from reconcile.exceptions import TapError, nearest
from reconcile.report import Diagnosis, Report, Row, Verdict, describe


def explain(report: Report, tap: str) -> str:
    """All rows of a tap, those that are not PASS in full, then the tightest PASS.

    Args:
        report: a run.
        tap: ``module:port``, or a module path that stands for all of its ports.

    Raises:
        TapError: the report has no such tap; names the nearest.
    """
    rows = [row for row in report.rows if tap in (row.tap, row.tap.partition(":")[0])]
    if not rows:
        known = {row.tap for row in report.rows}
        raise TapError(
            f"the report has no tap {tap!r}: "
            f"{nearest(tap, known, '`reconcile explain RUN` lists all')}"
        )
    bad = [row for row in rows if row.verdict is not Verdict.PASS]
    good = [row for row in rows if row.verdict is Verdict.PASS]
    lines = [f"{tap}: {len(rows)} rows, {len(bad)} of them not PASS"]
    for row in bad:
        lines += ["", *_full(row)]
    if good:
        tightest = max(good, key=lambda row: row.utilisation or 0.0)
        lines += ["", "closest PASS:", *_full(tightest)]
    return "\n".join(lines)


def taps(report: Report) -> str:
    """Every tap of a report, in its order, with its rows by verdict."""
    found: dict[str, Counter[Verdict]] = {}
    for row in report.rows:
        found.setdefault(row.tap, Counter())[row.verdict] += 1
    lines = [
        f"{tap}  {', '.join(f'{counts[v]} {v.value}' for v in Verdict if counts[v])}"
        for tap, counts in found.items()
    ]
    return "\n".join([f"{report.title}: {len(lines)} taps", *lines])


def explain_row(row: Row) -> str:
    """Everything that one row says."""
    return "\n".join(_full(row))


def _full(row: Row) -> list[str]:
    lines = [describe(row), f"  pass {row.pass_}, {_where(row)}"]
    lines += [_explanation(found) for found in row.diagnosis]
    if row.limits is not None:
        bounds = ", ".join(f"{k} <= {v:.4g}" for k, v in row.limits.bounds.items())
        lines.append(f"  limit ({row.limits.kind}): {bounds}")
        lines.append(f"  why: {row.limits.source}")
    if (null := _null_candidate(row)) is not None:
        lines.append(f"  a candidate of zeros would {null}")
    if row.utilisation is not None:
        lines.append(f"  utilisation {row.utilisation:.4g} (1 is the limit)")
    numbers = [
        f"{name} {row.stats[name]:.4g}"
        for name in ("max_abs", "nmse", "worst_row_nmse", "max_ulp", "bias", "reference_amax")
        if isinstance(row.stats.get(name), int | float)
    ]
    if numbers:
        lines.append(f"  {', '.join(numbers)}")
    lines += _worst(row.stats)
    return lines


_ROLES = {"cause": "cause", "also": "and also", "runner_up": "instead of it, less well"}
"""What a diagnosis is among those of its row, in words."""


def _explanation(found: Diagnosis) -> str:
    """One diagnosis: its part, its name, what it explains, and the parameters in words."""
    share = f" explains {found.explains:.1%} of the error" if found.explains else ""
    return f"  {_ROLES[found.role]}: {found.name}{share}: {found.text}"


def _null_candidate(row: Row) -> str | None:
    """What this limit would make of zeros: a limit that accepts them says nothing."""
    stats, limits = row.stats, row.limits
    if limits is None:
        return None
    if "zeros_over" in stats:
        return f"be refused at {stats['zeros_over']} of {stats['n']} elements"
    if "reference_amax" not in stats:
        return None
    zeros = {"max_abs": float(stats["reference_amax"]), "nmse": 1.0, "worst_row_nmse": 1.0}
    shares = {
        name: zeros[name] / bound if bound > 0 else float("inf")
        for name, bound in limits.bounds.items()
        if name in zeros
    }
    if not shares:
        return None
    worst = max(shares, key=lambda name: shares[name])
    return f"have {shares[worst]:.3g} times the accepted {worst}"


def _where(row: Row) -> str:
    if not row.engine:
        return f"{row.kernel}, no engine"
    return f"{row.kernel} on {row.engine} ({row.implementation}, {row.execution}, {row.fidelity})"


def _worst(stats: dict[str, Any]) -> list[str]:
    elements: Sequence[Sequence[Any]] = stats.get("worst_elements", ())
    lines = []
    if elements:
        lines.append("  worst elements: index, candidate, reference, candidate - reference")
        lines += [
            f"    {index!s:<14} {candidate:>14.7g} {reference:>14.7g} {error:>12.4g}"
            for index, candidate, reference, error in elements
        ]
    for name, what in (("worst_rows", "nmse"), ("worst_columns", "max |c - r|")):
        if stats.get(name):
            listed = ", ".join(f"{place}: {value:.3g}" for place, value in stats[name])
            lines.append(f"  {name.replace('_', ' ')} ({what}): {listed}")
    return lines
