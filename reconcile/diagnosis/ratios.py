"""Weights that are right up to a factor: everywhere, or per row, column, K range or rectangle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from reconcile.contract import UNIT_ROUNDOFF
from reconcile.diagnosis.evidence import LinearEvidence
from reconcile.diagnosis.hypothesis import few, named, parameters
from reconcile.diagnosis.model import Fit, LinearModel

FEWEST_FOR_SHARE = 32
"""Shortest piece of K that counts as a share of a split sum rather than as a tail."""


def tolerance(evidence: LinearEvidence) -> float:
    """Relative difference below which two effective weights count as equal: outputs round."""
    return 2.02 * UNIT_ROUNDOFF[str(evidence.impulses.y.dtype).removeprefix("torch.")] + 2.0**-18


def ratios(evidence: LinearEvidence, base: LinearModel) -> Tensor:
    """What was read over what the base has, [N, C]; NaN where that says nothing."""
    weight = base.weight[:, evidence.columns]
    usable = (weight != 0) & torch.isfinite(weight)
    return torch.where(usable, evidence.readout / weight, torch.nan)


def scaled(base: LinearModel, factor: Tensor | float) -> LinearModel:
    """The base with its weight times ``factor``, broadcastable to [N, K]."""
    return replace(base, weight=base.weight * factor)


def snapped(value: float, slack: float) -> float:
    """A nearby power of two, or a number of up to three digits; else the value itself.

    >>> snapped(0.2501, 1e-3), snapped(1.0101, 1e-3), snapped(1.2345678, 1e-5)
    (0.25, 1.01, 1.2345678)
    """
    if value == 0 or not math.isfinite(value):
        return value
    power = math.copysign(2.0 ** round(math.log2(abs(value))), value)
    for near in (power, float(f"{value:.1g}"), float(f"{value:.2g}"), float(f"{value:.3g}")):
        if near and abs(value / near - 1) <= slack:
            return near
    return value


def common_ratio(read: Tensor, weight: Tensor, slack: float) -> float:
    """The factor between two tensors: least squares over what agrees with the median."""
    usable = (weight != 0) & torch.isfinite(weight) & torch.isfinite(read)
    if not bool(usable.any()):
        return math.nan
    quotients = read[usable] / weight[usable]
    middle = float(quotients.median())
    inside = (quotients - middle).abs() <= slack * abs(middle) + 1e-300
    r, w = read[usable][inside], weight[usable][inside]
    fitted = float((r * w).sum() / (w * w).sum()) if len(r) else middle
    return snapped(fitted, max(slack / math.sqrt(max(1, len(r))), 2.0**-12))


@named("constant_ratio", cost=4)
def constant(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """One factor for every weight."""
    if not len(evidence.columns):
        return
    weight = base.weight[:, evidence.columns]
    ratio = common_ratio(evidence.readout, weight, tolerance(evidence))
    if math.isfinite(ratio) and ratio != 1:
        yield Fit(
            "constant_ratio",
            scaled(base, ratio),
            f"every weight is {ratio:.6g} times the right one{_as_power(ratio)}",
            parameters(ratio=ratio),
            1,
        )


def _as_power(ratio: float) -> str:
    exponent = math.log2(abs(ratio)) if ratio else 0.5
    return f" (2^{int(exponent)})" if exponent == int(exponent) and ratio > 0 else ""


def wrong_lines(lines: Tensor, slack: float) -> Tensor:
    """Which ratios are not 1; NaN says nothing."""
    return ((lines - 1).abs() > slack) & ~lines.isnan()


def line_medians(values: Tensor, dim: int) -> Tensor:
    """Median along a dimension without the NaN."""
    return torch.nanmedian(values, dim).values


@named("row_ratio", "n_tail_dropped", cost=6)
def rows(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """A factor for some output rows; zero for the last ones is a dropped tail."""
    if not len(evidence.columns):
        return
    slack = tolerance(evidence)
    lines = line_medians(ratios(evidence, base), 1)
    wrong = wrong_lines(lines, slack)
    n = len(lines)
    if not bool(wrong.any()):
        return
    factor = torch.where(wrong, lines, 1.0)
    places = wrong.nonzero().flatten()
    if bool((lines[wrong] == 0).all()):
        start = int(places[0])
        if bool(wrong[start:].all()):
            text = f"output columns n >= {start} of {n} are zero"
            found = parameters(start=start, of=n)
            yield Fit("n_tail_dropped", scaled(base, factor[:, None]), text, found, 1)
            return
    same = common_value(lines[wrong], slack)
    if same is not None:
        factor = torch.where(wrong, same, 1.0)
    shown = f"{same:.6g}" if same is not None else "a factor of its own"
    yield Fit(
        "row_ratio",
        scaled(base, factor[:, None]),
        f"{len(places)} of {n} rows are multiplied by {shown}: n = {few(places)}",
        parameters(rows=places, ratios=[float(f"{v:.6g}") for v in lines[wrong][:8]]),
        len(places) + (1 if same is not None else len(places)),
    )


def common_value(values: Tensor, slack: float) -> float | None:
    """The one value that all of these are, or None."""
    middle = float(values.median())
    if bool(((values - middle).abs() <= slack * abs(middle)).all()):
        return snapped(middle, slack / math.sqrt(len(values)) + 2.0**-14)
    return None


@named("column_ratio", "k_tail_dropped", "k_range_ratio", "split_missing", "k_term_doubled", cost=5)
def columns(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """A factor for some k: a dropped tail or share, a doubled term, a range, or any columns."""
    if not len(evidence.columns):
        return
    slack = tolerance(evidence)
    k = base.weight.shape[1]
    lines = torch.full((k,), torch.nan, dtype=torch.float64)
    found = line_medians(ratios(evidence, base), 0)
    lines[evidence.columns] = found  # of a column that was read twice the last counts
    wrong = wrong_lines(lines, slack)
    if not bool(wrong.any()):
        return
    same = common_value(lines[wrong], slack)
    span = _span(lines, wrong)
    if span is not None and same is not None:
        yield from _ranges(evidence, base, span, same)
        return
    places = wrong.nonzero().flatten()
    factor = torch.where(wrong, lines if same is None else torch.full_like(lines, same), 1.0)
    doubled = same == 2.0
    name = "k_term_doubled" if doubled else "column_ratio"
    what = "counted twice" if doubled else "multiplied by a factor"
    yield Fit(
        name,
        scaled(base, factor),
        f"{len(places)} of {k} columns of K are {what}: k = {few(places)}",
        parameters(columns=places, ratios=[float(f"{v:.6g}") for v in lines[wrong][:8]]),
        len(places) + (1 if same is not None else len(places)),
    )


def _span(lines: Tensor, wrong: Tensor) -> tuple[int, int] | None:
    """First and one past the last wrong column, if no column between them was seen right."""
    places = wrong.nonzero().flatten()
    start, end = int(places[0]), int(places[-1]) + 1
    inside = lines[start:end]
    right = ~inside.isnan() & ~wrong[start:end]
    if bool(right.any()):
        return None
    seen = ~lines.isnan()
    while start > 0 and not bool(seen[start - 1]):
        start -= 1  # columns that were not read belong to the wrong side of the gap
    while end < len(lines) and not bool(seen[end]):
        end += 1
    return start, end


def _ranges(
    evidence: LinearEvidence, base: LinearModel, span: tuple[int, int], ratio: float
) -> Iterator[Fit]:
    start, end = span
    k = base.weight.shape[1]
    factor = torch.ones(k, dtype=torch.float64)
    factor[start:end] = ratio
    model = scaled(base, factor)
    place = parameters(start=start, end=end, of=k)
    length = end - start
    share = ratio == 0 and length >= FEWEST_FOR_SHARE and k % length == 0 and start % length == 0
    declared = evidence.right.contract.split_k
    if share and k // length <= 16 and k // length > 1:
        parts = k // length
        likely = parts == declared or (length >= k / 4 and end < k)  # at the end: a tail
        text = f"part {start // length} of {parts} equal parts of K is missing: {start} to {end}"
        yield Fit("split_missing", model, text, place | {"parts": parts}, 0 if likely else 3)
    if ratio == 0 and end == k:
        text = f"the last {length} of {k} terms are dropped: k >= {start}"
        yield Fit("k_tail_dropped", model, text, place, 1)
    elif ratio == 2 and length < FEWEST_FOR_SHARE:
        text = f"{length} of {k} terms are counted twice: k = {start} to {end - 1}"
        yield Fit("k_term_doubled", model, text, place, 1)
    elif length < k:
        text = f"columns k = {start} to {end - 1} are multiplied by {ratio:.6g}"
        yield Fit("k_range_ratio", model, text, place | {"ratio": ratio}, 3)


@named("block_ratio", cost=8)
def rectangle(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """One factor for a rectangle of the weight."""
    if not len(evidence.columns):
        return
    slack = tolerance(evidence)
    found = ratios(evidence, base)
    wrong = wrong_lines(found, slack)
    if not bool(wrong.any()):
        return
    share_rows = wrong.double().mean(1)
    share_columns = wrong.double().mean(0)
    rows_hit = share_rows > 0.5 * float(share_rows.max())
    columns_hit = share_columns > 0.5 * float(share_columns.max())
    at = evidence.columns[columns_hit]
    first_n, last_n = _ends(rows_hit.nonzero().flatten())
    first_k, last_k = _ends(at)
    n, k = base.weight.shape
    if last_n - first_n == n or last_k - first_k == k:
        return  # whole rows or columns: said above
    inside = (evidence.columns >= first_k) & (evidence.columns < last_k)
    weight = base.weight[first_n:last_n, evidence.columns[inside]]
    ratio = common_ratio(evidence.readout[first_n:last_n, inside], weight, slack)
    if not math.isfinite(ratio) or ratio == 1:
        return
    factor = torch.ones_like(base.weight)
    factor[first_n:last_n, first_k:last_k] = ratio
    yield Fit(
        "block_ratio",
        scaled(base, factor),
        f"rows {first_n} to {last_n - 1}, columns {first_k} to {last_k - 1} are multiplied by "
        f"{ratio:.6g}",
        parameters(rows=[first_n, last_n], columns=[first_k, last_k], ratio=ratio),
        5,
    )


def _ends(places: Tensor) -> tuple[int, int]:
    return int(places.min()), int(places.max()) + 1


HYPOTHESES = (constant, rows, columns, rectangle)
