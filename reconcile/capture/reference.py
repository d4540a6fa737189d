"""The trusted half of a run: what the reference computes, and what plain torch loses.

Each prompt is one pass, or a prefill and decode steps with a KV cache, in two kinds:

``chained``
    the reference runs freely; the baseline's own errors in free runs are in its facts. The
    experts that a router chooses here are those of every other run (`reconcile.judging.routing`).
``isolated``
    the reference runs again on its inputs rounded once to the candidate's dtype: ``in0`` of
    every op and part, ``out``, and for ops ``abs`` = sum |x||w|, the yardstick of the bound; where
    the contract changes with the number of rows, both for the middle row alone (``out.row``).
    Of the blocks inside a layer, which gets the rounded inputs, what went in and came out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reconcile import registry
from reconcile.capture.passes import Stream, inner_blocks, tapped_modules
from reconcile.capture.plan import Plan, Progress
from reconcile.capture.provenance import provenance
from reconcile.capture.steps import Step
from reconcile.contract import UNIT_ROUNDOFF
from reconcile.exits import exits_refused
from reconcile.grouped import Reference, StoredWeight, baseline_linear, reference_linear
from reconcile.judging.suspect import weight_facts
from reconcile.judging.task import answers
from reconcile.numbers.limits import gamma, nan_or_max
from reconcile.numbers.metrics import nmse
from reconcile.numbers.model_metrics import model_stats
from reconcile.plan_record import record_to_facts
from reconcile.rounding import round_to
from reconcile.settings import own_arithmetic
from reconcile.tracing.norms import call_norms
from reconcile.tracing.ports import logits_tap, output_tap, ports
from reconcile.tracing.taps import forced_inputs
from reconcile.tracing.trace import Pass, Tap, Trace

Table = dict[str, dict[str, float]]
"""Statistics by tap and name."""

DRAWS = 4
"""Runs of the baseline per prompt from which the limits are taken."""


@exits_refused()
@own_arithmetic()
def capture_reference(plan: Plan, command: str, progress: Progress) -> Trace:
    """Everything the comparison needs from the trusted side."""
    ops: dict[str, Reference] = {}

    def make(name: str, weight: StoredWeight) -> nn.Module:
        ops[name] = reference_linear(weight, plan.arithmetic, plan.reference_dtype)
        return ops[name]

    model = plan.checkpoint.build(plan.reference_dtype, make)
    baseline = plan.checkpoint.build(
        plan.dtype, lambda _, w: baseline_linear(w, plan.dtype, plan.arithmetic)
    )
    trace = Trace(provenance=provenance(plan, "reference", command))
    with torch.no_grad():
        for ids in plan.prompts:
            progress("reference")
            streams = _Streams.over(plan, model, baseline)
            for step in plan.steps(ids):
                trace.passes += _both_kinds(plan, model, ops, baseline, streams, step)
        trace.passes.append(_norms(plan, model, baseline))
        task = _task(plan, model)
    trace.facts = {
        "plan": record_to_facts(plan.record()),
        **task,
        "order": _op_order(plan, trace.passes[0]),
        "blocks": _block_order(plan, trace.passes),
        "weights": _weight_facts(plan),
    }
    return trace


def _norms(plan: Plan, model: nn.Module, baseline: nn.Module) -> Pass:
    """Every norm on small rows, and what plain torch loses there."""
    with plan.checkpoint.precise(plan.reference_dtype):
        exact = call_norms(model, plan.dtype, plan.reference_dtype)
    plain = call_norms(baseline, plan.dtype, plan.dtype)
    outputs = {tap: y for tap, y in plain.tensors.items() if tap.endswith(":out")}
    exact.meta["baseline"] = {tap: _gated(y, exact.tensors[tap]) for tap, y in outputs.items()}
    return exact


@dataclass(frozen=True, slots=True)
class _Streams:
    """The runs over one prompt, each with a KV cache of its own."""

    free: Stream
    fed: Stream
    nudged: Stream
    draws: tuple[tuple[Stream, Stream], ...]
    """Free and fed runs of plain torch."""

    @classmethod
    def over(cls, plan: Plan, model: nn.Module, baseline: nn.Module) -> _Streams:
        free, fed, nudged = (Stream(plan, model, precise=True) for _ in range(3))
        plain = [(Stream(plan, baseline), Stream(plan, baseline)) for _ in range(DRAWS)]
        return cls(free, fed, nudged, tuple(plain))


def _both_kinds(
    plan: Plan,
    model: nn.Module,
    ops: Mapping[str, Reference],
    baseline: nn.Module,
    streams: _Streams,
    step: Step,
) -> list[Pass]:
    """The chained and the isolated pass of one call, with what plain torch loses in them."""
    chained = streams.free.record(step, tapped_modules(plan, model))
    said = {name: chained.meta[name] for name in ("phase", "seen") if name in chained.meta}
    isolated = _isolate(plan, model, ops, chained, streams.fed, step)
    gains = _gains(plan, model, chained, isolated, streams.nudged, step)
    meta = _baseline(plan, baseline, chained, isolated, streams.draws, step)
    closure = {str(Tap(module, "out")): _closes(op, module, chained) for module, op in ops.items()}
    chained.meta = said | meta["chained"] | {"gains": gains, "closure": closure}
    isolated.meta = said | meta["isolated"]
    return [chained, isolated]


def _task(plan: Plan, model: nn.Module) -> dict[str, Any]:
    """What the reference answers to the case's task, and what is right; empty without a task."""
    if plan.asked is None:
        return {}
    with plan.checkpoint.precise(plan.reference_dtype):
        given = answers(model, plan.asked)
    right = [list(item.answer) for item in plan.asked.items]
    return {"task": {"name": plan.asked.name, "right": right, "given": given}}


