"""Two traces of one candidate, paired, and what every level needs of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch

from reconcile.case import Tolerance
from reconcile.exceptions import ConfigError, TraceError
from reconcile.judging.examine import Block, digest
from reconcile.judging.gallery import Gallery
from reconcile.judging.judge import Finding
from reconcile.numbers.limits import nan_or_max, tolerance_share
from reconcile.numbers.metrics import error_stats
from reconcile.plan_record import PlanRecord, record_from_facts
from reconcile.report import Level, Row, Verdict
from reconcile.tracing.norms import KIND as NORMS
from reconcile.tracing.trace import Pass, Tap, Trace

Pairs = dict[str, tuple[Pass, Pass]]
"""Passes of one kind by key: (candidate, reference)."""


@dataclass(frozen=True, slots=True)
class Sides:
    """Both traces of one candidate, their passes paired by fingerprint."""

    record: PlanRecord
    order: tuple[str, ...]
    """The candidate's modules in execution order."""
    weights: dict[str, dict[str, Any]]
    """By module: ``suspicions`` and ``stats`` of its decoded weight."""
    stages: dict[str, list[dict[str, Any]]]
    """By module: what the kernel's loading did to the weight, step by step."""
    isolated: Pairs
    chained: Pairs
    norms: Pairs
    """The one pass of norms on small rows, where both sides have it."""
    unpaired: tuple[tuple[str, str], ...]
    """(key, what is missing) of the passes that only one side has."""
    task: tuple[dict[str, Any], dict[str, Any]] | None = None
    """What candidate and reference answered to the case's task; None: it has none."""
    blocks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By layer, the blocks inside it in execution order, as the reference's trace says."""
    gallery: Gallery = field(default_factory=Gallery)
    """Chooses the rows whose tensors are looked at closely."""

    def pooled(self, kind: str, tap: str, phase: str = "") -> dict[str, float] | None:
        """The largest of each statistic of plain torch over all prompts, or None.

        ``kind``: ``isolated`` (parts on the reference's inputs), ``chained`` (free runs), or
        ``ops`` (single ops on the reference's inputs). ``phase``: prefill and decode, where they
        are told apart, have limits of their own.
        """
        pairs = self.chained if kind == "chained" else self.isolated
        table = "ops" if kind == "ops" else "baseline"
        passes = [r for _, r in pairs.values() if phase_of(r) == phase]
        found = [r.meta.get(table, {}).get(tap) for r in passes]
        return largest([stats for stats in found if stats is not None])

    def isolated_rmse(self, tap: str, key: str) -> float | None:
        """The candidate's error at a part on the reference's inputs, in one pass."""
        c, r = self.isolated.get(key, (None, None))
        if c is None or r is None or tap not in c.tensors or tap not in r.tensors:
            return None
        if c.tensors[tap].shape != r.tensors[tap].shape:
            return None
        return error_stats(c.tensors[tap], r.tensors[tap]).rmse

    def judged(self, pairs: Pairs) -> Pairs:
        """The passes in which the kernel is used."""
        phases = ("", *self.record.phases)
        return {key: pair for key, pair in pairs.items() if phase_of(pair[1]) in phases}

    def tolerance(self, tap: str) -> Tolerance | None:
        """The fixed tolerance that the case sets for this tap; the first match counts."""
        for glob, tolerance in self.record.limits.items():
            if fnmatchcase(tap, glob):
                return tolerance
        return None

    def row(
        self,
        level: Level,
        tap: Tap,
        check: str,
        key: str,
        finding: Finding,
        shape: tuple[int, ...] = (),
    ) -> Row:
        """A row of this candidate."""
        looked = self.gallery.look(level, str(tap), check, finding, self._block(tap.module))
        return to_row(
            level, tap, check, key, looked, shape, self.record if self.uses(key) else None
        )

    def uses(self, key: str) -> bool:
        """Whether the kernel computed its modules in a pass; elsewhere plain torch did."""
        _, reference = self.chained.get(key, (None, None))
        return reference is None or phase_of(reference) in ("", *self.record.phases)

    def _block(self, module: str) -> Block:
        """Rows and columns of the module's weight that share a scale, where they are blocks."""
        block = self.weights.get(module, {}).get("block")
        return (int(block[0]), int(block[1])) if block else None


def to_row(
    level: Level,
    tap: Tap,
    check: str,
    key: str,
    finding: Finding,
    shape: tuple[int, ...] = (),
    record: PlanRecord | None = None,
) -> Row:
    """A finding as a row, with the kernel and engine of ``record`` where there is one."""
    engine = record.engine if record else None
    return Row(
        level=level,
        tap=str(tap),
        check=check,
        shape=shape or tuple(finding.stats.get("shape", ())),
        pass_=key,
        kernel=record.kernel if record else "",
        engine=engine.name if engine else "",
        implementation=engine.implementation if engine else "",
        execution=engine.execution if engine else "",
        fidelity=engine.fidelity if engine else "",
        verdict=Verdict.PASS if finding.reason is None else finding.reason.verdict,
        reason=finding.reason,
        text=finding.text,
        stats={name: value for name, value in finding.stats.items() if name != "shape"},
        limits=finding.limits,
        utilisation=finding.utilisation,
        digest=digest(finding.pair.candidate) if finding.pair else "",
        evidence=finding.evidence,
    )


