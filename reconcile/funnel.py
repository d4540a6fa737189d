"""Op, then module, then model: two traces to rows with verdicts.

Pure with respect to the traces: neither kernel nor model is needed. A row that fails because of
a failing row below it is ``blocked``, not a second FAIL, so that the first FAIL is the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from reconcile.capture import logits_tap, output_tap
from reconcile.case import Tolerance
from reconcile.contract import Contract
from reconcile.exceptions import ConfigError, TraceError
from reconcile.limits import (
    BASELINE_FACTORS,
    accepts_zeros,
    baseline_limits,
    bound_limits,
    error_bound,
    fixed_limits,
    share_of_limits,
    tolerance_share,
    utilisation,
)
from reconcile.metrics import ErrorStats, error_stats, worst_elements
from reconcile.model_metrics import TOP, model_stats
from reconcile.plan import PlanRecord, record_from_facts
from reconcile.report import Coverage, Level, Limits, Reason, Row, Verdict
from reconcile.trace import Pass, Tap, Trace

NO_OUTPUT = (Reason.NOT_RUN, Reason.RAISED, Reason.SHAPE, Reason.DTYPE)
"""Reasons that come without anything to compare."""
TENSOR_STATS = ("max_abs", "nmse", "worst_row_nmse")
"""Statistics that a baseline limit gates."""
GROWTH_FACTOR = 2.0
"""A chained error may grow this many times what the reference's own sensitivity explains."""


@dataclass(frozen=True, slots=True)
class Sides:
    """Both traces of one candidate, their passes paired by fingerprint."""

    record: PlanRecord
    order: tuple[str, ...]
    """The candidate's modules in execution order."""
    isolated: dict[str, tuple[Pass, Pass]]
    """By key: (candidate, reference)."""
    chained: dict[str, tuple[Pass, Pass]]
    unpaired: tuple[tuple[str, str], ...]
    """(key, what is missing) of passes that one side lacks."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The judgement of one pair, before it becomes a row."""

    stats: dict[str, Any]
    limits: Limits | None = None
    utilisation: float | None = None
    reason: Reason | None = None
    text: str = ""


def pair(reference: Trace, candidate: Trace) -> Sides:
    """Check that the traces belong together and pair their passes.

    Raises:
        TraceError: other checkpoint, dtype, contract or modules.
    """
    ours, theirs = record_from_facts(candidate.facts), record_from_facts(reference.facts)
    for name in ("dtype", "reference_dtype", "contract", "modules"):
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
    unpaired: list[tuple[str, str]] = []
    paired: dict[str, dict[str, tuple[Pass, Pass]]] = {}
    for kind in ("isolated", "chained"):
        c, r = candidate.select(kind), reference.select(kind)
        paired[kind] = {key: (c[key], r[key]) for key in r if key in c}
        if kind == "chained" and ours.engine is not None:
            unpaired += [(key, "no candidate pass") for key in r if key not in c]
            unpaired += [(key, "no reference pass") for key in c if key not in r]
    order = tuple(reference.facts["order"])
    return Sides(ours, order, paired["isolated"], paired["chained"], tuple(unpaired))


def funnel(sides: Sides) -> tuple[Row, ...]:
    """All rows of one candidate: op, module, model, each in execution order."""
    record = sides.record
    _check_tolerances(sides)
    if record.engine is None:
        return tuple(
            _row(
                sides,
                Level.OP,
                Tap(m, "out"),
                "isolated",
                "",
                Finding({}, reason=Reason.NOT_RUN, text=record.not_run),
            )
            for m in sides.order
        )
    rows: list[Row] = list(_unpaired_rows(sides))
    if "op" in record.levels:
        rows += _op_rows(sides)
    if "module" in record.levels:
        rows += _module_rows(sides, _failed(rows))
    if "model" in record.levels:
        rows += _model_rows(sides, _failed(rows))
    return tuple(rows)


