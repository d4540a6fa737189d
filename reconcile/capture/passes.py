"""The calls of a model over one prompt, recorded: all of it at once, or prefill and decode."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from reconcile.capture.plan import Plan
from reconcile.capture.steps import Step
from reconcile.exceptions import TraceError
from reconcile.judging.routing import forced_routing
from reconcile.tracing.taps import Recorder, cache_argument, cache_of
from reconcile.tracing.trace import Pass, TraceMemory


def tapped_modules(plan: Plan, model: nn.Module) -> tuple[str, ...]:
    """Modules whose ports are recorded: the model, layers and their blocks, ops, norm, head."""
    layers = plan.checkpoint.structure.layers
    blocks = {
        f"{layer}.{name}"
        for layer in layers
        for name, child in model.get_submodule(layer).named_children()
        if any(True for _ in child.children())
    }
    routers = plan.checkpoint.structure.routers
    wanted = {"", *plan.parts, *plan.modules, *blocks, *routers}
    return tuple(name for name, _ in model.named_modules() if name in wanted)


def inner_blocks(plan: Plan, model: nn.Module) -> tuple[str, ...]:
    """What the layers call on the way: their norms, attention, MLP."""
    return tuple(
        f"{layer}.{name}"
        for layer in plan.checkpoint.structure.layers
        for name, child in model.get_submodule(layer).named_children()
        if f"{layer}.{name}" not in plan.modules and _computes(child)
    )


def _computes(module: nn.Module) -> bool:
    """Whether it has weights of its own or modules inside, as a norm or an attention has."""
    return any(True for _ in (*module.children(), *module.parameters(recurse=False)))


class Stream:
    """A model that goes through one prompt, call by call, with a KV cache of its own."""

    def __init__(self, plan: Plan, model: nn.Module, *, precise: bool = False) -> None:
        """``precise`` for the reference."""
        self._plan = plan
        self._model = model
        self._precise = precise
        self._cache: Any = None
        self._ended: BaseException | None = None

    def record(
        self,
        step: Step,
        modules: Iterable[str],
        *,
        inputs: bool = True,
        inside: Iterable[str] = (),
        routed: Pass | None = None,
    ) -> Pass:
        """The next call, recorded; what ended an earlier one ends this too.

        Args:
            step: the call.
            modules: whose ports are recorded.
            inputs: whether inputs are recorded too.
            inside: blocks of which only main input and output are recorded.
            routed: the reference's pass, whose experts are taken; what is recorded of a router is
                its own choice.
        """
        if self._ended is not None:
            raise self._ended
        plan, model, memory = self._plan, self._model, TraceMemory()
        context = plan.checkpoint.precise(plan.reference_dtype) if self._precise else nullcontext()
        tokens = step.tokens.to(next(model.parameters()).device)
        routers = plan.checkpoint.structure.routers
        with (
            Recorder(model, modules, memory, inputs=inputs, streams=inside) as recorder,
            forced_routing(model, routers, routed),
            context,
        ):
            try:
                self._call(tokens, cached=bool(step.phase))
            except BaseException as error:
                self._ended = error
                raise
        if rewritten := memory.verify():
            raise TraceError(f"captures were rewritten after they were taken: {rewritten[:5]}")
        (recorded,) = memory.trace.passes
        recorded.key = step.key
        recorded.meta["unreached"] = list(recorder.unreached())
        if step.phase:
            recorded.meta |= {"phase": step.phase, "seen": step.seen.flatten().tolist()}
        return recorded

    def _call(self, tokens: Tensor, *, cached: bool) -> None:
        if not cached:
            self._model(input_ids=tokens, use_cache=False)
            return
        given = {} if self._cache is None else {cache_argument(self._model): self._cache}
        output = self._model(input_ids=tokens, use_cache=True, **given)
        self._cache = cache_of(output)
