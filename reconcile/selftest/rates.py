"""Counts with exact confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

LEVEL = 0.95
"""Confidence level of every interval."""


@dataclass(frozen=True, slots=True)
class Rate:
    """``hits`` of ``total``."""

    hits: int
    total: int

    @property
    def value(self) -> float:
        """Hits / total; NaN of nothing."""
        return self.hits / self.total if self.total else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The exact interval of Clopper and Pearson (Biometrika 26(4), 1934).

        >>> [round(end, 4) for end in Rate(0, 1000).interval]
        [0.0, 0.0037]
        >>> [round(end, 4) for end in Rate(9, 10).interval]
        [0.555, 0.9975]
        """
        if not self.total:
            return (0.0, 1.0)
        tail = (1 - LEVEL) / 2
        low = _solve(lambda p: _at_least(self.hits, self.total, p) - tail) if self.hits else 0.0
        high = 1.0
        if self.hits < self.total:
            high = _solve(lambda p: _at_least(self.hits + 1, self.total, p) - (1 - tail))
        return (low, high)

    def __str__(self) -> str:
        """``12 of 13 (92.3 %, 64.0-99.8)``; intervals in percent."""
        if not self.total:
            return "none"
        low, high = self.interval
        return (
            f"{self.hits} of {self.total} ({100 * self.value:.1f} %, "
            f"{100 * low:.1f}-{100 * high:.1f})"
        )


def _at_least(hits: int, total: int, p: float) -> float:
    """P(X >= hits) of a binomial; increasing in p."""
    if p <= 0:
        return float(hits <= 0)
    if p >= 1:
        return 1.0
    log_p, log_q = math.log(p), math.log1p(-p)
    return math.fsum(
        math.exp(
            math.lgamma(total + 1)
            - math.lgamma(k + 1)
            - math.lgamma(total - k + 1)
            + k * log_p
            + (total - k) * log_q
        )
        for k in range(hits, total + 1)
    )


def _solve(rising: Callable[[float], float]) -> float:
    """Root in [0, 1] of a rising function, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2