def coverage(sides: Sides, rows: Iterable[Row]) -> Coverage:
    """Modules of which every pass was compared at op level (or chained, if that is not run)."""
    if "op" in sides.record.levels:
        compared: dict[str, set[str]] = {}
        for row in rows:
            if row.level is Level.OP and row.check == "isolated" and row.stats:
                compared.setdefault(Tap.parse(row.tap).module, set()).add(row.pass_)
        done = {m for m, keys in compared.items() if keys >= set(sides.isolated)}
    else:
        done = {
            m
            for m in sides.order
            if sides.chained
            and all(str(Tap(m, "out")) in c.tensors for c, _ in sides.chained.values())
        }
    missing = tuple(m for m in sides.order if m not in done)
    return Coverage(
        expected=len(sides.order), compared=len(sides.order) - len(missing), missing=missing
    )


# --------------------------------------------------------------------------- op


def _op_rows(sides: Sides) -> Iterator[Row]:
    for module in sides.order:
        for key, (c, r) in sides.isolated.items():
            yield _isolated_op(sides, module, key, c, r, "out")
        for key, (c, r) in sides.isolated.items():
            yield _isolated_op(sides, module, key, c, r, "out.row")
        for key, (c, r) in sides.chained.items():
            yield _chained_op(sides, module, key, c, r)


def _isolated_op(sides: Sides, module: str, key: str, c: Pass, r: Pass, port: str) -> Row:
    """One op on the reference's rounded input: the whole of it, or its last row (M = 1)."""
    tap, out = Tap(module, "out"), str(Tap(module, "out"))
    if out not in r.tensors:
        finding = Finding({}, reason=Reason.NOT_COMPARED, text="the reference never reached it")
        return _row(sides, Level.OP, tap, "isolated", key, finding)
    y, magnitude = _last_axis(r.tensors[out]), _last_axis(r.tensors[str(Tap(module, "abs"))])
    k = r.tensors[str(Tap(module, "in0"))].shape[-1]
    if port == "out.row":
        y, magnitude = y[-1:], magnitude[-1:]
    name = str(Tap(module, port))
    event = c.meta.get("events", {}).get(name, {})
    shape = (y.shape[0], y.shape[1], k)
    if name not in c.tensors:
        reason = Reason(event["reason"]) if event.get("reason") else Reason.NOT_COMPARED
        text = event.get("text") or "the candidate has no such output"
        return _row(
            sides, Level.OP, tap, "isolated", key, Finding({}, reason=reason, text=text), shape
        )
    finding = _judge_op(
        sides, out, _last_axis(c.tensors[name]), y, magnitude, k, _pooled(sides, "ops", out)
    )
    finding = _with_event(sides, finding, event, shape[0])
    return _row(sides, Level.OP, tap, "isolated", key, finding, shape)


def _with_event(sides: Sides, finding: Finding, event: Mapping[str, Any], m: int) -> Finding:
    """What the kernel did besides goes before the numbers: it explains them."""
    stats = dict(finding.stats)
    if "batch_invariant" in event:
        stats["batch_invariant"] = event["batch_invariant"]
    if event.get("reason"):
        return replace(finding, stats=stats, reason=Reason(event["reason"]), text=event["text"])
    promised = sides.record.contract is not None and sides.record.contract.at(m).batch_invariant
    if promised and stats.get("batch_invariant") is False and finding.reason is None:
        text = "the contract promises batch invariance; the row alone has other bits than inside"
        return replace(finding, stats=stats, reason=Reason.UNSTABLE, text=text)
    return replace(finding, stats=stats)


