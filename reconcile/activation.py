"""Activation quantisers that a contract can declare, with the arithmetic that defines them.

A quantiser is discontinuous: an input moved by one ulp can get another code. The reference
therefore applies the declared arithmetic, operation by operation, in float32, and what it gives
is exact from there on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from reconcile.contract import MX
from reconcile.numbers import mx

Quantiser = Callable[[Tensor], Tensor]
"""x [..., K] of any floating dtype to the values that its codes stand for, float64 [..., K]."""


def per_token_int8(x: Tensor) -> Tensor:
    """Symmetric int8 per row: a = max(max|x|, 1e-7), q = rne(x * (127 / a)), value q * (a / 127).

    Source: vLLM csrc/cpu/sgl-kernels gemm_int8.cpp (the vector path).
    """
    wide = x.to(torch.float32)
    amax = wide.abs().amax(-1, keepdim=True).clamp_min(1e-7)
    largest = torch.full_like(amax, 127.0)  # a Python scalar over a tensor would be a reciprocal
    codes = torch.round(wide * (largest / amax)).clamp(-128, 127)
    return _spoilt_as(x, codes.to(torch.float64) * (amax / largest).to(torch.float64))


def per_token_fp8(x: Tensor) -> Tensor:
    """E4M3 per row: s = max(max|x| / 448, 1 / (448 * 512)), q = rne(x / s) saturating at 448.

    Source: vLLM csrc/cpu/fp8_quant.cpp (dynamic, per token).
    """
    wide = x.to(torch.float32)
    amax = wide.abs().amax(-1, keepdim=True)
    scale = (amax / torch.full_like(amax, 448.0)).clamp_min(1.0 / (448.0 * 512.0))
    codes = (wide / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return _spoilt_as(x, codes.to(torch.float64) * scale.to(torch.float64))


def mxfp8(x: Tensor, name: str = "mxfp8") -> Tensor:
    """E4M3 with one power of two per 32 values of K, by a rule of `reconcile.numbers.mx`."""
    return _spoilt_as(x, mx.quantise(x, mx.named(name)).dequantize())


def _spoilt_as(x: Tensor, values: Tensor) -> Tensor:
    """NaN where the input row is not finite: no code stands for that."""
    finite = x.isfinite().all(-1, keepdim=True)
    return torch.where(finite, values, torch.nan)


QUANTISERS: dict[str, Quantiser] = {
    "per_token_int8": per_token_int8,
    "per_token_fp8": per_token_fp8,
    **{name: partial(mxfp8, name=name) for name in MX},
}
"""What ``Contract.activation`` may name besides ``none``."""
