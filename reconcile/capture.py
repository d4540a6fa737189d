"""The two halves of a run: what the reference computes, and what the candidate computes.

The reference's half needs no kernel to run, the candidate's half no reference but its trace;
comparing the two needs neither. Each prompt is one pass, and each trace holds two kinds of it:

``chained``
    the model runs freely. The candidate's pass also holds the reference op on the candidate's
    own inputs (``ref.out``, ``ref.abs``), so that each op's own error can be told from what it
    inherited.
``isolated``
    every op and every part is fed the reference's inputs, rounded once to the candidate's
    dtype. The reference is run again on those bits (``out``, and ``abs`` = sum |x||w|), the
    candidate on the whole input (``out``) and on its last row alone (``out.row``).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from reconcile.contract import UNIT_ROUNDOFF
from reconcile.exceptions import TraceError
from reconcile.linears import BaselineLinear, ReferenceLinear
from reconcile.metrics import nmse
from reconcile.model_metrics import model_stats
from reconcile.plan import Plan, record_from_facts, record_to_facts
from reconcile.replay import Call, KernelFailureError, KernelLinear, Prepared
from reconcile.report import Provenance, Reason
from reconcile.rounding import bit_view, bitwise_equal, round_to
from reconcile.taps import Recorder, fingerprint, forced_inputs
from reconcile.trace import Pass, Tap, Trace, TraceMemory
from reconcile.weight import QuantizedWeight

REPEATS = 3
"""Calls of a kernel on one input whose bits must agree."""

DRAWS = 4
"""Runs of the baseline per prompt from which the limits are taken."""

Progress = Callable[[str], None]
"""Called once per unit of work with what is being done."""


def tapped_modules(plan: Plan, model: nn.Module) -> tuple[str, ...]:
    """Modules whose ports are recorded: the model, layers and their blocks, ops, norm, head."""
    layers = plan.checkpoint.structure.layers
    blocks = {
        f"{layer}.{name}"
        for layer in layers
        for name, child in model.get_submodule(layer).named_children()
        if any(True for _ in child.children())
    }
    wanted = {"", *plan.parts, *plan.modules, *blocks}
    return tuple(name for name, _ in model.named_modules() if name in wanted)


# --------------------------------------------------------------------------- the reference


def capture_reference(plan: Plan, command: str, progress: Progress) -> Trace:
    """Everything the comparison needs from the trusted side."""
    ops: dict[str, ReferenceLinear] = {}

    def make(name: str, weight: QuantizedWeight) -> nn.Module:
        ops[name] = ReferenceLinear(weight, plan.arithmetic, plan.reference_dtype)
        return ops[name]

    model = plan.checkpoint.build(plan.reference_dtype, make)
    baseline = plan.checkpoint.build(plan.dtype, lambda _, w: BaselineLinear(w, plan.dtype))
    trace = Trace(provenance=_provenance(plan, "reference", command))
    with torch.no_grad():
        for ids in plan.prompts:
            progress("reference")
            tokens = torch.tensor([ids])
            chained = _record(plan, model, tokens, tapped_modules(plan, model), precise=True)
            isolated = _isolate(plan, model, ops, chained, tokens)
            gains = _gains(plan, model, isolated, tokens)
            meta = _baseline(plan, baseline, chained, isolated, tokens)
            chained.meta = meta["chained"] | {"gains": gains}
            isolated.meta = meta["isolated"]
            trace.passes += [chained, isolated]
    trace.facts = {
        "plan": record_to_facts(plan.record()),
        "order": _op_order(plan, trace.passes[0]),
    }
    return trace


def _record(
    plan: Plan,
    model: nn.Module,
    tokens: Tensor,
    modules: Iterable[str],
    *,
    inputs: bool = True,
    precise: bool = False,
) -> Pass:
    """One recorded call of the model; ``precise`` for the reference."""
    memory = TraceMemory()
    context = plan.checkpoint.precise(plan.reference_dtype) if precise else nullcontext()
    with Recorder(model, modules, memory, inputs=inputs) as recorder, context:
        model(input_ids=tokens.to(next(model.parameters()).device), use_cache=False)
    if rewritten := memory.verify():
        raise TraceError(f"captures were rewritten after they were taken: {rewritten[:5]}")
    (recorded,) = memory.trace.passes
    recorded.meta["unreached"] = list(recorder.unreached())
    return recorded


def _isolate(
    plan: Plan,
    model: nn.Module,
    ops: Mapping[str, ReferenceLinear],
    chained: Pass,
    tokens: Tensor,
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
    inputs = {part: _rounded_inputs(part, chained, plan.dtype) for part in plan.parts}
    with forced_inputs(model, inputs, plan.reference_dtype):
        forced = _record(plan, model, tokens, plan.parts, inputs=False, precise=True)
    for part, ports in inputs.items():
        tensors |= {str(Tap(part, port)): value for port, value in ports.items()}
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


def _gains(plan: Plan, model: nn.Module, isolated: Pass, tokens: Tensor) -> dict[str, float]:
    """How much each layer amplifies a random error of its hidden state: rms out / rms in."""
    generator = torch.Generator().manual_seed(plan.case.seed)
    layers = plan.checkpoint.structure.layers
    nudged: dict[str, dict[str, Tensor]] = {}
    size: dict[str, float] = {}
    for layer in layers:
        ports = _ports(isolated, layer, "in")
        x = ports["in0"].to(plan.reference_dtype)
        noise = torch.randn(x.shape, generator=generator, dtype=plan.reference_dtype)
        noise *= 2.0**-8 * _rms(x)
        nudged[layer] = ports | {"in0": x + noise}
        size[layer] = _rms(noise)
    with forced_inputs(model, nudged, plan.reference_dtype):
        moved = _record(plan, model, tokens, layers, inputs=False, precise=True)
    gains = {}
    for layer in layers:
        port = output_tap(layer, moved)
        gains[layer] = _rms(moved.tensors[port] - isolated.tensors[port]) / max(
            size[layer], torch.finfo(torch.float64).tiny
        )
    return gains


def _baseline(
    plan: Plan, baseline: nn.Module, chained: Pass, isolated: Pass, tokens: Tensor
) -> dict[str, dict[str, Any]]:
    """What plain torch at the candidate's dtype loses on the same weights and inputs.

    Of each statistic the largest of `DRAWS` draws is kept: the plain run, and runs whose hidden
    states were dithered by one rounding error, which are as legal and round differently. One
    draw alone says little about a heavy-tailed statistic (docs/adr/0004).
    """
    free, fed, model = {}, {}, {}
    for draw in range(DRAWS):
        noise = torch.Generator().manual_seed(plan.case.seed + draw) if draw else None
        run = _draw(plan, baseline, isolated, tokens, noise)
        _keep_largest(free, _stats_of(run[0], chained))
        _keep_largest(fed, _stats_of(run[1], isolated))
        logits = logits_tap(chained)
        numbers = model_stats(
            run[0].tensors[logits], chained.tensors[logits], tokens.flatten().tolist()
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
    isolated: Pass,
    tokens: Tensor,
    noise: torch.Generator | None,
) -> tuple[Pass, Pass]:
    """One free run and one fed run of the baseline, dithered if ``noise`` is given."""

    def dithered(ports: dict[str, Tensor]) -> dict[str, Tensor]:
        return ports | {"in0": _dither(ports["in0"], noise)} if noise else ports

    inputs = {part: dithered(_ports(isolated, part, "in")) for part in plan.parts}
    first = {part: {"in0": inputs[part]["in0"]} for part in plan.parts[:1] if noise}
    with forced_inputs(baseline, first, plan.dtype):
        free = _record(plan, baseline, tokens, tapped_modules(plan, baseline), inputs=False)
    with forced_inputs(baseline, inputs, plan.dtype):
        fed = _record(plan, baseline, tokens, plan.parts, inputs=False)
    return free, fed


def _dither(x: Tensor, noise: torch.Generator) -> Tensor:
    """X with a random relative error of one unit roundoff of its dtype."""
    u = UNIT_ROUNDOFF[str(x.dtype).removeprefix("torch.")]
    error = u * torch.randn(x.shape, generator=noise, dtype=torch.float64)
    return round_to(x.to(torch.float64) * (1 + error), x.dtype)


def _stats_of(run: Pass, reference: Pass) -> dict[str, dict[str, float]]:
    return {tap: _gated(tensor, reference.tensors[tap]) for tap, tensor in run.tensors.items()}


def _keep_largest(
    into: dict[str, dict[str, float]], found: Mapping[str, Mapping[str, float]]
) -> None:
    """Elementwise maximum of two tables of statistics, in place."""
    for tap, stats in found.items():
        kept = into.setdefault(tap, {})
        for name, value in stats.items():
            kept[name] = max(value, kept.get(name, value))


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


# --------------------------------------------------------------------------- the candidate


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
    trace = Trace(provenance=_provenance(plan, plan.config.name, command))
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
        try:
            ready[name] = Prepared.of(
                plan.kernel, plan.engine, plan.checkpoint.weights[name], plan.dtype
            )
        except NotImplementedError as error:
            ready[name] = Call(output=None, reason=Reason.NOT_RUN, text=f"prepare: {error}")
        except Exception as error:  # noqa: BLE001 - a kernel may raise anything
            text = f"prepare raised {type(error).__name__}: {error}"
            ready[name] = Call(output=None, reason=Reason.RAISED, text=text)
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
    """Every op alone on the reference's rounded input, whole and on its last row."""
    tensors: dict[str, Tensor] = dict(fed.tensors)
    events: dict[str, dict[str, Any]] = {}
    for name in order:
        prepared, port = ready[name], str(Tap(name, "in0"))
        if port not in isolated.tensors:
            continue
        x = isolated.tensors[port].to(plan.config.device)
        row = x.reshape(-1, x.shape[-1])[-1:]
        whole = _repeated(plan, prepared, x, REPEATS)
        alone = _repeated(plan, prepared, row, 2)
        for suffix, call in (("out", whole), ("out.row", alone)):
            tap = str(Tap(name, suffix))
            if call.output is not None:
                tensors[tap] = call.output.cpu()
            events[tap] = {"reason": call.reason, "text": call.text}
        if whole.output is not None and alone.output is not None:
            inside = whole.output.reshape(-1, whole.output.shape[-1])[-1:]
            same = bitwise_equal(inside, alone.output)
            events[str(Tap(name, "out.row"))]["batch_invariant"] = same
    fed.tensors = tensors
    fed.meta["events"] = events