def _chained_op(sides: Sides, module: str, key: str, c: Pass, r: Pass) -> Row:
    """One op in the free run: its own error, what it inherited, and whether the parts close."""
    tap, out = Tap(module, "out"), str(Tap(module, "out"))
    level, check = Level.OP, "chained"
    if "failure" in c.meta:
        return _row(sides, level, tap, check, key, _ended(c))
    ref_out = str(Tap(module, "ref.out"))
    if ref_out not in c.tensors or out not in r.tensors:
        finding = Finding({}, reason=Reason.NOT_COMPARED, text="one side never reached it")
        return _row(sides, level, tap, check, key, finding)
    candidate, y = _last_axis(c.tensors[out]), _last_axis(c.tensors[ref_out])
    free = _last_axis(r.tensors[out])
    x = c.tensors[str(Tap(module, "in0"))]
    shape = (y.shape[0], y.shape[1], x.shape[-1])
    if not bool(x.isfinite().all()):
        text = "its input is not finite: the fault is upstream"
        return _row(
            sides, level, tap, check, key, Finding({}, reason=Reason.BLOCKED, text=text), shape
        )
    magnitude = _last_axis(c.tensors[str(Tap(module, "ref.abs"))])
    finding = _judge_op(sides, out, candidate, y, magnitude, shape[2], _pooled(sides, "ops", out))
    accumulated, propagated = error_stats(candidate, free), error_stats(y, free)
    closed = bool(c.meta.get("closure", {}).get(out, False))
    stats = finding.stats | {
        "local_max_abs": finding.stats["max_abs"],
        "accumulated_max_abs": accumulated.max_abs,
        "accumulated_nmse": accumulated.nmse,
        "propagated_max_abs": propagated.max_abs,
        "propagated_nmse": propagated.nmse,
        "closes": closed,
    }
    finding = replace(finding, stats=stats)
    promised = sides.record.contract is None or sides.record.contract.at(shape[0]).deterministic
    if not closed and promised and finding.reason is None:
        text = "a replay on its captured input gives other bits than the model run"
        finding = replace(finding, reason=Reason.UNSTABLE, text=text)
    return _row(sides, level, tap, check, key, finding, shape)


def _judge_op(
    sides: Sides,
    tap: str,
    candidate: Tensor,
    y: Tensor,
    magnitude: Tensor,
    k: int,
    baseline: Mapping[str, float] | None,
) -> Finding:
    """Statistics of [M, N] against the a-priori bound, or what stands in for it."""
    stats = error_stats(candidate, y)
    if (early := _nonfinite(stats, candidate, y)) is not None:
        return early
    if (tolerance := _tolerance(sides, tap)) is not None:
        return _judge_fixed(stats, tolerance, candidate, y)
    contract = sides.record.contract
    if contract is None:
        if baseline is None:
            raise TraceError(f"{tap}: the reference's trace has no baseline for it")
        names = TENSOR_STATS if candidate.shape[0] > 1 else ("max_abs", "worst_row_nmse")
        limits = baseline_limits(
            baseline, names, sides.record.dtype, "alone, largest of all prompts"
        )
        return _judge(stats, stats.as_dict(), limits, candidate, y)
    return _judge_bound(stats, contract.at(candidate.shape[0]), candidate, y, magnitude, k, sides)


def _judge_bound(
    stats: ErrorStats,
    contract: Contract,
    candidate: Tensor,
    y: Tensor,
    magnitude: Tensor,
    k: int,
    sides: Sides,
) -> Finding:
    wide, size = y.to(torch.float64), magnitude.to(torch.float64)
    bound = error_bound(contract, wide, size, k, sides.record.reference_dtype)
    used = utilisation(candidate, wide, bound)
    body = stats.as_dict() | {
        "utilisation": used.value,
        "utilisation_index": list(used.index),
        "over": used.over,
    }
    limits = bound_limits(contract, k)
    finding = Finding(body, limits, used.value)
    if not used.value <= 1:
        text = f"{used.over} of {stats.n} elements outside the bound; {_worst(stats)}"
        body = body | {"worst_elements": worst_elements(candidate, wide)}
        return replace(finding, stats=body, reason=Reason.OVER_LIMIT, text=text)
    if used.vacuous or stats.reference_constant:
        return replace(finding, reason=Reason.VACUOUS, text=_vacuous(stats))
    return finding


# --------------------------------------------------------------------------- module


def _module_rows(sides: Sides, failed: frozenset[str]) -> Iterator[Row]:
    for part in sides.record.parts:
        for key, (c, r) in sides.isolated.items():
            yield _isolated_part(sides, part, key, c, r, failed)
    for tap in _chained_taps(sides):
        for key, (c, r) in sides.chained.items():
            yield _chained_part(sides, tap, key, c, r, failed)


def _isolated_part(
    sides: Sides, part: str, key: str, c: Pass, r: Pass, failed: frozenset[str]
) -> Row:
    tap = output_tap(part, r)
    where = Tap.parse(tap)
    inside = sorted(name for name in failed if name.startswith(f"{part}."))
    if tap not in c.tensors:
        finding = _ended(c) if "failure" in c.meta else _absent()
    else:
        finding = _judge_pair(sides, tap, c, r, "on the reference's inputs, largest of all prompts")
    return _row(sides, Level.MODULE, where, "isolated", key, _blocked(finding, inside))


