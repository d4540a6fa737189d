"""What somebody may have computed instead of a linear, as a value that can be evaluated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from reconcile.contract import Contract
from reconcile.linears import operand
from reconcile.numbers.limits import error_bound

Map = Callable[[Tensor], Tensor]


class Sum(Protocol):
    """An order of summation with its roundings."""

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        """Operands [M, K] and weight [N, K], float64, to sums [M, N]."""

    def single(self, y: Tensor) -> Tensor:
        """What becomes of sums [M, N] of one product each."""


@dataclass(frozen=True, slots=True)
class Impulses:
    """Rows of the identity times a size each."""

    columns: Tensor
    """[C] the k of each."""
    sizes: Tensor
    """[C] in the activations' dtype."""
    step: int
    """How many were sent in one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearModel:
    """One reading of y = store(x W^T + b), right or wrong.

    The right one is the reference; a hypothesis is a model that differs in one of the fields.
    """

    weight: Tensor
    """Effective weight, float64 [N, K]."""
    bias: Tensor | None
    """float64 [N] or None."""
    contract: Contract
    """Arithmetic for this number of rows: the bound and the store follow from it."""
    quantise: Map | None = None
    """x to the operands of the products, where it is not the contract's quantiser."""
    accumulate: Sum | None = None
    """Where the order of summation is part of the hypothesis; exact up to float32."""
    before_bias: Map | None = None
    """Rounding of the sum before the bias is added, float64 to float64."""
    after: Map | None = None
    """Applied to the exact [M, N] before the store: a misplaced row, a dropped tail."""
    rows_only: bool = False
    """Whether it says nothing of other calls, such as those that read the impulses."""
    store: Map | None = None
    """The output's rounding, float64 to float64, where it is not the contract's."""

    def operands(self, x: Tensor) -> Tensor:
        """The rows [M, K] as the products see them, float64."""
        if self.quantise is not None:
            return self.quantise(x).double()
        return operand(x, self.contract).double()

    def exact(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Y before the store and the bound on how far legal arithmetic may be from it, [M, N]."""
        rows = self.operands(x)
        size = rows.abs() @ self.weight.abs().T
        if self.accumulate is not None:
            y = self.accumulate(rows, self.weight)
            bound = 2.0**-22 * size
        else:
            y = rows @ self.weight.T
            bound = self._bound(y, size, x.shape[-1])
        if self.before_bias is not None:
            y = self.before_bias(y)
        if self.bias is not None:
            y = y + self.bias
        return self._changed(y, bound, len(y))

    def _bound(self, y: Tensor, size: Tensor, products: int) -> Tensor:
        if self.bias is not None:
            size = size + self.bias.abs()
        bound = error_bound(self.contract, y, size, products, "float64")
        return torch.where(bound.isfinite(), bound, 0.0)  # an infinity has no neighbourhood

    def impulse(self, given: Impulses) -> tuple[Tensor, Tensor]:
        """The same for rows a_i times row k_i of the identity, as [C, N].

        A row of the weight that is not finite spoils its output for every impulse.
        """
        weight = self.weight[:, given.columns]
        spoilt = ~torch.isfinite(self.weight).all(1)
        y = self.amplitudes(given)[:, None] * weight.T
        if bool(spoilt.any()):
            y[:, spoilt] = torch.where(
                y[:, spoilt].isinf() & (torch.isfinite(self.weight[spoilt]).sum(1) == 1),
                y[:, spoilt],
                torch.nan,
            )
        if self.accumulate is not None:
            y = self.accumulate.single(y)
        if self.before_bias is not None:
            y = self.before_bias(y)
        one = torch.ones((), dtype=torch.float64)
        least = error_bound(self.contract, 0 * one, 0 * one, 1, "float64")
        bound = y.abs() * (error_bound(self.contract, one, one, 1, "float64") - least) + least
        return self._changed(y, bound, given.step)

    def _changed(self, y: Tensor, bound: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Middle and half of the interval after the outputs of each call of ``step`` rows moved."""
        if self.after is None:
            return y, bound
        low, high = (
            torch.cat([self.after(part) for part in torch.split(end, step)])
            for end in (y - bound, y + bound)
        )
        return (low + high) / 2, (high - low) / 2

    def amplitudes(self, given: Impulses) -> Tensor:
        """Sizes of the impulses as the products see them, float64 [C]."""
        if self.quantise is None and self.contract.activation == "none":
            return given.sizes.double()
        rows = torch.zeros(len(given.sizes), 32, dtype=given.sizes.dtype)
        rows[:, 0] = given.sizes
        return torch.cat([self.operands(part)[:, 0] for part in torch.split(rows, given.step)])


@dataclass(frozen=True, slots=True)
class Fit:
    """A hypothesis whose free parameters were solved for."""

    name: str
    """Name of the diagnosis."""
    model: LinearModel
    """What it says was computed."""
    text: str
    """The same in words."""
    parameters: dict[str, Any] = field(default_factory=dict)
    free: int = 0
    """Number of fitted parameters: the fewer, the more an equal explanation says."""
