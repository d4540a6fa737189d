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

import torch
from torch import Tensor

from reconcile.weight import Format, Packing

TERNARY_K_INTERLEAVED = Format(
    name="ternary_k_interleaved",
    table=(0.0, 1.0, -1.0, 0.0),
    invalid=frozenset({3}),
    packing=Packing(bits=2, dim=1, arrangement="interleaved"),
    granularity="channel",
    reference="docs/formats.md, ternary_k_interleaved",
)
"""uint8 [N, K/4]: byte j of row n holds k = 4j + i in bits 2i, 2i+1."""

TERNARY_HF = Format(
    name="ternary_hf",
    table=(-1.0, 0.0, 1.0, 2.0),
    invalid=frozenset({3}),
    packing=Packing(bits=2, dim=0, arrangement="planar", pad=True),
    granularity="tensor",
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
