"""The judged half of a run: the kernel under the same hooks, fed and free.

Each prompt is one pass, or a prefill and decode steps with a KV cache, in two kinds:

``isolated``
    the kernel alone on the reference's rounded inputs, the whole of them (``out``) and their
    middle row alone (``out.row``), called several times; then every layer, the final norm and the
    head on theirs.
``chained``
    the candidate runs freely, but for the experts: a router's own choice is recorded, that of
    the reference is taken (`judging.routing`). For each op the pass also holds the reference op on
    the candidate's own input (``ref.out``, ``ref.abs``) and whether a replay gave the same bits, so
    that an op's own error can be told from what it inherited.

In a phase in which the candidate does not use its kernel, plain torch computes the modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from reconcile.capture.passes import Stream, inner_blocks, tapped_modules
from reconcile.capture.plan import Plan, Progress
from reconcile.capture.provenance import provenance
from reconcile.capture.stages import all_stage_facts
from reconcile.capture.steps import Step
from reconcile.exceptions import TraceError
from reconcile.exits import exits_refused
from reconcile.grouped import (
    Reference,
    StoredWeight,
    baseline_linear,
    reference_linear,
    row_count,
    take_rows,
    to_kernel,
    to_module,
)
from reconcile.judging.task import answers
from reconcile.plan_record import record_from_facts, record_to_facts
from reconcile.replay import Call, KernelFailureError, KernelLinear, Prepared, repeated
from reconcile.report import Reason
from reconcile.rounding import bitwise_equal
from reconcile.settings import own_arithmetic
from reconcile.tracing.norms import call_norms
from reconcile.tracing.ports import ports
from reconcile.tracing.taps import forced_inputs
from reconcile.tracing.trace import Pass, Tap, Trace

CALLS = "calls of "
"""Beginning of the note that says how often the kernel ran in the model."""
REPEATS = 3
"""Calls of a kernel on one input whose bits must agree."""


@exits_refused()
@own_arithmetic()
def capture_candidate(
    plan: Plan,
    reference: Trace,
    command: str,
    progress: Progress,
    levels: Iterable[str] | None = None,
) -> Trace:
    """Run the kernel under the same hooks, chained and fed from the reference's trace.

    Raises:
        TraceError: the reference's trace is of another model, dtype, contract or prompts.
    """
    _check_same(plan, reference)
    wanted = set(plan.case.levels.run if levels is None else levels)
    trace = Trace(provenance=provenance(plan, plan.config.name, command))
    trace.facts = {"plan": record_to_facts(plan.record())}
    if plan.engine is None:
        return trace
    ready = prepare_all(plan)
    ops = {
        name: reference_linear(plan.checkpoint.weights[name], plan.arithmetic, plan.reference_dtype)
        for name in plan.modules
    }
    model = plan.checkpoint.build(plan.dtype, lambda n, w: _candidate_linear(plan, ready, n, w))
    model.to(plan.config.device)
    chained = reference.select("chained")
    isolated = reference.select("isolated")
    with torch.no_grad():
        for ids in plan.prompts:
            fed_stream, free_stream = Stream(plan, model), Stream(plan, model)
            for step in plan.steps(ids):
                key = step.key
                if key not in chained:
                    raise TraceError(f"the reference's trace lacks the prompt {list(ids)[:8]}...")
                _use(model, plan.runs_in(step.phase))
                _begin(model)
                fed = Pass(key, "isolated", meta=_said(step))
                if "op" in wanted and plan.runs_in(step.phase):
                    progress("ops")
                    order, first = reference.facts["order"], not trace.passes
                    _replay_ops(plan, ready, order, isolated[key], fed, owned=first)
                if "module" in wanted:
                    progress("modules")
                    force_parts(plan, model, isolated[key], chained[key], fed, fed_stream, step)
                trace.passes.append(fed)
                if wanted & {"op", "module", "model"}:
                    progress("model")
                    free = chain(plan, model, ops, ready, chained[key], free_stream, step)
                    trace.passes.append(free)
        if "module" in wanted:
            trace.passes.append(call_norms(model, plan.dtype, plan.dtype))
        if plan.asked is not None and "model" in wanted:
            progress("task")
            trace.facts["task"] = _task(plan, model)
    trace.facts["calls_in_model"] = sum(m.calls for m in _kernels(model).values())
    trace.facts["stages"] = stages_of(plan, ready)
    # again, now that the kernel has loaded its libraries
    source = provenance(plan, plan.config.name, command)
    trace.provenance = replace(source, notes=(*source.notes, *_ran(plan, trace)))
    return trace


def _task(plan: Plan, model: nn.Module) -> dict[str, Any]:
    """What the candidate answers, and how often its kernel ran meanwhile."""
    assert plan.asked is not None
    before = sum(_calls(model).values())
    _begin(model)
    try:
        given = answers(model, plan.asked, lambda phase: _use(model, plan.runs_in(phase)))
    except KernelFailureError as failure:
        return {"failure": _failure(failure)}
    fallbacks = sorted({m.fallback for m in _kernels(model).values() if m.fallback})
    calls = sum(m.calls for m in _kernels(model).values()) - before
    return {"given": given, "calls": calls, "fell_back": fallbacks}


def _ran(plan: Plan, trace: Trace) -> tuple[str, ...]:
    """How often the kernel itself ran in the model, by phase, where phases are told apart."""
    if not plan.case.model.decode:
        return ()
    counts: Counter[str] = Counter()
    fell = 0
    for item in trace.select("chained").values():
        counts[str(item.meta.get("phase"))] += sum(item.meta.get("calls", {}).values())
        fell += len(item.meta.get("fell_back", {}))
    text = ", ".join(f"{phase} {counts[phase]}" for phase in ("prefill", "decode"))
    left = [phase for phase in ("prefill", "decode") if not plan.runs_in(phase)]
    rest = f"; plain torch computes its modules in {left[0]}, as declared" if left else ""
    other = f"; other code in its place {fell} times" if fell else ""
    return (f"{CALLS}{plan.record().kernel} in the model: {text}{rest}{other}",)


def _kernels(model: nn.Module) -> dict[str, KernelLinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, KernelLinear)}


def _begin(model: nn.Module) -> None:
    """What the kernels do besides computing is noted anew."""
    for module in _kernels(model).values():
        module.forget()


def _calls(model: nn.Module) -> dict[str, int]:
    """Calls of each kernel so far."""
    return {name: module.calls for name, module in _kernels(model).items()}


def _use(model: nn.Module, used: bool) -> None:
    """Let the kernel compute its modules, or plain torch."""
    for module in _kernels(model).values():
        module.used = used


def _said(step: Step) -> dict[str, Any]:
    return {"phase": step.phase} if step.phase else {}


def _check_same(plan: Plan, reference: Trace) -> None:
    """TraceError unless the reference's trace was captured under the same plan."""
    record, mine = record_from_facts(reference.facts), plan.record()
    theirs = reference.provenance.checkpoint_sha256 if reference.provenance else "none"
    if theirs != plan.checkpoint.sha256:
        raise TraceError(
            f"the reference's trace is of another checkpoint: expected sha256 "
            f"{plan.checkpoint.sha256[:16]}..., got {theirs[:16]}..."
        )
    asked = ("task",) if mine.task else ()
    for name in ("dtype", "reference_dtype", "contract", "modules", *asked):
        if getattr(record, name) != getattr(mine, name):
            raise TraceError(
                f"the reference was captured for another {name}: expected "
                f"{getattr(mine, name)}, got {getattr(record, name)}; capture it again"
            )


