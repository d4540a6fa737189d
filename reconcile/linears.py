"""The linears that take a quantised layer's place: reference, baseline and candidate."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from reconcile.contract import DTYPES, Contract
from reconcile.rounding import round_to
from reconcile.weight import QuantizedWeight


def reference_weight(weight: QuantizedWeight, contract: Contract, dtype: torch.dtype) -> Tensor:
    """Decoded weight [N, K] in ``dtype`` after the rounding that the contract declares."""
    decoded = weight.dequantize(torch.float64)
    if contract.weight_rounding is not None:
        decoded = round_to(decoded, DTYPES[contract.weight_rounding]).to(torch.float64)
    return decoded.to(dtype)


class ReferenceLinear(nn.Module):
    """y = x W^T (+ b) in the reference's dtype under the contract that holds for M rows.

    x [..., K] of any floating dtype is widened exactly; y [..., N].
    """

    def __init__(self, weight: QuantizedWeight, contract: Contract, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._contract = contract
        self._bias = None if weight.bias is None else weight.bias.to(dtype)
        regimes = (contract, *(regime for _, regime in contract.by_batch))
        self._decoded = {
            regime.weight_rounding: reference_weight(weight, regime, dtype) for regime in regimes
        }

    def _at(self, m: int) -> Tensor:
        return self._decoded[self._contract.at(m).weight_rounding]

    def forward(self, x: Tensor) -> Tensor:
        """The exact layer, up to the rounding of ``dtype``."""
        return functional.linear(x.to(self.dtype), self._at(_rows(x)), self._bias)

    def magnitude(self, x: Tensor) -> Tensor:
        """S = sum_k |x_k| |w_k| (+ |b|), [..., N]: the yardstick of the bound."""
        bias = None if self._bias is None else self._bias.abs()
        return functional.linear(x.to(self.dtype).abs(), self._at(_rows(x)).abs(), bias)


class BaselineLinear(nn.Module):
    """Plain torch at the candidate's dtype on the same decoded weights."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight: Tensor
        self.bias: Tensor | None
        decoded = round_to(weight.dequantize(torch.float64), dtype)
        self.register_buffer("weight", decoded, persistent=False)
        bias = None if weight.bias is None else weight.bias.to(dtype)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        return functional.linear(x, self.weight, self.bias)


def _rows(x: Tensor) -> int:
    return x.numel() // max(1, x.shape[-1])
