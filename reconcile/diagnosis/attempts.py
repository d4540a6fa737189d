"""Every mistake that is tried in a failing layer."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from reconcile.diagnosis.experts import expert_families, expert_variations
from reconcile.diagnosis.fits import Family
from reconcile.diagnosis.hooks import Variation, child
from reconcile.diagnosis.rotary import rope_families, rope_variations
from reconcile.diagnosis.scores import score_families, score_variations
from reconcile.diagnosis.variations import families, variations, windows


def all_variations(
    layer: nn.Module, frequencies: Tensor | None, first: int | None
) -> Iterator[Variation]:
    """Mistakes without a number, likely ones first.

    Args:
        layer: of the reference.
        frequencies: of the model's RoPE, [d/2], where it has one.
        first: the first position that is wrong, where that is not 0.
    """
    yield from variations(layer)
    yield from windows(layer, first)
    attention = child(layer, "q_proj", "k_proj", "v_proj", "o_proj")
    if attention is not None:
        yield from score_variations(*attention)
    yield from expert_variations(layer)
    if attention is not None:
        yield from rope_variations(*attention, frequencies)


def all_families(layer: nn.Module, frequencies: Tensor | None) -> Iterator[Family]:
    """Mistakes with one number, likely ones first."""
    attention = child(layer, "q_proj", "k_proj", "v_proj", "o_proj")
    if attention is not None:
        yield from score_families(*attention)
    yield from expert_families(layer)
    yield from families(layer)
    if attention is not None:
        yield from rope_families(*attention, frequencies)
