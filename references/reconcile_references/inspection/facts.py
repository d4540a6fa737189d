"""What the bytes of a tensor say by themselves, exactly, in one pass and little memory.

8- and 16-bit elements are counted by code, so that range, unique values, zeros, NaN and infinities
are exact; wider ones are read in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from reconcile_references.inspection.source import DTYPES, Stored

MANY = 1 << 16
"""Unique values are counted up to here in dtypes wider than 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Statistics of one stored tensor."""

    minimum: float
    """Smallest finite value; NaN where there is none."""
    maximum: float
    unique: int
    """Different codes (of 16 bits or fewer) or values; `MANY` stands for that many or more."""
    zero_share: float
    nan: int
    infinite: int
    counts: np.ndarray | None = field(default=None, compare=False, repr=False)
    """Occurrences of every byte or 16-bit code; None for wider elements."""


def facts(stored: Stored) -> Facts:
    """Measure one tensor; an empty one has no range and no zeros."""
    width = DTYPES[stored.dtype].itemsize if stored.dtype in DTYPES else 1
    if width <= 2:
        return _by_code(stored, width)
    return _by_value(stored)


def byte_counts(stored: Stored) -> np.ndarray:
    """How often each of the 256 bytes occurs, int64 [256]."""
    return _count(stored, 1)


def _count(stored: Stored, width: int) -> np.ndarray:
    """Bytes are counted in pairs, which numpy does twice as fast, and an odd one apart."""
    pairs, single = np.zeros(1 << 16, np.int64), np.zeros(256, np.int64)
    for chunk in stored.chunks():
        even = chunk.size // 2 * 2
        pairs += np.bincount(chunk[:even].view(np.uint16), minlength=1 << 16)
        single += np.bincount(chunk[even:], minlength=256)
    if width == 2:
        return pairs
    grid = pairs.reshape(256, 256)
    counts: np.ndarray = grid.sum(0) + grid.sum(1) + single
    return counts


def _by_code(stored: Stored, width: int) -> Facts:
    counts = _count(stored, width)
    present = np.flatnonzero(counts)
    values = _table(stored.dtype, width)[present]
    weights = counts[present]
    finite = values[np.isfinite(values)]
    total = max(1, int(weights.sum()))
    return Facts(
        minimum=float(finite.min()) if finite.size else float("nan"),
        maximum=float(finite.max()) if finite.size else float("nan"),
        unique=len(present),
        zero_share=float(weights[values == 0].sum() / total),
        nan=int(weights[np.isnan(values)].sum()),
        infinite=int(weights[np.isinf(values)].sum()),
        counts=counts,
    )


@cache
def _table(dtype: str, width: int) -> np.ndarray:
    """Value of every code of a dtype of 8 or 16 bits, float64; unknown types are bytes."""
    codes = np.arange(256**width, dtype=np.uint8 if width == 1 else np.uint16)
    kind = DTYPES.get(dtype, torch.uint8)
    if kind == torch.bool:
        return codes.astype(np.float64)
    if kind == torch.uint16:
        return codes.astype(np.float64)
    signed = codes.view(np.int8 if width == 1 else np.int16)
    values = torch.from_numpy(signed).view(kind)
    wide: np.ndarray = values.to(torch.float32).to(torch.float64).numpy()
    return wide


def _by_value(stored: Stored) -> Facts:
    kind = DTYPES[stored.dtype]
    low, high, zeros, nan, infinite, total = np.inf, -np.inf, 0, 0, 0, 0
    seen = np.zeros(0)
    for chunk in stored.chunks():
        held = torch.from_numpy(np.array(chunk)).view(kind)
        values = held.to(torch.float64).numpy()
        finite = values[np.isfinite(values)]
        low, high = (
            (min(low, finite.min()), max(high, finite.max())) if finite.size else (low, high)
        )
        zeros += int((values == 0).sum())
        nan += int(np.isnan(values).sum())
        infinite += int(np.isinf(values).sum())
        total += values.size
        if len(seen) < MANY:
            seen = np.unique(np.concatenate([seen, finite]))[:MANY]
    return Facts(
        minimum=float(low) if total and np.isfinite(low) else float("nan"),
        maximum=float(high) if total and np.isfinite(high) else float("nan"),
        unique=len(seen),
        zero_share=zeros / max(1, total),
        nan=nan,
        infinite=infinite,
    )