def stages_of(plan: Plan, ready: Mapping[str, Prepared | Call]) -> dict[str, list[dict[str, Any]]]:
    """Per module that the kernel computes: what its loading does to the weight, step by step."""
    inspect = getattr(plan.kernel, "stages", None)
    if inspect is None or plan.engine is None:
        return {}
    ran = [name for name, prepared in ready.items() if isinstance(prepared, Prepared)]
    weights = {name: plan.checkpoint.weights[name] for name in ran}
    return {
        name: all_stage_facts(weight, plan.arithmetic, plan.engine, inspect)
        for name, weight in weights.items()
    }


def prepare_all(plan: Plan) -> dict[str, Prepared | Call]:
    """Every module's prepared kernel, or why there is none."""
    ready: dict[str, Prepared | Call] = {}
    assert plan.engine is not None
    for name in plan.modules:
        support = plan.can_implement(name)
        if not support:
            ready[name] = Call(output=None, reason=Reason.NOT_RUN, text=support.reason)
            continue
        ready[name] = Prepared.attempt(
            plan.kernel, plan.engine, plan.checkpoint.weights[name], plan.dtype
        )
    return ready


class _Missing(nn.Module):
    """Stands where the kernel gave no prepared weight; there is no fallback."""

    def __init__(self, name: str, call: Call) -> None:
        super().__init__()
        self._failure = (name, call)

    def forward(self, *_: Tensor) -> Tensor:
        raise KernelFailureError(*self._failure)


def _candidate_linear(
    plan: Plan, ready: Mapping[str, Prepared | Call], name: str, weight: StoredWeight
) -> nn.Module:
    if name not in ready:
        return baseline_linear(weight, plan.dtype)
    prepared = ready[name]
    if not isinstance(prepared, Prepared):
        return _Missing(name, prepared)
    everywhere = all(plan.runs_in(phase) for phase in ("prefill", "decode"))
    elsewhere = None if everywhere else baseline_linear(weight, plan.dtype)
    return KernelLinear(prepared, elsewhere)


