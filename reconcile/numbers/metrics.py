"""Error statistics of one (candidate, reference) pair; no limits and no verdicts here.

Everything is computed in float64 (ulps in integers). Sums are added in the order that
`fused_stats` describes: exactly, but for short pieces of a row; so the result depends
neither on the size of the chunks, nor on their order, nor on the number of threads, nor on which
code computes it: one native pass for CPU tensors where there is a compiler, torch operators
elsewhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reconcile.numbers.fused_stats import BLOCK, LANES, SUMS, Totals, measure
from reconcile.rounding import bit_view, code_order, round_to

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
    """Pairs (e, count): elements with 2^(e-1) <= |c - r| < 2^e; empty unless asked for."""
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
        return {name: _listed(getattr(self, name)) for name in self.__dataclass_fields__}


def error_stats(candidate: Tensor, reference: Tensor, *, histogram: bool = False) -> ErrorStats:
    """Statistics of ``candidate`` against ``reference``.

    Args:
        candidate: float64, float32, bfloat16 or float16, any shape with at least one element.
        reference: the same shape, floating point; the only one that divides.
        histogram: whether to count the exponents of the errors too, which takes as long again.

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
    total = measure(candidate, reference, histogram=histogram)
    if total is None:
        total = _torch_totals(candidate.detach(), reference.detach(), histogram=histogram)
    return _statistics(total, tuple(candidate.shape))


def _torch_totals(candidate: Tensor, reference: Tensor, *, histogram: bool = False) -> Totals:
    """What `measure` gives, in torch operators on chunks of rows; on any device."""
    total = _Accumulator(candidate.shape[-1] if candidate.dim() else 1, histogram)
    for start, c, r in _row_chunks(candidate, reference):
        total.add(start, c, r)
    return total.result()


