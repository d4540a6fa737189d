"""Norms that differ from the reference's: epsilon, and the one that some add to the weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from reconcile.report import Diagnosis

NAMES = ("epsilon", "norm_weight_plus_one", "norm_missing")
ROUNDING = 2.0**-7
"""Relative error that a 16-bit norm may have: two roundings."""


def diagnose_norm(x: Tensor, candidate: Tensor, reference: Tensor) -> tuple[Diagnosis, ...]:
    """What explains the outputs [rows, C] of an RMSNorm on x, best first; weights are not needed.

    The reference's own epsilon follows from its outputs at two sizes of rows.
    """
    x, c, r = (side.double().reshape(-1, side.shape[-1]) for side in (x, candidate, reference))
    power = x.square().mean(1, keepdim=True)
    own = _own_epsilon(x, r, power)
    before = _energy(c, r, r)
    found = []
    for name, predicted, parameters, text in _fits(x, c, r, power, own):
        share = 1 - _energy(c, predicted, r) / before if before > 0 else 0.0
        if share > 0:
            found.append(
                Diagnosis(name=name, explains=min(1.0, share), parameters=parameters, text=text)
            )
    return tuple(sorted(found, key=lambda item: -item.explains))


def _energy(c: Tensor, predicted: Tensor, r: Tensor) -> float:
    """Beyond the rounding, every row in units of what it should be: small ones count as much."""
    over = ((c - predicted).abs() - ROUNDING * predicted.abs()).clamp_min(0.0)
    size = r.square().mean(1, keepdim=True).clamp_min(1e-300)
    return float((over.square() / size).sum())


def _own_epsilon(x: Tensor, r: Tensor, power: Tensor) -> float:
    """(r / x)^2 = w^2 / (v + e) at the smallest and the largest row gives e."""
    small, large = int(power.argmin()), int(power.argmax())
    gain = (r[small] / x[small]).square() / (r[large] / x[large]).square()
    q = float(gain[torch.isfinite(gain)].median())
    a, b = float(power[small]), float(power[large])
    return max(0.0, (b - q * a) / (q - 1)) if q > 1 else 0.0


def _fits(
    x: Tensor, c: Tensor, r: Tensor, power: Tensor, own: float
) -> Iterator[tuple[str, Tensor, dict[str, float], str]]:
    ratio = (c * r).sum(1, keepdim=True) / r.square().sum(1, keepdim=True)
    small = power <= power.min() * 4
    epsilon = float(((power + own) / ratio.square() - power)[small].median())
    short = float(f"{epsilon:.1g}")
    if epsilon > 0 and abs(epsilon / short - 1) < 0.05:
        epsilon = short
    predicted = r * ((power + own) / (power + epsilon)).sqrt()
    own_short = float(f"{own:.1g}")
    found = {"epsilon": epsilon, "reference": own_short}
    yield "epsilon", predicted, found, f"the epsilon is {epsilon:g} instead of {own_short:g}"
    plain = x * (power + own).rsqrt()
    text = "the norm multiplies by 1 + weight"
    yield "norm_weight_plus_one", r + plain, {"added": 1.0}, text
    yield "norm_missing", x, {}, "the norm is left out: the output is the input"
    text = "the norm multiplies by weight where 1 + weight is meant"
    yield "norm_weight_plus_one", r - plain, {"added": -1.0}, text
