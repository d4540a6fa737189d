"""Ternary formats, and the rule that makes a ternary weight from a dense one.

Both formats keep four 2-bit codes in a byte, low bits first; they differ in everything else:

===================== =========== ============ ================= ==================
format                packed dim  arrangement  codes 0, 1, 2, 3  scale
===================== =========== ============ ================= ==================
ternary_k_interleaved 1 (K)       interleaved  0, +1, -1, (0)    [N], multiplies
ternary_hf            0 (N)       planar       -1, 0, +1, (+2)   [1], multiplies
ternary_hf_divide     0 (N)       planar       -1, 0, +1, (+2)   [1], divides
===================== =========== ============ ================= ==================

Code 3 is written by no encoder; the value in brackets is what the public decoders make of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from reconcile.weight import Format, Misreading, Packing
from reconcile_references.misreadings import CHANNEL_SCALE, NUMBER_SCALE, SCALE, reread

_FROM_ZERO = (0.0, 1.0, -1.0, 0.0)
_FROM_MINUS_ONE = (-1.0, 0.0, 1.0, 2.0)
_K_INTERLEAVED = Packing(bits=2, dim=1, arrangement="interleaved")
_N_PLANAR = Packing(bits=2, dim=0, arrangement="planar", pad=True)


def _packing_misreadings(packing: Packing) -> tuple[Misreading, ...]:
    """The other orders in which four codes can lie in the same bytes."""
    other: Literal["interleaved", "planar"]
    other = "planar" if packing.arrangement == "interleaved" else "interleaved"
    return (
        reread(
            "bit_order_reversed",
            "the codes of a byte are read from the high bits down",
            cause="bit_order",
            packing=replace(packing, low_first=not packing.low_first),
        ),
        reread(
            f"read_as_{other}",
            f"{packing.arrangement} codes are read as {other} ones",
            cause="interleaved_planar",
            packing=replace(packing, arrangement=other),
        ),
    )


_HF_MISREADINGS = (
    *SCALE,
    *NUMBER_SCALE,
    reread(
        "codes_from_zero",
        "codes 0, 1, 2 are read as 0, +1, -1",
        cause="ternary_table",
        table=_FROM_ZERO,
    ),
    reread("signs_swapped", "+1 and -1 are swapped", cause="sign", table=(1.0, 0.0, -1.0, -2.0)),
    *_packing_misreadings(_N_PLANAR),
)

TERNARY_K_INTERLEAVED = Format(
    name="ternary_k_interleaved",
    table=_FROM_ZERO,
    invalid=frozenset({3}),
    packing=_K_INTERLEAVED,
    granularity="channel",
    misreadings=(
        *SCALE,
        *NUMBER_SCALE,
        *CHANNEL_SCALE,
        reread(
            "codes_from_minus_one",
            "codes 0, 1, 2 are read as -1, 0, +1",
            cause="ternary_table",
            table=_FROM_MINUS_ONE,
        ),
        reread("signs_swapped", "+1 and -1 are swapped", cause="sign", table=(0.0, -1.0, 1.0, 0.0)),
        reread(
            "codes_sign_extended",
            "a code is read as a two-bit signed integer: 2 is -2",
            cause="ternary_table",
            table=(0.0, 1.0, -2.0, -1.0),
        ),
        *_packing_misreadings(_K_INTERLEAVED),
    ),
    reference="docs/formats.md, ternary_k_interleaved",
)
"""uint8 [N, K/4]: byte j of row n holds k = 4j + i in bits 2i, 2i+1."""

TERNARY_HF = Format(
    name="ternary_hf",
    table=_FROM_MINUS_ONE,
    invalid=frozenset({3}),
    packing=_N_PLANAR,
    granularity="tensor",
    misreadings=_HF_MISREADINGS,
    reference="transformers integrations/bitnet.py, AutoBitLinear",
)
"""uint8 [ceil(N/4), K]: byte row r holds rows r, r+R, r+2R, r+3R (R = ceil(N/4))."""

TERNARY_HF_DIVIDE = replace(
    TERNARY_HF,
    name="ternary_hf_divide",
    scale_convention="divide",
    reference="transformers integrations/bitnet.py, BitLinear",
)
"""The same bytes under BitLinear's convention: the stored scale divides."""


def pack_k_interleaved(values: Tensor) -> Tensor:
    """Ternary values, int8 [N, K] in {-1, 0, 1}, to ``ternary_k_interleaved`` bytes [N, K/4]."""
    return TERNARY_K_INTERLEAVED.pack(TERNARY_K_INTERLEAVED.encode(values))


def quantize_ternary(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Dense weight [N, K] to ternary values, int8 [N, K], and scales, float32 [N].

    The scale of a row is the mean of its magnitudes, taken in float64 and rounded once to
    float32; a value is its weight over that scale, rounded half to even and clamped to
    [-1, 1]. A row of zeros gets scale 1. (The absmean rule of BitNet b1.58, arXiv 2402.17764,
    per output row.)
    """
    wide = weight.to(torch.float64)
    scales = wide.abs().mean(dim=1).to(torch.float32)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    values = torch.round(wide / scales.to(torch.float64)[:, None]).clamp(-1, 1)
    return values.to(torch.int8), scales
