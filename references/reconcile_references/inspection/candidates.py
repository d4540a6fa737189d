"""Every layout that the bytes of packed tensors could have.

A candidate is a `Format`: a packing, a code table, and how the scale enters. The packings are the
published ones and their systematic variations (dimension, bit order, interleaved, planar, strided);
the tables are all that give three of the codes the values -1, 0 and +1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
import torch
from torch import Tensor

from reconcile.exceptions import FormatError
from reconcile.registry import formats
from reconcile.tile import strided
from reconcile.weight import Format, Packing, Shape
from reconcile_references.inspection.naming import Place
from reconcile_references.inspection.source import DTYPES, Stored
from reconcile_references.ternary_packed import MS_GPU_TILE, SIGNED_BYTES, TQ1_TILE, tiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One tensor of codes with what belongs to it."""

    codes: Stored
    scale: Stored | None
    stem: str
    place: Place | None
    shape: Shape | None
    """Logical (N, K) by the architecture or the container; None: not known."""
    shards: tuple[Shape, ...] = ()
    """Shapes of the linears that the tensor holds one below the other, where it is split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout that fits the shapes of every tensor of a group."""

    format: Format
    published: bool
    """Whether a registered format has this packing, table and scale."""

    @property
    def name(self) -> str:
        """The registered name, or what the layout is."""
        return self.format.name if self.published else f"unpublished: {describe(self.format)}"


def packings() -> tuple[Packing, ...]:
    """Every packing that is tried; the published ones first."""
    known = [form.packing for form in formats().values() if form.packing.bits == 2]
    orders = (True, False)
    plain = [
        Packing(bits=2, dim=dim, arrangement=arrangement, low_first=low)
        for dim in (1, 0)
        for arrangement in ("interleaved", "planar")
        for low in orders
    ]
    tiles = [strided(stride, low_first=low) for stride in (16, 32, 64) for low in orders]
    flat = [strided(stride, low_first=low, flat=True) for stride in (16, 32) for low in orders]
    bytewise = [Packing(bits=8, dim=1, arrangement="interleaved")]
    every = [*known, *plain, *map(tiled, [*tiles, *flat, MS_GPU_TILE, TQ1_TILE]), *bytewise]
    return tuple(dict.fromkeys(replace(packing, pad=False) for packing in every))


def logical_shape(packing: Packing, stored: Stored) -> Shape | None:
    """(N, K) if the stored bytes are packed this way; None where it does not follow."""
    rows, columns = stored.byte_shape
    if packing.tile is not None:
        tile = packing.tile
        if tile.flat:
            return None
        per_tile_row = tile.size / tile.rows
        k = columns / per_tile_row * tile.columns
        return (rows, int(k)) if k == int(k) and rows % tile.rows == 0 else None
    if packing.dim == 0:
        return rows * packing.per_byte, columns
    return rows, columns * packing.per_byte


def shape_of(item: Packed, packing: Packing) -> Shape | None:
    """The logical shape of a tensor under a packing, if that is what its bytes can hold."""
    shape = item.shape or logical_shape(packing, item.codes)
    if shape is None:
        return None
    try:
        expected = packing.stored_shape(shape)
    except FormatError:
        padded = replace(packing, pad=True) if packing.tile is None else packing
        if not padded.fits(shape):
            return None
        expected = padded.stored_shape(shape)
    held = item.codes.byte_shape
    if item.codes.declared or (packing.tile is not None and packing.tile.flat):
        return shape if expected[0] * expected[1] == held[0] * held[1] else None
    return shape if tuple(expected) == tuple(held) else None


PARTS = 8
"""Most scales of a tensor that holds several linears; BitNet's GPU kernels store four."""


def scale_size(item: Packed) -> int:
    """Number of scales; 0 where there is no tensor."""
    return int(np.prod(item.scale.shape, dtype=np.int64)) if item.scale is not None else 0


def has_parts(item: Packed) -> bool:
    """Whether the scales are one for each linear in the tensor, and more that are not used."""
    count = scale_size(item)
    flat = item.scale is not None and len(item.scale.shape) == 1
    return flat and count > 1 and len(item.shards) <= count <= PARTS


def own_scales(item: Packed) -> Tensor:
    """The scales that are in use, flat, in their stored dtype; 1 where there is no tensor."""
    if item.scale is None:
        return torch.ones(1)
    flat = item.scale.tensor().reshape(-1)
    return flat[: max(1, len(item.shards))] if has_parts(item) else flat


