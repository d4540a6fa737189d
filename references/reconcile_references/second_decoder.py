"""A second way to every decoded weight, which shares no code with `Format.dequantize`.

Bits are taken apart by numpy's `unpackbits`, 8-bit floats are decoded by torch's own dtypes, and
scales are spread by index instead of by repetition. A reference that was written once agrees with
itself; one that was written twice can be wrong only in the same way twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from reconcile.grouped import GroupedWeight, StoredWeight
from reconcile.linears import DenseWeight
from reconcile.weight import QuantizedWeight
from reconcile_references.dense import decode_dense_again

_FLOAT8 = {
    "fp8_e4m3_tensor": torch.float8_e4m3fn,
    "fp8_e4m3_channel": torch.float8_e4m3fn,
    "fp8_e4m3_block": torch.float8_e4m3fn,
    "fp8_e4m3_block_e8m0": torch.float8_e4m3fn,
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "fp8_e4m3fnuz_tensor": torch.float8_e4m3fnuz,
    "fp8_e5m2_tensor": torch.float8_e5m2,
}


def decode_again(weight: StoredWeight) -> Tensor | None:
    """The weight [N, K] ([G, N, K]) in float64, or None for a format without second decoder."""
    if isinstance(weight, GroupedWeight):
        parts = [decode_again(group) for group in weight.groups]
        known = [part for part in parts if part is not None]
        return torch.stack(known) if len(known) == len(parts) else None
    if isinstance(weight, DenseWeight):
        return decode_dense_again(weight)
    name = weight.format.name
    if name in _TERNARY:
        values = _TERNARY[name](weight)
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


def _strided(weight: QuantizedWeight, stride: int, bitorder: Literal["big", "little"]) -> Tensor:
    """Groups of ``stride`` bytes, whose bit pairs follow one another as planes."""
    groups = np.unpackbits(weight.codes.numpy().reshape(-1, stride), axis=1, bitorder=bitorder)
    pairs = groups.reshape(-1, stride, 4, 2)
    high, low = (0, 1) if bitorder == "big" else (1, 0)
    planes = (2 * pairs[..., high] + pairs[..., low]).transpose(0, 2, 1)
    return torch.from_numpy(planes.reshape(weight.shape).astype(np.float64) - 1.0)


def _four_rows(weight: QuantizedWeight) -> Tensor:
    places = np.array([64, 16, 4, 1])[None, :, None]
    codes = weight.codes.numpy()[:, None, :] // places % 4
    return torch.from_numpy(codes.reshape(weight.shape).astype(np.float64) - 1.0)


def _base_3(weight: QuantizedWeight) -> Tensor:
    """Digits by division, from q = floor(byte * 243 / 256)."""
    q = weight.codes.numpy().reshape(-1, 52).astype(np.int64) * 243 // 256
    digits = q[:, :, None] // np.array([81, 27, 9, 3, 1]) % 3
    runs = (digits[:, :32], digits[:, 32:48], digits[:, 48:, :4])
    codes = [run.transpose(0, 2, 1).reshape(len(q), -1) for run in runs]
    values = np.concatenate(codes, axis=1).reshape(weight.shape)
    return torch.from_numpy(values.astype(np.float64) - 1.0)


def _gpu_tiles(weight: QuantizedWeight) -> Tensor:
    """Element by element from the little-endian 32-bit words."""
    words = weight.codes.numpy().reshape(-1).view("<u4").astype(np.int64)
    n, k = np.indices(weight.shape)
    thread = n % 16 // 8 * 16 + k % 32 // 16 * 8 + n % 8
    word = (n // 16 * (weight.shape[1] // 32) + k // 32) * 32 + thread
    shift = k % 16 % 4 * 8 + k % 16 // 4 * 2
    return torch.from_numpy((words[word] >> shift & 3).astype(np.float64) - 2.0)


def _unpacked(weight: QuantizedWeight) -> Tensor:
    return torch.from_numpy(np.array([0.0, 1.0, -1.0])[weight.codes.numpy()])


_TERNARY: dict[str, Callable[[QuantizedWeight], Tensor]] = {
    "ternary_k_interleaved": _k_interleaved,
    "ternary_hf": _planar_rows,
    "ternary_hf_divide": _planar_rows,
    "ternary_i2_s_x86": partial(_strided, stride=32, bitorder="big"),
    "ternary_i2_s_arm": partial(_strided, stride=16, bitorder="big"),
    "ternary_i2_s_rows": _four_rows,
    "ternary_tq2_0": partial(_strided, stride=32, bitorder="little"),
    "ternary_tq1_0": _base_3,
    "ternary_ms_gpu": _gpu_tiles,
    "ternary_bytes": _unpacked,
    "ternary_int8": lambda weight: weight.codes.view(torch.int8).to(torch.float64),
}


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
