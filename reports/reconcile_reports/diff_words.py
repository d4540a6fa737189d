"""What a difference of two reports says, as plain data for every renderer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from reconcile.diff import Change, Difference, Pairing
from reconcile.report import Limits, Row
from reconcile_reports.wording import cut, number, number_beside, one_line, percent, plural, shape

ORDER = (
    Change.NEWLY_FAILING,
    Change.NEWLY_OPEN,
    Change.LOST,
    Change.NEWLY_PASSING,
    Change.NEW,
    Change.MOVED,
)
"""What is worst is told first; rows that are the same are only counted."""

TITLES = {
    Change.NEWLY_FAILING: "Newly failing",
    Change.NEWLY_OPEN: "No longer decided (pass or fail before)",
    Change.LOST: "Only before: these rows were not compared again",
    Change.NEWLY_PASSING: "Newly passing",
    Change.NEW: "Only after",
    Change.MOVED: "Moved, verdict as before; the largest change first",
}


def word(found: Difference) -> str:
    """The verdict of the change, for the head of a page."""
    return {0: "NO NEW FAILURE", 1: "NEWLY FAILING", 2: "LESS DECIDED"}[found.exit_code]


def sentence(found: Difference) -> str:
    """The change in one sentence."""
    counts = found.counts()
    common = sum(item.before is not None and item.after is not None for item in found.pairings)
    if not common:
        return "the two reports have no row in common"
    parts = [
        f"{counts[change]} {text}"
        for change, text in (
            (Change.NEWLY_FAILING, "newly failing"),
            (Change.NEWLY_OPEN, "no longer decided"),
            (Change.LOST, "not compared again"),
            (Change.NEWLY_PASSING, "newly passing"),
            (Change.NEW, "new"),
            (Change.MOVED, "moved within their verdict"),
        )
        if counts[change]
    ]
    return f"of {plural(common, 'common row')}: {', '.join(parts) or 'nothing changed'}"


def bits(found: Difference) -> str:
    """How many outputs have the same bits."""
    same, known = found.bits()
    if not known:
        return "bit identity unknown: no row has a digest on both sides"
    return f"{same} of {plural(known, 'output')} with the same bits ({percent(same / known)})"


def before_after(item: Pairing) -> list[tuple[str, str, str]]:
    """(number, before, after) of what moved, with enough digits to tell the two apart."""
    found = [("verdict", _verdict(item.before), _verdict(item.after))]
    if item.before is None or item.after is None:
        return found
    pairs = [("utilisation", item.before.utilisation, item.after.utilisation)]
    for name in ("max_abs", "nmse", "max_ulp", "kl_mean", "top10_set_gap", "growth_share"):
        pairs.append((name, item.before.stats.get(name), item.after.stats.get(name)))
    found += [
        (name, number_beside(was, now), number_beside(now, was))
        for name, was, now in pairs
        if str(was) != str(now)
    ]
    return found


def _verdict(row: Row | None) -> str:
    if row is None:
        return "-"
    return row.verdict.value + (f" {row.reason.value}" if row.reason else "")


def alike(items: Iterable[Pairing]) -> list[tuple[Pairing, int]]:
    """Rows that differ in their pass only as the first of them and their number, in order."""
    groups: dict[tuple[object, ...], list[Pairing]] = {}
    for item in items:
        row = item.row
        groups.setdefault((row.level, row.tap, row.check, row.shape), []).append(item)
    return [(group[0], len(group)) for group in groups.values()]


def place(item: Pairing, count: int) -> str:
    """Check, shape and number of alike rows."""
    dimensions = f" {shape(item.row.shape)}" if item.row.shape else ""
    times = f" ({count} passes)" if count > 1 else ""
    return one_line(f"{item.row.check}{dimensions}{times}")


def short(value: str) -> str:
    """A hash by its first digits, other text on one line.

    >>> short("ab" * 32), short("2.13.0")
    ('abababababab...', '2.13.0')
    """
    line = one_line(value)
    return f"{line[:12]}..." if re.fullmatch(r"[0-9a-f]{40,64}", line) else line


def factor(item: Pairing) -> str:
    """How the utilisation changed, as a factor."""
    value = item.factor
    if value is None:
        return "-"
    return "from 0" if math.isinf(value) else f"{number(value)}x"


def utilisations(item: Pairing) -> tuple[str, str]:
    """Before and after."""
    was = item.before.utilisation if item.before else None
    now = item.after.utilisation if item.after else None
    return number_beside(was, now), number_beside(now, was)


def same_bits(item: Pairing) -> str:
    """Yes, no, or unknown."""
    return {True: "same bits", False: "other bits", None: "-"}[item.same_bits]


def limit(limits: Limits | None) -> str:
    """A limit with its kind and source, in one line."""
    if limits is None:
        return "none"
    bounds = ", ".join(f"{one_line(name)} <= {bound:.6g}" for name, bound in limits.bounds.items())
    return f"{limits.kind}: {bounds} ({cut(one_line(limits.source), 200)})"
