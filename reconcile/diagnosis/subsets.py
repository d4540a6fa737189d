"""The smallest set that fails: delta-debugging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Smallest:
    """What was found, and whether it was proved minimal."""

    items: tuple[str, ...]
    minimal: bool
    """Whether it was seen to pass without any one of its items; False: the budget ran out."""
    tests: int


def smallest_failing(
    items: Sequence[str], fails: Callable[[Sequence[str]], bool], in_time: Callable[[], bool]
) -> Smallest:
    """A subset that fails and none of whose items can be left out (Zeller's ddmin).

    Args:
        items: a set that fails.
        fails: whether a subset, in the order of ``items``, fails.
        in_time: asked before each test; after a False the best set so far is returned.

    >>> smallest_failing("abcdefgh", lambda s: {"b", "g"} <= set(s), lambda: True).items
    ('b', 'g')
    """
    left, pieces, tests = tuple(items), 2, 0
    while len(left) > 1:
        parts = _split(left, pieces)
        rest = [tuple(item for item in left if item not in part) for part in parts]
        tried = [*parts, *(rest if pieces > 2 else ())]
        for number, subset in enumerate(tried):
            if not in_time():
                return Smallest(left, False, tests)
            tests += 1
            if fails(subset):
                pieces = 2 if number < len(parts) else pieces - 1
                left = subset
                break
        else:
            if pieces >= len(left):
                break
            pieces = min(2 * pieces, len(left))
    return Smallest(left, True, tests)


def _split(items: tuple[str, ...], pieces: int) -> list[tuple[str, ...]]:
    """Consecutive parts of nearly equal size."""
    bounds = [round(i * len(items) / pieces) for i in range(pieces + 1)]
    return [items[a:b] for a, b in pairwise(bounds)]
