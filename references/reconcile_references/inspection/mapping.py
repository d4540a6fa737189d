"""The mapping table: every stored key, the parameter it belongs to, and what is done to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reconcile_references.inspection.architecture import Architecture
from reconcile_references.inspection.candidates import Packed, logical_shape, packings
from reconcile_references.inspection.naming import Key, Place, by_shape, place, split_key
from reconcile_references.inspection.source import CODES, DTYPES, Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the table."""

    key: str
    parameters: tuple[str, ...]
    """Where it goes; several where it is split by rows or where nothing decides."""
    action: str
    """``copy``, ``unpack``, ``split``, ``transpose``, ``scale of``, ``unused``, ..."""
    how: str
    """``same name``, ``dialect``, ``split``, ``shape``, ``ambiguous`` or ````."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMap:
    """All keys, sorted into what they are."""

    packed: tuple[Packed, ...]
    dense: Mapping[str, Stored]
    """Every other weight, bias or norm by key."""
    places: Mapping[str, Place]
    """Of the dense ones."""
    entries: tuple[Entry, ...]
    unused: tuple[str, ...]
    missing: tuple[str, ...]
    """Parameters of the model that no tensor fills."""


def map_keys(tensors: Mapping[str, Stored], model: Architecture | None) -> KeyMap:
    """Sort the keys of a checkpoint and find the parameter of each."""
    keys = {name: split_key(name) for name in tensors}
    codes = {name for name, key in keys.items() if _is_codes(tensors[name], key)}
    scales = {keys[n].stem: n for n in tensors if keys[n].role == "scale"}
    found = {
        name: spot
        for name, key in keys.items()
        if key.role in ("weight", "bias", "other")
        and (spot := place(_stem(name, key), key.role, model))
    }
    if model is not None:
        found |= _placed_by_shape(tensors, keys, codes, found, model)
    packed = tuple(
        _packed(tensors, name, keys[name], scales, found.get(name), model) for name in sorted(codes)
    )
    dense = {
        name: tensors[name]
        for name, key in keys.items()
        if name not in codes and key.role in ("weight", "bias", "other")
    }
    used_scales = {item.scale.name for item in packed if item.scale is not None}
    entries = [
        _entry(name, keys[name], tensors, codes, used_scales, found, model) for name in tensors
    ]
    unused = tuple(entry.key for entry in entries if entry.action == "unused")
    return KeyMap(
        packed=packed,
        dense=dense,
        places={name: found[name] for name in dense if name in found},
        entries=tuple(entries),
        unused=unused,
        missing=_missing(found, model),
    )


def _stem(name: str, key: Key) -> str:
    return key.stem if key.role != "other" else name


def _is_codes(stored: Stored, key: Key) -> bool:
    if key.role not in ("weight", "other") or not stored.nbytes:
        return False
    return bool(stored.logical) or (stored.dtype in CODES and len(stored.shape) == 2)


def _placed_by_shape(
    tensors: Mapping[str, Stored],
    keys: Mapping[str, Key],
    codes: set[str],
    found: Mapping[str, Place],
    model: Architecture,
) -> dict[str, Place]:
    """Keys that no name places, by what their shapes may be."""
    taken = {parameter for spot in found.values() for parameter in spot.parameters}
    free = {n: s for n, s in model.parameters.items() if n not in taken and n not in model.tied}
    possible = {
        name: _possible_shapes(tensors[name], name in codes)
        for name, key in keys.items()
        if name not in found and key.role in ("weight", "bias", "other")
    }
    return by_shape(possible, free)


def _possible_shapes(stored: Stored, is_codes: bool) -> set[tuple[int, ...]]:
    if stored.logical:
        return {tuple(stored.logical)}
    if not is_codes or stored.dtype.startswith("F8"):
        return {stored.shape}
    shapes = {shape for p in packings() if (shape := logical_shape(p, stored))}
    return {*shapes, stored.shape}


def _packed(
    tensors: Mapping[str, Stored],
    name: str,
    key: Key,
    scales: Mapping[str, str],
    spot: Place | None,
    model: Architecture | None,
) -> Packed:
    stored = tensors[name]
    scale = scales.get(key.stem) or scales.get(name)
    shape, shards = _logical(stored, spot, model)
    return Packed(
        codes=stored,
        scale=tensors[scale] if scale else None,
        stem=_stem(name, key),
        place=spot,
        shape=shape,
        shards=shards,
    )


def _logical(
    stored: Stored, spot: Place | None, model: Architecture | None
) -> tuple[tuple[int, int] | None, tuple[tuple[int, int], ...]]:
    """Logical (N, K) and the shapes of the parts of a split tensor."""
    if spot is not None and model is not None and spot.how != "ambiguous":
        parts = [model.parameters[name] for name in spot.parameters]
        if all(len(part) == 2 for part in parts):
            sizes = tuple((part[0], part[1]) for part in parts)
            whole = (sum(n for n, _ in sizes), sizes[0][1])
            return whole, sizes if len(sizes) > 1 else ()
    if spot is not None and model is not None:
        shapes = {model.parameters[name] for name in spot.parameters}
        if len(shapes) == 1 and len(shape := shapes.pop()) == 2:
            return (shape[0], shape[1]), ()
    if stored.logical and len(stored.logical) == 2:
        return (stored.logical[0], stored.logical[1]), ()
    return None, ()


def _entry(
    name: str,
    key: Key,
    tensors: Mapping[str, Stored],
    codes: set[str],
    scales: set[str],
    found: Mapping[str, Place],
    model: Architecture | None,
) -> Entry:
    if name in scales:
        return Entry(key=name, parameters=(), action=f"scale of {key.stem}", how="same name")
    if key.role in ("input_scale", "cache_scale"):
        what = "activation scale" if key.role == "input_scale" else "cache scale"
        return Entry(key=name, parameters=(), action=f"{what} of {key.stem}", how="same name")
    spot = found.get(name)
    if spot is None:
        return Entry(key=name, parameters=(), action="unused", how="")
    return Entry(
        key=name,
        parameters=spot.parameters,
        action=_action(tensors[name], name in codes, spot, model),
        how=spot.how,
    )


def _action(stored: Stored, is_codes: bool, spot: Place, model: Architecture | None) -> str:
    if spot.how == "ambiguous":
        return f"one of {spot.choices} of this shape"
    verb = "decode" if stored.dtype.startswith("F8") else "unpack"
    if spot.how == "split":
        return f"{verb}, split by rows" if is_codes else "split by rows"
    if is_codes:
        return verb
    if stored.dtype not in DTYPES:
        return f"not decoded: {stored.dtype}"
    shape = model.parameters[spot.parameters[0]] if model is not None else stored.shape
    turned = stored.shape == shape[::-1] != shape
    return "transpose" if turned else "copy"


def _missing(found: Mapping[str, Place], model: Architecture | None) -> tuple[str, ...]:
    if model is None:
        return ()
    filled = {parameter for spot in found.values() for parameter in spot.parameters}
    return tuple(n for n in model.parameters if n not in filled and n not in model.tied)
