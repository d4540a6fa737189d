"""Ops pass alone and the model fails: the smallest set of modules whose kernel makes it fail.

The candidate's model runs again with the kernel in some modules and plain torch in the others, and
the failing row is judged again; delta-debugging over the set finds the smallest one that fails.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from reconcile.capture.candidate import chain, force_parts, prepare_all
from reconcile.capture.passes import Stream
from reconcile.capture.plan import Plan
from reconcile.capture.steps import Step
from reconcile.diagnosis.engine import NONE_FITS
from reconcile.diagnosis.hypothesis import few
from reconcile.diagnosis.subsets import Smallest, smallest_failing
from reconcile.grouped import Reference, StoredWeight, baseline_linear, reference_linear
from reconcile.judging.funnel import chained_op, judge_model, judge_pair
from reconcile.judging.judge import Finding
from reconcile.judging.sides import Sides, pair
from reconcile.replay import Call, KernelLinear, Prepared
from reconcile.report import Diagnosis, Level, Reason, Row, Verdict
from reconcile.tracing.ports import logits_tap
from reconcile.tracing.trace import Pass, Tap, Trace

NAMES = ("module_set",)
SECONDS = 20.0
"""Processor time after which the set is not made smaller."""
CHECKS = {
    Level.OP: ("chained",),
    Level.MODULE: ("isolated", "chained"),
    Level.MODEL: ("logits", "top10", "kl", "growth"),
}
"""Rows that say something of several modules together."""


def diagnose_set(
    plan: Plan, reference: Trace, candidate: Trace, rows: tuple[Row, ...]
) -> tuple[Row, ...]:
    """The rows, the first failing one with the set, if ops pass alone and nothing explains it."""
    place = next((i for i, row in enumerate(rows) if row.verdict is Verdict.FAIL), None)
    if place is None or not _wanted(rows[place]) or any(map(_fails_alone, rows)):
        return rows
    row = rows[place]
    found = _Trial.of(plan, pair(reference, candidate), row).smallest()
    return (*rows[:place], replace(row, diagnosis=_ordered(found, row)), *rows[place + 1 :])


def _ordered(found: Diagnosis, row: Row) -> tuple[Diagnosis, ...]:
    """The set first where it names modules; that the cause is none of them names no cause."""
    if found.parameters.get("modules"):
        return (found, *(replace(item, role="runner_up") for item in row.diagnosis))
    return (*row.diagnosis, replace(found, role="runner_up" if row.diagnosis else "cause"))


def _wanted(row: Row) -> bool:
    unexplained = not row.diagnosis or row.diagnosis[0].name == NONE_FITS
    numeric = row.reason in (Reason.OVER_LIMIT, Reason.BIAS, Reason.NONFINITE, Reason.UNSTABLE)
    return unexplained and numeric and row.check in CHECKS.get(row.level, ())


def _fails_alone(row: Row) -> bool:
    """A weight, a stage of its loading, or an op on the reference's inputs."""
    alone = row.level in (Level.WEIGHT, Level.STAGE) or row.check == "isolated"
    inside = row.level in (Level.WEIGHT, Level.STAGE, Level.OP)
    return alone and inside and row.verdict is Verdict.FAIL


