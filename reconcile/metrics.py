"""Error statistics of one (candidate, reference) pair; no limits and no verdicts here.

Everything is computed in float64 (ulps in integers). The sum over a row is numpy's pairwise
sum, the sum over rows is exact; so the result depends neither on the size of the chunks, nor on
their order, nor on the number of threads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reconcile.rounding import bitwise_equal, code_order, round_to

CHUNK = 1 << 20
"""Elements per chunk; bounds the temporaries to a few dozen MB."""
WORST = 5
"""How many of the worst rows and columns are kept."""
CANDIDATE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes whose codes are in the order of their values; convert others first."""

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStats:
    """Numbers about candidate c against reference r of equal shape [..., C]; a row is [C].

    Elements that are not finite on either side are counted and left out of the other numbers.
    """

    n: int
    """Number of elements."""
    nan_candidate: int
    inf_candidate: int
    nan_reference: int
    """NaN in the reference rounded once to the candidate's dtype."""
    inf_reference: int
    nonfinite_mismatch: int
    """Elements where the two differ in being NaN, +inf or -inf."""
    nonfinite_index: Index | None
    """The first such element."""
    bitwise_equal: bool
    """Whether c has the bits of r rounded once to c's dtype."""
    differing: int
    """Elements where it has not (by value: -0 equals +0)."""
    max_abs: float
    """max |c - r|."""
    max_abs_index: Index | None
    """The first such element; None where no pair is finite."""
    max_abs_candidate: float
    max_abs_reference: float
    max_rel: float
    """max |c - r| / |r| over r != 0."""
    max_rel_index: Index | None
    mean_abs: float
    rmse: float
    nmse: float
    """sum (c-r)^2 / sum r^2; 0/0 is 0 and x/0 is inf."""
    worst_row_nmse: float
    cosine: float
    """For information: it accepts most faults."""
    bias: float
    """Mean of sign(r) * clip(ulps from r rounded to c, -1, 1); 0 for unbiased rounding."""
    max_ulp: int
    """Largest distance from r rounded once, in representable values of c's dtype."""
    frac_over_1ulp: float
    reference_amax: float
    """max |r|: what the candidate 'all zeros' would have as max_abs."""
    reference_constant: bool
    """Whether all elements of r are equal, so that a permutation would not show."""
    histogram: tuple[tuple[int, int], ...] = ()
    """Pairs (e, count): elements with 2^(e-1) <= |c - r| < 2^e."""
    worst_rows: tuple[tuple[int, float], ...] = ()
    """Pairs (row, nmse) of the worst rows, worst first."""
    worst_columns: tuple[tuple[int, float], ...] = ()
    """Pairs (column, max_abs) of the worst columns, worst first."""
    shape: Index = field(default=())

    @property
    def nonfinite(self) -> int:
        """Elements that are NaN or infinite in the candidate."""
        return self.nan_candidate + self.inf_candidate

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON values (tuples as lists)."""
        return {name: _listed(value) for name, value in asdict(self).items()}


def error_stats(candidate: Tensor, reference: Tensor) -> ErrorStats:
    """Statistics of ``candidate`` against ``reference``.

    Args:
        candidate: float64, float32, bfloat16 or float16, any shape with at least one element.
        reference: the same shape, floating point; the only one that divides.

    Raises:
        ValueError: shapes differ (nothing is broadcast), nothing to compare, or another dtype.

    >>> x = torch.tensor([3.0, 4.0])
    >>> error_stats(2 * x, x).nmse, error_stats(x, 2 * x).nmse
    (1.0, 0.25)
    """
    if candidate.shape != reference.shape:
        raise ValueError(
            f"shapes differ: candidate {list(candidate.shape)}, reference {list(reference.shape)}"
        )
    if candidate.numel() == 0:
        raise ValueError(f"nothing to compare: shape {list(candidate.shape)}")
    if candidate.dtype not in CANDIDATE_DTYPES or not reference.is_floating_point():
        raise ValueError(
            f"expected a candidate in one of {', '.join(map(str, CANDIDATE_DTYPES))} and a "
            f"floating-point reference, got {candidate.dtype} and {reference.dtype}"
        )
    total = _Accumulator(candidate.shape[-1] if candidate.dim() else 1)
    for start, c, r in _row_chunks(candidate.detach(), reference.detach()):
        total.add(start, c, r)
    return total.result(tuple(candidate.shape))


def _row_chunks(candidate: Tensor, reference: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    columns = candidate.shape[-1] if candidate.dim() else 1
    c, r = candidate.reshape(-1, columns), reference.reshape(-1, columns)
    rows = max(1, CHUNK // columns)
    for start in range(0, c.shape[0], rows):
        stop = start + rows
        yield start, c[start:stop].cpu().contiguous(), r[start:stop].cpu().contiguous()


class _Accumulator:
    """Running totals over chunks of rows."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.counts: Counter[str] = Counter()
        self.sums: dict[str, list[float]] = {}
        self.max_abs = _Maximum()
        self.max_rel = _Maximum()
        self.first_mismatch: int | None = None
        self.max_ulp = 0
        self.bitwise = True
        self.amax = 0.0
        self.lowest, self.highest = math.inf, -math.inf
        self.histogram: Counter[int] = Counter()
        self.row_nmse: list[tuple[int, float]] = []
        self.column_max = torch.zeros(columns, dtype=torch.float64)

    def add(self, start: int, c: Tensor, r: Tensor) -> None:
        """Fold in rows ``start ...`` of both sides."""
        rounded = round_to(r, c.dtype)
        self._nonfinite(start, c, rounded)
        finite = c.isfinite() & rounded.isfinite()
        self.counts["finite"] += int(finite.sum())
        c64 = torch.where(finite, c.to(torch.float64), 0.0)
        r64 = torch.where(finite, r.to(torch.float64), 0.0)
        self._values(start, c64, r64, finite)
        self._ulps(c, rounded, r64, finite)

    def _nonfinite(self, start: int, c: Tensor, rounded: Tensor) -> None:
        same = (c == rounded) | (c.isnan() & rounded.isnan())
        mismatch = ~same & ~(c.isfinite() & rounded.isfinite())
        self.counts["n"] += c.numel()
        self.counts["nan_candidate"] += int(c.isnan().sum())
        self.counts["inf_candidate"] += int(c.isinf().sum())
        self.counts["nan_reference"] += int(rounded.isnan().sum())
        self.counts["inf_reference"] += int(rounded.isinf().sum())
        self.counts["differing"] += int((~same).sum())
        found = int(mismatch.sum())
        if found and self.first_mismatch is None:
            self.first_mismatch = start * self.columns + int(mismatch.flatten().int().argmax())
        self.counts["nonfinite_mismatch"] += found
        self.bitwise &= bitwise_equal(c, rounded)

    def _values(self, start: int, c: Tensor, r: Tensor, finite: Tensor) -> None:
        error = c - r
        size, amount = error.abs(), r.abs()
        offset = start * self.columns
        self.max_abs.update(torch.where(finite, size, -1.0), offset, c, r)
        self.max_rel.update(torch.where(amount > 0, size / amount, -1.0), offset, c, r)
        row_error, row_power = _row_sums(error * error), _row_sums(r * r)
        for name, rows in (
            ("abs", _row_sums(size)),
            ("error", row_error),
            ("power", row_power),
            ("candidate", _row_sums(c * c)),
            ("dot", _row_sums(c * r)),
        ):
            self.sums.setdefault(name, []).extend(_exact(rows.tolist()))
        self.row_nmse += [(start + i, v) for i, v in _worst(_ratio(row_error, row_power))]
        self.column_max = torch.maximum(self.column_max, size.amax(0))
        self.amax = max(self.amax, float(amount.max()))
        if bool(finite.any()):
            values = r[finite]
            self.lowest = min(self.lowest, float(values.min()))
            self.highest = max(self.highest, float(values.max()))
        exponents = torch.frexp(size[size > 0]).exponent
        bins, counts = np.unique(exponents.numpy(), return_counts=True)
        self.histogram.update(dict(zip(bins.tolist(), counts.tolist(), strict=True)))

    def _ulps(self, c: Tensor, rounded: Tensor, r: Tensor, finite: Tensor) -> None:
        ahead, behind = code_order(c), code_order(rounded)
        # below 2^64, so exact modulo 2^64: a negative int64 stands for itself + 2^64
        distance = torch.maximum(ahead, behind) - torch.minimum(ahead, behind)
        distance = torch.where(finite, distance, 0)
        wrapped = distance[distance < 0]
        largest = int(wrapped.max()) + 2**64 if wrapped.numel() else int(distance.max())
        self.max_ulp = max(self.max_ulp, largest)
        self.counts["over_1ulp"] += int(((distance > 1) | (distance < 0)).sum())
        side = (ahead > behind).to(torch.int8) - (ahead < behind).to(torch.int8)
        self.counts["bias"] += int(torch.where(finite, side * r.sign(), 0).sum())

    def result(self, shape: Index) -> ErrorStats:
        """The statistics of everything that was added."""
        total = {name: _sum(values) for name, values in self.sums.items()}
        counts, n, finite = self.counts, self.counts["n"], max(1, self.counts["finite"])
        rows = sorted(self.row_nmse, key=lambda pair: (-_nan_first(pair[1]), pair[0]))[:WORST]
        norm = math.sqrt(total["candidate"]) * math.sqrt(total["power"])
        return ErrorStats(
            n=n,
            nan_candidate=counts["nan_candidate"],
            inf_candidate=counts["inf_candidate"],
            nan_reference=counts["nan_reference"],
            inf_reference=counts["inf_reference"],
            nonfinite_mismatch=counts["nonfinite_mismatch"],
            nonfinite_index=_index(self.first_mismatch, shape),
            bitwise_equal=self.bitwise,
            differing=counts["differing"],
            max_abs=self.max_abs.value,
            max_abs_index=_index(self.max_abs.place, shape),
            max_abs_candidate=self.max_abs.candidate,
            max_abs_reference=self.max_abs.reference,
            max_rel=self.max_rel.value,
            max_rel_index=_index(self.max_rel.place, shape),
            mean_abs=total["abs"] / finite,
            rmse=math.sqrt(total["error"] / finite),
            nmse=nmse(total["error"], total["power"]),
            worst_row_nmse=rows[0][1],
            cosine=min(1.0, max(-1.0, total["dot"] / norm)) if norm > 0 else math.nan,
            bias=counts["bias"] / finite,
            max_ulp=self.max_ulp,
            frac_over_1ulp=counts["over_1ulp"] / finite,
            reference_amax=self.amax,
            reference_constant=self.lowest >= self.highest,
            histogram=tuple(sorted(self.histogram.items())),
            worst_rows=tuple(rows),
            worst_columns=_worst(self.column_max),
            shape=shape,
        )


