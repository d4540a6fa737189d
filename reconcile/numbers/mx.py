"""MXFP8: groups of 32 values of K share one power of two (OCP MX v1.0), by named rules.

A value is E4M3FN code times 2^(B - 127), B the group's byte (E8M0). Everybody agrees on how to
read it; how to make it differs in the choice of B, in the rounding of the elements, and at the ends
of the range. Each way that is in use is an `MxRule`. This is the reference: plain integer and
float64 operations, compared with the implementations that each rule names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 32
"""Values of K under one scale."""
LARGEST = 448.0
"""Largest magnitude of E4M3FN."""
NAN_BYTE = 255
"""The E8M0 byte that stands for NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MxRule:
    """How a group's byte and its elements are found."""

    name: str
    byte: Callable[[Tensor], Tensor]
    """max|x| of each group, float32 and finite, to B; what lies outside [0, 255] is clamped."""
    halves: Literal["even", "away"] = "even"
    """Where an element half way between two codes goes."""
    zeroed: bool = False
    """A group of byte 0 (max|x| < 2^-118) gets codes of zero."""
    nonfinite: tuple[int, int] = (NAN_BYTE, NAN_BYTE)
    """B of a group that holds an infinity, and of one that holds NaN."""
    negative_zero: bool = True
    """Whether an element -0 keeps its sign; what rounds to -0 always does."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mx:
    """Quantised values."""

    codes: Tensor
    """uint8 [..., K], E4M3FN; 0 throughout where the group's byte is 255."""
    scales: Tensor
    """uint8 [..., ceil(K / 32)]; a last group of fewer than 32 values is a group of its own."""

    def dequantize(self) -> Tensor:
        """Values, float64 [..., K]; exact; NaN where the byte is 255 or the code is NaN."""
        values = self.codes.view(torch.float8_e4m3fn).to(torch.float64)
        return values * _per_element(e8m0(self.scales), values.shape[-1])


def quantise(x: Tensor, rule: MxRule) -> Mx:
    """Quantise x [..., K] of any floating dtype; its groups lie along the last dimension.

    float64 is rounded to float32 first: no rule is defined for more.
    """
    wide = x.to(torch.float32) if rule.negative_zero else x.to(torch.float32) + 0.0
    k = wide.shape[-1]
    grouped = pad(wide, (0, -k % GROUP)).reshape(*wide.shape[:-1], -(-k // GROUP), GROUP)
    amax = grouped.abs().amax(-1)
    usual = rule.byte(torch.where(amax.isfinite(), amax, 0.0)).clamp(0, NAN_BYTE)
    inf_byte, nan_byte = rule.nonfinite
    byte = torch.where(amax.isnan(), nan_byte, torch.where(amax.isinf(), inf_byte, usual))
    unit = torch.ldexp(torch.ones(byte.shape, dtype=torch.float64), 127 - byte)
    codes = _elements(grouped.to(torch.float64) * unit[..., None], rule.halves)
    if rule.zeroed:
        codes = torch.where((byte == 0)[..., None], codes & 0x80, codes)
    codes = torch.where((byte == NAN_BYTE)[..., None], 0, codes).to(torch.uint8)
    return Mx(codes=codes.flatten(-2)[..., :k].contiguous(), scales=byte.to(torch.uint8))


def saturating(x: Tensor, scales: Tensor, rule: MxRule) -> Tensor:
    """Groups in which an element of x [..., K] exceeds 448 * 2^(B - 127), bool [..., G].

    Where an element is clamped: the largest error that ``floor`` makes. A group whose codes the
    rule blanks has none.
    """
    k = x.shape[-1]
    if rule.zeroed:
        scales = torch.where(scales == 0, NAN_BYTE, scales)
    beyond = x.to(torch.float64).abs() > LARGEST * _per_element(e8m0(scales), k)
    return pad(beyond, (0, -k % GROUP)).reshape(*scales.shape, GROUP).any(-1)


def e8m0(scales: Tensor) -> Tensor:
    """Bytes to 2^(B - 127), float64, exactly; 255 is NaN."""
    exponent = scales.to(torch.int32) - 127
    powers = torch.ldexp(torch.ones(scales.shape, dtype=torch.float64), exponent)
    return torch.where(scales == NAN_BYTE, torch.nan, powers)


def _per_element(groups: Tensor, k: int) -> Tensor:
    return groups.repeat_interleave(GROUP, -1)[..., :k]


def _elements(scaled: Tensor, halves: str) -> Tensor:
    """Codes of values that are in units of the group's scale, uint8."""
    if halves == "away":
        size = scaled.abs()
        step = torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent.clamp_min(-5) - 4)
        scaled = torch.copysign(torch.floor(size / step + 0.5) * step, scaled)
    clamped = scaled.clamp(-LARGEST, LARGEST).to(torch.float32)
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8)


