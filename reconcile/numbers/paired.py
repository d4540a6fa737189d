"""Whether one thing is faster than another: paired runs, and an interval of their ratio.

The two are run in turns, so that what else the machine does meets both; each round gives a ratio.
The interval of the median ratio comes from the order of the ratios alone, with no assumption about
how they are spread.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEVEL = 0.95
"""Confidence of the interval."""
FEWEST = 6
"""Pairs below which no interval at `LEVEL` exists: 1 - 2 / 2^6 is the first above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Seconds of both in every round, in the order in which they were measured."""

    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Ours / theirs, round by round; below 1 ours is faster."""
        return tuple(a / b for a, b in zip(self.ours, self.theirs, strict=True))

    @property
    def ratio(self) -> float:
        """Their median."""
        return statistics.median(self.ratios)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of the median ratio at `LEVEL`; None of fewer than `FEWEST` pairs."""
        return median_interval(self.ratios)

    @property
    def claim(self) -> str:
        """``faster``, ``slower``, or ``no difference claimed``."""
        found = self.interval
        if found is None or found[0] <= 1 <= found[1]:
            return "no difference claimed"
        return "faster" if found[1] < 1 else "slower"

    def text(self) -> str:
        """In one line."""
        if self.interval is None:
            return f"ratio {self.ratio:.3f} of {len(self.ours)} pairs, too few for an interval"
        low, high = self.interval
        return (
            f"{self.claim}: ratio {self.ratio:.3f} [{low:.3f}, {high:.3f}] over {len(self.ours)} "
            "pairs"
        )


def median_interval(samples: Sequence[float], level: float = LEVEL) -> tuple[float, float] | None:
    """The narrowest symmetric pair of order statistics that covers the median at ``level``.

    >>> median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    (1.0, 6.0)
    """
    n, ordered = len(samples), sorted(samples)
    outside, rank = 0.0, -1
    for below in range(n // 2):
        outside += 2 * math.comb(n, below) / 2**n
        if outside > 1 - level:
            break
        rank = below
    return None if rank < 0 else (ordered[rank], ordered[n - 1 - rank])


def paired(
    ours: Callable[[], float], theirs: Callable[[], float], rounds: int, warmup: int = 2
) -> Paired:
    """Run both in turns, each first in every second round.

    Args:
        ours: runs once and returns its seconds.
        theirs: the same of what it is compared with.
        rounds: pairs that count.
        warmup: pairs before them that do not.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(warmup + rounds):
        order = ((0, ours), (1, theirs)) if turn % 2 else ((1, theirs), (0, ours))
        for side, run in order:
            taken = run()
            if turn >= warmup:
                seconds[side].append(taken)
    return Paired(ours=tuple(seconds[0]), theirs=tuple(seconds[1]))
