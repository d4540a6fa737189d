"""Declared maps from one engine's taps to another's.

Engines fuse and flatten: one `qkv_proj` where the reference has three linears, tokens of all
requests in one dimension, a residual that the next layer adds. Each rule here says so
explicitly and is invertible; nothing is guessed from names or shapes. A rule that finds only a
part of what it needs is an error, and a tap that no rule names keeps its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from reconcile.exceptions import TraceError
from reconcile.tracing.trace import Pass, Trace

Tensors = Mapping[str, Tensor]
Make = Callable[[list[Tensor]], dict[str, Tensor]]


class Rule(Protocol):
    """One step of a mapping, from the candidate's taps to the reference's."""

    def apply(self, tensors: Tensors) -> dict[str, Tensor]:
        """Tensors under the reference's taps, in the same order."""

    def invert(self, tensors: Tensors) -> dict[str, Tensor]:
        """What `apply` was given."""


@dataclass(frozen=True, slots=True)
class Rename:
    """One tap under another name."""

    source: str
    target: str

    def apply(self, tensors: Tensors) -> dict[str, Tensor]:
        """``source`` becomes ``target``."""
        return _replaced(tensors, (self.source,), lambda found: {self.target: found[0]})

    def invert(self, tensors: Tensors) -> dict[str, Tensor]:
        """``target`` becomes ``source``."""
        return Rename(self.target, self.source).apply(tensors)


@dataclass(frozen=True, slots=True)
class Split:
    """A fused output cut along its last dimension: `qkv_proj` into q, k and v."""

    source: str
    targets: tuple[tuple[str, int], ...]
    """(tap, width) of each part, in the order in which they are concatenated."""

    def apply(self, tensors: Tensors) -> dict[str, Tensor]:
        """``source`` becomes its parts; TraceError where the widths do not add up."""

        def cut(found: list[Tensor]) -> dict[str, Tensor]:
            widths = [width for _, width in self.targets]
            if found[0].shape[-1] != sum(widths):
                raise TraceError(
                    f"{self.source}: expected a last dimension of {sum(widths)} = "
                    f"{' + '.join(map(str, widths))}, got {list(found[0].shape)}"
                )
            parts = torch.split(found[0], widths, dim=-1)
            return {tap: part for (tap, _), part in zip(self.targets, parts, strict=True)}

        return _replaced(tensors, (self.source,), cut)

    def invert(self, tensors: Tensors) -> dict[str, Tensor]:
        """The parts become ``source`` again."""
        taps = tuple(tap for tap, _ in self.targets)
        return _replaced(tensors, taps, lambda found: {self.source: torch.cat(found, dim=-1)})


@dataclass(frozen=True, slots=True)
class AddResidual:
    """A layer that returns (hidden, residual) and leaves the sum to the next one.

    The sum is rounded to the tensors' dtype, as the next layer's fused add does. ``residual``
    keeps its tap, so that the rule can be inverted where the sum is exact.
    """

    hidden: str
    residual: str
    target: str

    def apply(self, tensors: Tensors) -> dict[str, Tensor]:
        """``hidden`` becomes ``target`` = hidden + residual."""
        if self.residual not in tensors:
            raise TraceError(f"{self.target}: its residual {self.residual} was not captured")
        residual = tensors[self.residual]
        return _replaced(tensors, (self.hidden,), lambda found: {self.target: found[0] + residual})

    def invert(self, tensors: Tensors) -> dict[str, Tensor]:
        """``target`` becomes ``hidden`` = target - residual, in their dtype."""
        if self.residual not in tensors:
            raise TraceError(f"{self.hidden}: its residual {self.residual} was not captured")
        residual = tensors[self.residual]
        return _replaced(tensors, (self.target,), lambda found: {self.hidden: found[0] - residual})


@dataclass(frozen=True, slots=True)
class Unflatten:
    """Tokens [T, C] of one request as [1, T, C], with padding rows dropped."""

    tap: str
    tokens: int
    """Number T of real tokens; rows beyond are padding."""

    def apply(self, tensors: Tensors) -> dict[str, Tensor]:
        """[T', C] becomes [1, T, C]; TraceError where there are fewer than T rows."""

        def shaped(found: list[Tensor]) -> dict[str, Tensor]:
            if found[0].dim() != 2 or found[0].shape[0] < self.tokens:
                raise TraceError(
                    f"{self.tap}: expected at least {self.tokens} rows in two dimensions, got "
                    f"{list(found[0].shape)}"
                )
            return {self.tap: found[0][: self.tokens].unsqueeze(0)}

        return _replaced(tensors, (self.tap,), shaped)

    def invert(self, tensors: Tensors) -> dict[str, Tensor]:
        """[1, T, C] becomes [T, C]; the padding is gone."""
        return _replaced(tensors, (self.tap,), lambda found: {self.tap: found[0].squeeze(0)})


def map_trace(trace: Trace, rules: Iterable[Rule]) -> Trace:
    """The trace under the reference's taps; rules are applied in order to every pass."""
    steps = tuple(rules)

    def mapped(item: Pass) -> Pass:
        tensors: Mapping[str, Tensor] = item.tensors
        for rule in steps:
            tensors = rule.apply(tensors)
        return replace(item, tensors=tensors, strides={})

    return replace(trace, passes=[mapped(item) for item in trace.passes])


def _replaced(tensors: Tensors, sources: tuple[str, ...], make: Make) -> dict[str, Tensor]:
    """``tensors`` with ``sources`` replaced, at the first one's place, by what ``make`` gives."""
    missing = [tap for tap in sources if tap not in tensors]
    if missing:
        raise TraceError(f"the mapping needs {', '.join(missing)}, which was not captured")
    made = make([tensors[tap] for tap in sources])
    kept = [tap for tap in tensors if tap not in sources]
    if clash := sorted(set(made) & set(kept)):
        raise TraceError(f"the mapping gives {', '.join(clash)}, which already exists")
    result: dict[str, Tensor] = {}
    for tap, tensor in tensors.items():
        if tap == sources[0]:
            result.update(made)
        elif tap not in sources:
            result[tap] = tensor
    return result