def phase_of(recorded: Pass) -> str:
    """``prefill``, ``decode``, or empty where the two are not told apart."""
    return str(recorded.meta.get("phase", ""))


def largest(tables: list[dict[str, float]]) -> dict[str, float] | None:
    """Elementwise maximum of tables with the same keys, NaN before all; None of no table."""
    if not tables:
        return None
    return {name: nan_or_max(table[name] for table in tables) for name in tables[0]}


def pair(reference: Trace, candidate: Trace) -> Sides:
    """Check that the traces belong together and pair their passes.

    Raises:
        TraceError: other checkpoint, dtype, contract or modules.
    """
    ours, theirs = record_from_facts(candidate.facts), record_from_facts(reference.facts)
    if reference.provenance and reference.provenance.side != "reference":
        raise TraceError(
            f"the first trace is of {reference.provenance.side!r}, not of the reference: "
            "compare REF CAND"
        )
    alike = ("dtype", "reference_dtype", "contract", "modules", "groups", "parts", "layers")
    for name in (*alike, *(("task",) if ours.task else ())):
        if getattr(ours, name) != getattr(theirs, name):
            raise TraceError(
                f"the two traces differ in {name}: candidate {getattr(ours, name)}, reference "
                f"{getattr(theirs, name)}; capture both from the same case"
            )
    hashes = [
        side.provenance.checkpoint_sha256 for side in (candidate, reference) if side.provenance
    ]
    if len(set(hashes)) != 1 or len(hashes) != 2:
        raise TraceError(f"the two traces are of different checkpoints: sha256 {hashes}")
    order = reference.facts.get("order")
    if sorted(order or ()) != sorted(ours.modules):
        raise TraceError("the reference's trace does not list the candidate's modules in order")
    if not 0 < ours.gate.coverage <= 1:
        raise TraceError(f"the trace's gate.coverage {ours.gate.coverage} is outside (0, 1]")
    keys = set(reference.select("isolated"))
    if not keys or keys != set(reference.select("chained")):
        raise TraceError("the reference's trace lacks passes: capture it again")
    _check_parts(ours, reference)
    isolated, alone = _paired(reference, candidate, "isolated")
    chained, free = _paired(reference, candidate, "chained")
    unpaired = () if ours.engine is None else (*alone, *free)
    weights = reference.facts.get("weights", {})
    stages = candidate.facts.get("stages", {})
    theirs_task = reference.facts.get("task")
    if ours.task and theirs_task is None:
        raise TraceError("the reference's trace lacks its answers to the task: capture it again")
    task = None if theirs_task is None else (candidate.facts.get("task", {}), theirs_task)
    names = tuple(order or ())
    norms, _ = _paired(reference, candidate, NORMS)
    blocks = {layer: tuple(inner) for layer, inner in reference.facts.get("blocks", {}).items()}
    return Sides(ours, names, weights, stages, isolated, chained, norms, unpaired, task, blocks)


def _check_parts(record: PlanRecord, reference: Trace) -> None:
    """TraceError unless the record names exactly the parts and layers that were captured."""
    for item in reference.passes:
        if item.kind == "isolated":
            taps = [Tap.parse(name) for name in item.tensors]
            captured = {tap.module for tap in taps if tap.port.startswith("out")}
            inner = reference.facts.get("blocks", {}).values()
            named = {*record.modules, *record.parts, *chain.from_iterable(inner)}
            agree = captured <= named and set(record.parts) <= captured
        elif item.kind == NORMS:
            agree = bool(item.meta.get("baseline")) or not item.tensors
        else:
            agree = set(item.meta.get("gains", ())) == set(record.layers)
        if not agree:
            raise TraceError(
                f"the reference's {item.kind} pass {item.key} does not hold the parts and layers "
                "that the trace names"
            )


def _paired(reference: Trace, candidate: Trace, kind: str) -> tuple[Pairs, list[tuple[str, str]]]:
    c, r = candidate.select(kind), reference.select(kind)
    unpaired = [(key, f"no {kind} pass of the candidate") for key in r if key not in c]
    unpaired += [(key, f"no {kind} pass of the reference") for key in c if key not in r]
    return {key: (c[key], r[key]) for key in r if key in c}, unpaired


def check_tolerances(sides: Sides) -> None:
    """ConfigError for a tolerance that matches no output, or that zeros would pass."""
    unused = set(sides.record.limits)
    for _, r in (*sides.isolated.values(), *sides.chained.values()):
        for tap, tensor in r.tensors.items():
            tolerance = sides.tolerance(tap)
            if tolerance is None or not Tap.parse(tap).port.startswith("out"):
                continue
            unused -= {glob for glob in unused if fnmatchcase(tap, glob)}
            zeros = torch.zeros_like(tensor)
            if tolerance_share(zeros, tensor, tolerance.atol, tolerance.rtol) <= 1:
                raise ConfigError(
                    f"the tolerance atol={tolerance.atol:g}, rtol={tolerance.rtol:g} at {tap}: "
                    f"a candidate of zeros would pass (max |r| {float(tensor.abs().max()):.3g}); "
                    "tighten atol"
                )
    if unused and sides.isolated:
        raise ConfigError(f"limits match no tap: {', '.join(sorted(unused))}")
