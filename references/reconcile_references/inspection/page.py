"""The page that documents the format of a checkpoint, in Markdown, with a worked example."""

from __future__ import annotations

import numpy as np
import torch

from reconcile_references.inspection.candidates import Packed, describe_packing, describe_scale
from reconcile_references.inspection.forward import unpacked
from reconcile_references.inspection.run import Inspection
from reconcile_references.inspection.text import family, ranking, size, some
from reconcile_references.inspection.verdict import Layout

EXAMPLE = 16
"""Weights of the worked example."""


def as_page(found: Inspection) -> str:
    """One section for each layout, then mapping and traps."""
    items = {item.codes.name: item for item in found.keys.packed}
    sections = [_section(layout, items) for layout in found.layouts]
    traps = [
        f"* {trap.kind}: {trap.text}"
        + (f" ({some(sorted({family(name) for name in trap.tensors}))})" if trap.tensors else "")
        for trap in found.traps
    ]
    rows = sorted(
        {
            (
                family(e.key),
                " + ".join(family(p) for p in e.parameters[:3]) or "-",
                family(e.action),
            )
            for e in found.keys.entries
        }
    )
    table = ["| Stored key | Parameter | What is done |", "| --- | --- | --- |"]
    table += [f"| `{key}` | `{target}` | {action} |" for key, target, action in rows]
    head = [f"# The format of {found.source.path.name}", "", "Written by `reconcile inspect`."]
    parts = ["\n".join(head), *sections, "## Mapping\n\n" + "\n".join(table)]
    if traps:
        parts.append("## Traps\n\n" + "\n".join(traps))
    return "\n\n".join(parts) + "\n"


def _section(layout: Layout, items: dict[str, Packed]) -> str:
    families = some(sorted({f"`{family(stem)}`" for stem in layout.stems}), 8)
    if layout.best is None:
        return f"## Unexplained\n\n{families}: {'; '.join(layout.reasons)}."
    form = layout.best.candidate.format
    name = form.name if layout.best.candidate.published else "An unpublished layout"
    item = items[layout.stems[0]]
    lines = [
        f"## {name}",
        "",
        f"{families}: **{layout.confidence}**.",
        "",
        "| | |",
        "| --- | --- |",
        f"| Where a code lies | {describe_packing(form.packing)} |",
    ]
    if len(form.table) <= 4:
        codes = [c for c in range(len(form.table)) if c not in form.invalid]
        lines.append(f"| Codes | {', '.join(f'{c}: {form.table[c]:+g}' for c in codes)} |")
        if form.invalid:
            lines.append(f"| Invalid codes | {', '.join(map(str, sorted(form.invalid)))} |")
    lines.append(f"| Scale | {describe_scale(form)} |")
    if item.scale is not None:
        lines.append(f"| Scale tensor | `{family(item.scale.name)}` {size(item.scale.shape)} |")
    lines += ["", *(f"* {reason}" for reason in layout.reasons), ""]
    lines += [_example(layout, item), "", "Ranking:", "", "```", ranking(layout.ranking[:5]), "```"]
    return "\n".join(lines)


def _example(layout: Layout, item: Packed) -> str:
    """The first stored bytes and the first weights of the first tensor."""
    assert layout.best is not None
    form = layout.best.candidate.format
    stored = item.codes.rows(slice(0, 1)).reshape(-1)[:EXAMPLE]
    codes = unpacked(item, form.packing)[0, :EXAMPLE]
    values = torch.tensor(form.table)[codes].numpy()
    shown = " ".join(f"{value:+g}" for value in np.asarray(values))
    return (
        f"`{item.codes.name}` begins with the bytes `{bytes(stored).hex(' ')}`; its first row "
        f"begins with the codes {' '.join(map(str, codes.tolist()))}, which are {shown} before the "
        "scale."
    )