def _weight_facts(plan: Plan) -> dict[str, dict[str, Any]]:
    """Per module: is its decoded weight fit to judge by?"""
    path = plan.case.model.original
    originals = (
        {} if path is None else plan.checkpoint.originals(registry.checkpoint(path, plan.case.base))
    )
    return {
        module: weight_facts(
            plan.checkpoint.weights[module],
            plan.checkpoint.decode_again(module),
            originals.get(module),
        )
        for module in plan.modules
    }


def _closes(op: Reference, module: str, chained: Pass) -> bool:
    """Whether the reference op, on its captured input, gives its captured output.

    The same operation on the same bits differs at most by the order of the library's sum.
    """
    x, y = (chained.tensors.get(str(Tap(module, port))) for port in ("in0", "out"))
    if x is None or y is None:
        return False
    allowed = 2 * gamma(x.shape[-1], UNIT_ROUNDOFF[_name(op.dtype)], y.numel())
    return bool(((op(x) - y).abs() <= allowed * op.magnitude(x)).all())


def _isolate(
    plan: Plan,
    model: nn.Module,
    ops: Mapping[str, Reference],
    chained: Pass,
    stream: Stream,
    step: Step,
) -> Pass:
    """The reference again, on inputs rounded once to the candidate's dtype."""
    tensors: dict[str, Tensor] = {}
    for module in plan.modules:
        port = str(Tap(module, "in0"))
        if port not in chained.tensors:
            continue  # never reached; the comparison reports it
        x = round_to(chained.tensors[port], plan.dtype)
        tensors[port] = x
        tensors[str(Tap(module, "out"))] = ops[module](x)
        tensors[str(Tap(module, "abs"))] = ops[module].magnitude(x)
        if (
            plan.arithmetic.by_batch and module not in plan.groups
        ):  # one row may be another arithmetic
            row = x.reshape(-1, x.shape[-1])
            row = row[len(row) // 2 :][:1]
            tensors[str(Tap(module, "out.row"))] = ops[module](row)
            tensors[str(Tap(module, "abs.row"))] = ops[module].magnitude(row)
    inputs = {part: _rounded_inputs(part, chained, plan.dtype) for part in plan.parts}
    with forced_inputs(model, inputs, plan.reference_dtype):
        blocks = inner_blocks(plan, model)
        forced = stream.record(step, plan.parts, inputs=False, inside=blocks, routed=chained)
    for part, found in inputs.items():
        tensors |= {str(Tap(part, port)): value for port, value in found.items()}
    tensors |= forced.tensors
    return Pass(chained.key, "isolated", tensors)


def _rounded_inputs(part: str, chained: Pass, dtype: torch.dtype) -> dict[str, Tensor]:
    """The floating-point inputs of a part, rounded once.

    A mask marks what it hides by the lowest finite value of its dtype; that value becomes the
    lowest of the new dtype, not -inf.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in chained.tensors.items():
        tap = Tap.parse(name)
        if tap.module != part or not tap.port.startswith("in") or not tensor.is_floating_point():
            continue
        lowest = torch.finfo(tensor.dtype).min
        rounded = round_to(tensor, dtype)
        found[tap.port] = torch.where(tensor == lowest, torch.finfo(dtype).min, rounded).to(dtype)
    return found


def _gains(
    plan: Plan, model: nn.Module, chained: Pass, isolated: Pass, stream: Stream, step: Step
) -> dict[str, float]:
    """How much each layer amplifies a random error of its hidden state: rms out / rms in."""
    generator = torch.Generator().manual_seed(plan.case.seed)
    layers = plan.checkpoint.structure.layers
    nudged: dict[str, dict[str, Tensor]] = {}
    size: dict[str, float] = {}
    for layer in layers:
        given = ports(isolated, layer, "in")
        x = given["in0"].to(plan.reference_dtype)
        noise = torch.randn(x.shape, generator=generator, dtype=plan.reference_dtype)
        noise *= 2.0**-8 * _rms(x)
        nudged[layer] = given | {"in0": x + noise}
        size[layer] = _rms(noise)
    with forced_inputs(model, nudged, plan.reference_dtype):
        moved = stream.record(step, layers, inputs=False, routed=chained)
    gains = {}
    for layer in layers:
        port = output_tap(layer, moved)
        gains[layer] = _rms(moved.tensors[port] - isolated.tensors[port]) / max(
            size[layer], torch.finfo(torch.float64).tiny
        )
    return gains


def _baseline(
    plan: Plan,
    baseline: nn.Module,
    chained: Pass,
    isolated: Pass,
    streams: Iterable[tuple[Stream, Stream]],
    step: Step,
) -> dict[str, dict[str, Any]]:
    """What plain torch at the candidate's dtype loses on the same weights and inputs.

    Of each statistic the largest of `DRAWS` draws is kept: the plain run, and runs whose hidden
    states were dithered by one rounding error, which are as legal and round differently. One
    draw alone says little about a heavy-tailed statistic (docs/adr/0004).
    """
    free: Table = {}
    fed: Table = {}
    model: Table = {}
    for draw, pair in enumerate(streams):
        noise = torch.Generator().manual_seed(plan.case.seed + draw) if draw else None
        run = _draw(plan, baseline, chained, isolated, pair, step, noise)
        _keep_largest(free, _stats_of(run[0], chained))
        _keep_largest(fed, _stats_of(run[1], isolated))
        logits = logits_tap(chained)
        numbers = model_stats(
            run[0].tensors[logits], chained.tensors[logits], step.tokens.flatten().tolist()
        )
        _keep_largest(model, {"kl": {name: numbers[name] for name in ("kl_mean", "kl_max")}})
    ops = {}
    for module in plan.modules:
        port = str(Tap(module, "in0"))
        if port in isolated.tensors:
            y = baseline.get_submodule(module)(isolated.tensors[port])
            out = str(Tap(module, "out"))
            ops[out] = _gated(y, isolated.tensors[out])
    return {
        "chained": {"baseline": free, "model": model["kl"]},
        "isolated": {"baseline": fed, "ops": ops},
    }


def _draw(
    plan: Plan,
    baseline: nn.Module,
    chained: Pass,
    isolated: Pass,
    streams: tuple[Stream, Stream],
    step: Step,
    noise: torch.Generator | None,
) -> tuple[Pass, Pass]:
    """One free run and one fed run of the baseline, dithered if ``noise`` is given."""

    def dithered(given: dict[str, Tensor]) -> dict[str, Tensor]:
        return given | {"in0": _dither(given["in0"], noise)} if noise else given

    inputs = {part: dithered(ports(isolated, part, "in")) for part in plan.parts}
    first = {part: {"in0": inputs[part]["in0"]} for part in plan.parts[:1] if noise}
    with forced_inputs(baseline, first, plan.dtype):
        tapped = tapped_modules(plan, baseline)
        free = streams[0].record(step, tapped, inputs=False, routed=chained)
    with forced_inputs(baseline, inputs, plan.dtype):
        blocks = inner_blocks(plan, baseline)
        fed = streams[1].record(step, plan.parts, inputs=False, inside=blocks, routed=chained)
    return free, fed


def _dither(x: Tensor, noise: torch.Generator) -> Tensor:
    """X with a random relative error of one unit roundoff of its dtype."""
    u = UNIT_ROUNDOFF[_name(x.dtype)]
    error = u * torch.randn(x.shape, generator=noise, dtype=torch.float64)
    return round_to(x.to(torch.float64) * (1 + error), x.dtype)


def _stats_of(run: Pass, reference: Pass) -> Table:
    return {tap: _gated(tensor, reference.tensors[tap]) for tap, tensor in run.tensors.items()}


def _keep_largest(into: Table, found: Table) -> None:
    """Elementwise maximum of two tables of statistics, in place."""
    for tap, stats in found.items():
        kept = into.setdefault(tap, {})
        for name, value in stats.items():
            kept[name] = nan_or_max((value, kept.get(name, value)))


def _gated(candidate: Tensor, reference: Tensor) -> dict[str, float]:
    """The statistics of `error_stats` that a baseline limit uses, without the others."""
    r = reference.to(torch.float64).reshape(-1, reference.shape[-1])
    error = candidate.to(torch.float64).reshape(r.shape) - r
    squares, power = error.square().sum(1), r.square().sum(1)
    rows = torch.where(squares > 0, squares / power, 0.0)
    return {
        "max_abs": float(error.abs().max()),
        "nmse": nmse(float(squares.sum()), float(power.sum())),
        "worst_row_nmse": float(rows.max()),
        "rmse": float(squares.sum() / error.numel()) ** 0.5,
    }


def _op_order(plan: Plan, chained: Pass) -> list[str]:
    """The candidate's modules in the order in which they ran; unreached ones at the end."""
    ran = [Tap.parse(tap) for tap in chained.tensors]
    order = [tap.module for tap in ran if tap.port == "in0" and tap.module in plan.modules]
    unique = list(dict.fromkeys(order))
    return unique + [module for module in plan.modules if module not in unique]


def _block_order(plan: Plan, passes: Iterable[Pass]) -> dict[str, list[str]]:
    """By layer, the blocks inside it in the order in which they ran."""
    layers = plan.checkpoint.structure.layers
    ran = [tap for p in passes if p.kind == "isolated" for tap in map(Tap.parse, p.tensors)]
    outputs = dict.fromkeys(tap.module for tap in ran if tap.port.startswith("out"))
    inside = [name for name in outputs if name not in plan.modules]
    return {layer: [m for m in inside if m.rpartition(".")[0] == layer] for layer in layers}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rms(x: Tensor) -> float:
    return float(x.to(torch.float64).square().mean().sqrt())
