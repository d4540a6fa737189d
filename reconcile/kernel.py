"""The interface of a kernel: what it promises, where it runs, and how it is called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from reconcile.contract import Contract
from reconcile.exceptions import KernelError, nearest
from reconcile.weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class Engine:
    """How a kernel executes here; all four fields are shown wherever a result is shown."""

    name: str
    """E.g. ``python``, ``cuda``, ``cuda-on-cpu``, ``amx``, ``triton-interpreter``."""
    implementation: Literal["ours", "vendor"] = "ours"
    """Whose code runs: this package's or the user's own (``ours``), or an upstream library's."""
    execution: Literal["hardware", "emulated"] = "hardware"
    """``emulated``: instructions, grid or operators are executed by software."""
    fidelity: Literal["bit_exact", "semantic"] = "bit_exact"
    """``semantic`` where the hardware's order of operations is not documented."""


@dataclass(frozen=True, slots=True)
class Support:
    """Answer to "can this run?"; the reason is always given.

    >>> bool(Support(False, "no GPU"))
    False
    """

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        """Whether it can."""
        return self.ok


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """What a kernel is asked to implement."""

    n: int
    """Output features."""
    k: int
    """Input features."""
    format: str
    """Name of the weight's number format."""
    bias: bool
    """Whether a bias [N] is added."""
    activation_dtype: torch.dtype
    """Dtype of x and y."""
    groups: int | None = None
    """G of a batched linear: x [G, M, K], weight [G, N, K], y [G, M, N]; None: a plain one."""
    module: str = ""
    """Path of the layer in its model; empty where it is in none."""
    activation_scheme: str = ""
    """What the checkpoint asks of activations, ``none``, ``dynamic`` or ``static``; empty where
    there is no checkpoint."""


@runtime_checkable
class Kernel(Protocol):
    """A linear kernel y = x W^T (+ b) over quantised weights.

    ``apply`` takes x of any leading shape [..., K] and returns a new tensor [..., N]; it leaves
    x and the prepared weight as they were. Of a batched linear (`LinearSpec.groups`) it takes
    x [G, M, K], a strided view, and bias [G, N], and returns [G, M, N]. A call that the kernel does
    not implement raises NotImplementedError. It never falls back to other code unseen: one that
    does so says it with `fell_back`.

    An optional attribute ``launches``, the number of times that its own code was started, is
    compared before and after each call: one that did not raise it fell back.
    """

    @property
    def name(self) -> str:
        """Registered name, e.g. ``ternary_cuda.naive``."""

    @property
    def contract(self) -> Contract | None:
        """Promised arithmetic, or None where nothing is declared."""

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Every way to execute, preferred first."""

    @property
    def formats(self) -> tuple[str, ...] | None:
        """Names of the formats it reads; None: any."""

    def is_supported(self, engine: Engine) -> Support:
        """Whether ``engine`` runs on this machine, and why (not)."""

    def can_implement(self, spec: LinearSpec) -> Support:
        """Whether this layer can be computed, and why (not)."""

    def prepare(self, weight: Any, engine: Engine) -> Any:  # noqa: ANN401
        """The weight as ``apply`` wants it (repacked, moved), opaque to the caller.

        It comes as a `QuantizedWeight`, unquantised as a tensor [N, K]; of a batched linear as a
        `GroupedWeight`, unquantised as a tensor [G, N, K].
        """

    def apply(self, x: Tensor, prepared: Any, bias: Tensor | None = None) -> Tensor:  # noqa: ANN401
        """Y [..., N] for x [..., K]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The weight after one step of a kernel's loading, for inspection.

    A kernel with a method ``stages(weight, engine)`` that yields these, in order, has every step
    compared with the reference's and shown as a row of level ``stage``. ``resolve`` and
    ``requantise`` are the steps that a contract declares; a step of another name must not change
    a value. Of a batched linear each group is asked for by itself, under the name ``MODULE.g``.
    """

    name: str
    """E.g. ``resolve``, ``requantise``, ``repack``, ``persist``."""
    values: Tensor
    """What the weight is worth now, [N, K], in a dtype that holds it exactly."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the report says besides, e.g. dtype and layout."""
    fault: str = ""
    """What the step broke besides values, e.g. a buffer that moved; empty: nothing."""
    fell_back: str = ""
    """Why the declared steps that are left do not follow: other code runs on the weight as it is
    now. Empty: they do."""


