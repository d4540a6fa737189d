"""An ordered table of kernels: the first that runs here and can compute the layer is taken.

vLLM chooses its linear kernels so (`vllm/model_executor/kernels/linear/__init__.py`). What makes
such a table dangerous is that it never fails: a layer that the intended kernel refuses goes to
another one, whose semantics may differ. Here every rejection is kept with its reason, the choice
for each layer stands in the report, and a result of other semantics than the table's first kernel
declares is a fallback: INCONCLUSIVE, whatever its numbers are.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from reconcile.contract import Contract
from reconcile.exceptions import KernelError
from reconcile.fallback import fell_back
from reconcile.kernel import Engine, Kernel, LinearSpec, Support
from reconcile.weight import QuantizedWeight
from reconcile_kernels.amx_fp8 import W8A16
from reconcile_kernels.torch_w8a8 import TORCH_W8A8


@dataclass(frozen=True, slots=True)
class Choice:
    """What a table chose for a layer, or that there is nothing to choose."""

    kernel: Kernel | None
    engine: Engine | None
    rejected: tuple[tuple[str, str], ...]
    """Name and reason of every candidate before it (of all, where there is none)."""

    @property
    def text(self) -> str:
        """One line for a report."""
        why = "; ".join(f"{name} rejected: {reason}" for name, reason in self.rejected)
        if self.kernel is None or self.engine is None:
            return f"no kernel: {why}"
        return f"{self.kernel.name} on {self.engine.name}{f' ({why})' if why else ''}"


@dataclass(frozen=True, slots=True)
class Routed:
    """A weight that the chosen kernel prepared."""

    kernel: Kernel
    prepared: Any
    fallback: str
    """Why its results are not those of the table's first kernel; empty where they are."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A table of kernels as one kernel; it promises what its first candidate promises."""

    name: str
    candidates: tuple[Kernel, ...]

    @property
    def contract(self) -> Contract | None:
        """The first candidate's."""
        return self.candidates[0].contract

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Those of all candidates, in order."""
        return tuple(dict.fromkeys(e for kernel in self.candidates for e in kernel.engines))

    @property
    def formats(self) -> tuple[str, ...] | None:
        """What any candidate reads."""
        known = [kernel.formats for kernel in self.candidates]
        if None in known:
            return None
        return tuple(dict.fromkeys(name for names in known for name in names or ()))

    def is_supported(self, engine: Engine) -> Support:
        """Whether a candidate runs on ``engine`` here."""
        answers = [
            (kernel, kernel.is_supported(engine))
            for kernel in self.candidates
            if engine in kernel.engines
        ]
        for kernel, support in answers:
            if support:
                return Support(True, f"{kernel.name}: {support.reason}")
        reasons = "; ".join(f"{kernel.name}: {support.reason}" for kernel, support in answers)
        return Support(False, reasons or f"{self.name} has no engine {engine.name!r}")

    def can_implement(self, spec: LinearSpec) -> Support:
        """Whether any candidate that runs here takes the layer."""
        choice = self.choose(spec)
        return Support(choice.kernel is not None, choice.text)

    def choose(self, spec: LinearSpec, engine: Engine | None = None) -> Choice:
        """The first candidate that runs here and takes the layer.

        Args:
            spec: the layer.
            engine: where a candidate has it, it is not run on another.
        """
        rejected: list[tuple[str, str]] = []
        for kernel in self.candidates:
            found, reason = _engine_of(kernel, engine)
            support = kernel.can_implement(spec) if found else Support(False, reason)
            if found and support:
                return Choice(kernel, found, tuple(rejected))
            rejected.append((kernel.name, support.reason))
        return Choice(None, None, tuple(rejected))

    def route(self, spec: LinearSpec, engine: Engine) -> str:
        """The choice in words, for the report's notices."""
        choice = self.choose(spec, engine)
        other = self._other_semantics(choice)
        return f"{self.name}: {choice.text}{f'; other semantics: {other}' if other else ''}"

    def prepare(self, weight: QuantizedWeight, engine: Engine) -> Routed:
        """Let the chosen candidate prepare the weight.

        Raises:
            KernelError: no candidate takes the layer; every reason is given.
        """
        assert self.contract is not None
        spec = LinearSpec(
            n=weight.shape[0],
            k=weight.shape[1],
            format=weight.format.name,
            bias=weight.bias is not None,
            activation_dtype=self.contract.output_dtype,
        )
        choice = self.choose(spec, engine)
        if choice.kernel is None or choice.engine is None:
            raise KernelError(f"{weight.name or 'weight'}: {choice.text}")
        other = self._other_semantics(choice)
        return Routed(
            kernel=choice.kernel,
            prepared=choice.kernel.prepare(weight, choice.engine),
            fallback=f"{choice.text}; other semantics: {other}" if other else "",
        )

    def apply(self, x: Tensor, prepared: Routed, bias: Tensor | None = None) -> Tensor:
        """Y of the chosen candidate; a result of other semantics is said to be a fallback."""
        if prepared.fallback:
            fell_back(prepared.fallback)
        return prepared.kernel.apply(x, prepared.prepared, bias)

    def _other_semantics(self, choice: Choice) -> str:
        """What the chosen contract declares otherwise than the first one."""
        if choice.kernel is None:
            return ""
        mine, theirs = self.contract, choice.kernel.contract
        if mine is None or theirs is None:
            return "" if mine == theirs else "no contract is declared"
        return ", ".join(
            f"{field.name} {getattr(theirs, field.name)} instead of {getattr(mine, field.name)}"
            for field in fields(Contract)
            if field.name in SEMANTICS and getattr(mine, field.name) != getattr(theirs, field.name)
        )


SEMANTICS = ("activation", "weight_rounding")
"""Fields of a contract that say what is computed; the others say how well."""


def _engine_of(kernel: Kernel, wanted: Engine | None) -> tuple[Engine | None, str]:
    """The engine for a candidate: the wanted one where it has it, else its first that runs."""
    pool = (wanted,) if wanted in kernel.engines else kernel.engines
    reasons = []
    for engine in pool:
        assert engine is not None
        support = kernel.is_supported(engine)
        if support:
            return engine, ""
        reasons.append(f"{engine.name}: {support.reason}")
    return None, "; ".join(reasons)


FP8 = Dispatch("fp8_dispatch", (W8A16, TORCH_W8A8))
"""FP8 linears on a CPU: unquantised activations first, quantised ones where that is refused."""
