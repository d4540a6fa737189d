"""Op, then module, then model: two traces to rows with verdicts.

Pure with respect to the traces: neither kernel nor model is needed. A row that fails because of
a failing row below it is ``blocked``, not a second FAIL, so that the first FAIL is the cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from reconcile.exceptions import TraceError
from reconcile.grouped import flat_rows
from reconcile.judging.examine import examine_logits
from reconcile.judging.inside import blocked, judge_layer
from reconcile.judging.judge import (
    Finding,
    judge_baseline,
    judge_bound,
    judge_fixed,
    judge_numbers,
    worst_of,
)
from reconcile.judging.routing import routing_stats
from reconcile.judging.sides import Sides, check_tolerances, largest, phase_of
from reconcile.judging.task import judge_task
from reconcile.numbers.criteria import beside
from reconcile.numbers.limits import BASELINE_FACTORS, baseline_limits
from reconcile.numbers.metrics import error_stats
from reconcile.numbers.model_metrics import TOP, model_stats
from reconcile.report import Coverage, Level, Limits, Reason, Row, Verdict
from reconcile.tracing.ports import logits_tap, output_tap
from reconcile.tracing.trace import Pass, Tap

GROWTH_FACTOR = 4.0
"""A chained error may grow this many times what the reference's own sensitivity explains."""


def funnel(sides: Sides) -> tuple[Row, ...]:
    """All rows of one candidate: op, module, model, each in execution order."""
    record = sides.record
    if record.engine is None:
        finding = Finding({}, reason=Reason.NOT_RUN, text=record.not_run)
        return tuple(
            sides.row(Level.OP, Tap(module, "out"), "isolated", "", finding)
            for module in sides.order
        )
    check_tolerances(sides)
    rows = [
        sides.row(Level.MODEL, Tap("", "out"), "pass", key, _not_compared(text))
        for key, text in sides.unpaired
    ]
    rows += _weight_rows(sides)
    rows += _stage_rows(sides)
    rows += _op_rows(sides) if "op" in record.levels else _side_rows(sides)
    if "module" in record.levels:
        rows += _module_rows(sides, _failed(rows))
    if "model" in record.levels:
        rows += _model_rows(sides, _failed(rows))
        rows += _task_rows(sides, _failed(rows))
    return tuple(rows)


def coverage(sides: Sides, rows: Iterable[Row]) -> Coverage:
    """Modules of which every pass was compared at op level (or chained, if that is not run)."""
    compared: dict[str, set[str]] = {module: set() for module in sides.order}
    if "op" in sides.record.levels:
        keys = set(sides.judged(sides.isolated))
        for row in rows:
            ran = row.stats and row.reason is not Reason.FELL_BACK
            if row.level is Level.OP and row.check == "isolated" and ran:
                compared[Tap.parse(row.tap).module].add(row.pass_)
    else:
        chained = sides.judged(sides.chained)
        keys = set(chained)
        for key, (c, r) in chained.items():
            for module in sides.order:
                out = str(Tap(module, "out"))
                ran = out not in c.meta.get("fell_back", {})
                if ran and all(out in side.tensors for side in (c, r)):
                    compared[module].add(key)
    missing = tuple(module for module in sides.order if not keys or compared[module] != keys)
    expected = len(sides.order)
    return Coverage(expected=expected, compared=expected - len(missing), missing=missing)


# --------------------------------------------------------------------------- weight


def _weight_rows(sides: Sides) -> Iterator[Row]:
    """Whether each decoded weight is fit to judge by; the error of quantising is no kernel's."""
    for module in sides.order:
        facts = sides.weights.get(module)
        if facts is None:
            finding = _not_compared("the reference's trace does not say how it was decoded")
        elif facts["suspicions"]:
            text = "; ".join(facts["suspicions"])
            finding = Finding(facts["stats"], reason=Reason.REFERENCE_SUSPECT, text=text)
        else:
            finding = Finding(facts["stats"])
        yield sides.row(Level.WEIGHT, Tap(module, "param.weight"), "decode", "", finding)


