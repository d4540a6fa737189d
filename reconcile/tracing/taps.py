"""Hooks that copy what passes a module's ports, and hooks that feed a module other inputs."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import translate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reconcile.exceptions import TapError, nearest
from reconcile.rounding import bit_view, round_to
from reconcile.tracing.trace import Store, Tap, Trace, TraceMemory, TraceWriter, visit_tensors

CACHES = ("past_key_values", "cache")
"""Names under which transformers' models take their KV cache."""


@contextmanager
def taps(
    model: nn.Module,
    patterns: str | Sequence[str] = ("*",),
    *,
    inputs: bool = True,
    to: Path | str | None = None,
) -> Iterator[Trace]:
    """Record inputs and outputs of the matching modules during every call of ``model``.

    Each call of the model is one pass. Inputs are copied before the call, outputs after it.
    The hooks are removed whatever happens in the block.

    Args:
        model: the model that the block calls.
        patterns: globs over module paths; "" is the model itself. Containers that are never
            called (`nn.ModuleList`) do not count.
        inputs: whether inputs are recorded too.
        to: a directory to which the tensors are written as they come, instead of being kept in
            memory. The trace has its passes after the block; nothing is left if that raises.

    Raises:
        TapError: a pattern matches no module, a tapped module never ran, no pass was recorded,
            or a capture was rewritten before the block ended.
        TraceError: ``to`` holds a trace already or cannot be written.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True))
    >>> with taps(model, ["0"]) as trace:
    ...     _ = model(torch.ones(1, 2))
    >>> list(trace.passes[0].tensors)
    ['0:in0', '0:out']
    """
    modules = match_modules(model, [patterns] if isinstance(patterns, str) else patterns)
    if to is None:
        memory = TraceMemory()
        with Recorder(model, modules, memory, inputs=inputs) as recorder:
            yield memory.trace
        recorder.require_all_fired()
        if rewritten := memory.verify():
            raise TapError(f"captures were rewritten after they were taken: {rewritten[:5]}")
        return
    trace = Trace()
    with TraceWriter(to) as writer:
        with Recorder(model, modules, writer, inputs=inputs) as recorder:
            yield trace
        recorder.require_all_fired()
        writer.finish(trace.provenance, trace.facts)
    trace.passes = Trace.load(to).passes


def match_modules(model: nn.Module, patterns: Iterable[str]) -> tuple[str, ...]:
    """Paths of the modules that match any of the globs, in the model's order.

    A module that the model holds under several names is listed once, under the first that
    matches.

    Raises:
        TapError: a pattern that matches nothing, with the nearest path, or only containers.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen: set[str] = set()
    for pattern in patterns:
        matches = re.compile(translate(pattern)).match
        found = {pattern} & modules.keys() or {name for name in modules if matches(name)}
        if not found:
            known = {".".join(name.split(".")[:3]) for name in modules if name}
            raise TapError(
                f"no module matches {pattern!r}: "
                f"{nearest(pattern, known, '`model.named_modules()` lists all')}"
            )
        called = {name for name in found if _is_called(modules[name])}
        if not called:
            raise TapError(f"{pattern!r} matches only containers, which are never called")
        chosen |= called
    if not chosen:
        raise TapError("no pattern was given: nothing would be recorded")
    first: dict[nn.Module, str] = {}
    for name, module in modules.items():
        if name in chosen:
            first.setdefault(module, name)
    return tuple(first.values())


def _is_called(module: nn.Module) -> bool:
    """Whether the module has a ``forward``; containers such as `nn.ModuleList` have none."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


