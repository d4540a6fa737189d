"""What has misled others about checkpoints, found in the numbers of this one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reconcile_references.inspection.architecture import Architecture
from reconcile_references.inspection.candidates import Packed, own_scales, scale_size
from reconcile_references.inspection.facts import Facts
from reconcile_references.inspection.naming import split_key
from reconcile_references.inspection.source import CODES, DTYPES, Stored

_TOPS: dict[float, str] = {
    448.0: "float8_e4m3fn codes",
    240.0: "float8_e4m3fnuz codes",
    57344.0: "float8_e5m2 codes",
    127.0: "int8 codes",
    128.0: "int8 codes",
}
"""Largest magnitudes of codes that were converted to a float dtype without their scale."""
CONVENTIONS_APART = 50.0
"""Factor between the scales of one name from which two conventions are suspected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trap:
    """One finding."""

    kind: str
    """``undequantised``, ``unused``, ``missing``, ``padding``, ``conventions``, ``scale``,
    ``values``, ``shape``, ``declaration`` or ``files``."""
    text: str
    tensors: tuple[str, ...] = ()
    serious: bool = True
    """Whether something stays unexplained with it; else it is a note."""


def undequantised(dense: Mapping[str, Stored], measured: Mapping[str, Facts]) -> list[Trap]:
    """Float matrices whose values are codes: nobody has applied their scale."""
    found: dict[str, list[str]] = {}
    for name, stored in dense.items():
        facts = measured[name]
        floats = stored.dtype in ("F16", "BF16", "F32", "F64")
        if len(stored.shape) != 2 or not floats or math.isnan(facts.maximum):
            continue
        top = max(abs(facts.minimum), abs(facts.maximum))
        if facts.unique <= 3 and top == 1 and facts.minimum == -1:
            found.setdefault("ternary values -1, 0, 1", []).append(name)
        elif facts.unique <= 256 and top in _TOPS and stored.nbytes > 1024:
            found.setdefault(f"at most 256 values up to {top:g}: {_TOPS[top]}", []).append(name)
    return [
        Trap(
            kind="undequantised",
            text=f"stored as floats, {what}; no scale is applied",
            tensors=tuple(names),
        )
        for what, names in found.items()
    ]


_BAD_SCALES: dict[str, Callable[[Tensor], bool]] = {
    "scales that are NaN or infinite": lambda scales: not bool(scales.isfinite().all()),
    "scales that are zero": lambda scales: bool((scales == 0).any()),
    "negative scales": lambda scales: bool((scales < 0).any()),
}


def not_decoded(dense: Mapping[str, Stored]) -> list[Trap]:
    """Tensors of a block type that their container names and nobody here reads."""
    found: dict[str, list[str]] = {}
    for name, stored in dense.items():
        if stored.dtype not in DTYPES:
            found.setdefault(stored.dtype, []).append(name)
        elif stored.dtype in CODES and len(stored.shape) > 2:
            found.setdefault(f"{stored.dtype} in {len(stored.shape)} dimensions", []).append(name)
    return [
        Trap(kind="declaration", text=f"{kind} is not decoded here", tensors=tuple(names))
        for kind, names in found.items()
    ]


def scales(items: Sequence[Packed]) -> list[Trap]:
    """Scales that are missing, not finite, zero or negative."""
    traps = []
    lost = tuple(item.codes.name for item in items if item.scale is None)
    if lost:
        traps.append(Trap(kind="scale", text="codes without a scale tensor", tensors=lost))
    for text, bad in _BAD_SCALES.items():
        names = tuple(
            item.scale.name
            for item in items
            if item.scale is not None
            and item.scale.dtype not in ("U8", "F8_E8M0")
            and bad(own_scales(item).to(torch.float64))
        )
        if names:
            traps.append(Trap(kind="scale", text=text, tensors=names))
    return traps


