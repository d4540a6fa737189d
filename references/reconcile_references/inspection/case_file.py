"""A case file that `reconcile run` accepts, from what was found."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from reconcile.exceptions import CheckpointError
from reconcile.weight import Format
from reconcile_references.inspection.candidates import Packed, describe, has_parts
from reconcile_references.inspection.record import packing_fields
from reconcile_references.inspection.run import Inspection

KERNEL = "torch_dequant"
"""A kernel of every format; whoever has one of their own puts it here."""


def as_toml(found: Inspection, place: Path) -> str:
    """The case, to lie at ``place``: paths are relative to it.

    Raises:
        CheckpointError: what is missing for a case: a layout, one format for all, an architecture,
            or the parameter of a tensor.
    """
    form = _one_format(found)
    _check(found)
    base = place.resolve().parent
    lines = [
        "# Written by reconcile inspect.",
        *(f"# {layout.confidence}: {len(layout.stems)} tensors" for layout in found.layouts),
        "[case]",
        f"name = {_text(found.source.path.stem)}",
        "",
        "[model]",
        f"checkpoint = {_text(os.path.relpath(found.source.folder.resolve(), base))}",
        *_prompts(found, base),
        "",
        "[model.layout]",
        f"# {describe(form)}",
        *_format_lines(found, form),
    ]
    if found.config_folder.resolve() != found.source.folder.resolve():
        lines.append(f"config = {_text(os.path.relpath(found.config_folder.resolve(), base))}")
    if found.keys.unused:
        lines.append(f"unused = [{', '.join(map(_text, found.keys.unused))}]")
    if _spelt_out(found):
        lines += ["", "[model.layout.packing]", *_packing_lines(form)]
    lines += ["", "[model.layout.linears]", *_linears(found.keys.packed)]
    if dense := list(_dense(found)):
        lines += ["", "[model.layout.dense]", *dense]
    lines += ["", "[[candidate]]", f"name = {_text(KERNEL)}", f"kernel = {_text(KERNEL)}", ""]
    return "\n".join(lines)


def _prompts(found: Inspection, base: Path) -> list[str]:
    """The prompts that the inspection had; without them the checkpoint needs a tokenizer."""
    if found.prompts is None:
        return []
    return [f"prompts = {_text(os.path.relpath(found.prompts.resolve(), base))}"]


def _one_format(found: Inspection) -> Format:
    best = [layout.best for layout in found.layouts]
    if not best or any(one is None for one in best):
        raise CheckpointError("no case is written: some tensors have no layout that fits")
    forms = [one.candidate.format for one in best if one is not None]
    if any(packing_fields(f.packing) != packing_fields(forms[0].packing) for f in forms) or any(
        (f.table, f.granularity, f.block, f.scale_convention)
        != (forms[0].table, forms[0].granularity, forms[0].block, forms[0].scale_convention)
        for f in forms
    ):
        raise CheckpointError("no case is written: its linears are stored in more than one format")
    return forms[0]


def _check(found: Inspection) -> None:
    if found.model is None:
        raise CheckpointError(
            "no case is written: the architecture is not known; give --config with its config.json"
        )
    open_ = [entry.key for entry in found.keys.entries if entry.how == "ambiguous"]
    if open_:
        raise CheckpointError(
            f"no case is written: the parameter of {len(open_)} tensors is not known, among them "
            f"{open_[0]}"
        )
    if found.keys.missing:
        raise CheckpointError(f"no case is written: no tensor for {found.keys.missing[0]}")


def _spelt_out(found: Inspection) -> bool:
    best = found.layouts[0].best
    return best is not None and not best.candidate.published


def _format_lines(found: Inspection, form: Format) -> list[str]:
    """A published format by its name; another as changes of one that is near."""
    if not _spelt_out(found):
        block = f"block = {list(form.block)}" if form.block else None
        return [f"format = {_text(form.name)}", *([block] if block else [])]
    if len(form.table) > 4 or packing_fields(form.packing)["arrangement"] == "tiled":
        raise CheckpointError(f"no case is written: {describe(form)} cannot be spelt out in one")
    lines = [
        'format = "ternary_k_interleaved"  # changed by what follows',
        f"table = {list(form.table)}",
        f"invalid = {sorted(form.invalid)}",
        f"granularity = {_text(form.granularity)}",
        f"scale_convention = {_text(form.scale_convention)}",
    ]
    return [*lines, f"block = {list(form.block)}"] if form.block else lines


def _packing_lines(form: Format) -> list[str]:
    fields = packing_fields(form.packing)
    if form.packing.tile is not None:
        fields = {k: fields[k] for k in ("arrangement", "low_first", "stride", "flat")}
    return [f"{key} = {json.dumps(value)}" for key, value in fields.items()]


def _linears(items: Iterable[Packed]) -> list[str]:
    lines = []
    for item in items:
        assert item.place is not None
        start = 0
        for index, parameter in enumerate(item.place.parameters):
            fields = [f"codes = {_text(item.codes.name)}"]
            if item.scale is not None:
                fields.append(f"scale = {_text(item.scale.name)}")
            if item.shards:
                end = start + item.shards[index][0]
                fields.append(f"rows = [{start}, {end}]")
                start = end
            if has_parts(item):
                fields.append(f"part = {index}")
            module = parameter.removesuffix(".weight")
            lines.append(f"{_text(module)} = {{ {', '.join(fields)} }}")
    return lines


def _dense(found: Inspection) -> Iterable[str]:
    actions = {entry.key: entry.action for entry in found.keys.entries}
    for key, spot in found.keys.places.items():
        turned = actions[key] == "transpose"
        if len(spot.parameters) == 1 and (spot.parameters[0] != key or turned):
            yield f"{_text(spot.parameters[0])} = {_text(('T:' if turned else '') + key)}"


def _text(value: str) -> str:
    """A TOML basic string; JSON's escapes are among TOML's."""
    return json.dumps(value)
