"""The judgement of one (candidate, reference) pair: statistics, limits, and what is wrong.

Non-finite values are judged first, then the limit, then whether the limit says anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from reconcile.case import Tolerance
from reconcile.contract import Contract
from reconcile.evidence import Evidence
from reconcile.judging.examine import Pair
from reconcile.numbers.bias import bias_statistic, is_biased
from reconcile.numbers.limits import (
    accepts_zeros,
    baseline_limits,
    bound_limits,
    error_bound,
    fixed_limits,
    share_of_limits,
    tolerance_share,
    utilisation,
)
from reconcile.numbers.metrics import CANDIDATE_DTYPES, ErrorStats, error_stats, worst_elements
from reconcile.report import Limits, Reason, Verdict

TENSOR_STATS = ("max_abs", "nmse", "worst_row_nmse")
"""Statistics that a baseline limit gates."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The judgement of one pair, before it becomes a row."""

    stats: dict[str, Any]
    limits: Limits | None = None
    utilisation: float | None = None
    reason: Reason | None = None
    text: str = ""
    pair: Pair | None = None
    """The judged tensors, for a close look at the rows that matter."""
    evidence: Evidence | None = None
    """A look that was already taken."""


def worst_of(findings: Sequence[Finding]) -> int:
    """Of judgements of several outputs for one input, the place of the one that is worst."""

    def weight(place: int) -> tuple[bool, bool, float]:
        found = findings[place]
        used = 0.0 if found.utilisation is None else found.utilisation
        failed = found.reason is not None and found.reason.verdict is Verdict.FAIL
        return failed, found.reason is not None, math.inf if math.isnan(used) else used

    return max(range(len(findings)), key=weight)


def judge_bound(
    candidate: Tensor,
    reference: Tensor,
    magnitude: Tensor,
    k: int,
    contract: Contract,
    reference_dtype: str,
    *,
    nan_is_right: bool = False,
    dense: bool = True,
) -> Finding:
    """Against the a-priori bound of the contract that holds for these rows.

    Args:
        candidate: [M, N] in its own dtype.
        reference: [M, N], the exact result.
        magnitude: S = sum |x||w| (+ |b|), [M, N].
        k: number of products per element.
        contract: the promised arithmetic.
        reference_dtype: dtype in which the reference summed.
        nan_is_right: whether a NaN of the reference is meant, and must be one of the candidate.
        dense: whether every element sums many independent products; only then do errors that
            lean one way say something (a single product rounds as its code does, everywhere).
    """
    stats = error_stats(candidate, reference)
    early = _nonfinite(stats, candidate, reference)
    suspect = early is not None and early.reason is Reason.REFERENCE_SUSPECT
    if early is not None and suspect and not nan_is_right:
        return early
    wide, size = reference.to(torch.float64), magnitude.to(torch.float64)
    bound = error_bound(contract, wide, size, k, reference_dtype)
    pair = Pair(candidate, wide, bound, contract.output_rounding)
    used = utilisation(candidate, wide, bound, contract.output_rounding)
    if early is not None and not suspect and not used.value <= 1:
        return early  # an infinity that the bound reaches is one of the roundings of y
    body = stats.as_dict() | {
        "utilisation": used.value,
        "utilisation_index": list(used.index),
        "over": used.over,
        "zeros_over": used.zeros_over,
    }
    finding = Finding(body, bound_limits(contract, k), used.value, pair=pair)
    if not used.value <= 1:
        text = f"{used.over} of {stats.n} elements outside the bound; {_worst(stats)}"
        body = body | {"worst_elements": worst_elements(candidate, wide)}
        return replace(finding, stats=body, reason=Reason.OVER_LIMIT, text=text)
    if used.zeros_over == 0 or _constant(stats):
        return replace(finding, reason=Reason.VACUOUS, text=_vacuous(stats))
    statistic = bias_statistic(candidate, wide)
    finding = replace(finding, stats=body | {"bias_t": statistic})
    if dense and is_biased(statistic, candidate.shape[1], contract):
        text = (
            f"every element is inside its bound, but the errors lean one way: t = {statistic:.1f} "
            f"over {candidate.shape[1]} columns"
        )
        return replace(finding, reason=Reason.BIAS, text=text)
    return finding


