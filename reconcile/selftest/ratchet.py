"""What the suite reached before: no rate may fall, and what is missed is known by name."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from reconcile.exceptions import ConfigError
from reconcile.selftest.rates import Rate
from reconcile.selftest.run import Outcome
from reconcile.tracing.trace import write_atomically

FILE = "ratchet.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratchet:
    """The accepted state of a suite."""

    missed: dict[str, str] = field(default_factory=dict)
    """Mutants that are not detected, with the reason."""
    misnamed: dict[str, str] = field(default_factory=dict)
    """Mutants whose cause is not named first, with the reason."""
    rates: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Name of a rate to (hits, total) when it was accepted."""
    accepted: str = ""
    """Why it was accepted."""


def read_ratchet(folder: Path) -> Ratchet:
    """``ratchet.json`` of a suite; an empty one where there is none.

    Raises:
        ConfigError: unreadable, or of another layout.
    """
    path = folder / FILE
    if not path.exists():
        return Ratchet()
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        rates = {name: (int(hits), int(total)) for name, (hits, total) in body["rates"].items()}
        return Ratchet(**(body | {"rates": rates}))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: not a ratchet: {error}") from error


def write_ratchet(folder: Path, ratchet: Ratchet) -> Path:
    """Write ``ratchet.json``, sorted."""
    body = {
        "accepted": ratchet.accepted,
        "misnamed": ratchet.misnamed,
        "missed": ratchet.missed,
        "rates": {name: list(rate) for name, rate in ratchet.rates.items()},
    }
    path = folder / FILE
    write_atomically(path, json.dumps(body, indent=2, sort_keys=True) + "\n")
    return path


def accepted(outcome: Outcome, rates: dict[str, Rate], before: Ratchet, reason: str) -> Ratchet:
    """The outcome as the new state; reasons that are known are kept, others get ``reason``."""
    missed = [r.id for r in outcome.mutants if not r.detected]
    misnamed = [r.id for r in outcome.mutants if r.detected and r.causes and r.rank != 1]
    return Ratchet(
        missed={name: before.missed.get(name, reason) for name in missed},
        misnamed={name: before.misnamed.get(name, reason) for name in misnamed},
        rates={name: (rate.hits, rate.total) for name, rate in rates.items()},
        accepted=reason,
    )


def violations(
    outcome: Outcome, rates: dict[str, Rate], ratchet: Ratchet, *, whole: bool
) -> list[str]:
    """What is worse than accepted; ``whole``: the rates are of the whole suite."""
    found = [f"false alarm: {c.id}: {alarm}" for c in outcome.variants for alarm in c.alarms]
    for result in outcome.mutants:
        if result.twin:
            found.append(f"the clean twin of {result.id} is not clean: {result.twin}")
        if not result.detected and result.id not in ratchet.missed:
            found.append(f"missed: {result.id}: {result.patch}")
        if result.detected and result.id in ratchet.missed:
            found.append(f"{result.id} is found but listed as missed: accept that")
        if result.detected and result.op and not result.located:
            found.append(f"another op is named first: {result.id}: {result.tap}")
    if whole:
        found += _fallen(rates, ratchet)
    return found


def _fallen(rates: dict[str, Rate], ratchet: Ratchet) -> list[str]:
    found = []
    for name, (hits, total) in ratchet.rates.items():
        now = rates.get(name, Rate(0, 0))
        if not now.hits * total >= hits * now.total or (
            now.total < total and name != "false alarms"
        ):
            found.append(f"{name} fell: {now.hits} of {now.total}, accepted {hits} of {total}")
    return found
