"""Limits: the a-priori bound of a declared contract, calibrated baselines, fixed tolerances.

The order of preference is exact, bound, baseline, fixed. A value is accepted if
``value <= bound``, so NaN is never accepted.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from reconcile.contract import DTYPES, UNIT_ROUNDOFF, Contract
from reconcile.numbers.metrics import ErrorStats
from reconcile.report import Limits
from reconcile.rounding import neighbours, round_to

DELTA = 1e-6
"""Probability with which the probabilistic bound may fail for any element of one tensor."""
BASELINE_FACTORS = {
    "max_abs": 3.0,
    "nmse": 4.0,
    "worst_row_nmse": 16.0,
    "kl_mean": 4.0,
    "kl_max": 16.0,
}
"""How many times plain torch's own error a correct kernel may have. Sums over a tensor vary
little between correct runs, maxima over its rows much (measured in docs/adr/0004)."""
FLOOR_RUNS = 8
"""Fewest runs from which a noise floor is fitted."""
FIXED_TOLERANCE = 1e-3
"""rtol = atol where there is neither a contract nor a baseline."""
FIXED_ATTENTION = 1e-2
"""The same for attention outputs."""


def gamma(k: int, u: float, outputs: int, *, truncating: bool = False) -> float:
    """Relative error of a sum of ``k`` products against sum |x||w|.

    The smaller of the worst case k u / (1 - k u) and the probabilistic bound
    exp(lambda sqrt(k) u + k u^2 / (1 - u)) - 1 of Higham & Mary (SIAM J. Sci. Comput. 41(5),
    2019), with lambda such that it fails for any of ``outputs`` elements with probability at
    most `DELTA`. A truncating accumulator has twice the u and only the worst case.

    >>> gamma(0, 2.0**-24, 1)
    0.0
    """
    u = 2 * u if truncating else u
    worst = k * u / (1 - k * u) if k * u < 1 else math.inf
    if truncating or k == 0:
        return worst
    spread = math.sqrt(2 * math.log(2 * k * outputs / DELTA))
    likely = math.expm1(spread * math.sqrt(k) * u + k * u * u / (1 - u))
    return min(worst, likely)


def error_bound(
    contract: Contract, y: Tensor, magnitude: Tensor, k: int, reference_dtype: str
) -> Tensor:
    """E >= |result before the output's rounding - y|, float64 [..., N].

    Args:
        contract: the arithmetic that holds for this number of rows.
        y: the reference's result, float64 [..., N].
        magnitude: S = sum_k |x_k| |w_k| (+ |b|), float64 [..., N].
        k: number of products.
        reference_dtype: dtype in which the reference summed; its own error is part of E.
    """
    u = UNIT_ROUNDOFF[contract.accumulator]
    outputs = max(1, y.numel())
    truncating = contract.accumulator_rounding == "rtz"
    partials = UNIT_ROUNDOFF[contract.partials] * contract.split_k if contract.split_k > 1 else 0.0
    relative = gamma(k + contract.split_k, u, outputs, truncating=truncating) + partials
    if contract.scale_applied == "before" and contract.weight_rounding is None:
        relative += u  # code * scale may be rounded once to the accumulator's dtype
    if contract.scale_applied == "after_block":
        relative += 2 * u  # the scale's product, per block; the blocks may cancel in y
    relative += gamma(k, UNIT_ROUNDOFF[reference_dtype], outputs)
    bound = relative * magnitude
    if contract.scale_applied == "after_sum":
        bound = bound + 2 * u * (y.abs() + bound)  # the scale's product
    if "bias" in contract.epilogue:
        bound = bound + u * (y.abs() + bound)
    if contract.flush_subnormals:
        bound = bound + (k + 1) * 2.0**-126
    # fl(ab) = ab (1 + d) + n: a product that underflows is off by half a subnormal (Higham 2002, 2)
    return bound + (k + 1) * half_smallest(contract.accumulator)


def half_smallest(dtype: str) -> float:
    """Half of the smallest subnormal: the largest error of a rounding that underflows.

    >>> half_smallest("float32") == 2.0**-150
    True
    """
    info = torch.finfo(DTYPES[dtype])
    return info.smallest_normal * info.eps / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """How much of the a-priori bound the candidate uses, over one tensor."""

    value: float
    """Least t for which every element lies in [fl(y - tE), fl(y + tE)]; NaN if c has NaN."""
    index: tuple[int, ...]
    """Where it is largest."""
    over: int
    """Elements with t > 1."""
    zeros_over: int
    """Elements at which a candidate of zeros would be refused; 0: the bound says nothing."""


def utilisation(candidate: Tensor, y: Tensor, bound: Tensor, rounding: str = "rne") -> Utilisation:
    """The largest of `shares`, where it is, and how many elements are beyond the bound."""
    share = shares(candidate, y, bound, rounding)
    nan = share.isnan()
    place = int(nan.flatten().int().argmax()) if bool(nan.any()) else int(share.argmax())
    half_smallest = float(neighbours(torch.zeros((), dtype=candidate.dtype))[1]) / 2
    return Utilisation(
        value=float(share.flatten()[place]),
        index=tuple(int(i) for i in torch.unravel_index(torch.tensor(place), share.shape)),
        over=int((~(share <= 1)).sum()),
        zeros_over=int((~(y.abs() - bound <= half_smallest)).sum()),
    )


def shares(candidate: Tensor, y: Tensor, bound: Tensor, rounding: str = "rne") -> Tensor:
    """Least multiple of ``bound`` that the error of each element needs, NaN where only one is NaN.

    c is within t E of y, up to the output's own rounding, if and only if
    fl(y - tE) <= c <= fl(y + tE), that is, if [y - tE, y + tE] meets the interval of the numbers
    that round to c. Overflow to a legal infinity and subnormals are right by construction.

    Args:
        candidate: c in its own dtype, [..., N].
        y: the reference, float64.
        bound: E, float64, not negative.
        rounding: ``rne``, or ``rtz`` for an output that is declared to be truncated.
    """
    low, high = rounding_interval(candidate, rounding)
    needed = torch.maximum(low - y, y - high).clamp_min(0.0)
    share = torch.where(bound > 0, needed / bound, torch.inf)
    same = candidate == round_to(y, candidate.dtype) if rounding == "rne" else needed == 0
    share = torch.where(same | (candidate.isnan() & y.isnan()), 0.0, share)
    return torch.where(candidate.isnan() != y.isnan(), torch.nan, share)


def rounding_interval(candidate: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    """Ends of the interval of numbers that round to each element, float64.

    Infinity is what everything beyond the middle between the largest finite value and the power
    of two after it rounds to; a truncating store never makes one of a finite number.
    """
    below, above = neighbours(candidate)
    wide = candidate.to(torch.float64)
    if rounding == "rtz":
        low = torch.where(wide > 0, wide, below)
        high = torch.where(wide < 0, wide, above)
        return low, high
    finite = torch.where(candidate.isinf(), torch.where(wide > 0, above, below), wide)
    low = torch.where(wide == -torch.inf, -torch.inf, (below + finite) / 2)
    high = torch.where(wide == torch.inf, torch.inf, (finite + above) / 2)
    return low, high


def bound_limits(contract: Contract, k: int) -> Limits:
    """The limits of kind ``bound``: utilisation at most 1."""
    blocks = f", split_k={contract.split_k}" if contract.split_k > 1 else ""
    return Limits(
        kind="bound",
        source=(
            f"a-priori bound of the contract: K={k}, accumulator {contract.accumulator} "
            f"({contract.accumulator_rounding}){blocks}, scale {contract.scale_applied}, output "
            f"{contract.output}; failure probability {DELTA:g} per tensor"
        ),
        bounds={"utilisation": 1.0},
    )


def baseline_limits(
    baseline: Mapping[str, float], names: Iterable[str], dtype: str, what: str
) -> Limits:
    """Limits from plain torch's own error, `BASELINE_FACTORS` times each named statistic."""
    chosen = tuple(names)
    factors = ", ".join(f"{BASELINE_FACTORS[name]:g}x {name}" for name in chosen)
    return Limits(
        kind="baseline",
        source=f"{factors} of plain torch in {dtype} on the same decoded weights, {what}",
        bounds={name: BASELINE_FACTORS[name] * baseline[name] for name in chosen},
    )


