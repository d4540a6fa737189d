"""Mistakes with one free number are solved for; heads and phases are named."""

import math

import pytest
import torch

from reconcile.diagnosis.fits import Family, solve
from reconcile.diagnosis.heads import head_causes


def rows(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("wanted", [0.0884, 0.25, 3.0])
def test_a_number_is_solved_for(wanted):
    family = Family("f", "", str, None, tuple(2.0**n for n in range(-6, 4)))
    found, share = solve(lambda value: 1 - math.log(value / wanted) ** 2, family, lambda: True)
    assert found == pytest.approx(wanted, rel=0.01)
    assert share > 0.999


X, EMBEDDING, RIGHT = rows(1, 12, 8), rows(2, 40, 8), 9 * rows(3, 12, 40)


@pytest.mark.parametrize(
    ("name", "y"),
    [
        ("softcap", 15 * torch.tanh(RIGHT / 15)),
        ("logit_scale", RIGHT * 0.3),
        ("tied_head", X @ EMBEDDING.T),
        ("position_shift", RIGHT.roll(1, 0)),
    ],
)
def test_a_head_is_named(name, y):
    found = head_causes(X, RIGHT, y, EMBEDDING, lambda: True)
    best = max(found, key=lambda item: item.explains)
    assert best.name == name
    assert best.explains > 0.99
