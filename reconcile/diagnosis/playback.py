"""One part of a model, called again as it was called in a pass: nothing else of the model runs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from reconcile.capture.passes import Stream
from reconcile.capture.plan import Plan
from reconcile.capture.steps import Step
from reconcile.diagnosis.hooks import Hooks, undo
from reconcile.exceptions import TraceError
from reconcile.judging.routing import forced_routing
from reconcile.tracing.taps import CACHES, forced_inputs
from reconcile.tracing.trace import Pass


class _Reached(Exception):
    """The part is called: nothing after it is needed."""


@dataclass(frozen=True, slots=True)
class _Call:
    step: Step
    routed: Pass
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Playback:
    """The calls of a part over one prompt, up to a pass."""

    plan: Plan
    model: nn.Module
    part: str
    calls: tuple[_Call, ...]
    cached: str
    """Keyword of the KV cache, where there is one."""
    cache: Any
    """As it was before the first call."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        model: nn.Module,
        part: str,
        given: Sequence[tuple[Step, Pass, Mapping[str, Tensor]]],
    ) -> Playback:
        """Calls with given inputs.

        Args:
            plan: the candidate's.
            model: the reference's.
            part: path of what is called.
            given: for each call the step, the reference's pass whose experts are taken, and the
                part's inputs by port.
        """
        calls: list[_Call] = []
        cached, cache = "", None
        stream = Stream(plan, model, precise=True)
        last = given[-1][0]
        for step, routed, inputs in given:
            seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

            def hook(
                _: nn.Module,
                args: tuple[Any, ...],
                kwargs: dict[str, Any],
                seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = seen,
                stop: bool = step is last,
            ) -> None:
                held = {k: v for k, v in kwargs.items() if k in CACHES and v is not None}
                seen.append((args, kwargs | {k: copy.deepcopy(v) for k, v in held.items()}))
                if stop:
                    raise _Reached

            with forced_inputs(model, {part: inputs}, plan.reference_dtype), ExitStack() as stack:
                undo(
                    stack,
                    model.get_submodule(part).register_forward_pre_hook(hook, with_kwargs=True),
                )
                with suppress(_Reached):
                    stream.record(step, (), inside=[part], routed=routed)
            if len(seen) != 1:
                raise TraceError(f"{part} was called {len(seen)} times in one pass")
            args, kwargs = seen[0]
            if not calls:
                cached = next((k for k in CACHES if kwargs.get(k) is not None), "")
                cache = kwargs.get(cached)
            calls.append(_Call(step, routed, args, kwargs))
        return cls(plan, model, part, tuple(calls), cached, cache)

    def output(self, module: str, hooks: Hooks | None = None) -> Tensor:
        """What the part, or a module inside it, gives in the last call.

        Args:
            module: path in the model.
            hooks: a mistake in the part; in decode the prefill is without it.
        """
        cache = copy.deepcopy(self.cache)
        phase = self.calls[-1].step.phase
        given: list[Tensor] = []

        def keep(_: nn.Module, __: object, output: Any) -> None:  # noqa: ANN401
            given.append(output[0] if isinstance(output, tuple) else output)

        for call in self.calls:
            with ExitStack() as stack:
                stack.enter_context(self.plan.checkpoint.precise(self.plan.reference_dtype))
                routers = self.plan.checkpoint.structure.routers
                inside = [name for name in routers if name.startswith(f"{self.part}.")]
                stack.enter_context(forced_routing(self.model, inside, call.routed))
                part = self.model.get_submodule(self.part)
                if hooks is not None and call.step.phase == phase:
                    hooks(part, stack)
                undo(stack, self.model.get_submodule(module).register_forward_hook(keep))
                held = {self.cached: cache} if self.cached else {}
                part(*call.args, **call.kwargs | held)
        return given[-1]
