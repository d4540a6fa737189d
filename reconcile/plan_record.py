"""What both traces keep of a plan, so that they can be compared without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from reconcile.case import GateConfig, Tolerance
from reconcile.contract import Contract
from reconcile.exceptions import TraceError
from reconcile.kernel import Engine
from reconcile.numbers.criteria import Criterion
from reconcile.report import LEVELS, PHASES, Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """What both traces keep of a plan, so that they can be compared without it."""

    case: str
    candidate: str
    kernel: str
    engine: Engine | None
    """None: no engine runs here."""
    not_run: str
    """Why no engine runs here; empty where one does."""
    contract: Contract | None
    """None: nothing is declared, and ops are judged against the baseline."""
    dtype: str
    reference_dtype: str
    modules: tuple[str, ...]
    """Modules that the kernel computes, in the model's order."""
    groups: dict[str, int] = field(default_factory=dict)
    """G of the modules that are batched linears."""
    phases: tuple[str, ...] = ("prefill", "decode")
    """Where the kernel is used."""
    criteria: tuple[Criterion, ...] = ()
    """Criteria of others that ops are shown beside."""
    layers: tuple[str, ...]
    parts: tuple[str, ...]
    """Modules that are compared isolated: decoder layers, final norm, head."""
    levels: tuple[str, ...]
    task: str = ""
    """Identity of the task that was put to this side; empty: none was."""
    limits: dict[str, Tolerance]
    gate: GateConfig
    model_modules: int = 0
    """Modules of the model that have a weight to judge; 0: not known."""


def scope(records: Sequence[PlanRecord]) -> Scope | None:
    """What all candidates together are about; None where a trace of old does not say."""
    of = max(record.model_modules for record in records)
    if not of:
        return None
    modules = {module for record in records for module in record.modules}
    levels, phases = (
        tuple(item for item in known if any(item in getattr(record, name) for record in records))
        for name, known in (("levels", LEVELS), ("phases", PHASES))
    )
    return Scope(modules=len(modules), of=of, levels=levels, phases=phases)


_RECORD = TypeAdapter(PlanRecord)


def record_to_facts(record: PlanRecord) -> dict[str, Any]:
    """The record as JSON values."""
    facts: dict[str, Any] = _RECORD.dump_python(record, mode="json")
    return facts


def record_from_facts(facts: dict[str, Any]) -> PlanRecord:
    """The record that a trace keeps; TraceError where it keeps none."""
    try:
        return _RECORD.validate_python(facts["plan"])
    except (KeyError, ValueError) as error:
        raise TraceError(f"not a trace of `reconcile capture`: {error}") from error
