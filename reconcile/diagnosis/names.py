"""Every name that a diagnosis can have."""

from __future__ import annotations

from reconcile.diagnosis import module_set, modules, norm_fits, variations
from reconcile.diagnosis.families import linear_hypotheses


def known_names() -> frozenset[str]:
    """Names of the hypotheses about linears, norms, modules and models."""
    linear = {name for hypothesis in linear_hypotheses() for name in hypothesis.names}
    return frozenset(
        linear | {*norm_fits.NAMES, *variations.NAMES, *modules.NAMES, *module_set.NAMES}
    )