def _replay_ops(
    plan: Plan,
    ready: Mapping[str, Prepared | Call],
    order: Iterable[str],
    isolated: Pass,
    fed: Pass,
    *,
    owned: bool,
) -> None:
    """Every op alone on the reference's rounded input, whole and on its middle row.

    ``owned``: whether the whole output is also held to be the caller's own.
    """
    tensors: dict[str, Tensor] = dict(fed.tensors)
    events: dict[str, dict[str, Any]] = {}

    def deterministic(m: int) -> bool:
        return plan.arithmetic.at(m).deterministic

    for name in order:
        prepared, port = ready[name], str(Tap(name, "in0"))
        if port not in isolated.tensors:
            continue
        given, groups = isolated.tensors[port].to(plan.config.device), plan.groups.get(name)
        m = row_count(given, groups)
        x = to_kernel(given, groups)
        row = take_rows(x, groups, m // 2, 1)
        whole = repeated(prepared, x, REPEATS, deterministic(m))
        alone = repeated(prepared, row, 2, deterministic(1))
        if isinstance(prepared, Prepared) and _is_right(alone):
            alone = prepared.owning(alone, row, deterministic(1))
        if owned and m > 1 and isinstance(prepared, Prepared) and _is_right(whole):
            whole = prepared.owning(whole, x, deterministic(m))
        shapes = (given.shape[:-2], (1,))
        for suffix, call, lead in zip(("out", "out.row"), (whole, alone), shapes, strict=True):
            tap = str(Tap(name, suffix))
            if call.output is not None:
                tensors[tap] = to_module(call.output, lead, groups).cpu()
            for number, other in enumerate(call.others, 1):
                tensors[str(Tap(name, suffix, number))] = to_module(other, lead, groups).cpu()
            events[tap] = {"reason": call.reason, "text": call.text}
        if whole.output is not None and alone.output is not None:
            inside = take_rows(whole.output, groups, m // 2, 1)
            same = bitwise_equal(inside, alone.output)
            events[str(Tap(name, "out.row"))]["batch_invariant"] = same
    fed.tensors = tensors
    fed.meta["events"] = events


def _is_right(call: Call) -> bool:
    """Whether there is an output and nothing against it so far."""
    return call.output is not None and call.reason is None


def force_parts(
    plan: Plan,
    model: nn.Module,
    isolated: Pass,
    routed: Pass,
    fed: Pass,
    stream: Stream,
    step: Step,
) -> None:
    """Every layer, the final norm and the head, each on the reference's rounded inputs.

    Blocks inside a layer get what comes to them there; what came is kept beside what they gave.
    ``routed``: the reference's chained pass, whose experts are taken.
    """
    inputs = {part: ports(isolated, part, "in") for part in plan.parts}
    try:
        with forced_inputs(model, inputs, plan.dtype):
            blocks = inner_blocks(plan, model)
            forced = stream.record(step, plan.parts, inputs=False, inside=blocks, routed=routed)
    except KernelFailureError as failure:
        fed.meta["failure"] = _failure(failure)
        return
    fed.tensors = dict(fed.tensors) | dict(forced.tensors)


def chain(
    plan: Plan,
    model: nn.Module,
    ops: Mapping[str, Reference],
    ready: Mapping[str, Prepared | Call],
    routed: Pass,
    stream: Stream,
    step: Step,
) -> Pass:
    """The candidate's free run, and for each of ``ops`` it and a replay on its own input.

    ``routed``: the reference's chained pass, whose experts are taken.
    """
    before = _calls(model)
    try:
        chained = stream.record(step, tapped_modules(plan, model), routed=routed)
    except KernelFailureError as failure:
        return Pass(step.key, "chained", meta=_said(step) | {"failure": _failure(failure)})
    tensors = dict(chained.tensors)
    closure: dict[str, Any] = {}
    for name in ops if plan.runs_in(step.phase) else ():
        port, out = str(Tap(name, "in0")), str(Tap(name, "out"))
        prepared = ready[name]
        if port not in tensors or isinstance(prepared, Call):
            continue
        x, groups = tensors[port], plan.groups.get(name)
        tensors[str(Tap(name, "ref.out"))] = ops[name](x)
        tensors[str(Tap(name, "ref.abs"))] = ops[name].magnitude(x)
        replayed = prepared.call(to_kernel(x.to(plan.config.device), groups)).output
        closure[out] = replayed is not None and bitwise_equal(
            to_module(replayed, x.shape[:-2], groups).cpu(), tensors[out]
        )
    chained.tensors = tensors
    chained.meta |= {"closure": closure} | _done(model, before)
    return chained


def _done(model: nn.Module, before: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """By output tap: how often the kernel ran in the pass, and what it did besides."""
    kernels = {str(Tap(name, "out")): (name, m) for name, m in _kernels(model).items()}
    return {
        "calls": {tap: m.calls - before[name] for tap, (name, m) in kernels.items()},
        "mutated": {tap: m.mutation for tap, (_, m) in kernels.items() if m.mutation},
        "fell_back": {tap: m.fallback for tap, (_, m) in kernels.items() if m.fallback},
    }


def _failure(failure: KernelFailureError) -> dict[str, str]:
    return {
        "module": failure.module,
        "reason": failure.call.reason or Reason.RAISED,
        "text": failure.call.text,
    }
