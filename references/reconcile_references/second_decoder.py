"""A second way to every decoded weight, which shares no code with `Format.dequantize`.

Bits are taken apart by numpy's `unpackbits`, 8-bit floats are decoded by torch's own dtypes, and
scales are spread by index instead of by repetition. A reference that was written once agrees with
itself; one that was written twice can be wrong only in the same way twice.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from reconcile.weight import QuantizedWeight

_FLOAT8 = {
    "fp8_e4m3_tensor": torch.float8_e4m3fn,
    "fp8_e4m3_channel": torch.float8_e4m3fn,
    "fp8_e4m3_block": torch.float8_e4m3fn,
    "fp8_e4m3_block_e8m0": torch.float8_e4m3fn,
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "fp8_e4m3fnuz_tensor": torch.float8_e4m3fnuz,
    "fp8_e5m2_tensor": torch.float8_e5m2,
}


def decode_again(weight: QuantizedWeight) -> Tensor | None:
    """The weight [N, K] in float64, or None for a format that has no second decoder."""
    name = weight.format.name
    if name == "ternary_k_interleaved":
        values = _k_interleaved(weight)
    elif name in ("ternary_hf", "ternary_hf_divide"):
        values = _planar_rows(weight)
    elif name in _FLOAT8:
        values = weight.codes.view(_FLOAT8[name]).to(torch.float64)
    else:
        return None
    scales = _scale_of_each(weight)
    return values / scales if name.endswith("_divide") else values * scales


def _pairs(weight: QuantizedWeight) -> np.ndarray:
    """Two-bit codes of each byte, low bits first, [rows, columns, 4]."""
    stored = weight.codes.numpy()
    bits = np.unpackbits(stored, axis=1, bitorder="little").reshape(*stored.shape, 4, 2)
    codes: np.ndarray = bits[..., 0] + 2 * bits[..., 1]
    return codes


def _k_interleaved(weight: QuantizedWeight) -> Tensor:
    codes = _pairs(weight).reshape(weight.shape[0], -1)
    return torch.from_numpy(np.where(codes == 2, -1.0, np.where(codes == 1, 1.0, 0.0)))


def _planar_rows(weight: QuantizedWeight) -> Tensor:
    codes = np.moveaxis(_pairs(weight), 2, 0).reshape(-1, weight.shape[1])
    return torch.from_numpy(codes[: weight.shape[0]].astype(np.float64) - 1.0)


def _scale_of_each(weight: QuantizedWeight) -> Tensor:
    """The scale of each weight, by its place in the grid, [N, K] or broadcastable."""
    scales = weight.scales
    if weight.format.scale_encoding == "e8m0":
        scales = scales.view(torch.uint8).view(torch.float8_e8m0fnu).to(torch.float32)
    wide = scales.to(torch.float64)
    block = weight.format.block
    if block is None:
        return wide.reshape(-1, 1)
    rows = torch.arange(weight.shape[0])[:, None] // block[0]
    columns = torch.arange(weight.shape[1])[None, :] // block[1]
    return wide[rows, columns]