def _chained_taps(sides: Sides) -> tuple[str, ...]:
    """Outputs outside the ops that either side recorded in its free run, in execution order."""
    taps: dict[str, None] = {}
    for pair_ in sides.chained.values():
        for side in reversed(pair_):
            for name in side.tensors:
                tap = Tap.parse(name)
                if tap.port.startswith("out") and tap.module not in (*sides.order, ""):
                    taps[name] = None
    return tuple(taps)


def _chained_part(
    sides: Sides, tap: str, key: str, c: Pass, r: Pass, failed: frozenset[str]
) -> Row:
    if "failure" in c.meta:
        finding = _ended(c)
    elif tap not in c.tensors or tap not in r.tensors:
        finding = _absent()
    else:
        finding = _judge_pair(sides, tap, c, r, "in free runs, largest of all prompts")
    where = Tap.parse(tap)
    return _row(sides, Level.MODULE, where, "chained", key, _blocked(finding, sorted(failed)))


def _judge_pair(sides: Sides, tap: str, c: Pass, r: Pass, what: str) -> Finding:
    """One tensor against the limits that plain torch's own error sets."""
    candidate, reference = c.tensors[tap], r.tensors[tap]
    if candidate.shape != reference.shape:
        text = f"expected {list(reference.shape)}, got {list(candidate.shape)}"
        return Finding({}, reason=Reason.SHAPE, text=text)
    stats = error_stats(candidate, reference)
    if (early := _nonfinite(stats, candidate, reference)) is not None:
        return early
    if (tolerance := _tolerance(sides, tap)) is not None:
        return _judge_fixed(stats, tolerance, candidate, reference)
    baseline = _pooled(sides, r.kind, tap)
    if baseline is None:
        text = "the reference's trace has no baseline for it"
        return Finding(stats.as_dict(), reason=Reason.NOT_COMPARED, text=text)
    limits = baseline_limits(baseline, TENSOR_STATS, sides.record.dtype, what)
    return _judge(stats, stats.as_dict(), limits, candidate, reference)


# --------------------------------------------------------------------------- model


def _model_rows(sides: Sides, failed: frozenset[str]) -> Iterator[Row]:
    for key, (c, r) in sides.chained.items():
        tap = logits_tap(r)
        where = Tap.parse(tap)
        if "failure" in c.meta or tap not in c.tensors:
            finding = _ended(c) if "failure" in c.meta else _absent()
            for check in ("logits", "top10", "kl", "growth"):
                yield _row(sides, Level.MODEL, where, check, key, finding)
            continue
        for check, place, finding in _judge_model(sides, tap, c, r):
            blocked = _blocked(finding, sorted(failed))
            yield _row(sides, Level.MODEL, place, check, key, blocked)


def _judge_model(sides: Sides, tap: str, c: Pass, r: Pass) -> Iterator[tuple[str, Tap, Finding]]:
    where = Tap.parse(tap)
    yield "logits", where, _judge_pair(sides, tap, c, r, "in free runs, largest of all prompts")
    tokens = _token_ids(r)
    numbers = model_stats(c.tensors[tap], r.tensors[tap], tokens)
    plain = _largest([ref.meta["model"] for _, ref in sides.chained.values()])
    logits = _pooled(sides, "chained", tap)
    if plain is None or logits is None:
        raise TraceError(f"{tap}: the reference's trace has no baseline for it")
    slack = 2 * BASELINE_FACTORS["max_abs"] * logits["max_abs"]
    ranks = Limits(
        kind="baseline",
        source=(
            f"two logits may change places within twice the accepted max_abs ({slack:.3g}): a "
            f"smaller margin of the reference is a tie; top {TOP}"
        ),
        bounds={"top10_set_gap": slack, "top10_order_gap": slack},
    )
    yield "top10", where, _judge_numbers(numbers, ranks)
    divergence = baseline_limits(
        plain,
        ("kl_mean", "kl_max"),
        sides.record.dtype,
        "KL(reference || it), largest of all prompts",
    )
    yield "kl", where, _judge_numbers(numbers, divergence)
    if sides.record.layers:
        yield _growth(sides, c, r)