class _Maximum:
    """The largest value that is not negative, its first flat place, and both sides there."""

    def __init__(self) -> None:
        self.value = 0.0
        self.place: int | None = None
        self.candidate = self.reference = math.nan

    def update(self, values: Tensor, offset: int, c: Tensor, r: Tensor) -> None:
        place = int(values.argmax())
        value = float(values.flatten()[place])
        if value > self.value or (self.place is None and value == 0):
            self.value, self.place = value, offset + place
            self.candidate = float(c.flatten()[place])
            self.reference = float(r.flatten()[place])


def _row_sums(values: Tensor) -> Tensor:
    """Pairwise sums [R] over the rows of a contiguous [R, C], whatever R and the threads."""
    return torch.from_numpy(np.add.reduce(values.numpy(), axis=1))


def _exact(values: list[float]) -> list[float]:
    """Few numbers with exactly the same sum (each is what rounding took from the one before)."""
    parts: list[float] = []
    while (part := _sum(values)) != 0 and math.isfinite(part):
        parts.append(part)
        values.append(-part)
    return parts if part == 0 else [part]


def _sum(values: list[float]) -> float:
    """The exact sum, rounded once; the plain sum where it overflows."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)


def _worst(values: Tensor) -> tuple[tuple[int, float], ...]:
    """The `WORST` largest of a vector with their places, NaN first, the first of equals first."""
    found = values.sort(descending=True, stable=True)
    return tuple(zip(found.indices[:WORST].tolist(), found.values[:WORST].tolist(), strict=True))


def _nan_first(value: float) -> float:
    return math.inf if math.isnan(value) else value


def nmse(error: float, power: float) -> float:
    """Sum (c-r)^2 over sum r^2, with 0/0 = 0 and x/0 = inf."""
    if power > 0:
        return error / power
    return math.inf if error > 0 else 0.0


def _ratio(error: Tensor, power: Tensor) -> Tensor:
    return torch.where(power > 0, error / power, torch.where(error > 0, torch.inf, 0.0))


def worst_elements(candidate: Tensor, reference: Tensor, count: int = 10) -> list[list[Any]]:
    """The elements with the largest |c - r|, NaN first: [index, c, r, c - r] each."""
    c, r = candidate.to(torch.float64), reference.to(torch.float64)
    legal = (c == r) | (c.isinf() & (candidate == round_to(reference, candidate.dtype)))
    error = torch.where(legal | (c.isnan() & r.isnan()), 0.0, c - r)
    size = torch.where(error.isnan(), torch.inf, error.abs()).flatten()
    places = size.sort(descending=True, stable=True).indices[:count].tolist()
    return [
        [
            list(_index(place, tuple(c.shape)) or ()),
            *(float(side.flatten()[place]) for side in (c, r, error)),
        ]
        for place in places
        if size[place] > 0
    ]


def _listed(value: Any) -> Any:  # noqa: ANN401
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def _index(flat: int | None, shape: Index) -> Index | None:
    if flat is None:
        return None
    index = []
    for size in reversed(shape):
        flat, rest = divmod(flat, size)
        index.append(rest)
    return tuple(reversed(index))
