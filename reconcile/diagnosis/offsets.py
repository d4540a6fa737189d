"""What is added: the bias missing, doubled, scaled, after rounding; a constant per column."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from reconcile.contract import DTYPES
from reconcile.diagnosis.evidence import LinearEvidence
from reconcile.diagnosis.hypothesis import few, named, parameters
from reconcile.diagnosis.model import Fit, LinearModel
from reconcile.diagnosis.ratios import snapped
from reconcile.diagnosis.roundings import row_scale
from reconcile.rounding import round_to


@named("bias_missing", "bias_doubled", "bias_scaled", cost=1)
def bias(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """The bias times a factor: 0, 2, or one that is solved for."""
    if base.bias is None or not bool((base.bias != 0).any()):
        return
    missing = replace(base, bias=torch.zeros_like(base.bias))
    yield Fit("bias_missing", missing, "the bias is not added")
    yield Fit("bias_doubled", replace(base, bias=2 * base.bias), "the bias is added twice")
    offset = _offset(evidence, base)
    usable = torch.isfinite(offset)
    b, d = base.bias[usable], offset[usable]
    factor = snapped(1 + float((b * d).sum() / (b * b).sum()), 2.0**-8)
    scale = row_scale(evidence)
    if scale is not None and bool((scale != 1).any()):
        for what, factors in (("multiplied", scale), ("divided", 1 / scale)):
            model = replace(base, bias=factors * base.bias)
            text = f"the bias is {what} by the scale of the weight"
            yield Fit("bias_scaled", model, text, parameters(by=what))
    if factor not in (0.0, 1.0, 2.0):
        model = replace(base, bias=factor * base.bias)
        text = f"the bias is multiplied by {factor:.6g}"
        yield Fit("bias_scaled", model, text, parameters(factor=factor), 1)


@named("bias_after_rounding", cost=1)
def bias_after(_: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """The sum is rounded to the output's dtype before the bias is added, and again after."""
    if base.bias is None:
        return
    narrow = DTYPES[base.contract.output]
    model = replace(base, before_bias=lambda y: round_to(y, narrow).double())
    text = "the sum is rounded before the bias is added, and again after"
    yield Fit("bias_after_rounding", model, text)


def _offset(evidence: LinearEvidence, base: LinearModel) -> Tensor:
    """Median over the rows of read minus right, per column; NaN where that is not finite."""
    exact, _ = base.exact(evidence.x)
    return torch.nanmedian(evidence.rows.y.double() - exact, 0).values


@named("row_offset", cost=7)
def offset(evidence: LinearEvidence, base: LinearModel) -> Iterator[Fit]:
    """A constant added to some outputs, whatever x is."""
    found = torch.nan_to_num(_offset(evidence, base))
    excess = evidence.excess(base)[1]
    hit = (excess > 0).double().mean(0) > 0.5
    if not bool(hit.any()) or evidence.x.shape[0] < 2:
        return
    added = torch.where(hit, found, 0.0)
    same = added[hit]
    constant = float(same.median())
    if bool(((same - constant).abs() <= 2.0**-6 * abs(constant)).all()):
        added = torch.where(hit, snapped(constant, 2.0**-7), 0.0)
    places = hit.nonzero().flatten()
    before = 0.0 if base.bias is None else base.bias
    yield Fit(
        "row_offset",
        replace(base, bias=before + added),
        f"a constant is added to {len(places)} of {len(hit)} outputs: n = {few(places)}",
        parameters(columns=places, offsets=[float(f"{v:.6g}") for v in added[hit][:8]]),
        2 * len(places),
    )


HYPOTHESES = (bias, bias_after, offset)