class Recorder:
    """Hooks on a model that put what they see into a `Store`; a context manager.

    A call of the model itself delimits a pass and gives its fingerprint. ``kind`` may be set
    before each call. Of ``streams`` only the tensor that goes through is recorded: the main
    input (`main_input`) and the first floating-point output.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Iterable[str],
        store: Store,
        *,
        inputs: bool = True,
        streams: Iterable[str] = (),
    ) -> None:
        self.kind = "chained"
        self.passes = 0
        self.fired: Counter[str] = Counter()
        self._model = model
        self._modules = tuple(modules)
        self._streams = tuple(streams)
        self._store = store
        self._inputs = inputs
        self._calls: Counter[str] = Counter()
        self._recording = False
        self._stack = ExitStack()

    def __enter__(self) -> Recorder:
        """Register the hooks."""
        with ExitStack() as stack:
            add = stack.enter_context
            add(_removing(self._model.register_forward_pre_hook(self._begin, with_kwargs=True)))
            for name in self._modules:
                module = self._model.get_submodule(name)
                if self._inputs:
                    hook = self._before(name)
                    add(_removing(module.register_forward_pre_hook(hook, with_kwargs=True)))
                add(_removing(module.register_forward_hook(self._after(name))))
            for name in self._streams:
                module = self._model.get_submodule(name)
                hook = self._before_stream(name)
                add(_removing(module.register_forward_pre_hook(hook, with_kwargs=True)))
                add(_removing(module.register_forward_hook(self._after_stream(name))))
            add(_removing(self._model.register_forward_hook(self._end)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove every hook."""
        self._stack.close()

    def unreached(self) -> tuple[str, ...]:
        """Tapped modules that never ran."""
        return tuple(name for name in self._modules if not self.fired[name])

    def require_all_fired(self) -> None:
        """TapError if no pass was recorded, or naming the tapped modules that never ran."""
        if not self.passes:
            raise TapError(
                "no pass was recorded: the block must call the model itself, as model(...), and "
                "not a wrapper that torch.compile made of it"
            )
        if silent := self.unreached():
            raise TapError(
                f"{len(silent)} of {len(self._modules)} tapped modules never ran: "
                f"{', '.join(silent[:5])}. Hooks fire only through module(...): a caller that "
                "uses module.forward(...), or torch.compile before the hooks, bypasses them"
            )

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.clear()
        self._recording = True
        self._store.begin(fingerprint(args, kwargs), self.kind)

    def _end(self, *_: object) -> None:
        self._recording = False
        self._store.end()
        self.passes += 1

    def _before(self, name: str) -> Any:  # noqa: ANN401 - torch's hook type
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._require_pass(name)
            for index, value in enumerate(args):
                visit_tensors(value, f"in{index}", self._putter(name))
            visit_tensors(kwargs, "in", self._putter(name))

        return hook

    def _after(self, name: str) -> Any:  # noqa: ANN401 - torch's hook type
        def hook(_: nn.Module, __: tuple[Any, ...], output: object) -> None:
            self._require_pass(name)
            visit_tensors(output, "out", self._putter(name))
            self._calls[name] += 1
            self.fired[name] += 1

        return hook

    def _before_stream(self, name: str) -> Any:  # noqa: ANN401 - torch's hook type
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._require_pass(name)
            found = _floating(args, kwargs)
            if port := main_input(found):
                self._putter(name)(port, found[port])

        return hook

    def _after_stream(self, name: str) -> Any:  # noqa: ANN401 - torch's hook type
        def hook(_: nn.Module, __: tuple[Any, ...], output: object) -> None:
            found: dict[str, Tensor] = {}
            visit_tensors(output, "out", found.__setitem__)
            floating = (port for port, tensor in found.items() if tensor.is_floating_point())
            if (port := next(floating, None)) is not None:
                self._putter(name)(port, found[port])
            self._calls[name] += 1

        return hook

    def _require_pass(self, name: str) -> None:
        if not self._recording:
            raise TapError(
                f"{name} ran outside a call of the model: call model(...), not "
                "model.forward(...), so that passes can be told apart"
            )

    def _putter(self, name: str) -> Any:  # noqa: ANN401 - a local function
        call = self._calls[name]
        return lambda port, tensor: self._store.put(str(Tap(name, port, call)), tensor)


