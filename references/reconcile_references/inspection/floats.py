"""Layouts of weights that are stored as 8-bit floats or integers, a byte each.

The dtype names the codes where it is a float8; what is open is the extent of a scale, above all the
block, which the shapes of weight and scale leave open at the edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from reconcile.registry import formats
from reconcile.weight import Format, Shape
from reconcile_references.fp8 import E4M3FN, E4M3FNUZ, E5M2, FP8_E4M3_TENSOR
from reconcile_references.inspection.candidates import Candidate, Packed, same_layout
from reconcile_references.inspection.source import DTYPES
from reconcile_references.ternary_packed import SIGNED_BYTES

TABLES: dict[str, tuple[tuple[float, ...], torch.dtype]] = {
    "F8_E4M3": (E4M3FN, torch.float8_e4m3fn),
    "F8_E4M3FNUZ": (E4M3FNUZ, torch.float8_e4m3fnuz),
    "F8_E5M2": (E5M2, torch.float8_e5m2),
}
"""Code table of each float8 dtype."""
_BLOCKS: tuple[Shape, ...] = ((128, 128), (1, 32), (1, 128), (64, 64), (32, 32), (1, 64), (1, 16))
"""Blocks that are in use."""
AT_TOP = 0x7E
"""Code of the largest E4M3FN magnitude, which a block scaled by its maximum holds."""


def float_candidates(items: Sequence[Packed], counts: np.ndarray) -> list[Candidate]:
    """Candidates of tensors of a byte per weight; [] where they are none."""
    first = items[0]
    shape = first.shape or first.codes.byte_shape
    if any((i.shape or i.codes.byte_shape) != i.codes.byte_shape for i in items):
        return []
    tables = _tables(first.codes.dtype, counts)
    rules = _rules(first, shape)
    for item in items[1:]:
        own = _rules(item, item.shape or item.codes.byte_shape)
        rules = [rule for rule in rules if rule in own]
    return [
        _candidate(first, table, dtype, granularity, block, convention)
        for table, dtype in tables
        for granularity, block in rules
        for convention in ("multiply", "divide")
    ]


def _tables(dtype: str, counts: np.ndarray) -> list[tuple[tuple[float, ...], torch.dtype]]:
    if dtype in TABLES:
        return [TABLES[dtype]]
    if dtype == "I8":
        return [(SIGNED_BYTES, torch.int8)]
    if dtype == "U8":
        used = counts > 0
        readings = [(E4M3FN, torch.uint8), (E4M3FNUZ, torch.uint8), (E5M2, torch.uint8)]
        return [(t, d) for t, d in readings if not (used & ~np.isfinite(np.array(t))).any()]
    return []


def _rules(item: Packed, shape: Shape) -> list[tuple[str, Shape | None]]:
    """Granularity and block that the shape of the scale allows."""
    if item.scale is None:
        return [("tensor", None)]
    grid = item.scale.shape
    size = int(np.prod(grid, dtype=np.int64))
    if size == 1:
        return [("tensor", None)]
    found: list[tuple[str, Shape | None]] = []
    if size == shape[0] and len([s for s in grid if s != 1]) <= 1:
        found.append(("channel", None))
    if len(grid) == 2 and all(0 < g <= s for g, s in zip(grid, shape, strict=True)):
        even = (-(-shape[0] // grid[0]), -(-shape[1] // grid[1]))
        blocks = dict.fromkeys([*_BLOCKS, even])
        found += [("block", block) for block in blocks if block_fits(block, shape, grid)]
    return found


def block_fits(block: Shape, shape: Shape, grid: Sequence[int]) -> bool:
    """Whether blocks that are cut at the edges give this grid.

    >>> block_fits((128, 128), (192, 256), (2, 2)), block_fits((96, 128), (192, 256), (2, 2))
    (True, True)
    """
    return all(-(-s // b) == g for s, b, g in zip(shape, block, grid, strict=True))


def _candidate(
    item: Packed,
    table: tuple[float, ...],
    dtype: torch.dtype,
    granularity: str,
    block: Shape | None,
    convention: str,
) -> Candidate:
    scale = DTYPES.get(item.scale.dtype, torch.float32) if item.scale else torch.float32
    e8m0 = scale in (torch.uint8, torch.float8_e8m0fnu)
    form = replace(
        FP8_E4M3_TENSOR,
        name="unpublished",
        table=table,
        code_dtypes=(torch.uint8, dtype) if dtype != torch.uint8 else (dtype,),
        granularity=granularity,  # type: ignore[arg-type]
        block=block,
        scale_convention=convention,  # type: ignore[arg-type]
        scale_encoding="e8m0" if e8m0 else "value",
        scale_dtypes=(scale,),
        reference="inferred by reconcile inspect",
        misreadings=(),
    )
    known = next((f for f in formats().values() if _is(form, f)), None)
    if known is not None:
        kept = replace(known, block=block)
        return Candidate(format=kept, published=block in (known.block, *_BLOCKS))
    return Candidate(format=form, published=False)


def _is(form: Format, other: Format) -> bool:
    """Whether a registered format is this one, its block apart."""
    if form.block and other.block and (form.block[0] == 1) != (other.block[0] == 1):
        return False
    both = form.block is not None and other.block is not None
    return same_layout(form, replace(other, block=form.block) if both else other)


def at_top_share(item: Packed, block: Shape) -> float:
    """Share of blocks that hold a code of the largest E4M3FN magnitude.

    A quantiser that scales every block by its own maximum leaves such a code in each; read with
    another block some have none.
    """
    codes = item.codes.rows(slice(None)) & 0x7F
    n, k = codes.shape
    padded = np.zeros((-(-n // block[0]) * block[0], -(-k // block[1]) * block[1]), np.uint8)
    padded[:n, :k] = codes
    tiles = padded.reshape(padded.shape[0] // block[0], block[0], -1, block[1])
    return float((tiles.max((1, 3)) >= AT_TOP).mean())