def floor_limits(
    runs: Sequence[Mapping[str, float]], names: Iterable[str], what: str, rate: float = 1e-6
) -> Limits:
    """Limits from the measured noise of legal perturbations.

    The maximum of n runs would alarm on one correct run in n + 1. A log-normal tail is fitted to
    each statistic instead: its mean and spread over the runs, widened for their number, give the
    value that a further correct run exceeds with probability ``rate``.

    Args:
        runs: statistics of at least eight correct runs (summation order, threads, batches).
        names: the statistics to gate.
        what: perturbation and seeds, for the source.
        rate: accepted false-alarm rate per statistic.
    """
    if len(runs) < FLOOR_RUNS:
        raise ValueError(f"a noise floor needs {FLOOR_RUNS} runs, got {len(runs)}")
    z = NormalDist().inv_cdf(1 - rate)
    free = len(runs) - 1
    wide = z * (1 + (z * z + 1) / (4 * free)) * math.sqrt(1 + 1 / len(runs))
    bounds = {}
    for name in names:
        logs = [math.log(max(run[name], sys.float_info.min)) for run in runs]
        bounds[name] = math.exp(statistics.fmean(logs) + wide * statistics.stdev(logs))
    return Limits(
        kind="floor",
        source=f"noise floor of {len(runs)} runs, {what}; log-normal tail at {rate:g}",
        bounds=bounds,
    )


