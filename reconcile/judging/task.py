"""Accuracy on a small generated task: what was right on each side, and whether they differ.

Two accuracies of some hundred items differ by a percent for no reason. Both sides answer the same
items, so the question is put to the items on which they disagree: were it a matter of chance, each
would be as likely as the other to be the one that is right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reconcile.exceptions import ConfigError
from reconcile.judging.judge import Finding
from reconcile.report import Limits, Reason
from reconcile.tracing.taps import cache_argument, cache_of

BATCH = 64
"""Items that are answered together, at most."""
LEVEL = 1e-3
"""Chance of calling two equal sides different."""
Z95 = 1.959963984540054
"""97.5 % quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """Questions whose right answers are known."""

    name: str
    source: str
    """How they were made."""
    items: tuple[Item, ...]

    @property
    def identity(self) -> str:
        """Name and hash of the items: answers to other questions are not compared."""
        return f"{self.name} {sha256(repr(self.items).encode()).hexdigest()[:16]}"


def read_task(file: Path, vocab_size: int) -> Task:
    """A task file: ``{"source": text, "items": [{"prompt": [ids], "answer": [ids]}, ...]}``.

    Raises:
        ConfigError: not there, not of this form, empty, or with ids outside of the vocabulary.
    """
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
        items = tuple(Item(tuple(i["prompt"]), tuple(i["answer"])) for i in body["items"])
        task = Task(file.stem, str(body["source"]), items)
        known = all(
            type(token) is int and 0 <= token < vocab_size
            for item in items
            for token in (*item.prompt, *item.answer)
        )
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such task file") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: no task: {type(error).__name__}: {error}") from error
    if not known or not items or not all(item.prompt and item.answer for item in items):
        raise ConfigError(
            f"{file}: expected items with a prompt and an answer of token ids below {vocab_size}"
        )
    return task


def batches(task: Task) -> Iterator[list[int]]:
    """Places of the items that are answered together: prompts and answers of one length."""
    by_length: dict[tuple[int, int], list[int]] = {}
    for place, item in enumerate(task.items):
        by_length.setdefault((len(item.prompt), len(item.answer)), []).append(place)
    for places in by_length.values():
        for start in range(0, len(places), BATCH):
            yield places[start : start + BATCH]


def answers(model: nn.Module, task: Task, phase: Any = None) -> list[list[int]]:  # noqa: ANN401
    """What the model answers to each item: greedily, with a KV cache, one token per step.

    ``phase``: called with ``prefill`` or ``decode`` before each call of the model.
    """
    found: list[list[int]] = [[] for _ in task.items]
    for places in batches(task):
        tokens = torch.tensor([task.items[place].prompt for place in places])
        chosen = _answer(model, tokens, len(task.items[places[0]].answer), phase)
        for place, row in zip(places, chosen.tolist(), strict=True):
            found[place] = row
    return found


def _answer(model: nn.Module, tokens: Tensor, length: int, phase: Any) -> Tensor:  # noqa: ANN401
    given: dict[str, Any] = {}
    chosen = []
    for step in range(length):
        if phase is not None:
            phase("decode" if step else "prefill")
        output = model(input_ids=tokens, use_cache=True, **given)
        given = {cache_argument(model): cache_of(output)}
        tokens = output.logits[:, -1:].argmax(-1)
        chosen.append(tokens)
    return torch.cat(chosen, 1)


# --------------------------------------------------------------------------- judging


def interval(right: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share.

    >>> [round(end, 3) for end in interval(95, 100)]
    [0.888, 0.978]
    """
    share, z = right / n, Z95
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def sign_test(lost: int, won: int) -> float:
    """Two-sided probability of so uneven a split of the disagreements, were each side as good.

    >>> sign_test(0, 0), round(sign_test(8, 1), 4)
    (1.0, 0.0391)
    """
    n, extreme = lost + won, max(lost, won)
    tail = sum(math.comb(n, i) for i in range(extreme, n + 1))
    return min(1.0, float(2 * tail / 2**n))


def judge_task(
    right_answers: Sequence[Sequence[int]],
    reference: Sequence[Sequence[int]],
    candidate: Sequence[Sequence[int]],
) -> Finding:
    """Both sides' accuracies with their intervals; FAIL only if the candidate's is surely lower."""
    expected = [list(answer) for answer in right_answers]
    theirs = [list(a) == b for a, b in zip(reference, expected, strict=True)]
    ours = [list(a) == b for a, b in zip(candidate, expected, strict=True)]
    n = len(expected)
    lost = sum(r and not c for r, c in zip(theirs, ours, strict=True))
    won = sum(c and not r for r, c in zip(theirs, ours, strict=True))
    p = sign_test(lost, won)
    evidence = -math.log10(p) if lost > won else 0.0
    stats: dict[str, Any] = {"n": n, "lost": lost, "won": won, "p": p, "evidence": evidence}
    for side, right in (("reference", sum(theirs)), ("candidate", sum(ours))):
        stats |= {f"right_{side}": right, f"accuracy_{side}": right / n}
        stats[f"interval_{side}"] = [round(end, 4) for end in interval(right, n)]
    limits = Limits(
        kind="fixed",
        source=(
            f"sign test on the items on which the sides disagree, at {LEVEL:g}: evidence is -log10 "
            "of its p where the candidate is the worse one"
        ),
        bounds={"evidence": -math.log10(LEVEL)},
    )
    said = ", ".join(_said(side, stats) for side in ("reference", "candidate"))
    used = evidence / -math.log10(LEVEL)
    if sum(theirs) == 0:
        text = f"the reference answers none of {n} items: {said}"
        return Finding(stats, limits, used, reason=Reason.VACUOUS, text=text)
    text = f"{said}; they disagree on {lost + won} items, {lost} lost and {won} won, p = {p:.2g}"
    if evidence <= limits.bounds["evidence"]:
        return Finding(stats, limits, used, text=f"{text}: no difference is claimed")
    return Finding(stats, limits, used, reason=Reason.OVER_LIMIT, text=f"accuracy fell: {text}")


def _said(side: str, stats: dict[str, Any]) -> str:
    low, high = stats[f"interval_{side}"]
    return f"{side} {stats[f'accuracy_{side}']:.3f} [{low:.3f}, {high:.3f}]"