def _growth(sides: Sides, c: Pass, r: Pass) -> tuple[str, Tap, Finding]:
    """Whether the error jumps from one layer to the next by more than the reference explains.

    A layer may pass on what it got times its own gain for a random error, plus what plain torch
    adds on exact inputs, times `GROWTH_FACTOR`.
    """
    before, shares, curve = 0.0, {}, []
    for layer in sides.record.layers:
        tap = output_tap(layer, r)
        error = error_stats(c.tensors[tap], r.tensors[tap]).rmse
        own = (_pooled(sides, "isolated", tap) or {"rmse": 0.0})["rmse"]
        allowed = GROWTH_FACTOR * (r.meta["gains"][layer] * before + own)
        shares[tap] = error / allowed if allowed > 0 else (0.0 if error == 0 else float("inf"))
        curve.append(error)
        before = error
    worst = max(shares, key=lambda tap: (shares[tap] != shares[tap], shares[tap]))
    limits = Limits(
        kind="baseline",
        source=(
            f"{GROWTH_FACTOR:g}x (gain of the layer for a random error x error before it + plain "
            "torch's own error in it)"
        ),
        bounds={"growth_share": 1.0},
    )
    numbers = {"growth_share": shares[worst], "rmse_by_layer": curve}
    return "growth", Tap.parse(worst), _judge_numbers(numbers, limits)


def _judge_numbers(numbers: dict[str, Any], limits: Limits) -> Finding:
    share, name = share_of_limits(numbers, limits)
    finding = Finding(numbers, limits, share)
    if share <= 1:
        return finding
    text = f"{name} {numbers[name]:.3g} exceeds {limits.bounds[name]:.3g}"
    return replace(finding, reason=Reason.OVER_LIMIT, text=text)


# --------------------------------------------------------------------------- shared


def _judge_fixed(
    stats: ErrorStats, tolerance: Tolerance, candidate: Tensor, reference: Tensor
) -> Finding:
    share = tolerance_share(candidate, reference, tolerance.atol, tolerance.rtol)
    limits = fixed_limits(tolerance.atol, tolerance.rtol, tolerance.source)
    body = stats.as_dict() | {"tolerance_share": share}
    return _judge(stats, body, limits, candidate, reference)


def _judge(
    stats: ErrorStats, body: dict[str, Any], limits: Limits, candidate: Tensor, reference: Tensor
) -> Finding:
    share, name = share_of_limits(body, limits)
    finding = Finding(body, limits, share)
    if not share <= 1:
        text = f"{name} {body[name]:.3g} exceeds {limits.bounds[name]:.3g}; {_worst(stats)}"
        body = body | {"worst_elements": worst_elements(candidate, reference)}
        return replace(finding, stats=body, reason=Reason.OVER_LIMIT, text=text)
    if stats.reference_constant or accepts_zeros(stats, limits):
        return replace(finding, reason=Reason.VACUOUS, text=_vacuous(stats))
    return finding


def _nonfinite(stats: ErrorStats, candidate: Tensor, reference: Tensor) -> Finding | None:
    """A verdict where not everything is finite, before any number."""
    body = stats.as_dict()
    if stats.nonfinite_mismatch:
        text = (
            f"{stats.nonfinite_mismatch} of {stats.n} elements differ in NaN or infinity, first "
            f"at {list(stats.nonfinite_index or ())}: candidate {stats.nan_candidate} NaN, "
            f"{stats.inf_candidate} inf; reference {stats.nan_reference} NaN, "
            f"{stats.inf_reference} inf"
        )
        body |= {"worst_elements": worst_elements(candidate, reference)}
        return Finding(body, reason=Reason.NONFINITE, text=text)
    if stats.nan_reference:
        text = f"the reference has {stats.nan_reference} NaN of {stats.n} elements"
        return Finding(body, reason=Reason.REFERENCE_SUSPECT, text=text)
    return None


def _worst(stats: ErrorStats) -> str:
    index = list(stats.max_abs_index or ())
    return (
        f"max |c - r| {stats.max_abs:.3g} at {index}: {stats.max_abs_candidate:.6g} against "
        f"{stats.max_abs_reference:.6g}"
    )


