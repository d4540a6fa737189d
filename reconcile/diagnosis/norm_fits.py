"""Norms that differ from the reference's: epsilon, what is added to the weight, and roundings.

First what lies beyond all roundings is explained. Where nothing does, or the output is wider than
what the norm rounds to inside, it is by the places of its roundings that norms differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from reconcile.contract import DTYPES, UNIT_ROUNDOFF
from reconcile.numbers.limits import rounding_interval
from reconcile.report import Diagnosis
from reconcile.rounding import round_to

NAMES = ("epsilon", "norm_weight_plus_one", "norm_missing", "norm_rounding_order")
ARITHMETIC = 2.0**-20
"""Relative error of a norm that is computed in float32 throughout, before its output's rounding."""
NARROW = ("bfloat16", "float16")
"""What a norm may round to before its end."""
ALIKE = 1e-3
"""Share of the error by which two explanations must differ to be told apart."""


def diagnose_norm(x: Tensor, candidate: Tensor, reference: Tensor) -> tuple[Diagnosis, ...]:
    """What explains the outputs [rows, C] of an RMSNorm on x, best first; weights are not needed.

    The reference's own epsilon and weight follow from its outputs at several sizes of rows.
    """
    if not bool(x.any()):
        return ()
    norm = _Norm.of(x, candidate, reference)
    far = norm.beyond(norm.right, roundings=2) > 0
    found = []
    for fit in (*_fits(norm), *_orders(norm)):
        share = norm.explained(fit.predicted, roundings=2 if far else 1)
        if share > 0:
            found.append((fit, share))
    found.sort(key=lambda item: -item[1])
    return tuple(
        Diagnosis(
            name=fit.name,
            explains=min(1.0, share),
            parameters=fit.parameters,
            text=fit.text + (_equals(found) if place == 0 else ""),
        )
        for place, (fit, share) in enumerate(found)
    )


@dataclass(frozen=True, slots=True)
class _Fit:
    """One way in which a norm may be wrong, as the result [rows, C] that it gives."""

    name: str
    predicted: Tensor
    """float64, before the rounding of the output."""
    parameters: dict[str, float | str]
    text: str


def _equals(found: list[tuple[_Fit, float]]) -> str:
    """Other names that explain as much as the best: the data cannot tell them apart."""
    (best, most), *others = found
    names = [fit.name for fit, share in others if most - share < ALIKE and fit.name != best.name]
    same = [fit.text for fit, share in others if most - share < ALIKE and fit.name == best.name]
    said = [*dict.fromkeys(names), *same]
    return f"; nothing here tells it from: {'; '.join(said)}" if said else ""


@dataclass(frozen=True, slots=True)
class _Norm:
    """One call of a norm on both sides; all [rows, C] in float64."""

    x: Tensor
    given: Tensor
    """The candidate's output in its own dtype."""
    right: Tensor
    power: Tensor
    """Mean square of each row, [rows, 1]."""
    epsilon: float
    """The reference's."""

    @classmethod
    def of(cls, x: Tensor, candidate: Tensor, reference: Tensor) -> _Norm:
        """Rows of whatever shape; those of zeros are left out."""
        some = x.reshape(-1, x.shape[-1]).double().abs().amax(1) > 0
        given, wide, right = (
            side.reshape(-1, side.shape[-1])[some] for side in (candidate, x, reference)
        )
        wide, right = wide.double(), right.double()
        power = wide.square().mean(1, keepdim=True)
        return cls(wide, given, right, power, _own_epsilon(wide, right, power))

    @property
    def normal(self) -> Tensor:
        """The rows divided by their size."""
        return self.x * (self.power + self.epsilon).rsqrt()

    @property
    def weight(self) -> Tensor:
        """[C]: the median of what the outputs say; where x is 0 they say nothing."""
        said = self.right / self.normal
        return torch.where(said.isfinite(), said, torch.nan).nanmedian(0).values.nan_to_num()

    def beyond(self, predicted: Tensor, roundings: int) -> float:
        """Error energy, every row in units of what it should be: small ones count as much.

        Two roundings are granted: a norm may round inside, too. Or one: the output's own.
        """
        size = self.right.square().mean(1, keepdim=True).clamp_min(1e-300)
        if roundings == 1:
            low, high = rounding_interval(self.given, "rne")
            over = torch.maximum(low - predicted, predicted - high) - ARITHMETIC * predicted.abs()
        else:
            dtype = str(self.given.dtype).removeprefix("torch.")
            granted = max(2 * UNIT_ROUNDOFF[dtype], ARITHMETIC)
            over = (self.given.double() - predicted).abs() - granted * predicted.abs()
        return float((over.clamp_min(0.0).square() / size).sum())

    def explained(self, predicted: Tensor, roundings: int) -> float:
        """Share of the error energy that is gone with a prediction."""
        before = self.beyond(self.right, roundings)
        return 1 - self.beyond(predicted, roundings) / before if before > 0 else 0.0


