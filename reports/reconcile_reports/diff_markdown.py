"""``diff.md``: what a change did, in a size that a reviewer reads."""

from __future__ import annotations

from reconcile.diff import Change, Difference, Pairing
from reconcile_reports import diff_words
from reconcile_reports.markdown import code, escape
from reconcile_reports.wording import cut, plural

FILENAME: str | None = "diff.md"
"""Name of the file."""

LINES = 60
"""Most lines of the text."""
SHOWN = {Change.NEWLY_FAILING: 12, Change.NEWLY_PASSING: 4, Change.MOVED: 6}
"""Rows of each list; of the others three."""


def render(found: Difference) -> str:
    """The difference as GitHub-flavoured Markdown, at most `LINES` lines."""
    head = [
        f"## {diff_words.word(found)}: {escape(found.after.subject)}",
        "",
        f"{escape(diff_words.sentence(found))}; {escape(diff_words.bits(found))}.",
        "",
        f"Before: {found.before.verdict.value}, {escape(found.before.created or 'no time')}. "
        f"After: {found.after.verdict.value}, {escape(found.after.created or 'no time')}.",
        "",
        *_limits(found),
    ]
    bad = (Change.NEWLY_FAILING, Change.NEWLY_OPEN, Change.LOST)
    first = [line for change in bad for line in _list(found, change)]
    rest = [c for c in diff_words.ORDER if c not in bad]
    lines = [*head, *first, *_facts(found)]
    lines += [line for change in rest for line in _list(found, change)]
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], "... more in diff.html"]
    return "\n".join(lines).rstrip() + "\n"


def _list(found: Difference, change: Change) -> list[str]:
    items = found.having(change)
    if not items:
        return []
    most = SHOWN.get(change, 3)
    groups = diff_words.alike(items)
    more = [f"- ... and {len(groups) - most} more"] if len(groups) > most else []
    title = f"### {diff_words.TITLES[change]}: {plural(len(items), 'row')}"
    return [title, "", *(_line(*group) for group in groups[:most]), *more, ""]


def _line(item: Pairing, count: int) -> str:
    was, now = diff_words.utilisations(item)
    said = [
        f"{item.row.level.value} {code(item.row.tap)} {code(diff_words.place(item, count))}",
        f"utilisation {was} to {now}",
    ]
    if item.change in (Change.NEWLY_FAILING, Change.NEWLY_OPEN) and item.row.text:
        said.append(escape(cut(item.row.text, 120)))
    return f"- {'; '.join(said)}"


def _limits(found: Difference) -> list[str]:
    moved = found.limits_moved()
    if not moved:
        return []
    first = moved[0]
    assert first.before is not None
    assert first.after is not None
    return [
        f"**Another limit** judges {plural(len(moved), 'row')}, first {code(first.row.tap)}: "
        f"{escape(diff_words.limit(first.before.limits))} became "
        f"{escape(diff_words.limit(first.after.limits))}",
        "",
    ]


def _facts(found: Difference) -> list[str]:
    if not found.facts:
        return ["Nothing in the provenance differs.", ""]
    shown = [
        f"- {escape(name)}: {escape(cut(diff_words.short(was), 60))} → "
        f"{escape(cut(diff_words.short(now), 60))}"
        for name, was, now in found.facts[:8]
    ]
    more = [f"- ... and {len(found.facts) - 8} more"] if len(found.facts) > 8 else []
    return ["### What differs", "", *shown, *more, ""]