def conventions(
    items: Sequence[Packed], measured: Mapping[str, Facts], config: Mapping[str, Any]
) -> list[Trap]:
    """One name for scales that multiply and scales that divide."""
    traps = []
    by_name: dict[str, dict[str, float]] = {}
    for item in items:
        if item.scale is None or item.scale.dtype in ("U8", "F8_E8M0"):
            continue
        used = own_scales(item).to(torch.float64)
        if scale_size(item) and bool((used > 0).all()):
            middle = float(used.log().mean().exp())
            by_name.setdefault(item.scale.name.rpartition(".")[2], {})[item.scale.name] = middle
    for suffix, middles in by_name.items():
        low, high = min(middles.values()), max(middles.values())
        if high / low < CONVENTIONS_APART:
            continue
        border = math.sqrt(low * high)
        large = tuple(name for name, value in middles.items() if value > border)
        small = [value for value in middles.values() if value <= border]
        typical = float(np.median(small)) * float(np.median([middles[n] for n in large]))
        hint = "; their product is near 1: one kind divides" if 0.2 < typical < 5 else ""
        traps.append(
            Trap(
                kind="conventions",
                text=f"{suffix} lies around {low:.3g} in some modules and around {high:.3g} in "
                f"{len(large)}{hint}",
                tensors=large,
            )
        )
    suffixes = {name.rpartition(".")[2] for name in measured}
    if "weight_scale_inv" in suffixes:
        traps.append(
            Trap(
                kind="conventions",
                text="weight_scale_inv multiplies in every published checkpoint, despite its name",
                serious=False,
            )
        )
    declared = config.get("quantization_config")
    if isinstance(declared, dict) and declared.get("quant_method") == "bitnet":
        kind = declared.get("linear_class")
        how = "multiplies" if kind == "autobitlinear" else "divides"
        said = f"linear_class {kind!r}" if kind else "without linear_class, which means bitlinear,"
        traps.append(
            Trap(
                kind="conventions",
                text=f"bitnet: {said} the scale {how}; the other class of the same library does "
                "the opposite, under the same tensor name",
                serious=False,
            )
        )
    return traps


def padding(items: Sequence[Packed], model: Architecture | None) -> list[Trap]:
    """Rows that are stored beyond the logical ones."""
    traps = []
    short = tuple(i.codes.name for i in items if i.shape and i.codes.dtype == "U8" and _pads(i))
    if short:
        traps.append(
            Trap(
                kind="padding",
                text="N is no multiple of the codes per byte: the last rows of the bytes are "
                "padding, which unpacks to weights",
                tensors=short,
                serious=False,
            )
        )
    return traps if model is not None else []


def _pads(item: Packed) -> bool:
    assert item.shape is not None
    rows, columns = item.codes.byte_shape
    return columns == item.shape[1] and rows * 4 > item.shape[0] > rows


def shapes(
    dense: Mapping[str, Stored], places: Mapping[str, str], model: Architecture | None
) -> list[Trap]:
    """Dense tensors that are larger than their parameter, or lie on their side."""
    if model is None:
        return []
    traps = []
    for name, parameter in places.items():
        if name not in dense or parameter not in model.parameters:
            continue
        got, expected = dense[name].shape, model.parameters[parameter]
        if got == expected:
            continue
        if got == expected[::-1]:
            traps.append(
                Trap(
                    kind="shape",
                    text=f"stored transposed: {list(got)} for {list(expected)}",
                    tensors=(name,),
                    serious=False,
                )
            )
        elif len(got) == len(expected) and all(g >= e for g, e in zip(got, expected, strict=True)):
            text = f"padded: {list(got)} for {list(expected)}"
            traps.append(Trap(kind="padding", text=text, tensors=(name,)))
        else:
            text = f"shape {list(got)} instead of {list(expected)}"
            traps.append(Trap(kind="shape", text=text, tensors=(name,)))
    return traps


def values(measured: Mapping[str, Facts], tensors: Mapping[str, Stored]) -> list[Trap]:
    """Tensors with NaN or infinity, and matrices of zeros only."""
    bad = tuple(
        name
        for name, facts in measured.items()
        if (facts.nan or facts.infinite) and split_key(name).role != "scale"
    )
    empty = tuple(
        name
        for name, facts in measured.items()
        if facts.zero_share == 1
        and len(tensors[name].shape) == 2
        and facts.unique == 1
        and tensors[name].dtype not in ("U8", "I8")
    )
    traps = []
    if bad:
        traps.append(Trap(kind="values", text="NaN or infinity among the values", tensors=bad))
    if empty:
        traps.append(Trap(kind="values", text="all values are zero", tensors=empty))
    return traps