def _vacuous(stats: ErrorStats) -> str:
    if stats.reference_constant:
        return "the reference is constant: a permutation would not show"
    return f"a candidate of zeros would pass (max |r| {stats.reference_amax:.3g})"


def _absent() -> Finding:
    return Finding({}, reason=Reason.NOT_COMPARED, text="only one side has this tap")


def _ended(c: Pass) -> Finding:
    failure = c.meta["failure"]
    reason = Reason.NOT_RUN if failure["reason"] == Reason.NOT_RUN else Reason.BLOCKED
    text = f"the pass ended at {failure['module']}: {failure['text']}"
    return Finding({}, reason=reason, text=text)


def _pooled(sides: Sides, kind: str, tap: str) -> dict[str, float] | None:
    """The largest of each statistic of plain torch over all prompts, or None.

    ``kind``: ``isolated`` (parts), ``chained``, or ``ops`` (single ops, isolated).
    """
    pairs = sides.chained if kind == "chained" else sides.isolated
    table = "ops" if kind == "ops" else "baseline"
    found = [r.meta.get(table, {}).get(tap) for _, r in pairs.values()]
    return _largest([stats for stats in found if stats is not None])


def _largest(tables: list[dict[str, float]]) -> dict[str, float] | None:
    if not tables:
        return None
    return {name: max(table[name] for table in tables) for name in tables[0]}


def _blocked(finding: Finding, causes: list[str]) -> Finding:
    """A failure that a failing row below explains is not a second FAIL."""
    if finding.reason is None or finding.reason.verdict is not Verdict.FAIL or not causes:
        return finding
    more = f" and {len(causes) - 1} more" if len(causes) > 1 else ""
    text = f"explained by {causes[0]}{more}; {finding.text}"
    return replace(finding, reason=Reason.BLOCKED, text=text)


def _failed(rows: Iterable[Row]) -> frozenset[str]:
    """Modules with a FAIL."""
    return frozenset(Tap.parse(row.tap).module for row in rows if row.verdict is Verdict.FAIL)


def _unpaired_rows(sides: Sides) -> Iterator[Row]:
    for key, text in sides.unpaired:
        finding = Finding({}, reason=Reason.NOT_COMPARED, text=text)
        yield _row(sides, Level.MODEL, Tap("", "out"), "pass", key, finding)


def _row(
    sides: Sides,
    level: Level,
    tap: Tap,
    check: str,
    key: str,
    finding: Finding,
    shape: tuple[int, ...] = (),
) -> Row:
    engine = sides.record.engine
    return Row(
        level=level,
        tap=str(tap),
        check=check,
        shape=shape or tuple(finding.stats.get("shape", ())),
        pass_=key,
        kernel=sides.record.kernel,
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
    )


def _last_axis(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _token_ids(r: Pass) -> list[int]:
    for name, tensor in r.tensors.items():
        if name.endswith("input_ids"):
            return [int(i) for i in tensor.flatten()]
    return []


def _tolerance(sides: Sides, tap: str) -> Tolerance | None:
    """The fixed tolerance that the case sets for this tap, or None."""
    for glob, tolerance in sides.record.limits.items():
        if fnmatchcase(tap, glob):
            return tolerance
    return None


def _check_tolerances(sides: Sides) -> None:
    """ConfigError for a tolerance that matches no tap or that zeros would pass."""
    for glob, tolerance in sides.record.limits.items():
        matched = False
        for _, r in (*sides.isolated.values(), *sides.chained.values()):
            for tap, tensor in r.tensors.items():
                if not fnmatchcase(tap, glob) or not tensor.is_floating_point():
                    continue
                matched = True
                zeros = tolerance_share(
                    torch.zeros_like(tensor), tensor, tolerance.atol, tolerance.rtol
                )
                if zeros <= 1 and Tap.parse(tap).port.startswith("out"):
                    raise ConfigError(
                        f'limits."{glob}": a candidate of zeros would pass at {tap} '
                        f"(max |r| {float(tensor.abs().max()):.3g}); tighten atol"
                    )
        if not matched and sides.record.engine is not None:
            raise ConfigError(f'limits."{glob}" matches no tap')
