"""Somebody else's acceptance criterion, shown beside the verdict; it never decides one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reconcile.report import Limits
from reconcile.rounding import round_to


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """max |c - r| / (|r| + epsilon) <= limit, where r is rounded once to the dtype of c."""

    name: str
    """As its users call it, e.g. ``max rel err <= 5e-4``."""
    limit: float
    epsilon: float
    source: str
    """Who uses it, where."""
    meaning: str
    """What it asks for in the dtype of the outputs."""

    def value(self, candidate: Tensor, reference: Tensor) -> float:
        """The gated number; NaN where either side has one."""
        c, r = candidate.to(torch.float64), round_to(reference, candidate.dtype).to(torch.float64)
        return float(((c - r).abs() / (r.abs() + self.epsilon)).max())

    def limits(self) -> Limits:
        """As a limit of kind ``fixed``."""
        return Limits(kind="fixed", source=self.source, bounds={self.name: self.limit})


def beside(
    stats: dict[str, Any], accepted: bool, candidate: Tensor, reference: Tensor, by: Criterion
) -> tuple[dict[str, Any], str]:
    """The statistics with the criterion's own, and what to say where it disagrees with ours."""
    value = by.value(candidate, reference)
    met = value <= by.limit
    differing = int((candidate != round_to(reference, candidate.dtype)).sum())
    stats = stats | {
        by.name: value,
        f"{by.name} met": met,
        f"{by.name} is": f"fixed limit, not gated; {by.source}; {by.meaning}",
        "differing": differing,
    }
    if met == accepted:
        return stats, ""
    ours = "inside the bound" if accepted else "refused here"
    theirs = f"meets {by.name}" if met else f"misses {by.name} ({value:.3g})"
    ulps = stats.get("max_ulp")
    return stats, (
        f"{ours}, {theirs}: {differing} of {candidate.numel()} elements differ from the exact "
        f"result rounded once, by at most {ulps} ulp; {by.meaning}"
    )
