"""Codes that are decoded to other values: which ones, and to what."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from reconcile.diagnosis.evidence import LinearEvidence, effective_scale, logical_codes
from reconcile.diagnosis.hypothesis import few, named, parameters
from reconcile.diagnosis.model import Fit, LinearModel
from reconcile.diagnosis.ratios import common_value, snapped, tolerance
from reconcile.weight import QuantizedWeight


def scale_of(evidence: LinearEvidence, base: LinearModel, codes: Tensor) -> Tensor:
    """What multiplies each code's value under the base model, [N, K].

    Where the code's value is zero or not finite the base's scale does not show, and the right
    one stands in.
    """
    weight = evidence.weight
    assert isinstance(weight, QuantizedWeight)
    right = effective_scale(weight)
    if base.weight is evidence.right.weight:
        return right
    values = torch.tensor(weight.format.table, dtype=torch.float64)[codes]
    shows = (values != 0) & torch.isfinite(values) & torch.isfinite(base.weight)
    return torch.where(shows, base.weight / values, right)


def decoded_values(codes: Tensor, quotients: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Median quotient of each code and how often it was seen, [count] each; NaN where never.

    NaN among numbers is left out: another code of the row may have spoilt it.
    """
    order = codes.flatten().argsort()
    found = torch.full((count,), torch.nan, dtype=torch.float64)
    sizes = torch.bincount(codes.flatten(), minlength=count)
    for code, part in enumerate(torch.split(quotients.flatten()[order], sizes.tolist())):
        if len(part):
            found[code] = part.nanmedian()
    return found, sizes