def _repeated(plan: Plan, prepared: Prepared | Call, x: Tensor, repeats: int) -> Call:
    """The first of several calls, with the reason if the calls disagree.

    Memory is poisoned in the first call only: an element that is NaN there and something else
    in another call was never written.
    """
    if isinstance(prepared, Call):
        return prepared
    first = prepared.call(x, poison=True)
    if first.output is None or first.reason is not None:
        return first
    for _ in range(repeats - 1):
        again = prepared.call(x, poison=False)
        if again.output is None:
            return again
        if bitwise_equal(first.output, again.output):
            continue
        unwritten = first.output.isnan() & ~again.output.isnan()
        if bool(unwritten.any()):
            return Call(output=first.output, reason=Reason.UNWRITTEN, text=_places(unwritten))
        if plan.arithmetic.at(x.numel() // x.shape[-1]).deterministic:
            differing = bit_view(first.output) != bit_view(again.output)
            text = f"two calls on the same input differ: {_places(differing)}"
            return Call(output=first.output, reason=Reason.UNSTABLE, text=text)
    return first


def _places(mask: Tensor) -> str:
    """Counts, the first place, and the columns where they are few.

    >>> _places(torch.tensor([[False, True], [False, True]]))
    '2 of 4 elements, first at [0, 1], in column 1 only'
    """
    first = mask.nonzero()[0].tolist()
    text = f"{int(mask.sum())} of {mask.numel()} elements, first at {first}"
    columns = mask.reshape(-1, mask.shape[-1]).any(0).nonzero().flatten().tolist()
    if len(columns) == 1 and mask.shape[-1] > 1:
        text += f", in column {columns[0]} only"
    return text


def _force_parts(plan: Plan, model: nn.Module, isolated: Pass, fed: Pass, tokens: Tensor) -> None:
    """Every layer, the final norm and the head, each on the reference's rounded inputs."""
    inputs = {part: _ports(isolated, part, "in") for part in plan.parts}
    try:
        with forced_inputs(model, inputs, plan.dtype):
            forced = _record(plan, model, tokens, plan.parts, inputs=False)
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
    try:
        chained = _record(plan, model, tokens, tapped_modules(plan, model))
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
    return chained


def _failure(failure: KernelFailureError) -> dict[str, str]:
    return {
        "module": failure.module,
        "reason": failure.call.reason or Reason.RAISED,
        "text": failure.call.text,
    }


# --------------------------------------------------------------------------- shared


def output_tap(module: str, recorded: Pass) -> str:
    """The tap of a module's first floating-point output: ``out`` or ``out.0`` ..."""
    for name, tensor in recorded.tensors.items():
        tap = Tap.parse(name)
        if tap.module == module and tap.port.startswith("out") and tensor.is_floating_point():
            return name
    raise TraceError(f"{module} has no output in pass {recorded.key}")


def logits_tap(recorded: Pass) -> str:
    """The tap of the model's logits."""
    for name in (":out.logits", ":out"):
        if name in recorded.tensors:
            return name
    return output_tap("", recorded)


def _ports(recorded: Pass, module: str, prefix: str) -> dict[str, Tensor]:
    """Tensors of a module's ports that begin with ``prefix``, by port."""
    found = {}
    for name in recorded.tensors:
        tap = Tap.parse(name)
        if tap.module == module and tap.port.startswith(prefix):
            found[tap.port] = recorded.tensors[name]
    return found


def _rms(x: Tensor) -> float:
    return float(x.to(torch.float64).square().mean().sqrt())


def _provenance(plan: Plan, side: str, command: str) -> Provenance:
    dtype = plan.reference_dtype if side == "reference" else plan.dtype
    return Provenance(
        side=side,
        model=plan.checkpoint.path.name,
        checkpoint_sha256=plan.checkpoint.sha256,
        dtype=str(dtype).removeprefix("torch."),
        machine=f"{platform.processor() or platform.machine()}, {platform.platform()}",
        versions=versions(),
        command=command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        notes=() if side == "reference" else plan.notes,
    )


def versions() -> dict[str, str]:
    """Versions of what computes: the interpreter, torch, transformers and this package."""
    found = {"python": platform.python_version()}
    for name in ("reconcile-numerics", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
