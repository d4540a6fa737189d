"""The calls of a model over one prompt: all of it at once, or prefill and then token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reconcile.tracing.taps import fingerprint


@dataclass(frozen=True, slots=True)
class Step:
    """One call of the model: the whole prompt, its prefill, or one token on top of a KV cache."""

    key: str
    """Identity of the pass: over every token up to here, and what of them the cache holds."""
    phase: str
    """``prefill``, ``decode``, or empty where the two are not told apart."""
    tokens: Tensor
    """Token ids of this call, [1, T]."""
    seen: Tensor
    """Token ids up to and including this call, [1, S]."""


def steps(ids: tuple[int, ...], decode: int) -> tuple[Step, ...]:
    """The calls over one prompt: with ``decode`` its last tokens one at a time, the rest at once.

    >>> [(step.phase, step.tokens.tolist()) for step in steps((5, 6, 7), 2)]
    [('prefill', [[5]]), ('decode', [[6]]), ('decode', [[7]])]
    """
    tokens = torch.tensor([ids])
    if not decode:
        return (Step(fingerprint((), {"input_ids": tokens}), "", tokens, tokens),)
    first = len(ids) - decode
    ends = [first, *range(first + 1, len(ids) + 1)]
    return tuple(_step(tokens, start, end) for start, end in zip([0, *ends], ends, strict=False))


def _step(tokens: Tensor, start: int, end: int) -> Step:
    phase = "decode" if start else "prefill"
    inputs = {"input_ids": tokens[:, :end], "cached": torch.tensor(start)}
    return Step(f"{phase}-{fingerprint((), inputs)}", phase, tokens[:, start:end], tokens[:, :end])
