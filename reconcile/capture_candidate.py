"""The judged half of a run: the kernel under the same hooks, fed and free.

Each prompt is one pass, in two kinds:

``isolated``
    the kernel alone on the reference's rounded inputs, the whole of them (``out``) and their
    middle row alone (``out.row``), called several times; then every layer, the final norm and the
    head on theirs.
``chained``
    the candidate runs freely. For each op the pass also holds the reference op on the
    candidate's own input (``ref.out``, ``ref.abs``) and whether a replay gave the same bits, so
    that an op's own error can be told from what it inherited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from reconcile.exceptions import TraceError
from reconcile.linears import BaselineLinear, ReferenceLinear
from reconcile.passes import record, tapped_modules
from reconcile.plan import Plan, Progress
from reconcile.plan_record import record_from_facts, record_to_facts
from reconcile.ports import ports
from reconcile.provenance import provenance
from reconcile.replay import Call, KernelFailureError, KernelLinear, Prepared, repeated
from reconcile.report import Reason
from reconcile.rounding import bitwise_equal
from reconcile.taps import fingerprint, forced_inputs
from reconcile.trace import Pass, Tap, Trace
from reconcile.weight import QuantizedWeight

REPEATS = 3
"""Calls of a kernel on one input whose bits must agree."""


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
    ready = _prepare(plan)
    ops = {
        name: ReferenceLinear(plan.checkpoint.weights[name], plan.arithmetic, plan.reference_dtype)
        for name in plan.modules
    }
    model = plan.checkpoint.build(plan.dtype, lambda n, w: _candidate_linear(plan, ready, n, w))
    model.to(plan.config.device)
    chained = reference.select("chained")
    isolated = reference.select("isolated")
    with torch.no_grad():
        for ids in plan.prompts:
            tokens = torch.tensor([ids])
            key = fingerprint((), {"input_ids": tokens})
            if key not in chained:
                raise TraceError(f"the reference's trace lacks the prompt {list(ids)[:8]}...")
            fed = Pass(key, "isolated")
            if "op" in wanted:
                progress("ops")
                _replay_ops(plan, ready, reference.facts["order"], isolated[key], fed)
            if "module" in wanted:
                progress("modules")
                _force_parts(plan, model, isolated[key], fed, tokens)
            trace.passes.append(fed)
            if wanted & {"op", "module", "model"}:
                progress("model")
                trace.passes.append(_chain(plan, model, ops, ready, tokens, key))
    calls = sum(m.calls for m in model.modules() if isinstance(m, KernelLinear))
    trace.facts["calls_in_model"] = calls
    # again, now that the kernel has loaded its libraries
    trace.provenance = provenance(plan, plan.config.name, command)
    return trace


def _check_same(plan: Plan, reference: Trace) -> None:
    """TraceError unless the reference's trace was captured under the same plan."""
    record, mine = record_from_facts(reference.facts), plan.record()
    theirs = reference.provenance.checkpoint_sha256 if reference.provenance else "none"
    if theirs != plan.checkpoint.sha256:
        raise TraceError(
            f"the reference's trace is of another checkpoint: expected sha256 "
            f"{plan.checkpoint.sha256[:16]}..., got {theirs[:16]}..."
        )
    for name in ("dtype", "reference_dtype", "contract", "modules"):
        if getattr(record, name) != getattr(mine, name):
            raise TraceError(
                f"the reference was captured for another {name}: expected "
                f"{getattr(mine, name)}, got {getattr(record, name)}; capture it again"
            )


def _prepare(plan: Plan) -> dict[str, Prepared | Call]:
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
    plan: Plan, ready: Mapping[str, Prepared | Call], name: str, weight: QuantizedWeight
) -> nn.Module:
    if name not in ready:
        return BaselineLinear(weight, plan.dtype)
    prepared = ready[name]
    return KernelLinear(prepared) if isinstance(prepared, Prepared) else _Missing(name, prepared)


