"""Which experts a router chose, as sets: a choice among near equals is not a fault."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def routing_stats(candidate: Tensor, reference: Tensor, logits: Tensor) -> dict[str, Any]:
    """Statistics of chosen experts, integers [..., top_k], with the reference's logits [..., E].

    Returns:
        ``sets_equal``: share of tokens with the same set; ``set_gap``: the largest lead, in the
        reference's logits, of an expert that was left out over one that was taken for it, 0 where
        all sets agree; ``least_margin``: the smallest lead of a chosen expert over one that is not,
        over all tokens: the error of a logit that could change a set.

    Raises:
        ValueError: shapes that do not fit together.
    """
    if candidate.shape != reference.shape or logits.shape[:-1] != reference.shape[:-1]:
        raise ValueError(
            f"shapes differ: candidate {list(candidate.shape)}, reference {list(reference.shape)}, "
            f"logits {list(logits.shape)}"
        )
    experts = logits.shape[-1]
    values = logits.to(torch.float64).reshape(-1, experts)
    mine, theirs = (_member(chosen, experts) for chosen in (candidate, reference))
    lowest_in = values.masked_fill(~theirs, math.inf).amin(1)
    best_out = values.masked_fill(theirs, -math.inf).amax(1)
    left, came = theirs & ~mine, mine & ~theirs
    lead = values.masked_fill(~left, -math.inf).amax(1) - values.masked_fill(~came, math.inf).amin(
        1
    )
    same = (mine == theirs).all(1)
    gap = float(torch.where(same, 0.0, lead).amax())
    return {
        "sets_equal": float(same.double().mean()),
        "set_gap": math.nan if bool(values.isnan().any()) else max(0.0, gap),
        "least_margin": float((lowest_in - best_out).amin()),
        "experts_unused": int((~theirs.any(0)).sum()),
    }


def _member(chosen: Tensor, experts: int) -> Tensor:
    """Chosen experts as a mask, bool [T, E]."""
    rows = chosen.long().reshape(-1, chosen.shape[-1])
    mask = torch.zeros(len(rows), experts, dtype=torch.bool)
    return mask.scatter(1, rows, True)