def _floating(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Floating-point tensors that a module is called with, by port."""
    found: dict[str, Tensor] = {}
    for index, value in enumerate(args):
        visit_tensors(value, f"in{index}", found.__setitem__)
    visit_tensors(kwargs, "in", found.__setitem__)
    return {port: tensor for port, tensor in found.items() if tensor.is_floating_point()}


def main_input(ports: Iterable[str]) -> str:
    """Of input ports the one that holds the hidden states; empty of none.

    >>> main_input(["in.position_embeddings.0", "in.hidden_states"])
    'in.hidden_states'
    """
    known = [port for port in ports if port.startswith("in")]
    named = [port for port in ("in0", "in.hidden_states") if port in known]
    return next(iter([*named, *known]), "")


@contextmanager
def forced_inputs(
    model: nn.Module, inputs: Mapping[str, Mapping[str, Tensor]], dtype: torch.dtype
) -> Iterator[None]:
    """Teacher-force: while the block runs, feed each named module the given tensors.

    Args:
        model: the model whose modules are fed.
        inputs: module path to {port: tensor}; only the ports that are named are replaced.
        dtype: dtype in which the module gets them.
    """
    with ExitStack() as stack:
        for name, ports in inputs.items():
            module = model.get_submodule(name)
            hook = _forcing(ports, dtype)
            handle = module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
            stack.enter_context(_removing(handle))
        yield


def _forcing(ports: Mapping[str, Tensor], dtype: torch.dtype) -> Any:  # noqa: ANN401
    def replace(value: object, port: str) -> object:
        if isinstance(value, Tensor):
            given = ports.get(port)
            return value if given is None else given.to(device=value.device, dtype=dtype)
        if isinstance(value, tuple | list):
            return type(value)(replace(item, f"{port}.{i}") for i, item in enumerate(value))
        if isinstance(value, dict):
            return {key: replace(item, f"{port}.{key}") for key, item in value.items()}
        return value

    def hook(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (
            tuple(replace(value, f"in{i}") for i, value in enumerate(args)),
            {name: replace(value, f"in.{name}") for name, value in kwargs.items()},
        )

    return hook


@contextmanager
def _removing(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def cache_argument(model: nn.Module) -> str:
    """The name under which ``model`` takes its KV cache; transformers renames it."""
    known = inspect.signature(model.forward).parameters
    return "cache" if "cache" in known else "past_key_values"


def cache_of(output: Any) -> Any:  # noqa: ANN401
    """The KV cache that a model returned, under either name."""
    named = "cache" in output  # asking for the other name warns where there is this one
    return output["cache"] if named else output.past_key_values


def fingerprint(args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Identity of a pass: 16 hex digits over its integer and boolean inputs, by name.

    Token ids, positions and masks identify a pass whatever dtype the model computes in. Where
    there are none, the floating-point inputs stand in, rounded to bfloat16 so that the same
    values in another dtype give the same identity. The length of a KV cache counts too.
    """
    found: dict[str, Tensor] = {}
    for index, value in enumerate(args):
        visit_tensors(value, f"in{index}", found.__setitem__)
    visit_tensors({k: v for k, v in kwargs.items() if k not in CACHES}, "in", found.__setitem__)
    exact = {name: t for name, t in found.items() if not t.is_floating_point()}
    digest = hashlib.sha256()
    for name, tensor in sorted((exact or found).items()):
        values = round_to(tensor, torch.bfloat16) if tensor.is_floating_point() else tensor
        digest.update(f"{name}{list(values.shape)}".encode())
        digest.update(bit_view(values.detach().cpu().contiguous()).numpy().tobytes())
    cache = next((kwargs[name] for name in CACHES if kwargs.get(name) is not None), None)
    if cache is not None and hasattr(cache, "get_seq_length"):
        digest.update(f"cache{cache.get_seq_length()}".encode())
    return digest.hexdigest()[:16]