@dataclass(frozen=True, slots=True)
class _Trial:
    """A candidate's model whose modules can be given back to plain torch, and a failing row."""

    plan: Plan
    sides: Sides
    row: Row
    steps: tuple[Step, ...]
    """The calls of the row's prompt up to the row's own."""
    model: nn.Module
    ready: dict[str, Prepared | Call]
    ops: dict[str, Reference]
    """The row's own op, where it is one."""
    until: float

    @classmethod
    def of(cls, plan: Plan, sides: Sides, row: Row) -> _Trial:
        until = time.process_time() + SECONDS
        ready = prepare_all(plan)

        def linear(name: str, weight: StoredWeight) -> nn.Module:
            plain = baseline_linear(weight, plan.dtype, plan.arithmetic)
            prepared = ready.get(name)
            return KernelLinear(prepared, plain) if isinstance(prepared, Prepared) else plain

        model = plan.checkpoint.build(plan.dtype, linear).to(plan.config.device)
        ops = {}
        if row.level is Level.OP:
            name = Tap.parse(row.tap).module
            weight = plan.checkpoint.weights[name]
            ops[name] = reference_linear(weight, plan.arithmetic, plan.reference_dtype)
        return cls(plan, sides, row, _steps_to(plan, row.pass_), model, ready, ops, until)

    def smallest(self) -> Diagnosis:
        """The set, and the share of the error beyond plain torch's that goes without it."""
        modules = [name for name, item in self.ready.items() if isinstance(item, Prepared)]
        whole = self._run(modules)
        if not self._judged(whole, modules):
            text = "the failure did not repeat when the model ran again with the kernel everywhere"
            return Diagnosis(name=NONE_FITS, explains=0.0, text=text)
        plain = self._run(())
        if self._judged(plain, ()):
            text = "it fails with plain torch in every module: the cause is outside the kernel"
            nothing: dict[str, Any] = {"modules": []}
            return Diagnosis(name="module_set", explains=0.0, parameters=nothing, text=text)
        found = smallest_failing(modules, self._fails, lambda: time.process_time() < self.until)
        others = [name for name in modules if name not in found.items]
        rest = self._run(others)
        error, left, floor = map(self._energy, (whole, rest, plain))
        share = (error - left) / (error - floor) if error > floor else 0.0
        return _diagnosis(found, share, len(modules), self._judged(rest, others))

    def _fails(self, chosen: Sequence[str]) -> bool:
        return self._judged(self._run(chosen), chosen)

    def _run(self, chosen: Collection[str]) -> Pass:
        """The row's pass, with the kernel in the chosen modules alone."""
        stream = Stream(self.plan, self.model)
        for step in self.steps:
            for name, module in self.model.named_modules():
                if isinstance(module, KernelLinear):
                    module.used = name in chosen and self.plan.runs_in(step.phase)
            recorded = self._step(stream, step)
        return recorded

    def _step(self, stream: Stream, step: Step) -> Pass:
        plan, (_, routed) = self.plan, self.sides.chained[step.key]
        if self.row.check == "isolated":
            forced = Pass(step.key, "isolated")
            _, given = self.sides.isolated[step.key]
            force_parts(plan, self.model, given, routed, forced, stream, step)
            return forced
        return chain(plan, self.model, self.ops, self.ready, routed, stream, step)

    def _judged(self, c: Pass, chosen: Collection[str]) -> bool:
        """Whether the row fails again; an op that plain torch computes does not."""
        sides, row = self.sides, self.row
        pairs = sides.isolated if row.check == "isolated" else sides.chained
        _, r = pairs[row.pass_]
        if row.level is Level.OP:
            module = Tap.parse(row.tap).module
            again = chained_op(sides, module, row.pass_, c, r)
            return module in chosen and again.verdict is Verdict.FAIL
        if row.level is Level.MODULE:
            return _fail(judge_pair(sides, row.tap, c, r))
        if "failure" in c.meta:
            return False
        found = judge_model(sides, logits_tap(r), c, r)
        return any(_fail(finding) for check, _, finding in found if check == row.check)

    def _energy(self, c: Pass) -> float:
        """Error energy where the row is."""
        pairs = self.sides.isolated if self.row.check == "isolated" else self.sides.chained
        ours = c.tensors.get(self.row.tap)
        theirs: Tensor | None = pairs[self.row.pass_][1].tensors.get(self.row.tap)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            return 0.0
        return float((ours.double() - theirs.double()).square().nan_to_num().sum())


def _fail(finding: Finding) -> bool:
    return finding.reason is not None and finding.reason.verdict is Verdict.FAIL


def _steps_to(plan: Plan, key: str) -> tuple[Step, ...]:
    for ids in plan.prompts:
        steps = plan.steps(ids)
        for number, step in enumerate(steps):
            if step.key == key:
                return steps[: number + 1]
    raise LookupError(f"no prompt has the pass {key}")


def _diagnosis(found: Smallest, share: float, count: int, still: bool) -> Diagnosis:
    one = len(found.items) == 1
    text = f"it fails with the kernel in {few(found.items)} and plain torch in all others"
    if found.minimal and not one:
        text += "; with any one of these left to plain torch it passes"
    if not found.minimal:
        text += f"; {len(found.items)} of {count} modules, not the fewest: no time was left"
    if still and len(found.items) < count:
        text += "; with the kernel in all others it fails too: there is more than one cause"
    return Diagnosis(
        name="module_set",
        explains=max(0.0, min(1.0, share)),
        parameters={"modules": list(found.items), "of": count, "model_runs": found.tests + 3},
        text=text,
    )
