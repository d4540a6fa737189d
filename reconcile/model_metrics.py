"""Model-level numbers: top-10, KL divergence and perplexity of two sets of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

TOP = 10
"""How many of the largest logits are compared."""


def model_stats(candidate: Tensor, reference: Tensor, tokens: Sequence[int]) -> dict[str, Any]:
    """Statistics of candidate logits against reference logits, [..., T, V], in float64.

    Args:
        candidate: logits of one pass.
        reference: logits of the same pass.
        tokens: the T input tokens; the logits at t predict token t + 1.

    Returns:
        ``top10_set_gap`` and ``top10_order_gap``: the largest amount by which a reference logit
        was overtaken that should not have been (0 where set and order agree; a tie has no gap);
        ``top10_sets_equal``, ``top10_orders_equal``, ``argmax_agreement``: shares of positions;
        ``kl_mean``, ``kl_max``: KL(reference || candidate) in nats; ``nll_reference``,
        ``nll_candidate``: mean negative log likelihood of the next token, in nats.
    """
    c = candidate.to(torch.float64).flatten(0, -2)
    r = reference.to(torch.float64).flatten(0, -2)
    top = min(TOP, r.shape[-1])
    ours, theirs = c.topk(top).indices, r.topk(top).indices
    log_c, log_r = torch.log_softmax(c, -1), torch.log_softmax(r, -1)
    kl = (log_r.exp() * (log_r - log_c)).sum(-1).clamp_min(0.0)
    same_set = (ours.sort().values == theirs.sort().values).all(-1)
    return {
        "top10_set_gap": _set_gap(r, ours, theirs),
        "top10_order_gap": _order_gap(r, ours),
        "top10_sets_equal": float(same_set.double().mean()),
        "top10_orders_equal": float((ours == theirs).all(-1).double().mean()),
        "argmax_agreement": float((ours[:, 0] == theirs[:, 0]).double().mean()),
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()) if not bool(kl.isnan().any()) else math.nan,
        "nll_reference": _nll(log_r, tokens),
        "nll_candidate": _nll(log_c, tokens),
    }


def _set_gap(reference: Tensor, ours: Tensor, theirs: Tensor) -> float:
    """How far below the reference's last of the top any chosen token lies, at most."""
    last = reference.gather(-1, theirs[:, -1:])
    chosen = reference.gather(-1, ours)
    return _largest(last - chosen)


def _order_gap(reference: Tensor, ours: Tensor) -> float:
    """How much a later token of the candidate's order leads an earlier one in the reference."""
    chosen = reference.gather(-1, ours)
    best_later = chosen.flip(-1).cummax(-1).values.flip(-1)
    return _largest(best_later - chosen)


def _largest(gap: Tensor) -> float:
    return math.nan if bool(gap.isnan().any()) else max(0.0, float(gap.max()))


def _nll(log_probabilities: Tensor, tokens: Sequence[int]) -> float:
    """Mean -log p of the next token; NaN for a single token, which has none."""
    if len(tokens) < 2:
        return math.nan
    following = torch.tensor(tokens[1:])[:, None]
    return float(-log_probabilities[:-1].gather(-1, following).mean())