def scale_rule(item: Packed, shape: Shape) -> tuple[str, Shape | None] | None:
    """Granularity and block that the shape of the scale has; None where it fits none."""
    if item.codes.declared.startswith("TQ"):
        return "block", (1, 256)
    size = scale_size(item)
    if item.scale is not None and not size:
        return None
    if item.scale is None or size == 1 or has_parts(item):
        return "tensor", None
    if size == shape[0] and len([s for s in item.scale.shape if s != 1]) <= 1:
        return "channel", None
    grid = item.scale.shape
    if len(grid) == 2 and all(0 < g <= s for g, s in zip(grid, shape, strict=True)):
        block = tuple(-(-s // g) for s, g in zip(shape, grid, strict=True))
        rounded = tuple(1 << (side - 1).bit_length() for side in block)  # edges are cut
        for sides in (block, rounded):
            if tuple(-(-s // b) for s, b in zip(shape, sides, strict=True)) == tuple(grid):
                return "block", (sides[0], sides[1])
    return None


def tables(counts: np.ndarray, packing: Packing) -> list[tuple[tuple[float, ...], frozenset[int]]]:
    """Code tables that the codes allow: three of them are -1, 0, +1, and the others never occur.

    ``counts``: occurrences of each code. With fewer than three codes in use every table that
    covers them is listed.
    """
    used = [int(code) for code in np.flatnonzero(counts)]
    found: list[tuple[tuple[float, ...], frozenset[int]]] = []
    if packing.codes == 256:
        if set(used) <= {0, 1, 255}:
            found.append((SIGNED_BYTES, frozenset(range(2, 255))))
        if set(used) <= {0, 1, 2}:
            for order in permutations((-1.0, 0.0, 1.0)):
                found.append(((*order, *(0.0,) * 253), frozenset(range(3, 256))))
        return found
    size = packing.codes
    for invalid in range(size) if size == 4 else [-1]:
        legal = [code for code in range(size) if code != invalid]
        if not set(used) <= set(legal):
            continue
        for order in permutations((-1.0, 0.0, 1.0)):
            values = dict(zip(legal, order, strict=True))
            table = tuple(values.get(code, _beyond(values, code)) for code in range(size))
            found.append((table, frozenset({invalid} if invalid >= 0 else ())))
    return found


def _beyond(values: dict[int, float], code: int) -> float:
    """Value of the code that does not occur: what published decoders make of it."""
    arithmetic = {values.get(c, c) - c for c in values}
    return code + arithmetic.pop() if len(arithmetic) == 1 else 0.0


def enumerate_candidates(
    items: Sequence[Packed], counts_of: dict[Packing, np.ndarray]
) -> list[Candidate]:
    """All candidates of a group of tensors that are stored alike.

    ``counts_of``: occurrences of each code over the group, by packing that fits.
    """
    found = []
    for packing, counts in counts_of.items():
        shape = shape_of(items[0], packing)
        rule = scale_rule(items[0], shape) if shape else None
        if rule is None:
            continue
        for table, invalid in tables(counts, packing):
            for convention in ("multiply", "divide"):
                found.append(_candidate(items[0], packing, table, invalid, rule, convention))
    return found


def _candidate(
    item: Packed,
    packing: Packing,
    table: tuple[float, ...],
    invalid: frozenset[int],
    rule: tuple[str, Shape | None],
    convention: str,
) -> Candidate:
    scale = DTYPES.get(item.scale.dtype, torch.float32) if item.scale else torch.float32
    e8m0 = scale in (torch.uint8, torch.float8_e8m0fnu)
    form = Format(
        name="unpublished",
        table=table,
        invalid=invalid,
        packing=packing,
        code_dtypes=(torch.uint8, torch.int8),
        granularity=rule[0],  # type: ignore[arg-type]
        block=rule[1],
        scale_convention=convention,  # type: ignore[arg-type]
        scale_encoding="e8m0" if e8m0 else "value",
        scale_dtypes=(scale,),
        reference="inferred by reconcile inspect",
    )
    known = next((other for other in formats().values() if same_layout(form, other)), None)
    if known is None:
        return Candidate(format=form, published=False)
    return Candidate(format=replace(known, scale_dtypes=(scale,)), published=True)


def same_layout(form: Format, other: Format) -> bool:
    """Whether two formats read every stored weight alike, dtypes of the scale apart."""
    return (
        len(form.table) == len(other.table)
        and replace(form.packing, pad=False) == replace(other.packing, pad=False)
        and form.invalid == other.invalid
        and all(
            a == b or (a != a and b != b) or code in form.invalid
            for code, (a, b) in enumerate(zip(form.table, other.table, strict=True))
        )
        and form.granularity == other.granularity
        and form.block == other.block
        and form.scale_convention == other.scale_convention
        and form.scale_encoding == other.scale_encoding
    )


def describe(form: Format) -> str:
    """A layout in one line of plain words."""
    return f"{describe_packing(form.packing)}; {describe_table(form)}; {describe_scale(form)}"


def describe_packing(packing: Packing) -> str:
    """Dimension, codes per byte, arrangement and bit order.

    >>> describe_packing(Packing(bits=2, dim=1, arrangement="interleaved", low_first=False))
    '4 per byte along K, interleaved, high bits first'
    """
    if packing.per_byte == 1:
        return "1 per byte"
    order = "low bits first" if packing.low_first else "high bits first"
    if packing.tile is None:
        along = "NK"[packing.dim]
        return f"{packing.per_byte} per byte along {along}, {packing.arrangement}, {order}"
    tile = packing.tile
    if tile.rows > 1:
        return f"4 per byte in {tile.rows} x {tile.columns} tiles of 32-bit words"
    if tile.base == 3:
        return "5 base-3 digits per byte along K, strides 32, 16 and 4"
    slot = tile.places[0][1]
    stride = next(i for i, (_, digit) in enumerate(tile.places) if digit != slot)
    order = "low bits first" if slot == 0 else "high bits first"
    where = "flat across rows" if tile.flat else "along K"
    return f"4 per byte {where}, strided by {stride}, {order}"


def describe_table(form: Format) -> str:
    """Which code is which value."""
    codes = [code for code in range(len(form.table)) if code not in form.invalid]
    if len(codes) > 4:
        return "codes as their format has them"
    return "codes " + " ".join(f"{code}:{form.table[code]:+g}" for code in codes)


def describe_scale(form: Format) -> str:
    """Granularity, dtype and convention of the scale."""
    per = {"tensor": "one scale", "channel": "a scale per row"}.get(
        form.granularity,
        f"a scale per {form.block[0]} x {form.block[1]} block" if form.block else "",
    )
    dtype = "E8M0" if form.scale_encoding == "e8m0" else _names(form.scale_dtypes)
    verb = {"multiply": "multiplies", "divide": "divides"}[form.scale_convention]
    return f"{per}, {dtype}, {verb}"


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
