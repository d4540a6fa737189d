"""Inspect a checkpoint: read, map, infer, judge."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from reconcile.exceptions import CheckpointError
from reconcile.registry import formats
from reconcile.weight import Format, Packing
from reconcile_references.inspection import traps
from reconcile_references.inspection.architecture import Architecture, read_architecture
from reconcile_references.inspection.candidates import (
    Candidate,
    Packed,
    enumerate_candidates,
    has_parts,
    own_scales,
    packings,
    same_layout,
    scale_size,
    shape_of,
)
from reconcile_references.inspection.evidence import (
    CHECK,
    TENSORS,
    Evidence,
    gather,
    group_bytes,
    own_agreement,
    scale_ratio,
    spread,
)
from reconcile_references.inspection.facts import Facts, facts
from reconcile_references.inspection.floats import at_top_share, float_candidates
from reconcile_references.inspection.forward import ModelProbe, make_probe
from reconcile_references.inspection.mapping import KeyMap, map_keys
from reconcile_references.inspection.samples import sample
from reconcile_references.inspection.source import DTYPES, Source, Stored, open_source
from reconcile_references.inspection.traps import Trap
from reconcile_references.inspection.verdict import (
    AGREES,
    APART,
    Confidence,
    Layout,
    Scored,
    judge,
    rank,
    refuted,
    score,
)
from reconcile_references.scheme import MODELOPT_FILE, Scheme, read_scheme

I2_S = ("ternary_i2_s_x86", "ternary_i2_s_arm", "ternary_i2_s_rows")
FINALISTS = 6
"""Candidates whose loss is taken over all prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Everything that was found about a checkpoint."""

    source: Source
    config_folder: Path
    config: Mapping[str, Any]
    model: Architecture | None
    scheme: Scheme | None
    facts: Mapping[str, Facts]
    keys: KeyMap
    layouts: tuple[Layout, ...]
    traps: tuple[Trap, ...]
    notes: tuple[str, ...]
    prompts: Path | None = None

    @property
    def exit_code(self) -> int:
        """0: everything is explained; 2: something is ambiguous, likely at best, or odd."""
        sure = (Confidence.PROVED, Confidence.DECLARED)
        settled = all(layout.confidence in sure for layout in self.layouts)
        contradicted = any(
            lay.declared and not (lay.best and lay.best.declared) for lay in self.layouts
        )
        ambiguous = any(entry.how == "ambiguous" for entry in self.keys.entries)
        serious = any(trap.serious for trap in self.traps)
        return 0 if settled and not (contradicted or ambiguous or serious) else 2


def inspect(
    path: Path,
    *,
    config: Path | None = None,
    twin: Path | None = None,
    prompts: Path | None = None,
) -> Inspection:
    """Read a checkpoint and find out how its weights are stored.

    Args:
        path: checkpoint directory, safetensors or GGUF file.
        config: directory of the config.json, where it is not beside the tensors.
        twin: checkpoint of the same weights, dense.
        prompts: JSON list of texts or token ids, for the model's own predictions.

    Raises:
        CheckpointError: nothing readable, or a damaged file.
    """
    source = open_source(path)
    folder = config.parent if config and config.is_file() else config or source.folder
    by_expert = any(re.search(r"\.experts\.\d+\.", name) for name in source.tensors)
    model, body, note = read_architecture(folder, split=by_expert)
    scheme, scheme_note = _declared_scheme(body, folder)
    keys = map_keys(source.tensors, model)
    if not source.tensors:
        raise CheckpointError(f"{path}: holds no tensors")
    measured = {name: facts(stored) for name, stored in source.tensors.items()}
    twins, twin_note = _twins(twin, keys, model)
    probe, probe_note = _probe(folder, keys, model, prompts)
    norms = {
        name: stored
        for name, stored in keys.dense.items()
        if len(stored.shape) == 1 and name.endswith("weight")
    }
    layouts = tuple(
        layout
        for items in _groups(keys.packed)
        for layout in _infer_apart(items, norms, twins, _declared(items, scheme), probe)
    )
    found = _traps(source, keys, measured, model, body, scheme)
    found += _scales_apart(keys.packed, layouts, twins)
    notes = (note, scheme_note, twin_note, probe_note, *source.notes)
    return Inspection(
        source=source,
        config_folder=folder,
        config=body,
        model=model,
        scheme=scheme,
        facts=measured,
        keys=keys,
        layouts=layouts,
        traps=tuple(found),
        notes=tuple(text for text in notes if text),
        prompts=prompts,
    )


# --------------------------------------------------------------------------- what is declared


def _declared_scheme(body: Mapping[str, Any], folder: Path) -> tuple[Scheme | None, str]:
    if not body:
        return None, ""
    if "quantization_config" not in body and not (folder / MODELOPT_FILE).exists():
        return None, "config.json declares no quantisation"
    try:
        return read_scheme(body, folder), ""
    except CheckpointError as error:
        return None, f"no format is declared: {error}"


def _declared(items: Sequence[Packed], scheme: Scheme | None) -> list[Format]:
    """Formats that the container or the config declares for a group."""
    label = items[0].codes.declared
    if label == "I2_S":
        return [formats()[name] for name in I2_S]
    if label:
        return [formats()[f"ternary_{label.lower()}"]]
    if scheme is None:
        return []
    form = scheme.format
    scale = items[0].scale
    if scheme.powers_of_two and scale is not None and scale.dtype in ("U8", "F8_E8M0"):
        form = replace(form, scale_encoding="e8m0")
    return [form]


def _groups(items: Sequence[Packed]) -> list[list[Packed]]:
    """Tensors that are stored alike: dtype, declaration, and the relation of their shapes."""
    groups: dict[tuple[object, ...], list[Packed]] = {}
    for item in items:
        groups.setdefault(_likeness(item), []).append(item)
    return list(groups.values())


def _likeness(item: Packed) -> tuple[object, ...]:
    rows, columns = item.codes.byte_shape
    scale: tuple[object, ...] = ()
    if item.scale is not None and not item.codes.declared:
        many = scale_size(item) > 1 and not has_parts(item)
        sides = len([size for size in item.scale.shape if size != 1]) if many else 0
        scale = (item.scale.dtype, sides)
    ratio: tuple[object, ...] = ()
    if item.shape is not None and not item.codes.declared:
        ratio = (round(item.shape[0] / rows), round(item.shape[1] / max(1, columns), 3))
    return item.codes.dtype, item.codes.declared, scale, ratio


# --------------------------------------------------------------------------- witnesses


def _twins(
    path: Path | None, keys: KeyMap, model: Architecture | None
) -> tuple[dict[str, list[Stored]], str]:
    """Dense weights of the twin by stem of the packed tensor."""
    if path is None:
        return {}, "no twin was given (--twin)"
    other = map_keys(open_source(path).tensors, model)
    by_parameter = {
        spot.parameters[0]: other.dense[name]
        for name, spot in other.places.items()
        if spot.how != "ambiguous"
        and len(spot.parameters) == 1
        and other.dense[name].dtype in ("F16", "BF16", "F32", "F64")
    }
    found = {}
    for item in keys.packed:
        if item.place is None or item.place.how == "ambiguous":
            continue
        parts = [by_parameter.get(name) for name in item.place.parameters]
        if all(part is not None and len(part.shape) == 2 for part in parts):
            found[item.stem] = [part for part in parts if part is not None]
    if not found:
        return {}, f"{path}: no tensor of it is the dense twin of a packed one"
    lost = len(keys.packed) - len(found)
    return found, f"the twin has no dense weight for {lost} packed tensors" if lost else ""


def _probe(
    folder: Path, keys: KeyMap, model: Architecture | None, prompts: Path | None
) -> tuple[ModelProbe | None, str]:
    if model is None or not keys.packed:
        return None, ""
    if any(i.place is None or i.place.how == "ambiguous" for i in keys.packed):
        return None, "the model was not run: the parameters of some packed tensors are not known"
    dense = {
        spot.parameters[0]: keys.dense[name]
        for name, spot in keys.places.items()
        if len(spot.parameters) == 1 and spot.how != "ambiguous"
    }
    shapes = {n: s.shape for n, s in dense.items() if n in model.parameters}
    if any(shape != model.parameters[name] for name, shape in shapes.items()):
        return None, "the model was not run: dense tensors have other shapes than its parameters"
    if any(stored.dtype not in DTYPES for stored in dense.values()):
        return None, "the model was not run: some tensors are of a type that is not decoded here"
    if len(_groups(keys.packed)) != 1:
        return None, "the model was not run: the packed tensors are stored in more than one way"
    return make_probe(folder, keys.packed, dense, prompts)


# --------------------------------------------------------------------------- inference


def _infer_apart(
    items: Sequence[Packed],
    norms: Mapping[str, Stored],
    twins: Mapping[str, Sequence[Stored]],
    declared: Sequence[Format],
    probe: ModelProbe | None,
) -> list[Layout]:
    """The layouts of tensors that look alike; those that their own twins deny are taken apart."""
    layout = _infer(items, norms, twins, declared, probe)
    if layout.best is None:
        return [layout]
    form = layout.best.candidate.format
    denied = [
        item
        for item in items
        if item.stem in twins and own_agreement(item, form, twins[item.stem]) < AGREES
    ]
    if not denied or len(denied) == len(items):
        return [layout]
    others = [item for item in items if item not in denied]
    return [
        _infer(others, norms, twins, declared, None),
        *_infer_apart(denied, norms, twins, declared, None),
    ]


def _infer(
    items: Sequence[Packed],
    norms: Mapping[str, Stored],
    twins: Mapping[str, Sequence[Stored]],
    declared: Sequence[Format],
    probe: ModelProbe | None,
) -> Layout:
    """The layout of tensors that are stored alike."""
    totals = group_bytes(items)
    tried: dict[Packing, Evidence] = {}
    if items[0].codes.dtype in ("U8", "I8", "I32"):
        for packing in packings():
            found = gather(items, packing, norms, twins, totals)
            if found is not None and found.illegal_share == 0:
                tried[packing] = found
    candidates = enumerate_candidates(items, {p: e.counts for p, e in tried.items()})
    candidates = _without_copies(candidates, tried)
    if not candidates:
        candidates = float_candidates(items, totals)
        byte = Packing(bits=8, dim=1, arrangement="interleaved")
        whole = gather(items, byte, {}, twins, totals) if candidates else None
        tried = {byte: whole} if whole else {}
        candidates = candidates if whole else []
    scored = score(candidates, tried, declared)
    best = max((one.twin for one in scored if one.twin is not None), default=0.0)
    scored = [
        _with_scale(one, items, twins)
        if one.twin is not None and one.twin > best - APART and best >= AGREES
        else one
        for one in scored
    ]
    scored = _with_loss(scored, probe)
    if items[0].codes.dtype.startswith("F8"):
        scored = [_with_block(one, items) for one in scored]
    return judge(
        [item.codes.name for item in items],
        scored,
        declared,
        probe.guessing if probe else None,
        lambda a, b: _alike(a, b, items),
    )


def _without_copies(
    candidates: Sequence[Candidate], tried: Mapping[Packing, Evidence]
) -> list[Candidate]:
    """Leave out packings that decode these tensors exactly as an earlier one does."""
    digests: dict[bytes, Packing] = {}
    kept: dict[Packing, bool] = {}
    for packing, found in tried.items():
        first = digests.setdefault(found.digest, packing)
        kept[packing] = first is packing
    return [c for c in candidates if kept[replace(c.format.packing, pad=False)]]


def _with_scale(
    one: Scored,
    items: Sequence[Packed],
    twins: Mapping[str, Sequence[Stored]],
) -> Scored:
    """The factor by which the twin's magnitudes differ from the weight's."""
    if not twins:
        return one
    form = one.candidate.format
    packing = replace(form.packing, pad=False)
    ratios = []
    for item in spread(items, TENSORS):
        shape = shape_of(item, packing)
        if item.stem in twins and shape:
            part = sample(item, packing, shape)
            ratio = scale_ratio(item, form, part, twins[item.stem])
            ratios += [ratio[form.scale_convention == "divide"]] if ratio else []
    good = [abs(float(np.log2(ratio))) for ratio in ratios if ratio > 0]
    return replace(one, scale_error=float(np.median(good))) if good else one


def _with_loss(scored: list[Scored], probe: ModelProbe | None) -> list[Scored]:
    """The loss of the model under every candidate, of the best ones over all prompts.

    What a twin has refuted already is not run.
    """
    if probe is None:
        return scored
    leader = rank(scored)[:1]
    ordered = rank(
        one
        if leader and refuted(leader[0], one, None)
        else replace(one, loss=probe.loss(one.candidate.format, 1))
        for one in scored
    )
    if len(probe.prompts) == 1:
        return ordered
    best = [
        replace(one, loss=probe.loss(one.candidate.format, len(probe.prompts)))
        if one.loss is not None
        else one
        for one in ordered[:FINALISTS]
    ]
    return [*best, *ordered[FINALISTS:]]


def _with_block(one: Scored, items: Sequence[Packed]) -> Scored:
    """Whether every block holds a code of the largest magnitude, as profile over the blocks."""
    block = one.candidate.format.block
    if block is None:
        return one
    return replace(one, profile=50 * at_top_share(items[0], block), pairs=1)


def _alike(a: Candidate, b: Candidate, items: Sequence[Packed]) -> bool:
    """Whether two candidates differ in a convention that no scale of these tensors shows."""
    convention = b.format.scale_convention
    if not same_layout(replace(a.format, scale_convention=convention), b.format):
        return False
    return all(
        item.scale is None or bool((a.format.scale_values(own_scales(item)) == 1).all())
        for item in items
    )


# --------------------------------------------------------------------------- traps


def _traps(
    source: Source,
    keys: KeyMap,
    measured: Mapping[str, Facts],
    model: Architecture | None,
    body: Mapping[str, Any],
    scheme: Scheme | None,
) -> list[Trap]:
    places = {n: s.parameters[0] for n, s in keys.places.items() if len(s.parameters) == 1}
    found = [
        *traps.not_decoded(keys.dense),
        *traps.undequantised(keys.dense, measured),
        *traps.scales(keys.packed),
        *traps.conventions(keys.packed, measured, body),
        *traps.padding(keys.packed, model),
        *traps.shapes(keys.dense, places, model),
        *traps.values(measured, source.tensors),
        *_declaration(keys, model, scheme),
    ]
    for kind, text, names in (
        ("unused", "tensors that no parameter takes", keys.unused),
        ("missing", "parameters that no tensor fills", keys.missing),
    ):
        if names and not any(entry.how == "ambiguous" for entry in keys.entries):
            found.append(Trap(kind=kind, text=text, tensors=tuple(names)))
    return found


def _scales_apart(
    items: Sequence[Packed], layouts: Sequence[Layout], twins: Mapping[str, Sequence[Stored]]
) -> list[Trap]:
    """Tensors whose scale fits the twin only under the other convention, or under none."""
    by_name = {item.codes.name: item for item in items}
    wrong = []
    for layout in layouts:
        if layout.best is None:
            continue
        form = layout.best.candidate.format
        packing = replace(form.packing, pad=False)
        for item in (by_name[stem] for stem in layout.stems):
            shape = shape_of(item, packing)
            if item.stem not in twins or shape is None:
                continue
            part = sample(item, packing, shape, CHECK)
            ratio = scale_ratio(item, form, part, twins[item.stem])
            if ratio and not 0.5 < ratio[form.scale_convention == "divide"] < 2:
                wrong.append(item.codes.name)
    if not wrong:
        return []
    text = "the weight is not of the twin's magnitude under the convention that the others have"
    return [Trap(kind="conventions", text=text, tensors=tuple(wrong))]


def _declaration(keys: KeyMap, model: Architecture | None, scheme: Scheme | None) -> list[Trap]:
    """Linears that are quantised although declared dense, or the reverse."""
    if model is None or scheme is None:
        return []
    packed = {name for item in keys.packed if item.place for name in item.place.parameters}
    dense = {
        spot.parameters[0]
        for name, spot in keys.places.items()
        if len(spot.parameters) == 1 and spot.how != "ambiguous"
    }
    quantised = {m for m in model.linears if scheme.is_quantized(m, model.head)}
    plain = tuple(sorted(m for m in quantised if f"{m}.weight" in dense))
    extra = tuple(sorted(m for m in set(model.linears) - quantised if f"{m}.weight" in packed))
    traps_ = []
    if plain:
        text = "declared quantised, stored dense"
        traps_.append(Trap(kind="declaration", text=text, tensors=plain))
    if extra:
        text = "declared dense, stored as codes"
        traps_.append(Trap(kind="declaration", text=text, tensors=extra))
    return traps_
