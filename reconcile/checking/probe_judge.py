"""What each kind of probe expects of the kernel's answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace

import torch
from torch import Tensor

from reconcile.checking.probes import Probe
from reconcile.checking.readout import name_boundaries, name_codes, name_places
from reconcile.contract import Contract
from reconcile.judging.judge import Finding, judge_bound
from reconcile.linears import SMALLEST_NORMAL, ReferenceLinear, operand
from reconcile.numbers.limits import error_bound
from reconcile.report import Limits, Reason, Verdict
from reconcile.rounding import neighbours, round_to
from reconcile.weight import QuantizedWeight

Watcher = Callable[[ReferenceLinear, Probe, Tensor, Contract], None]
"""Sees the arguments of `judge_probe`."""
WATCH: ContextVar[Watcher | None] = ContextVar("WATCH", default=None)
"""Who else looks at what is judged, e.g. other gates on the same outputs."""


def judge_probe(
    reference: ReferenceLinear, probe: Probe, candidate: Tensor, contract: Contract
) -> Finding:
    """The judgement of one probe.

    Args:
        reference: the exact layer of the probe's weight.
        probe: what was asked.
        candidate: [M, N], what came.
        contract: the arithmetic that holds for M rows.
    """
    if (watcher := WATCH.get()) is not None:
        watcher(reference, probe, candidate, contract)
    x = probe.x.reshape(-1, probe.x.shape[-1])
    if probe.columns is not None:
        return _judge_impulse(reference, probe, candidate, contract)
    if probe.expect == "special":
        return _judge_special(reference, probe, candidate, contract)
    y, magnitude = reference(x), reference.magnitude(x)
    if probe.expect in ("exact", "rounded"):
        right = y if probe.expect == "exact" else _stored(y, contract).double()
        return _judge_exact(candidate, y, right, magnitude, x.shape[-1], contract)
    dense = probe.name == "bound"
    return judge_bound(candidate, y, magnitude, x.shape[-1], contract, "float64", dense=dense)


def _judge_impulse(
    reference: ReferenceLinear, probe: Probe, candidate: Tensor, contract: Contract
) -> Finding:
    """The output is the effective weight; one product reaches each element."""
    assert probe.columns is not None
    weight = reference.effective(candidate.shape[0])
    spoilt = ~torch.isfinite(weight).all(1)
    x = operand(probe.x, contract).double()
    y = x.amax(1, keepdim=True) * weight[:, probe.columns].T
    y[:, spoilt] = x @ weight[spoilt].T  # 0 * NaN and 0 * inf are NaN
    bias = probe.weight.bias
    size = x.abs().amax(1, keepdim=True) * reference.size(len(x))[:, probe.columns].T
    size = torch.where(y.isfinite(), size, y.abs())
    if bias is not None:
        y, size = y + bias.double(), size + bias.double().abs()
    finding = judge_bound(
        candidate, y, size, probe.products, contract, "float64", nan_is_right=True, dense=False
    )
    if finding.pair is not None:
        finding = replace(finding, pair=replace(finding.pair, places=probe.columns))
    if finding.reason is None or finding.reason.verdict is not Verdict.FAIL:
        return finding
    wrong = _outside(candidate, y, size, probe.products, contract)
    got = candidate.double() / probe.amplitude
    texts = [name_places(probe.columns, wrong)]
    if isinstance(probe.weight, QuantizedWeight):
        texts = [
            name_codes(probe.weight, probe.columns, got, wrong),
            name_boundaries(probe.weight, probe.columns, got),
            *texts,
        ]
    named = "; ".join(text for text in texts if text)
    return replace(finding, text=f"{named}; {finding.text}") if named else finding


def _outside(
    candidate: Tensor, y: Tensor, size: Tensor, products: int, contract: Contract
) -> Tensor:
    """Elements that the bound refuses."""
    bound = error_bound(contract, y, size, products, "float64")
    low, high = (round_to(y + sign * bound, candidate.dtype) for sign in (-1, 1))
    inside = (candidate >= low) & (candidate <= high)
    return ~(inside | (candidate.isnan() & y.isnan()))


def _stored(y: Tensor, contract: Contract) -> Tensor:
    """Y rounded once to the output's dtype, as the contract declares."""
    near = round_to(y, contract.output_dtype)
    if contract.output_rounding == "rne":
        return near
    below, above = neighbours(near)
    inner = torch.where(y > 0, below, above).to(near.dtype)
    return torch.where(near.double().abs() > y.abs(), inner, near)


def _judge_exact(
    candidate: Tensor, y: Tensor, right: Tensor, magnitude: Tensor, k: int, contract: Contract
) -> Finding:
    """Every order of summation is exact here; ``right`` is the only output there can be."""
    finding = judge_bound(candidate, y, magnitude, k, contract, "float64", dense=False)
    wrong = candidate.double() != right
    limits = Limits(
        kind="exact",
        source="sums of few small integers times powers of two are exact in any order",
        bounds={"differing": 0.0},
    )
    exact = replace(finding, limits=limits, utilisation=math.inf if bool(wrong.any()) else 0.0)
    if not bool(wrong.any()):
        return replace(exact, reason=None, text="")
    row, column = (int(i) for i in wrong.nonzero()[0])
    text = (
        f"{int(wrong.sum())} of {wrong.numel()} exact results are wrong, first at "
        f"[{row}, {column}]: {float(candidate[row, column]):g} instead of "
        f"{float(right[row, column]):g}, the sum being {float(y[row, column]):g}"
    )
    return replace(exact, reason=finding.reason or Reason.OVER_LIMIT, text=text)


def _judge_special(
    reference: ReferenceLinear, probe: Probe, candidate: Tensor, contract: Contract
) -> Finding:
    """Finite rows by the bound; NaN and infinity must reach the outputs that they touch."""
    x = probe.x
    k = x.shape[-1]
    finite = x.isfinite().all(1)
    y, magnitude = reference(x[finite]), reference.magnitude(x[finite])
    finding = judge_bound(candidate[finite], y, magnitude, k, contract, "float64", dense=False)
    if finding.reason is Reason.VACUOUS:
        finding = replace(finding, reason=None, text="")
    tiny = x.abs().amax(1) < SMALLEST_NORMAL
    if finding.reason is Reason.OVER_LIMIT and bool((candidate[tiny] == 0).all()):
        text = "subnormal inputs count as zero; declare flush_subnormals if that is meant"
        finding = replace(finding, text=text)
    weight = reference.effective(x.shape[0])
    for row in (~finite).nonzero().flatten().tolist():
        (place,) = (~x[row].isfinite()).nonzero().flatten().tolist()
        touched = weight[:, place].abs() >= SMALLEST_NORMAL  # a smaller one may underflow to 0
        lost = touched & ~_spread(candidate[row], float(x[row, place]) * weight[:, place], contract)
        if bool(lost.any()):
            first = int(lost.nonzero()[0])
            text = (
                f"{float(x[row, place])} at k = {place} of row {row} does not reach "
                f"{int(lost.sum())} outputs as it should, first n = {first}: "
                f"{float(candidate[row, first])}"
            )
            return replace(finding, reason=Reason.NONFINITE, text=text)
    return finding


def _spread(candidate: Tensor, product: Tensor, contract: Contract) -> Tensor:
    """Where an output is what one infinite or NaN product makes of it.

    An infinity keeps its sign; a quantiser has no code for it and may make NaN of the row.
    """
    right = (candidate == product) | (candidate.isnan() & product.isnan())
    return right if contract.activation == "none" else right | candidate.isnan()
