"""Every hypothesis about a linear that is known here: ours in order of cost, then registered."""

from __future__ import annotations

from functools import cache

from reconcile import registry
from reconcile.diagnosis import (
    codes,
    layouts,
    microscaling,
    misread,
    offsets,
    outputs,
    placement,
    ratios,
    roundings,
    scales,
)
from reconcile.diagnosis.hypothesis import Hypothesis

OURS: tuple[Hypothesis, ...] = (
    *misread.HYPOTHESES,
    *scales.HYPOTHESES,
    *microscaling.HYPOTHESES,
    *ratios.HYPOTHESES,
    *codes.HYPOTHESES,
    *offsets.HYPOTHESES,
    *outputs.HYPOTHESES,
    *placement.HYPOTHESES,
    *roundings.HYPOTHESES,
    *layouts.HYPOTHESES,
)


@cache
def linear_hypotheses() -> tuple[Hypothesis, ...]:
    """Ours and those of the entry point group ``reconcile.hypotheses``."""
    return (*OURS, *registry.hypotheses())