def _stage_rows(sides: Sides) -> Iterator[Row]:
    """What the kernel's loading made of each weight, step by step.

    The loss of a step that the contract declares is shown and is no fault; values other than the
    reference's after the same step are one.
    """
    limits = Limits(
        kind="exact",
        source="the same values as the reference after the same step",
        bounds={"differing": 0.0},
    )
    for module in sides.order:
        for stage in sides.stages.get(module, ()):
            stats, reason = stage["stats"], stage["reason"]
            finding = Finding(
                stats,
                limits=limits if "differing" in stats else None,
                utilisation=None if "differing" not in stats else math.inf if reason else 0.0,
                reason=Reason(reason) if reason else None,
                text=stage["text"],
            )
            tap = Tap(module, "param.weight")
            yield sides.row(Level.STAGE, tap, stage["name"], "", finding)


def _by_stage(sides: Sides, module: str, finding: Finding) -> Finding:
    """A failure of an op whose weight was loaded wrong is that of its loading."""
    stages = sides.stages.get(module, ())
    wrong = [s["name"] for s in stages if s["reason"] not in (None, Reason.FELL_BACK)]
    if not wrong or finding.reason is None or finding.reason.verdict is not Verdict.FAIL:
        return finding
    text = f"its weight is wrong from the stage {wrong[0]} on; {finding.text}"
    return replace(finding, reason=Reason.BLOCKED, text=text)


def _by_suspect(sides: Sides, module: str, finding: Finding) -> Finding:
    """A failure by a suspect reference is not the kernel's."""
    suspect = sides.weights.get(module, {}).get("suspicions")
    if not suspect or finding.reason is None or finding.reason.verdict is not Verdict.FAIL:
        return finding
    text = f"the reference is suspect: {'; '.join(suspect)}; {finding.text}"
    return replace(finding, reason=Reason.REFERENCE_SUSPECT, text=text)


# --------------------------------------------------------------------------- op


def _op_rows(sides: Sides) -> Iterator[Row]:
    """For each op in execution order: on whole inputs, on one row, and in the free run.

    Only the passes in which the kernel is used: elsewhere there is nothing of it to judge.
    """
    isolated, chained = sides.judged(sides.isolated), sides.judged(sides.chained)
    for module in sides.order:
        for port in ("out", "out.row"):
            for key, (c, r) in isolated.items():
                yield _isolated_op(sides, module, port, key, c, r)
        for key, (c, r) in chained.items():
            yield chained_op(sides, module, key, c, r)


def _side_rows(sides: Sides) -> Iterator[Row]:
    """Of ops that are not judged themselves: what the kernel did in the model besides computing.

    A module or a model that other code computed says nothing about the kernel, at any level.
    """
    for key, (c, _) in sides.judged(sides.chained).items():
        for module in sides.order:
            if (failure := _own_failure(c, module)) is not None:
                yield sides.row(Level.OP, Tap(module, "out"), "chained", key, failure)
        for name, reason in (("fell_back", Reason.FELL_BACK), ("mutated", Reason.INPUT_MUTATED)):
            for tap, text in c.meta.get(name, {}).items():
                finding = Finding({}, reason=reason, text=text)
                yield sides.row(Level.OP, Tap.parse(tap), "chained", key, finding)


