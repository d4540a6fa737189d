"""How many threads torch uses: few where the tensors are small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 16_000_000
"""Weights below which one thread is used: a barrier then costs more than it saves."""


@contextmanager
def few_threads(weights: int) -> Iterator[None]:
    """One thread while there are fewer than `SMALL` ``weights``; the caller's number after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if weights < SMALL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
