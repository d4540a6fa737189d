"""Parts of large tensors, so that evidence costs the same for any checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reconcile.weight import Packing, Shape
from reconcile_references.inspection.candidates import Packed
from reconcile_references.inspection.source import DTYPES, Stored

BUDGET = 1 << 20
"""Codes that are decoded of one tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Codes of some rows or some columns of a weight under one packing."""

    codes: Tensor
    """uint8 [rows, columns]."""
    rows: np.ndarray | None
    """Their row numbers; None: all."""
    columns: np.ndarray | None


def sample(item: Packed, packing: Packing, shape: Shape, budget: int = BUDGET) -> Sample:
    """Decode a part of a tensor that holds at most about ``budget`` codes."""
    n, k = shape
    if packing.tile is not None and packing.tile.flat:
        return _flat(item, packing, shape, budget)
    if packing.dim == 1:
        step = packing.tile.rows if packing.tile is not None else 1
        rows = _spread(n // step, max(1, budget // (k * step)))
        index = (rows[:, None] * step + np.arange(step)).reshape(-1)
        stored = torch.from_numpy(item.codes.rows(index))
        stored = stored.reshape(packing.stored_shape((len(index), k)))
        codes = packing.unpack(stored, (len(index), k))
        return Sample(codes=codes, rows=None if len(index) == n else index, columns=None)
    columns = _spread(k, max(1, budget // n))
    packed_rows = item.codes.nbytes // k
    held = item.codes.data.reshape(packed_rows, k)[:, columns]
    codes = _padded(packing).unpack(torch.from_numpy(np.array(held)), (n, len(columns)))
    return Sample(codes=codes, rows=None, columns=None if len(columns) == k else columns)


def _padded(packing: Packing) -> Packing:
    """The packing that takes a last unit with padding as well."""
    return Packing(
        bits=packing.bits,
        dim=packing.dim,
        arrangement=packing.arrangement,
        low_first=packing.low_first,
        pad=True,
    )


def _flat(item: Packed, packing: Packing, shape: Shape, budget: int) -> Sample:
    """The first rows that end with a whole block."""
    assert packing.tile is not None
    n, k = shape
    step = packing.tile.columns // math.gcd(k, packing.tile.columns)
    count = n if n * k <= budget or step >= n else max(step, budget // k // step * step)
    part = (count, k)
    size = packing.stored_shape(part)
    stored = torch.from_numpy(np.array(item.codes.data.reshape(-1)[: size[0] * size[1]]))
    codes = packing.unpack(stored.reshape(size), part)
    return Sample(codes=codes, rows=None if count == n else np.arange(count), columns=None)


def _spread(total: int, wanted: int) -> np.ndarray:
    """At most ``wanted`` numbers below ``total``, evenly spread."""
    return np.unique(np.linspace(0, total - 1, min(total, wanted)).astype(np.int64))


def dense_part(stored: Stored, part: Sample) -> Tensor:
    """The same rows and columns of a dense tensor [N, K], float64."""
    kind = DTYPES[stored.dtype]
    rows = slice(None) if part.rows is None else part.rows
    values = torch.from_numpy(stored.rows(rows)).view(kind)
    if part.columns is not None:
        values = values[:, torch.from_numpy(part.columns)]
    return values.to(torch.float64)


def values_of(stored: Stored) -> Tensor:
    """A small tensor as numbers, float64; E8M0 and float8 dtypes by their meaning."""
    held = stored.tensor()
    if held.dtype == torch.float8_e8m0fnu:
        return held.to(torch.float32).to(torch.float64)
    return held.to(torch.float64)
