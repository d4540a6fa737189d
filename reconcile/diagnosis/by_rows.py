"""For which numbers of rows M a linear fails, where it is not for all of them.

The failing rows themselves are sent again in calls of other sizes, so that it is the size that
decides and not what the rows hold; between a size that fails and one that passes the boundary is
found by halving.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from reconcile.diagnosis.hypothesis import few

Fails = Callable[[int], bool | None]
"""Whether a call of M rows fails; None: it gave nothing, or there is no time."""
MOST_CALLS = 16
"""Calls that may be made to find out."""
MULTIPLES = (64, 32, 16, 8, 4, 2)
"""Numbers of rows per tile that are tried."""


@dataclass(frozen=True, slots=True)
class Regime:
    """The numbers of rows that fail."""

    m: str
    """Short, for parameters: ``<= 32``, ``>= 33``, ``not a multiple of 4``, ``5``."""
    text: str


def regime(failing: Collection[int], passing: Collection[int], fails: Fails) -> Regime | None:
    """What the sizes that fail have in common; None where all fail, or it is not the size.

    Args:
        failing: numbers of rows that were seen to fail.
        passing: those that were seen to pass.
        fails: tries another one.
    """
    if not failing or not passing or any(fails(m) is not False for m in passing):
        return None
    if not all(fails(m) for m in failing):
        return None
    if max(failing) < min(passing):
        last, first = _halved(max(failing), min(passing), fails)
        return _below(last, first)
    if min(failing) > max(passing):
        last, first = _halved(max(passing), min(failing), lambda m: _not(fails(m)))
        return _above(last, first)
    return _multiple(failing, passing, fails) or _listed(failing, passing)


def _not(failed: bool | None) -> bool | None:
    return None if failed is None else not failed


def _halved(last: int, first: int, holds: Fails) -> tuple[int, int]:
    """Neighbours of which ``holds`` is true of the former alone, or as near as it can be told."""
    while first - last > 1:
        middle = (last + first) // 2
        answer = holds(middle)
        if answer is None:
            break
        last, first = (middle, first) if answer else (last, middle)
    return last, first


def _below(last: int, first: int) -> Regime:
    rows = "1 row" if last == 1 else f"M <= {last} rows"
    more = "" if first == last + 1 else f"; M >= {first} passes"
    return Regime(f"<= {last}", f"only calls of {rows} fail{more}")


def _above(last: int, first: int) -> Regime:
    more = "" if first == last + 1 else f"; M <= {last} passes"
    return Regime(f">= {first}", f"only calls of M >= {first} rows fail{more}")


def _multiple(failing: Collection[int], passing: Collection[int], fails: Fails) -> Regime | None:
    for size in MULTIPLES:
        apart = all(m % size for m in failing) and not any(m % size for m in passing)
        if apart and fails(2 * size) is False and fails(2 * size + 1) and fails(3 * size - 1):
            text = f"only calls of M rows fail where M is no multiple of {size}"
            return Regime(f"not a multiple of {size}", text)
    return None


def _listed(failing: Collection[int], passing: Collection[int]) -> Regime:
    bad, good = few(sorted(failing)), few(sorted(passing))
    return Regime(bad, f"calls of M = {bad} rows fail, of M = {good} pass")


def resized(x: Tensor, worst: int, m: int) -> Tensor:
    """``m`` rows of x [M, K], the worst among them; of more than there are, again from the first.

    >>> resized(torch.arange(5.0)[:, None], 3, 2).flatten().tolist()
    [3.0, 4.0]
    """
    start = max(0, min(worst, len(x) - m))
    return x[(start + torch.arange(m)) % len(x)]
