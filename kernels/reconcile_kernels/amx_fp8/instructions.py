"""The two bfloat16 dot product instructions in plain numpy: the oracle of the native engines.

Both multiply pairs of bfloat16 numbers and add into float32; they differ in the order of the
additions, so a K loop over one has other bits than over the other. Neither reads MXCSR: rounding is
to nearest even, and a subnormal counts as a zero of its sign wherever it stands, as an operand
(DAZ) and as a result (FTZ; tininess is detected after rounding).

The order of VDPBF16PS is what processors do. That of TDPBF16PS is taken from the Bochs emulator
(cpu/avx/amx.cc at 783b58fd); Intel's manual leaves it open.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

_SMALLEST_NORMAL = np.float32(2.0**-126)
_LIFT = 2.0**64
"""Moves results near the subnormals to where float32 has all its 24 digits."""


def vdpbf16ps(accumulator: Floats, a: Floats, b: Floats) -> Floats:
    """One step of VDPBF16PS: the odd product is added first, then the even one, each fused.

    Args:
        accumulator: float32 [...].
        a: bfloat16 values held in float32, [..., 2]; element 0 is the low half of the dword.
        b: the same.

    Returns:
        float32 [...]; ``fma(a[0], b[0], fma(a[1], b[1], accumulator))``.
    """
    odd = fused(a[..., 1], b[..., 1], accumulator)
    return fused(a[..., 0], b[..., 0], odd)


def tdpbf16ps(c: Floats, a: Floats, b: Floats) -> Floats:
    """One TDPBF16PS: even and odd k are summed apart from zero, and their sum is added to c.

    Args:
        c: float32 [M, N].
        a: bfloat16 values held in float32, [M, 2 * P] for P pairs along k.
        b: the same, [P, 2 * N]: element (k, n) lies at [k // 2, 2 * n + k % 2].

    Returns:
        float32 [M, N].
    """
    sums = [np.zeros_like(c), np.zeros_like(c)]
    for pair in range(b.shape[0]):
        for odd in (0, 1):
            left, right = a[:, 2 * pair + odd, None], b[None, pair, odd::2]
            sums[odd] = fused(left, right, sums[odd])
    one = np.float32(1)
    return fused(fused(sums[0], one, sums[1]), one, c)


def fused(a: Floats, b: Floats | np.float32, c: Floats) -> Floats:
    """Round a * b + c once, for float32 operands: float64 holds their product exactly."""
    with np.errstate(invalid="ignore", over="ignore"):
        product = _daz(a).astype(np.float64) * _daz(b).astype(np.float64)
        return _to_float32(_sum_to_odd(product, _daz(c).astype(np.float64)))


def _daz(x: Floats | np.float32) -> Floats:
    """Subnormals as zeros of their sign."""
    return np.where(np.abs(x) < _SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def _sum_to_odd(a: Doubles, b: Doubles) -> Doubles:
    """A + b in float64, to odd where inexact, so that one more rounding gives the right result.

    (S. Boldo and G. Melquiond, IEEE Trans. Computers 57(4), 2008.)
    """
    total = a + b
    back = total - a
    error = (a - (total - back)) + (b - back)  # exact: Knuth's TwoSum
    inexact = np.isfinite(total) & (error != 0)
    even = (total.view(np.int64) & 1) == 0
    beside = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(inexact & even, beside, total)


def _to_float32(x: Doubles) -> Floats:
    """Round to nearest even; what is then below the smallest normal becomes a zero of its sign."""
    rounded = x.astype(np.float32)
    lifted = np.abs((x * _LIFT).astype(np.float32))
    tiny = lifted < np.float32(_LIFT) * _SMALLEST_NORMAL
    return np.where(tiny, np.copysign(np.float32(0), rounded), rounded)