def _isolated_op(sides: Sides, module: str, port: str, key: str, c: Pass, r: Pass) -> Row:
    """One op on the reference's rounded input: all of it, or its middle row (M = 1)."""
    out, name = Tap(module, "out"), str(Tap(module, port))
    if str(out) not in r.tensors:
        finding = _not_compared("the reference never reached it")
        return sides.row(Level.OP, out, "isolated", key, finding)
    groups = sides.record.groups.get(module)
    y, magnitude = (
        flat_rows(r.tensors[tap], groups) for tap in (str(out), str(Tap(module, "abs")))
    )
    if name in r.tensors and port == "out.row":
        y, magnitude = r.tensors[name], r.tensors[str(Tap(module, "abs.row"))]
    elif port == "out.row":
        y, magnitude = (side[len(y) // 2 :][:1] for side in (y, magnitude))
    shape = _op_shape(y, r.tensors[str(Tap(module, "in0"))].shape[-1], groups)
    event = c.meta.get("events", {}).get(name, {})
    if name in c.tensors:
        findings = [
            _judge_op(sides, str(out), output, y, magnitude, shape[-1], phase_of(r))
            for output in _outputs(c, Tap(module, port), groups)
        ]
        finding = findings[worst_of(findings)]
        finding = _with_event(sides, finding, event, len(y))
    elif event.get("reason"):
        finding = Finding({}, reason=Reason(event["reason"]), text=event["text"])
    else:
        finding = _not_compared("the candidate has no such output")
    finding = _by_stage(sides, module, _by_suspect(sides, module, finding))
    return sides.row(Level.OP, out, "isolated", key, finding, shape)


def _outputs(c: Pass, tap: Tap, groups: int | None) -> Iterator[Tensor]:
    """[M, N] of the first call, and of further ones on the same input with other bits."""
    while str(tap) in c.tensors:
        yield flat_rows(c.tensors[str(tap)], groups)
        tap = replace(tap, call=tap.call + 1)


def _with_event(sides: Sides, finding: Finding, event: Mapping[str, Any], m: int) -> Finding:
    """What the kernel did besides goes before the numbers: it explains them."""
    if "batch_invariant" in event:
        stats = finding.stats | {"batch_invariant": event["batch_invariant"]}
        finding = replace(finding, stats=stats)
    if event.get("reason"):
        return replace(finding, reason=Reason(event["reason"]), text=event["text"])
    contract = sides.record.contract
    promised = contract is not None and contract.at(m).batch_invariant
    if promised and event.get("batch_invariant") is False and finding.reason is None:
        text = "the contract promises batch invariance; the row alone has other bits than inside"
        return replace(finding, reason=Reason.UNSTABLE, text=text)
    return finding


def chained_op(sides: Sides, module: str, key: str, c: Pass, r: Pass) -> Row:
    """One op in the free run: its own error, what it inherited, and whether the parts close.

    accumulated = captured candidate - captured reference = local + propagated, where local is
    the candidate's op against the reference's op on the candidate's input, and propagated the
    reference's op on the candidate's input against the captured reference.
    """
    tap, out = Tap(module, "out"), str(Tap(module, "out"))
    if "failure" in c.meta:
        finding = _own_failure(c, module) or _ended(c)
        return sides.row(Level.OP, tap, "chained", key, finding)
    own = str(Tap(module, "ref.out"))
    if own not in c.tensors or out not in r.tensors:
        finding = _not_compared("one side never reached it")
        return sides.row(Level.OP, tap, "chained", key, finding)
    groups = sides.record.groups.get(module)
    x, y = c.tensors[str(Tap(module, "in0"))], flat_rows(c.tensors[own], groups)
    free = flat_rows(r.tensors[out], groups)
    shape = _op_shape(y, x.shape[-1], groups)
    if not bool(x.isfinite().all()):
        text = "its input is not finite: the fault is upstream"
        finding = Finding({}, reason=Reason.BLOCKED, text=text)
        return sides.row(Level.OP, tap, "chained", key, finding, shape)
    candidate = flat_rows(c.tensors[out], groups)
    magnitude = flat_rows(c.tensors[str(Tap(module, "ref.abs"))], groups)
    finding = _judge_op(sides, out, candidate, y, magnitude, shape[-1], phase_of(r))
    finding = _with_budget(finding, candidate, y, free)
    if not r.meta.get("closure", {}).get(out, False):
        text = "the reference op on its captured input does not give its captured output"
        finding = Finding(finding.stats, reason=Reason.CAPTURE_INVALID, text=text)
        return sides.row(Level.OP, tap, "chained", key, finding, shape)
    closes = bool(c.meta.get("closure", {}).get(out, False))
    ran = {"calls": c.meta["calls"].get(out, 0)} if phase_of(r) else {}
    finding = replace(finding, stats=finding.stats | {"closes": closes} | ran)
    if (fallback := c.meta.get("fell_back", {}).get(out)) is not None:
        finding = replace(finding, reason=Reason.FELL_BACK, text=fallback)
        return sides.row(Level.OP, tap, "chained", key, finding, shape)
    if (mutation := c.meta.get("mutated", {}).get(out)) is not None:
        finding = replace(finding, reason=Reason.INPUT_MUTATED, text=mutation)
    contract = sides.record.contract
    promised = contract is None or contract.at(len(y)).deterministic
    if not closes and promised and finding.reason is None:
        text = "a replay on its captured input gives other bits than the model run"
        finding = replace(finding, reason=Reason.UNSTABLE, text=text)
    finding = _by_stage(sides, module, _by_suspect(sides, module, finding))
    return sides.row(Level.OP, tap, "chained", key, finding, shape)


def _with_budget(finding: Finding, candidate: Tensor, y: Tensor, free: Tensor) -> Finding:
    accumulated, propagated = error_stats(candidate, free), error_stats(y, free)
    budget = {
        "local_max_abs": finding.stats["max_abs"],
        "accumulated_max_abs": accumulated.max_abs,
        "accumulated_nmse": accumulated.nmse,
        "propagated_max_abs": propagated.max_abs,
        "propagated_nmse": propagated.nmse,
    }
    return replace(finding, stats=finding.stats | budget)


def _op_shape(y: Tensor, k: int, groups: int | None) -> tuple[int, ...]:
    """(M, N, K), of a batched linear (G, M, N, K)."""
    m, n = y.shape
    return (m, n, k) if groups is None else (groups, m, n // groups, k)


def _judge_op(
    sides: Sides, tap: str, candidate: Tensor, y: Tensor, magnitude: Tensor, k: int, phase: str
) -> Finding:
    """[M, N], of a batched linear [M, G N]: our verdict, and the kernel's users' criteria."""
    finding = _verdict_on_op(sides, tap, candidate, y, magnitude, k, phase)
    for criterion in sides.record.criteria if finding.stats else ():
        accepted = finding.reason is None
        stats, text = beside(finding.stats, accepted, candidate, y, criterion)
        finding = replace(finding, stats=stats, text=finding.text or text)
    return finding


def _verdict_on_op(
    sides: Sides, tap: str, candidate: Tensor, y: Tensor, magnitude: Tensor, k: int, phase: str
) -> Finding:
    """Against the case's tolerance, the contract's bound, or plain torch."""
    record = sides.record
    if (tolerance := sides.tolerance(tap)) is not None:
        return judge_fixed(candidate, y, tolerance)
    if record.contract is not None:
        contract = record.contract.at(candidate.shape[0])
        return judge_bound(candidate, y, magnitude, k, contract, record.reference_dtype)
    what = "alone on the reference's inputs, largest of all prompts"
    return judge_baseline(candidate, y, sides.pooled("ops", tap, phase), record.dtype, what)


# --------------------------------------------------------------------------- module


def _module_rows(sides: Sides, failed: frozenset[str]) -> Iterator[Row]:
    """Layers, final norm and head on the reference's inputs; then every output of the free run.

    Before each layer, the blocks inside it, in the same run of it.
    """
    for key, (c, r) in sides.norms.items():
        for tap in r.meta["baseline"]:
            finding = _judge_norm(sides, tap, c, r)
            yield sides.row(Level.MODULE, Tap.parse(tap), "small_rows", key, finding)
    for part in sides.record.parts:
        inner = sides.blocks.get(part, ())
        judge = partial(judge_pair, sides)
        found = judge_layer(part, inner, sides.isolated, failed, judge)
        for tap, key, finding in (*found.blocks, *found.whole):
            yield sides.row(Level.MODULE, tap, "isolated", key, finding)
    for tap in _chained_taps(sides):
        for key, (c, r) in sides.chained.items():
            finding = blocked(judge_pair(sides, tap, c, r), sorted(failed))
            yield sides.row(Level.MODULE, Tap.parse(tap), "chained", key, finding)


def _judge_norm(sides: Sides, tap: str, c: Pass, r: Pass) -> Finding:
    """A norm on rows so small that its epsilon shows, against plain torch there."""
    if tap not in c.tensors:
        return _not_compared("the candidate has no such norm")
    what = "on random rows of rms 2^-10, 2^-5 and 1"
    baseline = r.meta["baseline"][tap]
    return judge_baseline(c.tensors[tap], r.tensors[tap], baseline, sides.record.dtype, what)


def _chained_taps(sides: Sides) -> tuple[str, ...]:
    """Outputs outside the ops that either side recorded in its free run, in execution order."""
    taps: dict[str, None] = {}
    for c, r in sides.chained.values():
        for name in (*r.tensors, *c.tensors):
            tap = Tap.parse(name)
            if tap.port.startswith("out") and tap.module not in (*sides.order, ""):
                taps[name] = None
    return tuple(taps)


def judge_pair(sides: Sides, tap: str, c: Pass, r: Pass) -> Finding:
    """One tap of both sides, against the case's tolerance or plain torch."""
    if tap not in c.tensors and "failure" in c.meta:
        return _ended(c)
    if tap not in c.tensors or tap not in r.tensors:
        return _not_compared(f"only the {'reference' if tap in r.tensors else 'candidate'} has it")
    candidate, reference = c.tensors[tap], r.tensors[tap]
    if (routed := _routed_logits(tap, r)) is not None and candidate.shape == reference.shape:
        return _judge_routing(sides, candidate, reference, routed, r)
    if candidate.shape != reference.shape:
        text = f"expected {list(reference.shape)}, got {list(candidate.shape)}"
        return Finding({}, reason=Reason.SHAPE, text=text)
    if (tolerance := sides.tolerance(tap)) is not None:
        return judge_fixed(candidate, reference, tolerance)
    what = "on the reference's inputs" if r.kind == "isolated" else "in free runs"
    return judge_baseline(
        candidate,
        reference,
        sides.pooled(r.kind, tap, phase_of(r)),
        sides.record.dtype,
        f"{what}, largest of all prompts",
    )


def _routed_logits(tap: str, r: Pass) -> str | None:
    """Of a tap that holds chosen experts, integers, the tap of the router's logits."""
    if r.tensors[tap].is_floating_point():
        return None
    module, top = Tap.parse(tap).module, r.tensors[tap].shape[-1]
    beside = [
        name
        for name, tensor in r.tensors.items()
        if Tap.parse(name).module == module
        and Tap.parse(name).port.startswith("out")
        and tensor.is_floating_point()
        and tensor.shape[-1] > top
    ]
    return beside[0] if len(beside) == 1 else None


def _judge_routing(
    sides: Sides, candidate: Tensor, reference: Tensor, logits: str, r: Pass
) -> Finding:
    """Chosen experts as sets; a set may differ among logits that the accepted error can swap."""
    baseline = sides.pooled(r.kind, logits, phase_of(r))
    if baseline is None:
        return _not_compared("the reference's trace has no baseline for the router's logits")
    slack = 2 * BASELINE_FACTORS["max_abs"] * baseline["max_abs"]
    limits = Limits(
        kind="baseline",
        source=(
            f"two experts may change places within twice the accepted max_abs of the router's "
            f"logits ({slack:.3g}): a smaller margin of the reference is a tie"
        ),
        bounds={"set_gap": slack},
    )
    finding = judge_numbers(routing_stats(candidate, reference, r.tensors[logits]), limits)
    idle = ", ".join(map(str, finding.stats["experts_idle"]))
    said = f"no token is routed to expert {idle}" if idle else ""
    return replace(finding, text="; ".join(text for text in (finding.text, said) if text))


# --------------------------------------------------------------------------- model


def _model_rows(sides: Sides, failed: frozenset[str]) -> Iterator[Row]:
    for key, (c, r) in sides.chained.items():
        tap = logits_tap(r)
        if tap in c.tensors:
            found = judge_model(sides, tap, c, r)
        else:
            finding = _ended(c) if "failure" in c.meta else _not_compared("no logits")
            checks = ("logits", "top10", "kl", "growth")
            found = iter([(check, Tap.parse(tap), finding) for check in checks])
        for check, place, finding in found:
            yield sides.row(Level.MODEL, place, check, key, blocked(finding, sorted(failed)))


def _task_rows(sides: Sides, failed: frozenset[str]) -> Iterator[Row]:
    """Accuracy on the case's task, where it has one."""
    if sides.task is None:
        return
    ours, theirs = sides.task
    if "given" in ours:
        finding = judge_task(theirs["right"], theirs["given"], ours["given"])
        stats = finding.stats | {"task": theirs["name"], "calls": ours["calls"]}
        finding = replace(finding, stats=stats)
        if ours["fell_back"]:
            text = "; ".join(ours["fell_back"])
            finding = replace(finding, reason=Reason.FELL_BACK, text=f"{text}; {finding.text}")
    elif "failure" in ours:
        finding = _ended_at(ours["failure"])
    else:
        finding = _not_compared("the candidate's trace has no answers to the task")
    finding = blocked(finding, sorted(failed))
    yield sides.row(Level.MODEL, Tap("", "out.tokens"), "task", "", finding)


def judge_model(sides: Sides, tap: str, c: Pass, r: Pass) -> Iterator[tuple[str, Tap, Finding]]:
    """Check, place and finding for the logits, their top 10, KL divergence, and growth."""
    where = Tap.parse(tap)
    logits = judge_pair(sides, tap, c, r)
    yield "logits", where, logits
    if logits.reason in (Reason.SHAPE, Reason.REFERENCE_SUSPECT):
        return
    baseline = sides.pooled("chained", tap, phase_of(r))
    like = [ref for _, ref in sides.chained.values() if phase_of(ref) == phase_of(r)]
    plain = largest([ref.meta["model"] for ref in like])
    if plain is None or baseline is None:
        raise TraceError(f"{tap}: the reference's trace has no baseline for it")
    numbers = model_stats(c.tensors[tap], r.tensors[tap], _token_ids(r))
    seen = examine_logits(c.tensors[tap], r.tensors[tap], TOP)
    ranks = judge_numbers(numbers, _rank_limits(baseline["max_abs"]))
    yield "top10", where, replace(ranks, evidence=replace(seen, kl_by_token=()))
    what = "as KL(reference || plain torch), largest of all prompts"
    divergence = baseline_limits(plain, ("kl_mean", "kl_max"), sides.record.dtype, what)
    found = judge_numbers(numbers, divergence)
    yield "kl", where, replace(found, evidence=replace(seen, ranking=None))
    if sides.record.layers:
        yield _growth(sides, c, r)


def _rank_limits(max_abs: float) -> Limits:
    """Two logits may change places within twice the accepted error of one."""
    slack = 2 * BASELINE_FACTORS["max_abs"] * max_abs
    return Limits(
        kind="baseline",
        source=(
            f"two logits may change places within twice the accepted max_abs ({slack:.3g}): a "
            f"smaller margin of the reference is a tie; top {TOP}"
        ),
        bounds={"top10_set_gap": slack, "top10_order_gap": slack},
    )


CURVES = (
    "rmse_by_layer",
    "local_rmse_by_layer",
    "inherited_rmse_by_layer",
    "floor_rmse_by_layer",
    "allowed_rmse_by_layer",
    "gain_by_layer",
    "reference_rms_by_layer",
)
"""What the growth row keeps of each layer's output: the accumulated error in the free run; the
error on the reference's inputs; the error before the layer times the layer's gain for a random
error; plain torch's error in free runs (the noise floor); the accepted error; the gain; and the
size of the reference. None where one side has no such number."""


def _growth(sides: Sides, c: Pass, r: Pass) -> tuple[str, Tap, Finding]:
    """Whether the error jumps from one layer to the next by more than the reference explains.

    A layer may pass on what it got times its own gain for a random error, plus what plain torch
    adds on exact inputs, times `GROWTH_FACTOR`.
    """
    before = 0.0
    shares: dict[str, float] = {}
    curves: dict[str, list[float | None]] = {name: [] for name in CURVES}
    for layer in sides.record.layers:
        tap = output_tap(layer, r)
        if tap not in c.tensors:
            return "growth", Tap.parse(tap), _not_compared("the candidate never reached it")
        own = (sides.pooled("isolated", tap, phase_of(r)) or {"rmse": 0.0})["rmse"]
        gain = r.meta["gains"][layer]
        allowed = GROWTH_FACTOR * (gain * before + own)
        floor = r.meta["baseline"].get(tap, {}).get("rmse")
        inherited = gain * before
        before = error_stats(c.tensors[tap], r.tensors[tap]).rmse
        alone = sides.isolated_rmse(tap, r.key)
        values = (before, alone, inherited, floor, allowed, gain, _rms(r.tensors[tap]))
        for name, value in zip(CURVES, values, strict=True):
            curves[name].append(value)
        shares[tap] = before / allowed if allowed > 0 else (0.0 if before == 0 else float("inf"))
    worst = max(shares, key=lambda tap: (shares[tap] != shares[tap], shares[tap]))
    limits = Limits(
        kind="baseline",
        source=(
            f"{GROWTH_FACTOR:g}x (gain of the layer for a random error x error before it + plain "
            "torch's own error in it)"
        ),
        bounds={"growth_share": 1.0},
    )
    numbers = {"growth_share": shares[worst], **curves}
    return "growth", Tap.parse(worst), judge_numbers(numbers, limits)


# --------------------------------------------------------------------------- shared


def _not_compared(text: str) -> Finding:
    return Finding({}, reason=Reason.NOT_COMPARED, text=text)


def _ended(c: Pass) -> Finding:
    """The candidate's pass did not get this far."""
    return _ended_at(c.meta["failure"])


def _own_failure(c: Pass, module: str) -> Finding | None:
    """How the kernel itself failed at ``module``, where that ended the pass."""
    failure = c.meta.get("failure")
    if failure is None or failure["module"] != module:
        return None
    reason = Reason(failure["reason"])
    return Finding({}, reason=reason, text=f"{failure['text']}, in the model run")


def _ended_at(failure: Mapping[str, str]) -> Finding:
    reason = Reason.NOT_RUN if failure["reason"] == Reason.NOT_RUN else Reason.BLOCKED
    text = f"the pass ended at {failure['module']}: {failure['text']}"
    return Finding({}, reason=reason, text=text)


def _failed(rows: Iterable[Row]) -> frozenset[str]:
    """Modules with a FAIL, whose reference is suspect, or that other code computed.

    What they explain is blocked.
    """
    return frozenset(
        Tap.parse(row.tap).module
        for row in rows
        if row.verdict is Verdict.FAIL or row.reason in (Reason.REFERENCE_SUSPECT, Reason.FELL_BACK)
    )


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def _token_ids(r: Pass) -> list[int]:
    for name, tensor in r.tensors.items():
        if Tap.parse(name).port.endswith("input_ids"):
            return [int(i) for i in tensor.flatten()]
    return []