def _row_chunks(candidate: Tensor, reference: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    columns = candidate.shape[-1] if candidate.dim() else 1
    c, r = candidate.reshape(-1, columns), reference.reshape(-1, columns)
    rows = max(1, CHUNK // columns)
    for start in range(0, c.shape[0], rows):
        stop = start + rows
        yield start, c[start:stop].cpu().contiguous(), r[start:stop].cpu().contiguous()


class _Accumulator:
    """Running totals over chunks of rows."""

    def __init__(self, columns: int, with_histogram: bool) -> None:
        self.columns = columns
        self.with_histogram = with_histogram
        self.counts: Counter[str] = Counter()
        self.sums: tuple[list[float], ...] = tuple([] for _ in SUMS)
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
        if c.dtype != r.dtype:  # the bits of a NaN that was converted are nobody's promise
            rounded = torch.where(c.isnan() & rounded.isnan(), c, rounded)
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
        self.bitwise &= torch.equal(bit_view(c), bit_view(rounded))

    def _values(self, start: int, c: Tensor, r: Tensor, finite: Tensor) -> None:
        error = c - r
        size, amount = error.abs(), r.abs()
        offset = start * self.columns
        self.max_abs.update(torch.where(finite, size, -1.0), offset, c, r)
        self.max_rel.update(torch.where(amount > 0, size / amount, -1.0), offset, c, r)
        blocks = [_block_sums(terms) for terms in (size, error * error, r * r, c * c, c * r)]
        for parts, found in zip(self.sums, blocks, strict=True):
            parts.extend(_exact(found.flatten().tolist()))
        ratio = _ratio(_row_sums(blocks[1]), _row_sums(blocks[2]))
        self.row_nmse += [(start + i, v) for i, v in _worst(ratio)]
        self.column_max = torch.maximum(self.column_max, size.amax(0))
        self.amax = max(self.amax, float(amount.max()))
        if bool(finite.any()):
            values = r[finite]
            self.lowest = min(self.lowest, float(values.min()))
            self.highest = max(self.highest, float(values.max()))
        if self.with_histogram:
            self._exponents(size)

    def _exponents(self, size: Tensor) -> None:
        sizes = size[size > 0]
        exponents = torch.frexp(sizes).exponent
        exponents[sizes.isinf()] = 1025  # 2^1024 and more
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

    def result(self) -> Totals:
        """The totals of everything that was added."""
        counts = self.counts
        return Totals(
            n=counts["n"],
            finite=counts["finite"],
            nan_candidate=counts["nan_candidate"],
            inf_candidate=counts["inf_candidate"],
            nan_reference=counts["nan_reference"],
            inf_reference=counts["inf_reference"],
            mismatch=counts["nonfinite_mismatch"],
            mismatch_place=self.first_mismatch,
            bitwise_equal=self.bitwise,
            differing=counts["differing"],
            over_1ulp=counts["over_1ulp"],
            bias=counts["bias"],
            max_ulp=self.max_ulp,
            max_abs=self.max_abs.value,
            max_abs_place=self.max_abs.place,
            max_abs_candidate=self.max_abs.candidate,
            max_abs_reference=self.max_abs.reference,
            max_rel=self.max_rel.value,
            max_rel_place=self.max_rel.place,
            reference_amax=self.amax,
            reference_constant=self.lowest >= self.highest,
            sums=tuple(map(_sum, self.sums)),
            worst_rows=tuple(sorted(self.row_nmse, key=_worst_first)[:WORST]),
            worst_columns=_worst(self.column_max),
            histogram=tuple(sorted(self.histogram.items())),
        )


def _statistics(total: Totals, shape: Index) -> ErrorStats:
    """The statistics of a pair of this shape."""
    size, error, power, candidate, dot = total.sums
    finite = max(1, total.finite)
    norm = math.sqrt(candidate) * math.sqrt(power)
    return ErrorStats(
        n=total.n,
        nan_candidate=total.nan_candidate,
        inf_candidate=total.inf_candidate,
        nan_reference=total.nan_reference,
        inf_reference=total.inf_reference,
        nonfinite_mismatch=total.mismatch,
        nonfinite_index=_index(total.mismatch_place, shape),
        bitwise_equal=total.bitwise_equal,
        differing=total.differing,
        max_abs=total.max_abs,
        max_abs_index=_index(total.max_abs_place, shape),
        max_abs_candidate=total.max_abs_candidate,
        max_abs_reference=total.max_abs_reference,
        max_rel=total.max_rel,
        max_rel_index=_index(total.max_rel_place, shape),
        mean_abs=size / finite,
        rmse=math.sqrt(error / finite),
        nmse=nmse(error, power),
        worst_row_nmse=total.worst_rows[0][1],
        cosine=min(1.0, max(-1.0, dot / norm)) if norm > 0 else math.nan,
        bias=total.bias / finite,
        max_ulp=total.max_ulp,
        frac_over_1ulp=total.over_1ulp / finite,
        reference_amax=total.reference_amax,
        reference_constant=total.reference_constant,
        histogram=total.histogram,
        worst_rows=total.worst_rows,
        worst_columns=total.worst_columns,
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


def _block_sums(values: Tensor) -> Tensor:
    """Sums [R, B] over the blocks of the rows of [R, C], in the order of `fused_stats`."""
    rows, columns = values.shape
    lanes = min(LANES, 1 << (columns - 1).bit_length())  # lanes beyond the row would stay 0
    width = min(BLOCK, -columns // lanes * -lanes)
    blocks = -(columns // -width)
    padded = np.zeros((rows, blocks * width))
    padded[:, :columns] = values.numpy()
    terms = padded.reshape(rows, blocks, width // lanes, lanes)
    total = np.zeros((rows, blocks, lanes))
    with np.errstate(over="ignore", invalid="ignore"):
        for step in range(terms.shape[2]):
            total += terms[:, :, step]
        while (half := total.shape[2] // 2) > 0:
            total = total[:, :, :half] + total[:, :, half:]
    return torch.from_numpy(total[:, :, 0])


def _row_sums(blocks: Tensor) -> Tensor:
    """The exact sums [R] of [R, B], rounded once."""
    if blocks.shape[1] == 1:
        return blocks[:, 0]
    return torch.tensor([_sum(row) for row in blocks.tolist()], dtype=torch.float64)


def _exact(values: list[float]) -> list[float]:
    """Few numbers with exactly the same sum (each is what rounding took from the one before)."""
    parts: list[float] = []
    remaining = list(values)
    while (part := _sum(remaining)) != 0:
        if not math.isfinite(part):
            return values
        parts.append(part)
        remaining.append(-part)
    return parts


def _sum(values: list[float]) -> float:
    """The exact sum, rounded once; inf where it overflows, inf or NaN where such are added."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # perhaps only on the way
        special = [value for value in values if not math.isfinite(value)]
        return sum(special) if special else _limited(sum(map(Fraction, values)))


def _limited(value: Fraction | int) -> float:
    """``value`` rounded to a float, inf beyond the largest."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _worst(values: Tensor) -> tuple[tuple[int, float], ...]:
    """The `WORST` largest of a vector with their places, NaN first, the first of equals first."""
    found = values.sort(descending=True, stable=True)
    return tuple(zip(found.indices[:WORST].tolist(), found.values[:WORST].tolist(), strict=True))


def _worst_first(pair: tuple[int, float]) -> tuple[bool, float, int]:
    """Sorts pairs (place, value) like `_worst`."""
    place, value = pair
    return (False, 0.0, place) if math.isnan(value) else (True, -value, place)


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