def _replay_ops(
    plan: Plan,
    ready: Mapping[str, Prepared | Call],
    order: Iterable[str],
    isolated: Pass,
    fed: Pass,
) -> None:
    """Every op alone on the reference's rounded input, whole and on its middle row."""
    tensors: dict[str, Tensor] = dict(fed.tensors)
    events: dict[str, dict[str, Any]] = {}

    def deterministic(x: Tensor) -> bool:
        return plan.arithmetic.at(x.numel() // x.shape[-1]).deterministic

    for name in order:
        prepared, port = ready[name], str(Tap(name, "in0"))
        if port not in isolated.tensors:
            continue
        x = isolated.tensors[port].to(plan.config.device)
        rows = x.reshape(-1, x.shape[-1])
        row = rows[len(rows) // 2 :][:1]
        whole = repeated(prepared, x, REPEATS, deterministic(x))
        alone = repeated(prepared, row, 2, deterministic(row))
        if isinstance(prepared, Prepared) and alone.output is not None and not alone.reason:
            alone = prepared.owning(alone, row)
        for suffix, call in (("out", whole), ("out.row", alone)):
            tap = str(Tap(name, suffix))
            if call.output is not None:
                tensors[tap] = call.output.cpu()
            events[tap] = {"reason": call.reason, "text": call.text}
        if whole.output is not None and alone.output is not None:
            inside = whole.output.reshape(-1, whole.output.shape[-1])[len(rows) // 2 :][:1]
            same = bitwise_equal(inside, alone.output)
            events[str(Tap(name, "out.row"))]["batch_invariant"] = same
    fed.tensors = tensors
    fed.meta["events"] = events


def _force_parts(plan: Plan, model: nn.Module, isolated: Pass, fed: Pass, tokens: Tensor) -> None:
    """Every layer, the final norm and the head, each on the reference's rounded inputs."""
    inputs = {part: ports(isolated, part, "in") for part in plan.parts}
    try:
        with forced_inputs(model, inputs, plan.dtype):
            forced = record(plan, model, tokens, plan.parts, inputs=False)
    except KernelFailureError as failure:
        fed.meta["failure"] = _failure(failure)
        return
    fed.tensors = dict(fed.tensors) | dict(forced.tensors)


def _chain(
    plan: Plan,
    model: nn.Module,
    ops: Mapping[str, ReferenceLinear],
    ready: Mapping[str, Prepared | Call],
    tokens: Tensor,
    key: str,
) -> Pass:
    """The candidate's free run, and for each op the reference and a replay on its own input."""
    mutated: dict[str, str] = {}
    try:
        chained = record(plan, model, tokens, tapped_modules(plan, model))
        for name, module in model.named_modules():
            if isinstance(module, KernelLinear) and module.mutation:
                mutated[str(Tap(name, "out"))] = module.mutation
    except KernelFailureError as failure:
        return Pass(key, "chained", meta={"failure": _failure(failure)})
    tensors = dict(chained.tensors)
    closure: dict[str, Any] = {}
    for name in plan.modules:
        port, out = str(Tap(name, "in0")), str(Tap(name, "out"))
        prepared = ready[name]
        if port not in tensors or isinstance(prepared, Call):
            continue
        x = tensors[port]
        tensors[str(Tap(name, "ref.out"))] = ops[name](x)
        tensors[str(Tap(name, "ref.abs"))] = ops[name].magnitude(x)
        replayed = prepared.call(x.to(plan.config.device)).output
        same = replayed is not None and bitwise_equal(replayed.cpu(), tensors[out])
        closure[out] = same
    chained.tensors = tensors
    chained.meta["closure"] = closure
    chained.meta["mutated"] = mutated
    return chained


def _failure(failure: KernelFailureError) -> dict[str, str]:
    return {
        "module": failure.module,
        "reason": failure.call.reason or Reason.RAISED,
        "text": failure.call.text,
    }
