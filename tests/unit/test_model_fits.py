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


@pytest.mark.parametrize("ratio", [0.5, 0.6, 0.7, 0.816, 0.894, 0.95, 1.1, 1.3, 1.5, 1.7, 2.0, 8.0])
def test_a_number_near_the_right_one_is_solved_for_and_keeps_its_own_meaning(ratio):
    """The error is linear in the number, as of a scale; the right number explains nothing of it."""
    right, wanted = 0.125, 0.125 * ratio
    grid = tuple(right * 2.0**n for n in range(-4, 5))
    family = Family("f", "", str, None, grid, nice=(right, 2 * right))

    def share(value):
        return (1 - 1e-6) * (1 - ((value - wanted) / (right - wanted)) ** 2)

    found, explained = solve(share, family, lambda: True)
    assert found == pytest.approx(wanted, rel=0.005)
    assert explained > 0.99


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
