"""The verdict in one sentence, what was not checked, and how sure the answer is.

Text between backticks is code; a backtick in a name becomes an apostrophe, so pairs are pairs.
"""

from __future__ import annotations

import re
from collections import Counter

from reconcile.report import Diagnosis, Level, Reason, Report, Row, Verdict
from reconcile_reports import summary
from reconcile_reports.wording import cut, number, one_line, percent, plural

_NOT_CHECKED = (
    Reason.NOT_RUN,
    Reason.FELL_BACK,
    Reason.NOT_COMPARED,
    Reason.REFERENCE_SUSPECT,
    Reason.CAPTURE_INVALID,
    Reason.VACUOUS,
)
"""Reasons of rows from which nothing about the kernel follows."""
_UNCHECKED = "not checked: "
_LEFT_OUT = ("declined:", "sampled:", "restricted to", _UNCHECKED)
"""Beginnings of notices that say what a run left out."""
_LONGEST = 160
NONE_FITS = "none_fits"
"""Name of the explanation that says that there is none."""


def sentence(report: Report) -> str:
    """What a reviewer must know, without the verdict's word."""
    row = summary.first_divergence(report)
    if row is None:
        return _passing(report) if report.verdict is Verdict.PASS else summary.headline(report)
    return f"{_first(report, row)}; {_why(row)}"


def _passing(report: Report) -> str:
    nearest = max(
        (r for r in report.rows if r.verdict is Verdict.PASS), key=summary.utilisation_key
    )
    said = summary.headline(report)
    if nearest.utilisation is None:
        return said
    place = f"`{name(nearest.tap)}` ({nearest.level.value}, {one_line(nearest.check)})"
    return f"{said}; nearest to its limit is {place} at {number(nearest.utilisation)} of it"


def _first(report: Report, row: Row) -> str:
    """Which tap fails first, and of how many."""
    taps = dict.fromkeys(r.tap for r in report.rows if r.level is row.level)
    place = f"`{name(row.tap.partition(':')[0] or row.tap)}`"
    if len(taps) == 1:
        checks = [r for r in report.rows if r.level is row.level]
        bad = sum(r.verdict is Verdict.FAIL for r in checks)
        return f"{place} fails {bad} of {plural(len(checks), 'check')}, first {one_line(row.check)}"
    if row.level is Level.MODEL:
        return f"{place} is wrong in the whole model ({one_line(row.check)}) only"
    said = f"{place} is the first wrong {row.level.value} of {len(taps)}"
    return said + (_in_the_free_run(report, row) if row.level is Level.MODULE else "")


def _in_the_free_run(report: Report, row: Row) -> str:
    """The part of a wrong module that goes wrong first where everything runs freely."""
    inside = f"{row.tap.partition(':')[0]}."
    for other in report.rows:
        if other.level is Level.MODULE and other.check == "chained" and _bad(other):
            return f" (in the free run `{name(other.tap)}`)" if other.tap.startswith(inside) else ""
    return ""


def _bad(row: Row) -> bool:
    return row.verdict is Verdict.FAIL or row.reason is Reason.BLOCKED


def _why(row: Row) -> str:
    """The best explanation, or what was seen."""
    best = explanations(row)
    if not best or best[0].role == "runner_up":
        seen = cut(summary.seen(row).replace("`", "'"), _LONGEST)
        return f"{seen}; no known fault explains it" if row.diagnosis else seen
    said = cause(best[0]).rstrip(".")
    more = [f"; and also: {cause(item).rstrip('.')}" for item in best[1:] if item.role == "also"]
    share = percent(best[0].explains)
    return f"cause: {said}, which explains {share} of the error{''.join(more[:1])}"


def explanations(row: Row) -> list[Diagnosis]:
    """The fitted explanations, best first; empty where none fits."""
    return [item for item in summary.fitted(row) if item.name != NONE_FITS]


def role(item: Diagnosis) -> str:
    """What an explanation is to the reader."""
    if item.name == NONE_FITS:
        return "no cause"
    return {"cause": "cause", "also": "and also", "runner_up": "runner-up"}[item.role]


def cause(item: Diagnosis) -> str:
    """An explanation in words; never empty."""
    return summary.visible_or(item.text, item.name.replace("_", " ") or "unnamed").replace("`", "'")


def name(text: str) -> str:
    """A name on one line, fit to stand between backticks."""
    return one_line(text).replace("`", "'")


def not_checked(report: Report) -> list[str]:
    """What no verdict covers, and why: one line each."""
    left_out = [
        one_line(text).removeprefix(_UNCHECKED)
        for text in report.notices
        if text.startswith(_LEFT_OUT)
    ]
    declined = [text for text in left_out if text.startswith("declined:")]
    lines = [text for text in left_out if text not in declined]
    if declined:
        more = f", and {len(declined) - 1} more shapes" if len(declined) > 1 else ""
        lines.append(f"{declined[0]}{more}")
    missing = [level.value for level in (Level.OP, Level.MODULE, Level.MODEL)]
    present = {level.value for level in summary.levels(report)}
    absent = [level for level in missing if level not in present]
    if report.rows and absent:
        lines.append(f"no rows of level {', '.join(absent)}")
    if not report.covered and report.coverage.expected:
        lines.append(summary.coverage_text(report))
    lines += [f"required, but not run: {name(item)}" for item in report.required_not_run]
    return lines + _left_open(report)


def notices(report: Report) -> list[str]:
    """The notices that do not say what was left out: `not_checked` does."""
    return [text for text in report.notices if not text.startswith(_LEFT_OUT)]


def _left_open(report: Report) -> list[str]:
    """Rows that decide nothing, by reason and sentence."""
    groups: Counter[tuple[str, str]] = Counter()
    for row in report.rows:
        if row.reason in _NOT_CHECKED:
            groups[row.reason.value, cut(summary.seen(row), _LONGEST)] += 1
    return [f"{plural(count, 'row')} {reason}: {text}" for (reason, text), count in groups.items()]


def certainty(report: Report) -> list[str]:
    """What the verdicts rest on."""
    kinds: Counter[str] = Counter(row.limits.kind for row in report.rows if row.limits)
    words: dict[str, str] = {
        "exact": "exact by construction",
        "bound": "a bound derived from the declared contract",
        "baseline": "what plain torch loses at the same dtype",
        "floor": "a measured noise floor",
        "fixed": "a tolerance that somebody set",
        "ratchet": "errors accepted before",
    }
    said = [
        f"{plural(kinds[kind], 'row')} judged by {text}"
        for kind, text in words.items()
        if kinds[kind]
    ]
    unlimited = sum(row.limits is None for row in report.rows)
    return said + ([f"{plural(unlimited, 'row')} without a limit"] if unlimited else [])


def cause_of(report: Report, row: Row) -> int | None:
    """Index of the failing row that explains a blocked one."""
    found = re.match(r"explained by ([^\s;]+)", row.text)
    if row.reason is not Reason.BLOCKED or not found:
        return None
    for index, other in enumerate(report.rows):
        if other.tap.partition(":")[0] == found.group(1) and (
            other.verdict is Verdict.FAIL or other.reason is Reason.REFERENCE_SUSPECT
        ):
            return index
    return None
