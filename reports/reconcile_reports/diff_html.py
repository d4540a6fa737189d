"""``diff.html``: two reports side by side as one self-contained page."""

from __future__ import annotations

from reconcile.diff import Difference
from reconcile_reports import diff_words
from reconcile_reports.page import render_page

FILENAME: str | None = "diff.html"
"""Name of the file."""

MOST = 2000
"""Rows of one table; the rest are counted."""


def render(found: Difference) -> str:
    """The difference as HTML."""
    return render_page(
        "diff.jinja",
        found=found,
        words=diff_words,
        css={0: "PASS", 1: "FAIL", 2: "INCONCLUSIVE"}[found.exit_code],
        most=MOST,
        moved_limits=_limits(found),
    )


def _limits(found: Difference) -> list[tuple[str, str, int, str]]:
    """(before, after, number of rows, the first tap) of every limit that moved."""
    groups: dict[tuple[str, str], list[str]] = {}
    for item in found.limits_moved():
        assert item.before is not None
        assert item.after is not None
        key = (diff_words.limit(item.before.limits), diff_words.limit(item.after.limits))
        groups.setdefault(key, []).append(item.row.tap)
    return [(was, now, len(taps), taps[0]) for (was, now), taps in groups.items()]
