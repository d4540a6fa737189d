"""The linears that take a quantised layer's place: reference, baseline and candidate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from reconcile.activation import QUANTISERS
from reconcile.contract import DTYPES, Contract
from reconcile.exceptions import KernelError
from reconcile.numbers import mx
from reconcile.rounding import round_to

SMALLEST_NORMAL = 2.0**-126
"""Smallest normal float32 and bfloat16; below it, units that flush see zero."""


_withheld: ContextVar[bool] = ContextVar("reference_withheld", default=False)


@contextmanager
def reference_withheld() -> Iterator[None]:
    """While a kernel runs, the reference that judges it raises: nobody is its own judge."""
    token = _withheld.set(True)
    try:
        yield
    finally:
        _withheld.reset(token)


class Weight(Protocol):
    """What a reference linear needs of a weight: `QuantizedWeight` or `DenseWeight`."""

    @property
    def shape(self) -> tuple[int, int]:
        """Logical (N, K)."""

    @property
    def bias(self) -> Tensor | None:
        """[N] or None."""

    def dequantize(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Values [N, K]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseWeight:
    """A plain floating-point weight [N, K]; its kernel gets the tensor itself."""

    tensor: Tensor
    name: str = ""
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Logical (N, K)."""
        return self.tensor.shape[0], self.tensor.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The tensor in ``dtype``."""
        return round_to(self.tensor.to(torch.float64), dtype)


def reference_weight(weight: Weight, contract: Contract, dtype: torch.dtype) -> Tensor:
    """Decoded weight [N, K] in ``dtype`` after what the contract declares is done to it.

    A declared rounding starts from the float32 product code * scale, as kernels compute it; a
    declared quantiser follows it.
    """
    return list(weight_chain(weight, contract).values())[-1].to(dtype)


def weight_chain(weight: Weight, contract: Contract) -> dict[str, Tensor]:
    """The weight, float64 [N, K], after each step from the checkpoint to the product.

    ``decode``: exactly as stored; ``resolve``: rounded as declared; ``requantise``: quantised
    as declared. The last one is what the kernel multiplies by.
    """
    chain = {"decode": weight.dequantize(torch.float64)}
    if contract.weight_requantised is not None and is_mx(weight):
        return chain
    if contract.weight_rounding is not None:
        product = chain["decode"].to(torch.float32).to(torch.float64)
        chain["resolve"] = round_to(product, DTYPES[contract.weight_rounding]).to(torch.float64)
    if contract.weight_requantised is not None:
        latest = list(chain.values())[-1]
        rule = mx.named(contract.weight_requantised)
        chain["requantise"] = mx.quantise(latest, rule).dequantize()
    return chain


def is_mx(weight: Weight) -> bool:
    """Whether a weight is stored with one E8M0 byte per 32 values of K."""
    form = getattr(weight, "format", None)
    return form is not None and (form.block, form.scale_encoding) == ((1, 32), "e8m0")


def operand(x: Tensor, contract: Contract) -> Tensor:
    """X after the declared quantiser, and with subnormals as zeros where that is declared (DAZ).

    The quantiser's float32 is meant: no mode that keeps a model in float64 reaches into it.
    """
    if contract.activation != "none":
        with _disable_current_modes():
            x = QUANTISERS[contract.activation](x)
    if contract.flush_subnormals:
        x = torch.where(x.abs() < SMALLEST_NORMAL, 0.0, x)
    return x


def _has_subnormals(weight: Tensor) -> bool:
    size = weight.abs()
    return bool(((size > 0) & (size < SMALLEST_NORMAL)).any())


class ReferenceLinear(nn.Module):
    """y = x W^T (+ b) in the reference's dtype under the contract that holds for M rows.

    x [..., K] of any floating dtype is widened exactly; y [..., N].
    """

    def __init__(self, weight: Weight, contract: Contract, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._contract = contract
        self._bias = None if weight.bias is None else weight.bias.to(dtype)
        regimes = (contract, *(regime for _, regime in contract.by_batch))
        self._decoded = {
            _treatment(regime): reference_weight(weight, regime, dtype) for regime in regimes
        }
        self._has_subnormals = any(map(_has_subnormals, self._decoded.values()))

    def forward(self, x: Tensor) -> Tensor:
        """The exact layer, up to the rounding of ``dtype``."""
        return functional.linear(self._operand(x), self.effective(_rows(x)), self._bias)

    def effective(self, m: int) -> Tensor:
        """The weight [N, K] that a call with ``m`` rows multiplies by.

        Raises:
            KernelError: a kernel asks while it is judged (`reference_withheld`).
        """
        if _withheld.get():
            raise KernelError("a kernel called the reference that judges it")
        return self._decoded[_treatment(self._contract.at(m))]

    def magnitude(self, x: Tensor) -> Tensor:
        """S = sum_k |x_k| |w_k| (+ |b|), [..., N]: the yardstick of the bound."""
        bias = None if self._bias is None else self._bias.abs()
        return functional.linear(self._operand(x).abs(), self.size(_rows(x)), bias)

    def size(self, m: int) -> Tensor:
        """|W| [N, K] of a call with ``m`` rows, as the bound counts it.

        A weight that is subnormal in float32 counts as the smallest normal: the product of code
        and scale is rounded as if it were.
        """
        size = self.effective(m).abs()
        if not self._has_subnormals:
            return size
        return torch.where(size > 0, size.clamp_min(SMALLEST_NORMAL), size)

    def _operand(self, x: Tensor) -> Tensor:
        """X as the contract's products see it, in the reference's dtype."""
        return operand(x, self._contract.at(_rows(x))).to(self.dtype)


class BaselineLinear(nn.Module):
    """Plain torch at the candidate's dtype on the same decoded weights and quantised inputs."""

    def __init__(
        self, weight: Weight, dtype: torch.dtype, contract: Contract | None = None
    ) -> None:
        super().__init__()
        self._contract = contract or Contract()
        self.weight: Tensor
        self.bias: Tensor | None
        decoded = round_to(reference_weight(weight, self._contract, torch.float64), dtype)
        self.register_buffer("weight", decoded, persistent=False)
        bias = None if weight.bias is None else weight.bias.to(dtype)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        x = round_to(operand(x, self._contract.at(_rows(x))), self.weight.dtype)
        return functional.linear(x, self.weight, self.bias)


def _treatment(contract: Contract) -> tuple[str | None, str | None]:
    """What of a contract changes the weight."""
    return contract.weight_rounding, contract.weight_requantised


def _rows(x: Tensor) -> int:
    return x.numel() // max(1, x.shape[-1])
