"""A kernel where it was measured to be faster, torch's dense linear elsewhere.

The route is by the number of rows, from a table of `reconcile bench` for this very shape, dtype,
device and number of threads; nothing is guessed for others. What changes with the route is in the
contract (``by_batch``), so that both sides of a crossover are judged by their own arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from reconcile.bench.crossover import DENSE, Crossovers, Measurement, spans_text
from reconcile.bench.timing import setting
from reconcile.contract import Contract
from reconcile.exceptions import KernelError
from reconcile.kernel import Engine, Kernel, LinearSpec, Support
from reconcile.rounding import round_to
from reconcile.weight import QuantizedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class Both:
    """A weight as the two paths want it; None for a path that the table never takes."""

    packed: Any
    dense: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """``kernel`` or the dense path, for layers of the shape that was measured."""

    kernel: Kernel
    measurement: Measurement

    @property
    def name(self) -> str:
        """The kernel's name, with what was added."""
        return f"{self.kernel.name} routed"

    @property
    def contract(self) -> Contract:
        """Each path's own arithmetic for the numbers of rows that take it."""
        spans = self.measurement.spans()
        alone = len(spans) == 1
        contracts = [replace(self._of(path), batch_invariant=alone) for _, path in spans]
        ends = [start - 1 for start, _ in spans[1:]]
        return replace(contracts[-1], by_batch=tuple(zip(ends, contracts[:-1], strict=True)))

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engine that was measured."""
        return tuple(e for e in self.kernel.engines if e.name == self.measurement.engine)

    @property
    def formats(self) -> tuple[str, ...] | None:
        """The kernel's."""
        return self.kernel.formats

    def is_supported(self, engine: Engine) -> Support:
        """Whether the kernel runs here, in the setting that was measured."""
        s = self.measurement.setting
        now = setting(s.n, s.k, self._dtype, "cuda" if engine.name == "cuda" else "cpu")
        if engine not in self.engines or now != s:
            return Support(False, f"measured on {self.measurement.engine} in {s}, this is {now}")
        return self.kernel.is_supported(engine)

    def can_implement(self, spec: LinearSpec) -> Support:
        """Whether the layer has the shape and dtype that were measured."""
        s = self.measurement.setting
        if (spec.n, spec.k, spec.activation_dtype) != (s.n, s.k, self._dtype):
            return Support(
                False, f"{self.name}: measured for N={s.n}, K={s.k}, {s.dtype}, not for {spec}"
            )
        return self.kernel.can_implement(spec)

    def route(self, spec: LinearSpec, engine: Engine) -> str:  # noqa: ARG002
        """What is taken from which number of rows on, for a report."""
        return spans_text(self.measurement.spans())

    def prepare(self, weight: QuantizedWeight, engine: Engine) -> Both:
        """What the paths of the table need, and no more."""
        paths = {path for _, path in self.measurement.spans()}
        packed = self.kernel.prepare(weight, engine) if self.kernel.name in paths else None
        if DENSE not in paths:
            return Both(packed=packed, dense=None)
        device = "cuda" if engine.name == "cuda" else "cpu"
        return Both(
            packed=packed,
            dense=round_to(weight.dequantize(torch.float64), self._dtype).to(device),
        )

    def apply(self, x: Tensor, prepared: Both, bias: Tensor | None = None) -> Tensor:
        """Y [..., N] by the path that was faster for this number of rows."""
        if x.dtype != self._dtype:
            raise NotImplementedError(f"{self.name}: x must be {self._dtype}, got {x.dtype}")
        rows = x.numel() // max(1, x.shape[-1])
        if self.measurement.path(rows) != DENSE:
            return self.kernel.apply(x, prepared.packed, bias)
        assert prepared.dense is not None
        return linear(x, prepared.dense, None if bias is None else bias.to(x.dtype))

    @property
    def _dtype(self) -> torch.dtype:
        found = getattr(torch, self.measurement.setting.dtype)
        assert isinstance(found, torch.dtype)
        return found

    def _of(self, path: str) -> Contract:
        dtype = self.measurement.setting.dtype
        if path != DENSE:
            return self.kernel.contract or Contract(output=dtype)
        return Contract(weight_rounding=dtype, output=dtype, flush_subnormals=dtype == "bfloat16")


def route(
    kernel: Kernel, table: Crossovers, n: int, k: int, dtype: torch.dtype, device: str = "cpu"
) -> Routed:
    """``kernel`` routed for a layer by its measurement in the present setting.

    Raises:
        KernelError: not measured so; the message says by which command it is.
    """
    wanted = setting(n, k, dtype, device)
    found = table.find(kernel.name, wanted)
    if found is None:
        raise KernelError(
            f"{kernel.name} was not measured for {wanted}: run `reconcile bench --kernel "
            f"{kernel.name} --shape {n}x{k} --dtype {wanted.dtype} --threads {wanted.threads}`"
        )
    return Routed(kernel=kernel, measurement=found)