PYTHON = Engine("python")
"""The engine of a plain function."""


@dataclass(frozen=True, slots=True)
class FunctionKernel:
    """A function ``f(x, weight, bias=None) -> y`` as a kernel.

    Optional attributes of f: ``contract``; ``prepare(weight) -> prepared``, after which f is
    called as ``f(x, prepared, bias)``; ``formats``, the names of the formats that it reads.
    """

    name: str
    function: Callable[..., Tensor]

    @property
    def contract(self) -> Contract | None:
        """``function.contract`` or None."""
        return getattr(self.function, "contract", None)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Only ``python``."""
        return (PYTHON,)

    @property
    def formats(self) -> tuple[str, ...] | None:
        """``function.formats`` or None."""
        return getattr(self.function, "formats", None)

    def is_supported(self, engine: Engine) -> Support:
        """A function runs wherever Python does."""
        return Support(engine == PYTHON, "a plain Python function")

    def can_implement(self, spec: LinearSpec) -> Support:
        """A function declines by raising NotImplementedError when it is called."""
        return Support(True, f"a function is asked by calling it (N={spec.n}, K={spec.k})")

    def prepare(self, weight: QuantizedWeight, engine: Engine) -> Any:  # noqa: ANN401, ARG002
        """``function.prepare(weight)`` where there is one, else the weight itself."""
        prepare = getattr(self.function, "prepare", None)
        return weight if prepare is None else prepare(weight)

    def apply(self, x: Tensor, prepared: Any, bias: Tensor | None = None) -> Tensor:  # noqa: ANN401
        """Call the function; the bias is passed only where the layer has one."""
        return self.function(x, prepared) if bias is None else self.function(x, prepared, bias)


def routes(kernel: Kernel, specs: Iterable[LinearSpec], engine: Engine | None) -> tuple[str, ...]:
    """What a kernel that chooses among others chose, and why not those before it.

    Such a kernel has a method ``route(spec, engine) -> str``; the layers with the same answer are
    counted together. Empty for any other kernel.
    """
    route = getattr(kernel, "route", None)
    if route is None or engine is None:
        return ()
    counts = Counter(str(route(spec, engine)) for spec in specs)
    return tuple(f"{text} ({count} layers)" for text, count in counts.items())


def choose_engine(kernel: Kernel, wanted: str) -> tuple[Engine | None, str]:
    """The engine to use and a note for the report, or None and why none runs here.

    ``wanted`` is an engine's name, ``auto`` (the first that runs here), ``hardware``,
    ``emulated`` or ``vendor`` (the first of that kind).
    """
    kinds = ("hardware", "emulated", "vendor")
    names = [engine.name for engine in kernel.engines]
    if wanted == "auto":
        pool = kernel.engines
    elif wanted in kinds:
        pool = tuple(e for e in kernel.engines if wanted in (e.execution, e.implementation))
    elif wanted in names:
        pool = tuple(e for e in kernel.engines if e.name == wanted)
    else:
        raise KernelError(
            f"{kernel.name} has no engine {wanted!r}: {nearest(wanted, [*names, *kinds, 'auto'])}"
        )
    refusals: list[str] = []
    for engine in pool:
        try:
            support = kernel.is_supported(engine)
        except Exception as error:  # noqa: BLE001 - a user's kernel may raise anything
            support = Support(False, f"is_supported raised {type(error).__name__}: {error}")
        if support:
            before = f" ({'; '.join(refusals)})" if refusals else ""
            how = f": {support.reason}" if support.reason else ""
            return engine, f"{kernel.name} runs on {engine.name} (asked: {wanted}){before}{how}"
        refusals.append(f"{engine.name}: {support.reason}")
    return None, "; ".join(refusals) or f"{kernel.name} has no engine of kind {wanted}"
