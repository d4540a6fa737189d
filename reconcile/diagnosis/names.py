"""Every name that a diagnosis can have."""

from __future__ import annotations

from reconcile.diagnosis import (
    between_groups,
    experts,
    groups,
    heads,
    module_set,
    modules,
    norm_fits,
    rotary,
    scores,
    traces,
    variations,
)
from reconcile.diagnosis.families import linear_hypotheses


def known_names() -> frozenset[str]:
    """Names of the hypotheses about linears, groups, norms, modules and models."""
    linear = {name for hypothesis in linear_hypotheses() for name in hypothesis.names}
    others = (
        *(norm_fits, variations, modules, module_set, traces, between_groups, groups),
        *(rotary, scores, experts, heads),
    )
    return frozenset(linear.union(*(file.NAMES for file in others)))
