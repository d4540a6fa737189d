"""Hypotheses as values, and all that are known here.

A hypothesis is a family of faults with free parameters. It is given what was seen and a base
model, solves for its parameters, and yields every fit that is worth weighing; the engine
measures how much of the error each removes. Anyone can register more: entry point group
``reconcile.hypotheses``, an object with the fields of `Hypothesis`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from reconcile.diagnosis.evidence import LinearEvidence
from reconcile.diagnosis.model import Fit, LinearModel

LinearFit = Callable[[LinearEvidence, LinearModel], Iterable[Fit]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """One family of faults of a linear."""

    names: tuple[str, ...]
    """Names of the diagnoses that it can give."""
    fit: LinearFit
    """Evidence and base model to fits; it may raise, which is noted and changes nothing."""
    cost: int = 0
    """Order among families that explain equally much: the simpler first."""
    last_resort: bool = False
    """Slow: not tried where a fit before it explains nearly all."""


def named(
    *names: str, cost: int = 0, last_resort: bool = False
) -> Callable[[LinearFit], Hypothesis]:
    """Decorator: a function that fits, as a `Hypothesis`."""
    return lambda fit: Hypothesis(names=names, fit=fit, cost=cost, last_resort=last_resort)


def parameters(**values: Any) -> dict[str, Any]:  # noqa: ANN401
    """Parameters for a report: tensors as numbers or lists, long lists cut."""
    return {name: _plain(value) for name, value in values.items()}


MOST_LISTED = 8
"""At most this many places are listed in a diagnosis."""


def _plain(value: Any) -> Any:  # noqa: ANN401
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value[:MOST_LISTED]]
    return value


def few(places: Any) -> str:  # noqa: ANN401
    """A short list in words.

    >>> few([1, 2, 3, 4, 5, 6, 7])
    '1, 2, 3, 4, ... (7 in all)'
    """
    listed = [str(place) for place in _listed(places)]
    if len(listed) <= 5:
        return ", ".join(listed)
    return f"{', '.join(listed[:4])}, ... ({len(listed)} in all)"


def _listed(places: Any) -> list[Any]:  # noqa: ANN401
    return places.tolist() if hasattr(places, "tolist") else list(places)