# --------------------------------------------------------------------------- the byte


def _bits(amax: Tensor) -> Tensor:
    return amax.view(torch.int32)


def _floor(amax: Tensor) -> Tensor:
    return (_bits(amax) >> 23) - 8


def _ceil(amax: Tensor) -> Tensor:
    return _floor(amax) + (_bits(amax) & 0x7FFFFF != 0).int()


def _even(amax: Tensor) -> Tensor:
    """The exponent after rounding to the three bits of the element, half up; may overflow."""
    exponent = _bits(amax) + (1 << 19) >> 23
    return torch.where(exponent == 255, NAN_BYTE, exponent - 8)


def _rceil(amax: Tensor) -> Tensor:
    """fl32(amax * fl32(1/448)) up to a power of two."""
    bits = _bits(amax * torch.tensor(0x3B124925, dtype=torch.int32).view(torch.float32))
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    normal = (exponent > 0) & (exponent < 254) & (mantissa != 0)
    subnormal = (exponent == 0) & (mantissa > 0x400000)
    return exponent + (normal | subnormal).int()


def _log2_ceil(amax: Tensor) -> Tensor:
    """ceil(log2(amax / 448)) in float32, with its log2's own rounding."""
    tiny = torch.finfo(torch.float32).tiny
    return torch.ceil(torch.log2(amax.clamp_min(tiny) / LARGEST)).int() + 127


def _log2_floor(amax: Tensor) -> Tensor:
    """floor(log2 amax) - 8 in float32: one too high just below a power of two."""
    exponent = torch.floor(torch.log2(amax)).clamp_min(-127) - 8
    return torch.where(amax == 0, 0, exponent.clamp_min(-127).int() + 127)


def _fp4_even(amax: Tensor) -> Tensor:
    """The exponent after the rounding of a one-bit mantissa: bumps from 1.75 on."""
    return (_bits(amax) + (1 << 21) >> 23) - 8


_TORCHAO = "torchao, prototype/mx_formats/mx_tensor.py at 36027d8"
_ASCEND = "CANN ops-nn, quant/dynamic_mx_quant/op_kernel/arch35 at e5c3fa9"
_MICROX = "microxcaling, mx_ops.py and elemwise_ops.py at 7bc4195"

RULES: dict[str, MxRule] = {
    rule.name: rule
    for rule in (
        MxRule(name="floor", byte=_floor, source=f"OCP MX v1.0, section 6.3; {_TORCHAO}, FLOOR"),
        MxRule(name="rceil", byte=_rceil, source=f"{_TORCHAO}, RCEIL; cuBLAS"),
        MxRule(name="ceil", byte=_ceil, source=f"{_TORCHAO}, CEIL"),
        MxRule(name="even", byte=_even, source=f"{_TORCHAO}, EVEN"),
        MxRule(
            name="ascend_0",
            byte=_floor,
            zeroed=True,
            source=f"{_ASCEND}, scale_alg 0",
        ),
        MxRule(name="ascend_1", byte=_rceil, source=f"{_ASCEND}, scale_alg 1"),
        MxRule(
            name="vllm",
            byte=_log2_ceil,
            nonfinite=(254, 0),
            source="vLLM 0.33.0, quantization/utils/mxfp8_utils.py, torch path",
        ),
        MxRule(
            name="compressed_tensors",
            byte=_fp4_even,
            nonfinite=(127, 127),
            negative_zero=False,
            source="compressed-tensors 0.20.1",
        ),
        MxRule(
            name="microxcaling",
            byte=_log2_floor,
            halves="away",
            negative_zero=False,
            source=f"{_MICROX}, rounding nearest",
        ),
        MxRule(
            name="microxcaling_even",
            byte=_log2_floor,
            negative_zero=False,
            source=f"{_MICROX}, rounding even",
        ),
    )
}
"""Every rule by name. ``ascend_0`` and ``ascend_1`` are the two that the NPU has."""


def named(name: str) -> MxRule:
    """The rule that a contract names: ``mxfp8`` is ``floor``, ``mxfp8_<rule>`` the rule."""
    return RULES[name.removeprefix("mxfp8_") if name != "mxfp8" else "floor"]
