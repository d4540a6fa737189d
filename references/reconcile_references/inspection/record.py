"""An inspection as a JSON object; keys are stable within a schema number."""

from __future__ import annotations

import math
from typing import Any

from reconcile.weight import Format, Packing
from reconcile_references.inspection.candidates import describe
from reconcile_references.inspection.run import Inspection
from reconcile_references.inspection.verdict import Layout, Scored

SCHEMA = 1


def as_record(found: Inspection) -> dict[str, Any]:
    """Tensors, layouts with whole rankings, mapping, traps."""
    logical = {item.codes.name: item.shape for item in found.keys.packed}
    return {
        "schema": SCHEMA,
        "checkpoint": str(found.source.path),
        "container": found.source.container,
        "architecture": found.model.name if found.model else None,
        "declared": found.scheme.format.name if found.scheme else None,
        "exit_code": found.exit_code,
        "notes": list(found.notes),
        "tensors": [
            {
                "name": name,
                "dtype": stored.declared or stored.dtype,
                "stored": list(stored.shape),
                "logical": list(shape) if (shape := logical.get(name)) else None,
                "minimum": _number(found.facts[name].minimum),
                "maximum": _number(found.facts[name].maximum),
                "unique": found.facts[name].unique,
                "zero_share": found.facts[name].zero_share,
                "nan": found.facts[name].nan,
                "infinite": found.facts[name].infinite,
            }
            for name, stored in found.source.tensors.items()
        ],
        "layouts": [_layout(layout) for layout in found.layouts],
        "mapping": [
            {
                "key": entry.key,
                "parameters": list(entry.parameters),
                "action": entry.action,
                "how": entry.how,
            }
            for entry in found.keys.entries
        ],
        "unused": list(found.keys.unused),
        "missing": list(found.keys.missing),
        "traps": [
            {
                "kind": trap.kind,
                "text": trap.text,
                "tensors": list(trap.tensors),
                "serious": trap.serious,
            }
            for trap in found.traps
        ],
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _layout(layout: Layout) -> dict[str, Any]:
    best = layout.best
    return {
        "tensors": list(layout.stems),
        "confidence": layout.confidence.value,
        "format": best.candidate.format.name if best and best.candidate.published else None,
        "text": describe(best.candidate.format) if best else None,
        "layout": format_fields(best.candidate.format) if best else None,
        "declared": layout.declared or None,
        "reasons": list(layout.reasons),
        "ties": list(layout.ties),
        "ranking": [_scored(one) for one in layout.ranking],
    }


def _scored(one: Scored) -> dict[str, Any]:
    return {
        "name": one.candidate.name,
        "published": one.candidate.published,
        "declared": one.declared,
        "score": one.score,
        "asymmetry": one.asymmetry,
        "profile": one.profile,
        "pairs": one.pairs,
        "twin": one.twin,
        "scale_error": one.scale_error,
        "loss": None if one.loss is None else _number(one.loss),
    }


def format_fields(form: Format) -> dict[str, Any]:
    """A format as plain data; tables of 256 codes are left to their name."""
    short = len(form.table) <= 4
    return {
        "format": form.name,
        "packing": packing_fields(form.packing),
        "table": list(form.table) if short else None,
        "invalid": sorted(form.invalid) if short else None,
        "granularity": form.granularity,
        "block": list(form.block) if form.block else None,
        "scale_convention": form.scale_convention,
        "scale_encoding": form.scale_encoding,
    }


def packing_fields(packing: Packing) -> dict[str, Any]:
    """A packing as plain data; ``stride`` and ``flat`` of a strided tile."""
    plain = {
        "bits": packing.bits,
        "dim": packing.dim,
        "arrangement": packing.arrangement,
        "low_first": packing.low_first,
    }
    if packing.tile is None:
        return plain
    tile = packing.tile
    slot = tile.places[0][1]
    stride = next(i for i, (_, digit) in enumerate(tile.places) if digit != slot)
    kind = "tiled" if tile.rows > 1 or tile.base == 3 else "strided"
    return plain | {
        "arrangement": kind,
        "low_first": slot == 0,
        "stride": stride,
        "flat": tile.flat,
    }