@named("code_table", "ternary_table", "sign", "subnormals", "nan_codes", "zero_point", cost=3)
def table(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """The table that was used, code by code, against the format's."""
    weight = evidence.weight
    if not isinstance(weight, QuantizedWeight) or not len(evidence.columns):
        return
    codes = logical_codes(weight)
    assert codes is not None
    scale = scale_of(evidence, base, codes)
    at = codes[:, evidence.columns]
    count = len(weight.format.table)
    used, often = decoded_values(at, evidence.readout / scale[:, evidence.columns], count)
    right = torch.tensor(weight.format.table, dtype=torch.float64)
    present = often > 0
    slack = tolerance(evidence)
    smallest = float(right[torch.isfinite(right) & (right != 0)].abs().min())
    near = (used - right).abs() <= slack * right.abs() + slack * smallest
    wrong = present & ~near & ~(used.isnan() & right.isnan())
    wrong &= ~(used.isnan() & torch.isfinite(right))  # spoilt by a neighbour, or not a decode
    if not bool(wrong.any()):
        return
    for code in wrong.nonzero().flatten().tolist():
        used[code] = _snap(float(used[code]), 2 * slack / math.sqrt(float(often[code])) + 2.0**-14)
    yield from _zero_point(base, scale, used, right, present, slack)
    new = torch.where(wrong, used, right)
    model = replace(base, weight=torch.where(wrong[codes], new[codes] * scale, base.weight))
    guilty = wrong.nonzero().flatten().tolist()
    name, what = _name(weight, guilty, used, right)
    listed = [f"0x{c:02X} means {right[c]:.6g}, decoded as {used[c]:.6g}" for c in guilty]
    yield Fit(
        name,
        model,
        f"{what}: {few(listed)}",
        parameters(codes=guilty, values=[float(used[c]) for c in guilty]),
        len(guilty) + (len(guilty) if name == "code_table" else 1),
    )


def _snap(value: float, slack: float) -> float:
    """The number of fewest significant bits, up to eight, within the slack: tables hold such."""
    if value == 0 or not math.isfinite(value):
        return value
    fraction, exponent = math.frexp(value)
    for bits in range(1, 9):
        short = math.ldexp(round(fraction * 2**bits) / 2**bits, exponent)
        if short and abs(value / short - 1) <= slack:
            return short
    return snapped(value, slack)


def _zero_point(
    base: LinearModel, scale: Tensor, used: Tensor, right: Tensor, present: Tensor, slack: float
) -> Iterator[Fit]:
    """Every code shifted by the same amount before the scale."""
    known = present & torch.isfinite(used) & torch.isfinite(right)
    shift = (used - right)[known]
    if len(shift) < 2:
        return
    middle = float(shift.median())
    size = right[known].abs() + abs(middle)
    if middle and bool(((shift - middle).abs() <= 2 * slack * size).all()):
        value = snapped(middle, 2 * slack)
        model = replace(base, weight=base.weight + value * scale)
        text = f"every code is shifted by {value:.6g} before the scale: a zero point"
        yield Fit("zero_point", model, text, parameters(zero_point=-value), 1)


@named("zero_point", cost=4)
def zero_points(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """The codes of a range of K, or of some rows, shifted by one amount before the scale."""
    weight = evidence.weight
    if not isinstance(weight, QuantizedWeight) or not len(evidence.columns):
        return
    codes = logical_codes(weight)
    assert codes is not None
    scale, slack = scale_of(evidence, base, codes), tolerance(evidence)
    at, right = scale[:, evidence.columns], base.weight[:, evidence.columns]
    shift = (evidence.readout - right) / at
    noise = 2 * slack * (right.abs() + evidence.readout.abs()) / at.abs()
    for dim, axis in ((0, "K"), (1, "N")):
        lines = torch.nanmedian(shift, dim, keepdim=True).values
        agrees = ((shift - lines).abs() <= noise).double().mean(dim) > 0.9
        moved = agrees & ~((shift.abs() <= noise).double().mean(dim) > 0.9)
        if not bool(moved.any()) or bool(moved.all()):
            continue
        value = common_value(lines.flatten()[moved], slack)
        if value is None:
            continue
        hit = _all_of(moved, evidence.columns, base.weight.shape[1]) if dim == 0 else moved
        places = hit.nonzero().flatten()
        added = torch.where(hit[None, :] if dim == 0 else hit[:, None], value, 0.0) * scale
        what = f"k = {few(places)}" if dim == 0 else f"n = {few(places)}"
        yield Fit(
            "zero_point",
            replace(base, weight=base.weight + added),
            f"codes at {len(places)} of {len(hit)} places along {axis} are shifted by {value:.6g} "
            f"before the scale, a zero point: {what}",
            parameters(zero_point=-value, axis=axis, places=places),
            2,
        )


def _all_of(moved: Tensor, columns: Tensor, k: int) -> Tensor:
    """Per column of the weight: as its nearest neighbour that was read, [K]."""
    order = columns.argsort()
    known = columns[order]
    after = torch.searchsorted(known, torch.arange(k)).clamp(max=len(known) - 1)
    before = (after - 1).clamp(min=0)
    near = torch.arange(k)
    nearer = (known[after] - near).abs() <= (near - known[before]).abs()
    return moved[order][torch.where(nearer, after, before)]


def _name(
    weight: QuantizedWeight, guilty: Sequence[int], used: Tensor, right: Tensor
) -> tuple[str, str]:
    values = [float(right[code]) for code in guilty]
    if len(weight.format.table) <= 4:
        if all(float(used[code]) == -float(right[code]) for code in guilty):
            return "sign", "signs are swapped"
        return "ternary_table", "the table of the codes is another one"
    if not any(math.isfinite(value) for value in values):
        return "nan_codes", "codes that are not finite are decoded as numbers"
    if len(guilty) > 1 and all(float(used[c]) == -float(right[c]) for c in guilty):
        return "sign", "the sign of codes is wrong"
    finite = [abs(v) for v in weight.format.table if v and math.isfinite(v)]
    below = _smallest_normal(sorted(set(finite)))
    if len(guilty) > 1 and all(abs(value) < below for value in values if math.isfinite(value)):
        return "subnormals", "subnormal codes are decoded wrongly"
    return "code_table", "codes are decoded wrongly"


def _smallest_normal(values: list[float]) -> float:
    """Of a float's magnitudes the first where the spacing is about to double."""
    steps = [b - a for a, b in pairwise(values)]
    same = next((i for i, step in enumerate(steps) if step > steps[0]), len(steps))
    return values[max(0, (same + 1) // 2 - 1)] if same else values[0]


HYPOTHESES = (table, zero_points)