def _own_epsilon(x: Tensor, r: Tensor, power: Tensor) -> float:
    """(r / x)^2 = w^2 / (v + e) at the smallest and the largest row gives e."""
    small, large = int(power.argmin()), int(power.argmax())
    gain = (r[small] / x[small]).square() / (r[large] / x[large]).square()
    q = float(gain[torch.isfinite(gain)].median())
    a, b = float(power[small]), float(power[large])
    return max(0.0, (b - q * a) / (q - 1)) if q > 1 else 0.0


def _fits(norm: _Norm) -> Iterator[_Fit]:
    r, power, own = norm.right, norm.power, norm.epsilon
    ratio = (norm.given.double() * r).sum(1, keepdim=True) / r.square().sum(1, keepdim=True)
    small = power <= power.min() * 4
    epsilon = float(((power + own) / ratio.square() - power)[small].median())
    short = float(f"{epsilon:.1g}")
    if epsilon > 0 and abs(epsilon / short - 1) < 0.05:
        epsilon = short
    predicted = r * ((power + own) / (power + epsilon)).sqrt()
    own_short = float(f"{own:.1g}")
    found: dict[str, float | str] = {"epsilon": epsilon, "reference": own_short}
    text = f"the epsilon is {epsilon:g} instead of {own_short:g}"
    yield _Fit("epsilon", predicted, found, text)
    text = "the norm multiplies by 1 + weight"
    yield _Fit("norm_weight_plus_one", r + norm.normal, {"added": 1.0}, text)
    yield _Fit("norm_missing", norm.x, {}, "the norm is left out: the output is the input")
    text = "the norm multiplies by weight where 1 + weight is meant"
    yield _Fit("norm_weight_plus_one", r - norm.normal, {"added": -1.0}, text)


def _orders(norm: _Norm) -> Iterator[_Fit]:
    """Where the norm rounds to a narrower dtype, or to the output's own, before its end."""
    name, own = "norm_rounding_order", str(norm.given.dtype).removeprefix("torch.")
    for narrow in NARROW if own == "float32" else (own,):
        for what, rounded, text in _rounded(norm, narrow):
            yield _Fit(name, rounded, {"rounded": what, "dtype": narrow}, text)


def _rounded(norm: _Norm, narrow: str) -> Iterator[tuple[str, Tensor, str]]:
    def to(values: Tensor) -> Tensor:
        return round_to(values, DTYPES[narrow]).double()

    weight = norm.weight
    text = f"the normalised input is rounded to {narrow} before the weight is multiplied"
    yield "input", weight * to(norm.normal), text
    text = f"the weight is rounded to {narrow} before it is multiplied"
    yield "weight", to(weight) * norm.normal, text
    text = f"normalised input and weight are rounded to {narrow} before they are multiplied"
    yield "both", to(weight) * to(norm.normal), text
    if str(norm.given.dtype) != f"torch.{narrow}":
        yield "output", to(norm.right), f"the product with the weight is rounded to {narrow}"