def judge_baseline(
    candidate: Tensor,
    reference: Tensor,
    baseline: Mapping[str, float] | None,
    dtype: str,
    what: str,
) -> Finding:
    """Against plain torch's own error at the candidate's dtype.

    Args:
        candidate: any shape.
        reference: the same shape.
        baseline: plain torch's statistics for this tap; None where there are none.
        dtype: the candidate's dtype, for the limit's source.
        what: which run of plain torch, for the limit's source.
    """
    if (early := unfit(candidate, reference)) is not None:
        return early
    stats = error_stats(candidate, reference)
    if (early := _nonfinite(stats, candidate, reference)) is not None:
        return early
    if baseline is None:
        text = "the reference's trace has no baseline for it"
        pair = Pair(candidate, reference)
        return Finding(stats.as_dict(), reason=Reason.NOT_COMPARED, text=text, pair=pair)
    rows = stats.n // candidate.shape[-1]
    names = TENSOR_STATS if rows > 1 else ("max_abs", "worst_row_nmse")
    limits = baseline_limits(baseline, names, dtype, what)
    if (early := _without_limit(limits, stats.as_dict())) is not None:
        return replace(early, pair=Pair(candidate, reference))
    return _judge(stats, stats.as_dict(), limits, candidate, reference)


def judge_fixed(candidate: Tensor, reference: Tensor, tolerance: Tolerance) -> Finding:
    """Against an elementwise tolerance that somebody set."""
    if (early := unfit(candidate, reference)) is not None:
        return early
    stats = error_stats(candidate, reference)
    if (early := _nonfinite(stats, candidate, reference)) is not None:
        return early
    share = tolerance_share(candidate, reference, tolerance.atol, tolerance.rtol)
    limits = fixed_limits(tolerance.atol, tolerance.rtol, tolerance.source)
    body = stats.as_dict() | {"tolerance_share": share}
    finding = _judge(stats, body, limits, candidate, reference)
    zeros = torch.zeros_like(candidate)
    if finding.reason is None and (
        tolerance_share(zeros, reference, tolerance.atol, tolerance.rtol) <= 1
    ):
        return replace(finding, reason=Reason.VACUOUS, text=_vacuous(stats))
    return finding


def judge_numbers(numbers: dict[str, Any], limits: Limits) -> Finding:
    """Numbers that are not statistics of one tensor, against their limits."""
    if (early := _without_limit(limits, numbers)) is not None:
        return early
    share, name = share_of_limits(numbers, limits)
    finding = Finding(numbers, limits, share)
    if share <= 1:
        return finding
    text = f"{name} {numbers[name]:.3g} exceeds {limits.bounds[name]:.3g}"
    return replace(finding, reason=Reason.OVER_LIMIT, text=text)


def unfit(candidate: Tensor, reference: Tensor) -> Finding | None:
    """A verdict where two tensors have no statistics: other shapes, no elements, other dtypes.

    Integers are compared exactly; that they differ is no fault by itself (a choice among equals).
    """
    if candidate.shape != reference.shape:
        text = f"expected {list(reference.shape)}, got {list(candidate.shape)}"
        return Finding({}, reason=Reason.SHAPE, text=text)
    if candidate.is_floating_point() != reference.is_floating_point():
        text = f"the reference is {reference.dtype}, the candidate {candidate.dtype}"
        return Finding({}, reason=Reason.DTYPE, text=text)
    for side, tensor in (("candidate", candidate), ("reference", reference)):
        if tensor.layout != torch.strided or tensor.is_meta:
            text = f"the {side} is no dense tensor with values: {tensor.layout} on {tensor.device}"
            return Finding({}, reason=Reason.NOT_COMPARED, text=text)
    if candidate.numel() == 0:
        text = f"there is nothing to compare: shape {list(candidate.shape)}"
        return Finding({}, reason=Reason.NOT_COMPARED, text=text)
    if not candidate.is_floating_point() and not candidate.is_complex():
        return _codes(candidate, reference)
    if candidate.dtype not in CANDIDATE_DTYPES:
        text = f"{candidate.dtype} has no error statistics: convert both sides to one that has"
        return Finding({}, reason=Reason.NOT_COMPARED, text=text)
    return None


