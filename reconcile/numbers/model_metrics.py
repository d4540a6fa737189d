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
        ``nll_candidate``: mean negative log likelihood of the next token, in nats. NaN logits on
        either side make the gaps, and the KL where they are, NaN.

    Raises:
        ValueError: the shapes differ, or the tokens are not as many as the positions.
    """
    if candidate.shape != reference.shape:
        raise ValueError(
            f"shapes differ: candidate {list(candidate.shape)}, reference {list(reference.shape)}"
        )
    c = candidate.detach().to("cpu", torch.float64).flatten(0, -2)
    r = reference.detach().to("cpu", torch.float64).flatten(0, -2)
    if len(tokens) > 1 and len(tokens) != r.shape[0]:
        raise ValueError(f"expected logits for {len(tokens)} tokens, got {r.shape[0]}")
    top = min(TOP, r.shape[-1])
    ours, theirs = _top(c, top), _top(r, top)
    log_c, log_r = torch.log_softmax(c, -1), torch.log_softmax(r, -1)
    share = log_r.exp()
    kl = torch.where(share == 0, 0.0, share * (log_r - log_c)).sum(-1).clamp_min(0.0)
    same_set = (ours.sort().values == theirs.sort().values).all(-1)
    lost = bool(c.isnan().any() | r.isnan().any())
    return {
        "top10_set_gap": math.nan if lost else _set_gap(r, ours, theirs),
        "top10_order_gap": math.nan if lost else _order_gap(r, ours),
        "top10_sets_equal": float(same_set.double().mean()),
        "top10_orders_equal": float((ours == theirs).all(-1).double().mean()),
        "argmax_agreement": float((ours[:, 0] == theirs[:, 0]).double().mean()),
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "nll_reference": _nll(log_r, tokens),
        "nll_candidate": _nll(log_c, tokens),
    }


def _top(logits: Tensor, count: int) -> Tensor:
    """Places of the largest logits, [..., count]; the first of equals first."""
    return logits.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _set_gap(reference: Tensor, ours: Tensor, theirs: Tensor) -> float:
    """By how much, at most, a token that left the top leads one that came in, in the reference."""
    stayed = (theirs[:, :, None] == ours[:, None, :]).any(-1)
    left = reference.gather(-1, theirs).masked_fill(stayed, -math.inf).amax(-1)
    lowest = reference.gather(-1, ours).amin(-1)
    return _largest_lead(left.where(~stayed.all(-1), lowest), lowest)


def _order_gap(reference: Tensor, ours: Tensor) -> float:
    """How much a later token of the candidate's order leads an earlier one in the reference."""
    chosen = reference.gather(-1, ours)
    best_later = chosen.flip(-1).cummax(-1).values.flip(-1)
    return _largest_lead(best_later, chosen)


def _largest_lead(better: Tensor, chosen: Tensor) -> float:
    """Max of better - chosen, at least 0; equal logits, also infinite ones, have no lead."""
    return max(0.0, float(torch.where(better == chosen, 0.0, better - chosen).max()))


def _nll(log_probabilities: Tensor, tokens: Sequence[int]) -> float:
    """Mean -log p of the next token; NaN for a single token, which has none."""
    if len(tokens) < 2:
        return math.nan
    following = torch.tensor(tokens[1:])[:, None]
    return float(-log_probabilities[:-1].gather(-1, following).mean())
