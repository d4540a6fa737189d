"""FP8 formats: code tables from the specifications, scales per tensor, channel or block.

The tables are written from the definition of the encodings (OCP 8-bit Floating Point
Specification v1.0, sections 5.1 and 5.2; the ``fnuz`` variants from arXiv 2206.02915), not taken
from a library: the tests compare all 256 codes with ml_dtypes and torch.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from reconcile.weight import Format, Misreading, Packing
from reconcile_references.misreadings import (
    BLOCK_SCALE,
    CHANNEL_SCALE,
    E8M0_SCALE,
    NUMBER_SCALE,
    SCALE,
    reread,
)

BYTES = Packing(bits=8, dim=1, arrangement="interleaved")
"""One code per byte, as it is."""


def minifloat_table(
    exponent_bits: int, mantissa_bits: int, bias: int, *, nonfinite: str
) -> tuple[float, ...]:
    """Values of the 256 codes of an 8-bit float, sign in the top bit.

    Args:
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the mantissa field.
        bias: exponent bias; exponent field 0 holds the subnormals m * 2^(1 - bias - mantissa_bits).
        nonfinite: ``fn``: only S.1111.111 is NaN; ``fnuz``: only 0x80 is NaN, there is no -0;
            ``ieee``: the top exponent holds infinity and NaN; ``none``: every code is a number.
    """
    return tuple(
        _minifloat(code, exponent_bits, mantissa_bits, bias, nonfinite) for code in range(256)
    )


def _minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int, kind: str) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    if kind == "fnuz" and code == 0x80:
        return math.nan
    if kind == "fn" and code & 0x7F == 0x7F:
        return math.nan
    if kind == "ieee" and exponent == (1 << exponent_bits) - 1:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


E4M3FN = minifloat_table(4, 3, 7, nonfinite="fn")
"""float8_e4m3fn: largest 448, subnormals m * 2^-9, no infinity."""
E4M3FNUZ = minifloat_table(4, 3, 8, nonfinite="fnuz")
"""float8_e4m3fnuz: the same bits mean half as much; largest 240, 0x80 is NaN."""
E5M2 = minifloat_table(5, 2, 15, nonfinite="ieee")
"""float8_e5m2: largest 57344, infinities and NaN as in IEEE 754."""


def table_misreadings(
    table: tuple[float, ...], mantissa_bits: int, **others: tuple[float, ...]
) -> tuple[Misreading, ...]:
    """What is done wrong to the codes of an 8-bit float.

    Args:
        table: the right values.
        mantissa_bits: width of the mantissa field.
        others: tables of other floats over the same bytes, by their names.
    """
    field_1 = 1 << mantissa_bits
    subnormal = [code & 0x7F < field_1 and not math.isnan(v) for code, v in enumerate(table)]
    as_normal = tuple(
        table[code + field_1] / 2 if below else value
        for code, (value, below) in enumerate(zip(table, subnormal, strict=True))
    )
    readings = {
        "exponent_bias_low": (
            "an exponent bias is one too small: everything doubles",
            tuple(2 * value for value in table),
        ),
        "exponent_bias_high": (
            "an exponent bias is one too large: everything halves",
            tuple(value / 2 for value in table),
        ),
        "sign_ignored": (
            "the sign bit is ignored",
            tuple(table[code & 0x7F] for code in range(256)),
        ),
        "subnormals_as_normals": (
            "no branch for exponent field 0, except that zero is zero",
            tuple(v and n for v, n in zip(table, as_normal, strict=True)),
        ),
        "subnormals_and_zero_as_normals": (
            "no branch for exponent field 0, not even for zero",
            as_normal,
        ),
        "subnormals_as_zero": (
            "subnormal codes are flushed to zero",
            tuple(0 * v if below else v for v, below in zip(table, subnormal, strict=True)),
        ),
    } | {
        f"read_as_{name}": (f"the bytes are read as {name}", other)
        for name, other in others.items()
    }
    return tuple(
        reread(name, text, cause=_cause(name, mantissa_bits), table=values)
        for name, (text, values) in readings.items()
    )


def _cause(name: str, mantissa_bits: int) -> str:
    """The diagnosis that a misread table is a case of."""
    if name.startswith("read_as_"):
        if "without_nan" in name:
            return "nan_codes"
        return "fn_fnuz" if f"m{mantissa_bits}fn" in name else "code_table"
    causes = ("exponent_bias", "sign", "subnormals")
    return next(cause for cause in causes if name.startswith(cause))


_MISREAD_E4M3FN = table_misreadings(
    E4M3FN,
    3,
    e4m3fnuz=E4M3FNUZ,
    e5m2=E5M2,
    e4m3_without_nan=minifloat_table(4, 3, 7, nonfinite="none"),
)
_MISREAD_E4M3FNUZ = table_misreadings(
    E4M3FNUZ,
    3,
    e4m3fn=E4M3FN,
    e4m3fnuz_without_nan=minifloat_table(4, 3, 8, nonfinite="none"),
)
_MISREAD_E5M2 = table_misreadings(
    E5M2,
    2,
    e4m3fn=E4M3FN,
    e5m2fnuz=minifloat_table(5, 2, 16, nonfinite="fnuz"),
    e5m2_without_nan=minifloat_table(5, 2, 15, nonfinite="none"),
)

_OCP = "OCP 8-bit Floating Point Specification v1.0, E4M3"

FP8_E4M3_TENSOR = Format(
    name="fp8_e4m3_tensor",
    table=E4M3FN,
    packing=BYTES,
    code_dtypes=(torch.uint8, torch.float8_e4m3fn),
    granularity="tensor",
    reference=_OCP,
    misreadings=SCALE + NUMBER_SCALE + _MISREAD_E4M3FN,
)
"""Codes [N, K], one scale [1]: Ministral and Pixtral style."""

FP8_E4M3_CHANNEL = replace(
    FP8_E4M3_TENSOR,
    name="fp8_e4m3_channel",
    granularity="channel",
    misreadings=SCALE + NUMBER_SCALE + CHANNEL_SCALE + _MISREAD_E4M3FN,
)
"""Codes [N, K], one scale per output row [N]: compressed-tensors FP8-dynamic."""

FP8_E4M3_BLOCK = replace(
    FP8_E4M3_TENSOR,
    name="fp8_e4m3_block",
    granularity="block",
    block=(128, 128),
    misreadings=SCALE + NUMBER_SCALE + BLOCK_SCALE + _MISREAD_E4M3FN,
)
"""Codes [N, K], one scale per 128 x 128 block, ceil at the edges. The checkpoints' name
``weight_scale_inv`` notwithstanding, it multiplies (DeepSeek-V3, Qwen3-FP8)."""

FP8_E4M3_BLOCK_E8M0 = replace(
    FP8_E4M3_BLOCK,
    name="fp8_e4m3_block_e8m0",
    scale_encoding="e8m0",
    scale_dtypes=(torch.uint8, torch.float8_e8m0fnu),
    misreadings=SCALE + E8M0_SCALE + BLOCK_SCALE + _MISREAD_E4M3FN,
)
"""The same with power-of-two scales stored as E8M0 bytes (``scale_fmt: ue8m0``)."""

FP8_E4M3FNUZ_TENSOR = replace(
    FP8_E4M3_TENSOR,
    name="fp8_e4m3fnuz_tensor",
    table=E4M3FNUZ,
    code_dtypes=(torch.uint8, torch.float8_e4m3fnuz),
    misreadings=SCALE + NUMBER_SCALE + _MISREAD_E4M3FNUZ,
    reference="arXiv 2206.02915, e4m3fnuz",
)
"""AMD MI300's variant."""

FP8_E5M2_TENSOR = replace(
    FP8_E4M3_TENSOR,
    name="fp8_e5m2_tensor",
    table=E5M2,
    code_dtypes=(torch.uint8, torch.float8_e5m2),
    misreadings=SCALE + NUMBER_SCALE + _MISREAD_E5M2,
    reference="OCP 8-bit Floating Point Specification v1.0, E5M2",
)

MXFP8_E4M3 = replace(
    FP8_E4M3_BLOCK_E8M0,
    name="mxfp8_e4m3",
    block=(1, 32),
    reference="OCP Microscaling Formats (MX) Specification v1.0, section 5.1",
)
"""Codes [N, K], one E8M0 byte per 32 values of K."""
