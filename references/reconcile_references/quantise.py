"""Rules that make an FP8 weight from a dense one; the inverse of what the formats decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from reconcile.weight import Format, Shape

LARGEST = 448.0
"""Largest magnitude of E4M3FN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Rule:
    """How a dense weight becomes E4M3 codes and scales.

    The scale is fl32(max|w| / 448) over what it covers, rounded to ``scale_dtype``; 1 where all is
    zero. A code is fl32(w / scale) rounded to nearest even, saturating at 448.
    """

    form: Format
    scale_dtype: torch.dtype = torch.float32

    def __call__(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, float8_e4m3fn [N, K], and scales in the format's own shape."""
        n, k = weight.shape
        wide = weight.to(torch.float32)
        amax = _block_maxima(wide, _covered(self.form, (n, k)))
        scales = (amax / torch.full_like(amax, LARGEST)).to(self.scale_dtype)
        scales = torch.where(scales == 0, 1, scales).to(self.scale_dtype)
        scales = scales.reshape(self.form.scale_shape((n, k)))
        spread = self.form.spread(scales.to(torch.float32), (n, k))
        codes = (wide / spread).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return codes, scales


def _covered(form: Format, shape: Shape) -> Shape:
    """Rows and columns under one scale."""
    by_kind: dict[Literal["tensor", "channel", "block"], Shape]
    by_kind = {"tensor": shape, "channel": (1, shape[1]), "block": form.block or shape}
    return by_kind[form.granularity]


def _block_maxima(wide: Tensor, block: Shape) -> Tensor:
    """max|w| of each block, [ceil(N / rows), ceil(K / columns)]; edge blocks may be partial."""
    (n, k), (rows, columns) = wide.shape, block
    padded = torch.nn.functional.pad(wide.abs(), (0, -k % columns, 0, -n % rows))
    grid = padded.reshape(-(-n // rows), rows, -(-k // columns), columns)
    return grid.amax((1, 3))
