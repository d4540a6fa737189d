"""One recorded call of a model."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

from torch import Tensor, nn

from reconcile.exceptions import TraceError
from reconcile.plan import Plan
from reconcile.taps import Recorder
from reconcile.trace import Pass, TraceMemory


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


def record(
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
