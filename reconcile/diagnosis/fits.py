"""Mistakes with one free number, which is solved for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from reconcile.diagnosis.hooks import Hooks

STEPS = 14
"""Steps of the golden section between two points of the grid."""
AS_GOOD = 1e-4
"""Share of the error that a number with a meaning may leave besides twice what the best leaves."""
FLAT = 0.05
"""Share below which only a look close by decides whether the grid's best point is a maximum."""
CLOSE = 1 / 16
"""Of the way to a neighbour in the grid, where that look is taken."""
NEAR = 0.1
"""How far a number with a meaning may be from the best one, in logarithms or as it is."""


@dataclass(frozen=True, slots=True)
class Family:
    """A mistake in a layer that has one number."""

    name: str
    """Name of the diagnosis."""
    where: str
    """Path inside the layer, for the report."""
    text: Callable[[float], str]
    hooks: Callable[[float], Hooks]
    grid: tuple[float, ...]
    """Rising; positive where ``logarithmic``."""
    nice: tuple[float, ...] = ()
    """Numbers with a meaning."""
    logarithmic: bool = True


def solve(
    share: Callable[[float], float], family: Family, in_time: Callable[[], bool]
) -> tuple[float, float]:
    """The number that explains most, and the share of the error energy that it explains.

    The best point of the grid, then a golden section between its neighbours; a number with a
    meaning is preferred where it explains as much.
    """
    there, back = (math.log, math.exp) if family.logarithmic else (float, float)
    seen: dict[float, float] = {}

    def at(place: float) -> float:
        if place not in seen:
            seen[place] = share(back(place)) if in_time() else -math.inf
        return seen[place]

    points = [there(value) for value in family.grid]
    middle = max(range(len(points)), key=lambda i: at(points[i]))
    low, high = points[max(0, middle - 1)], points[min(len(points) - 1, middle + 1)]
    if at(points[middle]) >= FLAT or _rises(at, low, points[middle], high):
        _golden(at, low, high)
    best = max(seen, key=lambda place: seen[place])
    enough = 1 - 2 * (1 - seen[best]) - AS_GOOD
    for value in family.nice:
        if abs(there(value) - best) <= NEAR and at(there(value)) >= enough:
            return value, at(there(value))
    return back(best), seen[best]


def _rises(at: Callable[[float], float], low: float, middle: float, high: float) -> bool:
    """Whether more is explained close by: the right number itself explains nothing."""
    return any(at(middle + CLOSE * (end - middle)) > at(middle) for end in (low, high))


def _golden(at: Callable[[float], float], low: float, high: float) -> None:
    """Narrow the bracket of a maximum; what was seen is kept by ``at``."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    for _ in range(STEPS):
        if at(left) >= at(right):
            high, right = right, left
            left = high - ratio * (high - low)
        else:
            low, left = left, right
            right = low + ratio * (high - low)
