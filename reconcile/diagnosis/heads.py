"""What a head that no kernel computes would give with one common mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from reconcile.diagnosis.fits import Family, solve
from reconcile.diagnosis.hooks import both
from reconcile.report import Diagnosis

NAMES = ("tied_head", "softcap", "logit_scale", "position_shift")


def head_causes(
    x: Tensor, right: Tensor, y: Tensor, embedding: Tensor | None, in_time: Callable[[], bool]
) -> tuple[Diagnosis, ...]:
    """Causes with the share of the error energy that each explains, in no order.

    Args:
        x: what the head was given, [T, K].
        right: what it should give, [T, N].
        y: what it gave, [T, N].
        embedding: the model's, [N, K]; None where it has another shape, or is the head's own.
        in_time: whether a fit may go on.
    """
    right, y = right.double(), y.double()
    found = list(_fitted(right, y, in_time))
    if embedding is not None:
        other = x.double() @ embedding.double().T
        text = "the head's weight is the embedding's, where it has its own"
        found.append(Diagnosis(name="tied_head", explains=_share(right, y, other), text=text))
    for step, text in ((1, "before"), (-1, "after")):
        if len(y) > abs(step) + 1:
            own, moved = _moved(right, y, step)
            share = _share(own[0], own[1], moved)
            words = f"each position has the logits of the one {text} it"
            found.append(Diagnosis(name="position_shift", explains=share, text=words))
    return tuple(found)


def _share(right: Tensor, y: Tensor, other: Tensor) -> float:
    error = float((y - right).square().sum())
    left = float((y - other).square().sum())
    return max(0.0, 1 - left / error) if error > 0 else 0.0


def _moved(right: Tensor, y: Tensor, step: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Right rows and given rows where a neighbour exists, and the neighbour's right rows."""
    if step > 0:
        return (right[step:], y[step:]), right[:-step]
    return (right[:step], y[:step]), right[-step:]


def _fitted(right: Tensor, y: Tensor, in_time: Callable[[], bool]) -> Iterator[Diagnosis]:
    power = float(right.square().sum())
    factor = float((y * right).sum()) / power if power > 0 else 1.0
    text = f"logits are {factor:.4g} times the right ones"
    share = _share(right, y, factor * right)
    yield Diagnosis(name="logit_scale", explains=share, parameters={"factor": factor}, text=text)
    top = float(right.abs().amax())
    if top <= 0:
        return
    family = Family(
        "softcap",
        "",
        str,
        lambda _: both(),
        tuple(top * 2.0 ** (n / 2) for n in range(-10, 11)),
        (30.0, 50.0, 20.0, 15.0, 10.0, 5.0, 100.0),
    )
    cap, share = solve(lambda c: _share(right, y, c * torch.tanh(right / c)), family, in_time)
    text = f"logits are capped at {cap:.4g} by tanh"
    yield Diagnosis(name="softcap", explains=share, parameters={"cap": cap}, text=text)
