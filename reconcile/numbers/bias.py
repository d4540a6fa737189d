"""Small errors with a preferred sign, which a bound on each element does not see.

A truncating store under a loose contract, or all scales up by one percent, stays inside a wide
bound element by element but pushes them all one way. Correct rounding has no preferred way.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reconcile.contract import UNIT_ROUNDOFF, Contract
from reconcile.rounding import code_order, round_to

Z = 6.11
"""Two-sided normal quantile of 1e-9: 1e-6 over a thousand tests of one run."""
COARSE = 2.0**8
"""The output's unit roundoff is at least this many times the accumulator's, or there is no test."""
FEWEST = 32
"""Columns below which there is no test: they are the clusters."""


def bias_statistic(candidate: Tensor, reference: Tensor) -> float:
    """Student's t of sign(r) * clip(ulps of c from r rounded, -1, 1), clustered by column.

    Elements of a column share a weight row and are not independent; columns are the sample.
    0 where no element differs (0/0 is 0), and below `FEWEST` columns.

    Args:
        candidate: [M, N], finite where the reference is.
        reference: [M, N], float64.
    """
    if candidate.shape[1] < FEWEST:
        return 0.0
    rounded = round_to(reference, candidate.dtype)
    usable = candidate.isfinite() & rounded.isfinite()
    ulps = (code_order(candidate) - code_order(rounded)).clamp(-1, 1).to(torch.float64)
    away = torch.where(usable, torch.sign(reference) * ulps, 0.0).mean(0)
    mean, spread = float(away.mean()), float(away.std())
    if mean == 0:
        return 0.0
    return (
        mean / (spread / math.sqrt(away.numel())) if spread > 0 else math.copysign(math.inf, mean)
    )


def is_biased(statistic: float, columns: int, contract: Contract) -> bool:
    """Whether the statistic is beyond chance.

    Never where the contract declares truncation, and never where the output is about as fine as
    the accumulator: permitted roundings of code * scale are then as large as an ulp of the
    output, and they lean as the scale does.
    """
    truncates = "rtz" in (contract.accumulator_rounding, contract.output_rounding)
    coarse = UNIT_ROUNDOFF[contract.output] >= COARSE * UNIT_ROUNDOFF[contract.accumulator]
    if truncates or not coarse or columns < FEWEST:
        return False
    free = columns - 1
    critical = Z * (1 + (Z * Z + 1) / (4 * free))  # Student's t from the normal quantile
    return not abs(statistic) <= critical
