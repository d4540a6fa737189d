"""An inspection for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from reconcile_references.inspection.candidates import describe
from reconcile_references.inspection.mapping import Entry
from reconcile_references.inspection.run import Inspection
from reconcile_references.inspection.verdict import Layout, Scored

RANKED = 8
"""Lines of a ranking that are shown."""
SHOWN = 3
"""Names of a list that are shown."""


def as_text(found: Inspection) -> str:
    """Tensors, layouts with their rankings, the mapping table, traps and the verdict."""
    parts = [
        _head(found),
        _tensors(found),
        *(_layout(layout) for layout in found.layouts),
        _mapping(found.keys.entries),
        _traps(found),
        _verdict(found),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(found: Inspection) -> str:
    total = sum(stored.nbytes for stored in found.source.tensors.values()) / 1e6
    model = f"{found.model.name}, {found.model.layers} layers" if found.model else "no architecture"
    count = len(found.source.tensors)
    notes = "".join(f"\n  {note}" for note in found.notes)
    held = f"{found.source.container}, {count} tensors, {total:.1f} MB"
    return f"{found.source.path.name}: {held}; {model}{notes}"


def family(name: str) -> str:
    """A key with its layer and expert numbers replaced.

    >>> family("model.layers.12.mlp.up_proj.weight")
    'model.layers.*.mlp.up_proj.weight'
    """
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _tensors(found: Inspection) -> str:
    shapes = {item.codes.name: item.shape for item in found.keys.packed}
    families: dict[tuple[str, ...], list[str]] = {}
    for name, stored in found.source.tensors.items():
        logical = shapes.get(name)
        key = (family(name), stored.declared or stored.dtype, size(stored.shape), size(logical))
        families.setdefault(key, []).append(name)
    rows = [("tensor", "dtype", "stored", "logical", "range", "unique", "zeros")]
    for (name, dtype, shape, logical_), names in sorted(families.items()):
        facts = [found.facts[n] for n in names]
        low, high = min(f.minimum for f in facts), max(f.maximum for f in facts)
        least, most = min(f.unique for f in facts), max(f.unique for f in facts)
        zeros = sum(f.zero_share for f in facts) / len(facts)
        count = f" ({len(names)})" if len(names) > 1 else ""
        unique = f"{least}" if least == most else f"{least} .. {most}"
        span = f"{low:.4g} .. {high:.4g}"
        rows.append((f"{name}{count}", dtype, shape, logical_, span, unique, f"{zeros:.1%}"))
    return columns(rows)


def size(shape: Sequence[int] | None) -> str:
    """A shape as text.

    >>> size((3, 4)), size(()), size(None)
    ('3 x 4', 'scalar', '')
    """
    if shape is None:
        return ""
    return " x ".join(map(str, shape)) or "scalar"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells under one another, two spaces apart."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def _layout(layout: Layout) -> str:
    names = sorted({family(stem) for stem in layout.stems})
    title = f"layout of {len(layout.stems)} tensors ({some(names)})"
    if layout.best is None:
        return f"{title}\n  UNEXPLAINED: {'; '.join(layout.reasons)}{_said(layout)}"
    best = layout.best.candidate
    name = best.format.name if best.published else "an unpublished layout"
    lines = [title, f"  {layout.confidence.upper()}: {name}", f"  {describe(best.format)}"]
    lines += [f"  {reason}" for reason in layout.reasons]
    if layout.confidence == "ambiguous":
        lines.append("  these cannot be told apart by what was given:")
        tied = [describe(best.format), *(t.removeprefix("unpublished: ") for t in layout.ties)]
        lines += [f"    {name}" for name in tied[:RANKED]]
    lines.append(indent(ranking(layout.ranking[:RANKED])))
    hidden = len(layout.ranking) - RANKED
    return "\n".join([*lines, f"  and {hidden} more"] if hidden > 0 else lines)


def _said(layout: Layout) -> str:
    return f"; declared {layout.declared}" if layout.declared else ""


def ranking(scored: Sequence[Scored]) -> str:
    """Candidates with what was measured for each."""
    rows = [("rank", "score", "twin", "loss", "asymmetry", "profile", "layout")]
    for place, one in enumerate(scored, 1):
        rows.append(
            (
                str(place),
                f"{one.score:.1f}",
                "-" if one.twin is None else f"{one.twin:.3f}",
                "-" if one.loss is None else f"{one.loss:.2f}",
                f"{one.asymmetry:.3f}",
                f"{one.profile:.0f}/{one.pairs}" if one.pairs else "-",
                one.candidate.name.removeprefix("unpublished: "),
            )
        )
    return columns(rows)


def indent(text: str) -> str:
    """Two spaces before every line."""
    return "\n".join(f"  {line}" for line in text.splitlines())


def _mapping(entries: Iterable[Entry]) -> str:
    families: dict[tuple[str, str, str, str], int] = {}
    for entry in entries:
        targets = [family(name) for name in entry.parameters]
        open_ = entry.how == "ambiguous"
        target = some(sorted(set(targets))) if open_ else " + ".join(targets)
        key = (family(entry.key), target, family(entry.action), entry.how)
        families[key] = families.get(key, 0) + 1
    rows = [("stored key", "parameter", "what is done", "found by")]
    rows += [
        (f"{key} ({count})" if count > 1 else key, target or "-", action, how or "-")
        for (key, target, action, how), count in sorted(families.items())
    ]
    return columns(rows)


def some(names: Sequence[str], limit: int = SHOWN) -> str:
    """The first names of a list, and how many more there are.

    >>> some(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _traps(found: Inspection) -> str:
    lines = []
    for trap in found.traps:
        names = sorted({family(name) for name in trap.tensors})
        where = f": {some(names)}" if names else ""
        count = f" ({len(trap.tensors)})" if len(trap.tensors) > 1 else ""
        mark = "!" if trap.serious else "-"
        lines.append(f"{mark} {trap.kind}: {trap.text}{count}{where}")
    return "\n".join(lines)


def _verdict(found: Inspection) -> str:
    counts: dict[str, int] = {}
    for layout in found.layouts:
        counts[layout.confidence] = counts.get(layout.confidence, 0) + len(layout.stems)
    said = ", ".join(f"{count} {name}" for name, count in counts.items()) or "no packed tensors"
    verdict = "everything is explained" if found.exit_code == 0 else "not everything is explained"
    return f"{verdict}: {said} (exit code {found.exit_code})"
