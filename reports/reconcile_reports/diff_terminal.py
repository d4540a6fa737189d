"""What ``reconcile diff`` prints."""

from __future__ import annotations

from reconcile.diff import Change, Difference, Pairing
from reconcile_reports import diff_words
from reconcile_reports.terminal import WIDTH, labelled, middle, wrapped
from reconcile_reports.wording import one_line, plural

FILENAME: str | None = None
"""The text goes to the terminal, not to a file."""

SHOWN = 8
"""Rows of each list."""


def render(found: Difference) -> str:
    """The difference as plain text, at most 100 columns wide."""
    head = (
        f"{diff_words.word(found)}: {one_line(found.after.subject)}: {diff_words.sentence(found)}"
    )
    lines = [
        *wrapped(head),
        *labelled("bits", [diff_words.bits(found)]),
        *labelled("limits", _limits(found)),
        *labelled(
            "differs",
            [
                f"{one_line(n)}: {diff_words.short(a)} -> {diff_words.short(b)}"
                for n, a, b in found.facts[:SHOWN]
            ],
        ),
        *(line for change in diff_words.ORDER for line in _list(found, change)),
    ]
    return "\n".join(lines) + "\n"


def _limits(found: Difference) -> list[str]:
    moved = found.limits_moved()
    return [f"{plural(len(moved), 'row')} judged by another limit"] if moved else []


def _list(found: Difference, change: Change) -> list[str]:
    items = found.having(change)
    if not items:
        return []
    groups = diff_words.alike(items)
    more = [f"  ... and {len(groups) - SHOWN} more"] if len(groups) > SHOWN else []
    title = f"{diff_words.TITLES[change]}: {plural(len(items), 'row')}; utilisation"
    return ["", title, *(_line(*group) for group in groups[:SHOWN]), *more]


def _line(item: Pairing, count: int) -> str:
    was, now = diff_words.utilisations(item)
    tail = f" {diff_words.place(item, count)}: {was} -> {now}"
    head = f"  {item.row.level.value} "
    return head + middle(one_line(item.row.tap), WIDTH - len(head) - len(tail)) + tail
