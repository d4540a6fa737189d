"""Rounding done once, and the order of the codes of a floating-point dtype."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BITS: dict[torch.dtype, torch.dtype] = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` rounded once to ``dtype``, to nearest with ties to even.

    torch converts float64 to a 16-bit dtype through float32, which rounds twice. Here the
    middle step rounds to odd, after which the second rounding is the only one that counts
    (Boldo & Melquiond, IEEE Trans. Computers 57(4), 2008). Overflow gives inf, NaN stays NaN,
    subnormals are kept.

    >>> x = torch.tensor(1 + 2.0**-8 + 2.0**-40, dtype=torch.float64)
    >>> x.to(torch.bfloat16).item(), round_to(x, torch.bfloat16).item()
    (1.0, 1.0078125)
    """
    if x.dtype != torch.float64 or dtype not in (torch.bfloat16, torch.float16):
        return x.to(dtype)
    near = x.to(torch.float32)
    error = x - near.to(torch.float64)
    inexact = error != 0
    away = inexact & (near.to(torch.float64).abs() > x.abs())
    bits = near.view(torch.int32) - away.to(torch.int32)
    odd = torch.where(inexact & x.isfinite(), bits | 1, near.view(torch.int32))
    return odd.view(torch.float32).to(dtype)


def bit_view(x: Tensor) -> Tensor:
    """The bits of a tensor as integers of the same width; other dtypes as bytes or unchanged."""
    if x.dtype.is_complex:
        return bit_view(torch.view_as_real(x.resolve_conj()))
    if x.dtype in _BITS:
        return x.view(_BITS[x.dtype])
    return x.view(torch.uint8) if x.dtype.is_floating_point else x


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """Same dtype, shape and bits: NaN equals the same NaN, and -0 differs from +0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.numel() == 0:
        return True
    return torch.equal(bit_view(a.contiguous()), bit_view(b.contiguous()))


def code_order(x: Tensor) -> Tensor:
    """Place of each value in its dtype's order of codes, int64; +0 and -0 are both 0.

    Neighbouring representable values differ by 1, so a difference of two places is a distance
    in ulps. Not meaningful for NaN.
    """
    signed = x.contiguous().view(_BITS[x.dtype]).to(torch.int64)
    lowest = torch.iinfo(_BITS[x.dtype]).min
    return torch.where(signed < 0, lowest - signed, signed)


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    """The representable values next below and next above each x, as float64.

    An infinity counts as the power of two that follows the largest finite value: half-way to
    it is where IEEE 754 rounding to infinity begins. Beyond it there is nothing, so it is its
    own neighbour there. NaN gives NaN.
    """
    order = code_order(x)
    return _value_at(order - 1, x), _value_at(order + 1, x)


def _value_at(order: Tensor, like: Tensor) -> Tensor:
    """The float64 values at these places of ``like``'s dtype's order of codes."""
    ints = _BITS[like.dtype]
    last = int(code_order(torch.tensor(math.inf, dtype=like.dtype)))
    order = order.clamp(-last, last)
    bits = torch.where(order < 0, torch.iinfo(ints).min - order, order)
    values = bits.to(ints).view(like.dtype).to(torch.float64)
    emax = math.frexp(torch.finfo(like.dtype).max)[1]
    over = math.ldexp(1.0, emax) if emax < 1024 else math.inf
    values = torch.where(values.isinf(), values.sign() * over, values)
    return torch.where(like.isnan(), torch.nan, values)