def _codes(candidate: Tensor, reference: Tensor) -> Finding:
    """Integers: equal, or nothing is known about them."""
    differing = int((candidate != reference).sum())
    stats = {"n": candidate.numel(), "differing": differing}
    limits = Limits(kind="exact", source="integers are the same", bounds={"differing": 0.0})
    if not differing:
        return Finding(stats, limits, 0.0)
    text = f"{differing} of {candidate.numel()} integers differ, and no limit is known for them"
    return Finding(stats, limits, math.inf, reason=Reason.NOT_COMPARED, text=text)


def _without_limit(limits: Limits, numbers: Mapping[str, Any]) -> Finding | None:
    """A verdict where plain torch itself is not finite: then nothing would be right or wrong."""
    odd = [name for name, bound in limits.bounds.items() if not math.isfinite(bound)]
    if not odd:
        return None
    text = f"no limit for {', '.join(odd)}: plain torch itself is not finite; {limits.source}"
    return Finding(dict(numbers), limits, reason=Reason.VACUOUS, text=text)


def _judge(
    stats: ErrorStats, body: dict[str, Any], limits: Limits, candidate: Tensor, reference: Tensor
) -> Finding:
    share, name = share_of_limits(body, limits)
    finding = Finding(body, limits, share, pair=Pair(candidate, reference))
    if not share <= 1:
        text = f"{name} {body[name]:.3g} exceeds {limits.bounds[name]:.3g}; {_worst(stats)}"
        body = body | {"worst_elements": worst_elements(candidate, reference)}
        return replace(finding, stats=body, reason=Reason.OVER_LIMIT, text=text)
    if _constant(stats) or accepts_zeros(stats, limits):
        return replace(finding, reason=Reason.VACUOUS, text=_vacuous(stats))
    return finding


def _nonfinite(stats: ErrorStats, candidate: Tensor, reference: Tensor) -> Finding | None:
    """A verdict where not everything is finite, before any number."""
    body = stats.as_dict()
    if stats.nonfinite_mismatch:
        text = (
            f"{stats.nonfinite_mismatch} of {stats.n} elements differ in NaN or infinity, first "
            f"at {list(stats.nonfinite_index or ())}: candidate {stats.nan_candidate} NaN, "
            f"{stats.inf_candidate} inf; reference {stats.nan_reference} NaN, "
            f"{stats.inf_reference} inf"
        )
        body |= {"worst_elements": worst_elements(candidate, reference)}
        pair = Pair(candidate, reference)
        return Finding(body, reason=Reason.NONFINITE, text=text, pair=pair)
    if stats.nan_reference:
        text = f"the reference has {stats.nan_reference} NaN of {stats.n} elements"
        return Finding(body, reason=Reason.REFERENCE_SUSPECT, text=text)
    return None


def _worst(stats: ErrorStats) -> str:
    index = list(stats.max_abs_index or ())
    return (
        f"max |c - r| {stats.max_abs:.3g} at {index}: {stats.max_abs_candidate:.6g} against "
        f"{stats.max_abs_reference:.6g}"
    )


def _constant(stats: ErrorStats) -> bool:
    """Whether a permutation would not show; rows of one element have none."""
    return stats.reference_constant and (not stats.shape or stats.shape[-1] > 1)


def _vacuous(stats: ErrorStats) -> str:
    if _constant(stats):
        return "the reference is constant: a permutation would not show"
    return f"a candidate of zeros would pass (max |r| {stats.reference_amax:.3g})"