def ratchet_limits(accepted: Mapping[str, float], names: Iterable[str], what: str) -> Limits:
    """Limits that accept no more than what was accepted before."""
    return Limits(
        kind="ratchet",
        source=f"accepted: {what}",
        bounds={name: accepted[name] for name in names},
    )


def fixed_limits(atol: float, rtol: float, source: str) -> Limits:
    """Elementwise tolerance |c - r| <= atol + rtol |r|; the gated number is the share of it."""
    return Limits(
        kind="fixed",
        source=f"atol={atol:g}, rtol={rtol:g}: {source}",
        bounds={"tolerance_share": 1.0},
    )


def tolerance_share(candidate: Tensor, reference: Tensor, atol: float, rtol: float) -> float:
    """Max |c - r| / (atol + rtol |r|); NaN if either side has one, x/0 is inf.

    An infinity that r rounds to is no error.
    """
    c, r = candidate.to(torch.float64), reference.to(torch.float64)
    legal = (c == r) | (c.isinf() & (candidate == round_to(reference, candidate.dtype)))
    error = (c - r).abs()
    share = torch.where(legal | (error == 0), 0.0, error / (atol + rtol * r.abs()))
    return math.nan if bool(share.isnan().any()) else float(share.max())


def nan_or_max(values: Iterable[float]) -> float:
    """The largest value, NaN where there is one; ``max`` would lose it in some orders.

    >>> nan_or_max([1.0, math.nan]), nan_or_max([1.0, 2.0])
    (nan, 2.0)
    """
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


def share_of_limits(stats: Mapping[str, Any], limits: Limits) -> tuple[float, str]:
    """Largest value / bound over the gated statistics, and which one; NaN wins.

    It is at most 1 if and only if every value <= its bound. 0/0 is 0: a bound of zero is met by
    zero only.
    """
    shares = {name: _share(float(stats[name]), bound) for name, bound in limits.bounds.items()}
    worst = max(shares, key=lambda name: (math.isnan(shares[name]), shares[name]))
    return shares[worst], worst


def _share(value: float, bound: float) -> float:
    if value <= bound:
        return value / bound if 0 < bound < math.inf else float(value == math.inf)
    return value / bound if bound > 0 else math.nan if math.isnan(value + bound) else math.inf


def accepts_zeros(stats: ErrorStats, limits: Limits) -> bool:
    """Whether a candidate of zeros would pass: then the limits say nothing about this tensor."""
    zeros = {"max_abs": stats.reference_amax, "nmse": 1.0, "worst_row_nmse": 1.0}
    if stats.reference_amax == 0:
        return True
    gated = [name for name in limits.bounds if name in zeros]
    return bool(gated) and all(zeros[name] <= limits.bounds[name] for name in gated)
