"""The result of a suite as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from reconcile.selftest.gates import GATES
from reconcile.selftest.ratchet import Ratchet
from reconcile.selftest.rates import Rate
from reconcile.selftest.run import Outcome, Result

SCHEMA = 1
"""Version of the JSON layout."""


def rates(outcome: Outcome) -> dict[str, Rate]:
    """Detection, localisation, diagnosis (of detected faults that have a cause), false alarms."""
    found = [r for r in outcome.mutants if r.detected]
    with_op = [r for r in outcome.mutants if r.op]
    several = [r for r in with_op if r.several_ops]
    with_cause = [r for r in outcome.mutants if r.causes]
    return {
        "detection": Rate(len(found), len(outcome.mutants)),
        "right op first": Rate(sum(r.detected and r.located for r in with_op), len(with_op)),
        "right op first, several ops": Rate(
            sum(r.detected and r.located for r in several), len(several)
        ),
        "right cause first": Rate(sum(r.rank == 1 for r in with_cause), len(with_cause)),
        "right cause in two": Rate(sum(r.rank in (1, 2) for r in with_cause), len(with_cause)),
    }


def alarm_rate(outcome: Outcome) -> Rate:
    """False alarms of all checks of clean variants."""
    return Rate(
        sum(len(c.alarms) for c in outcome.variants), sum(c.checks for c in outcome.variants)
    )


def gate_rates(outcome: Outcome) -> dict[str, dict[str, Rate]]:
    """By gate: caught and false alarms, on random activations and on all probes' outputs."""
    judged = [r for r in outcome.mutants if r.gates is not None and r.gates_probes is not None]
    checks = sum(c.checks for c in outcome.variants)
    table = {}
    for gate in GATES:
        name = gate.name
        table[name] = {
            "caught": Rate(sum((r.gates or {}).get(name, False) for r in judged), len(judged)),
            "alarms": Rate(sum(c.gates.get(name, 0) for c in outcome.variants), checks),
            "caught, all probes": Rate(
                sum((r.gates_probes or {}).get(name, False) for r in judged), len(judged)
            ),
            "alarms, all probes": Rate(
                sum(c.gates_probes.get(name, 0) for c in outcome.variants), checks
            ),
        }
    ours = Rate(sum(r.detected for r in judged), len(judged))
    alarms = alarm_rate(outcome)
    table["reconcile"] = {
        "caught": ours,
        "alarms": alarms,
        "caught, all probes": ours,
        "alarms, all probes": alarms,
    }
    return table


def to_text(outcome: Outcome, ratchet: Ratchet, violations: Iterable[str], seconds: float) -> str:
    """The whole table."""
    parts = [
        _mutant_table(outcome.mutants),
        _gate_table(outcome),
        _rate_table(outcome),
        _missed(outcome, ratchet),
    ]
    if found := list(violations):
        parts.append("worse than accepted:\n" + "\n".join(f"  {text}" for text in found))
    verdict = "the ratchet does NOT hold" if found else "the ratchet holds"
    parts.append(f"{verdict}; {seconds:.0f} s")
    return "\n\n".join(part for part in parts if part)


def to_dict(
    outcome: Outcome, violations: Iterable[str], seconds: float, subset: str
) -> dict[str, Any]:
    """Everything, as JSON values."""
    return {
        "schema": SCHEMA,
        "subset": subset,
        "seconds": round(seconds, 1),
        "rates": {k: _rate(v) for k, v in (rates(outcome) | _alarms(outcome)).items()},
        "gates": {
            gate: {k: _rate(v) for k, v in row.items()} for gate, row in gate_rates(outcome).items()
        },
        "mutants": [asdict(result) for result in outcome.mutants],
        "variants": [asdict(clean) for clean in outcome.variants],
        "violations": list(violations),
    }


def _alarms(outcome: Outcome) -> dict[str, Rate]:
    return {"false alarms": alarm_rate(outcome)}


def _rate(rate: Rate) -> dict[str, Any]:
    low, high = rate.interval
    return {"hits": rate.hits, "total": rate.total, "low": round(low, 5), "high": round(high, 5)}


def _mutant_table(results: Iterable[Result]) -> str:
    rows: list[tuple[str, ...]] = [
        ("mutant", "seen", "op", "cause named first (share explained)", "expected")
    ]
    for r in results:
        seen = "found" if r.detected else "MISSED"
        place = "-" if not r.op else "right" if r.located else r.tap or "none"
        rows.append((r.id, f"{seen}: {r.exit_code} {r.reason}", place, _named(r), _expected(r)))
    return _aligned(rows)


def _named(r: Result) -> str:
    if not r.named:
        return "-" if not r.causes else "none"
    return f"{r.named[0]} ({r.explains[0]:.2f})"


def _expected(r: Result) -> str:
    if not r.causes:
        return "-"
    return {1: "first", 2: "second"}.get(r.rank or 0, f"no: {' or '.join(r.causes)}")


def _gate_table(outcome: Outcome) -> str:
    table = gate_rates(outcome)
    judged = next(iter(table.values()))["caught"].total
    if not judged:
        return ""
    apart = len(outcome.mutants) - judged
    names = ("caught", "alarms", "caught, all probes", "alarms, all probes")
    heads = ("on random activations", "false alarms", "on all our probes", "false alarms")
    rows: list[tuple[str, ...]] = [("gate", *heads)]
    rows += [(gate, *(str(row[name]) for name in names)) for gate, row in table.items()]
    text = (
        f"published gates on the same outputs; {apart} faults show in no single output of an op "
        "and are counted apart"
    )
    return f"{text}\n{_aligned(rows)}"


def _rate_table(outcome: Outcome) -> str:
    table = rates(outcome) | _alarms(outcome)
    lines = [(name, str(rate)) for name, rate in table.items()]
    return "counts, rates, exact 95 % intervals\n" + _aligned(lines)


def _missed(outcome: Outcome, ratchet: Ratchet) -> str:
    lines = []
    for r in outcome.mutants:
        if not r.detected:
            lines.append(f"  {r.id}: not detected: {ratchet.missed.get(r.id, 'no reason known')}")
        elif r.causes and r.rank != 1:
            why = ratchet.misnamed.get(r.id, "no reason known")
            got = ", ".join(r.named[:2]) or "nothing"
            lines.append(f"  {r.id}: named {got}, expected {' or '.join(r.causes)}: {why}")
    return "missed, with the reason\n" + "\n".join(lines) if lines else ""


def _aligned(rows: Iterable[tuple[str, ...]]) -> str:
    listed = [tuple(row) for row in rows]
    widths = [max(len(row[i]) for row in listed) for i in range(len(listed[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in listed
    )
