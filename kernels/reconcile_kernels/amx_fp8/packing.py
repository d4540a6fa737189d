"""VNNI-2: how the kernel's weight lies in memory, byte for byte as vLLM's `convert_weight_packed`.

Columns (rows of the weight) are cut into blocks of 32. In a block, two neighbours along k lie side
by side for each of its columns, so that one 64-byte register holds 32 columns x 2 k:

    index(n, k) = 32 (n // 32) K + (k // 2) 64 + (n % 32) 2 + k % 2

(Source: vLLM 0.33.0, csrc/cpu/sgl-kernels/gemm.cpp.) vLLM also packs N = 32 j + 16, with a last
block of 16 columns; its kernels do not compute such a weight right, and ours refuses it.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from reconcile.exceptions import KernelError

COLUMNS = 32
"""Columns of a block: N is a multiple of it."""
DEPTH = 32
"""Values of k that one tile instruction takes: K is a multiple of it, since nothing is padded."""

Layout = Literal["nk", "kn"]
"""``nk``: codes [N, K], as checkpoints store them. ``kn``: codes [K, N], as `torch._scaled_mm`
wants them and vLLM's loader leaves them."""


def pack(codes: Tensor, shape: tuple[int, int], layout: Layout) -> Tensor:
    """Codes to the packed weight, uint8 [N, K] in memory order.

    Args:
        codes: uint8 or float8_e4m3fn, [N, K] or [K, N] as ``layout`` says; any strides.
        shape: logical (N, K). Square weights look the same either way round, so both the shape
            and the layout are declared and neither is guessed.
        layout: orientation of ``codes``.

    Raises:
        KernelError: a shape, layout or dtype that does not fit the declaration, or that the
            kernel does not pack.
    """
    if layout not in get_args(Layout):
        raise KernelError(f"layout: expected nk or kn, got {layout!r}")
    n, k = shape
    if reason := refused(n, k):
        raise KernelError(reason)
    stored = (n, k) if layout == "nk" else (k, n)
    if codes.dtype not in (torch.uint8, torch.float8_e4m3fn) or tuple(codes.shape) != stored:
        raise KernelError(
            f"expected codes {list(stored)} in uint8 or float8_e4m3fn (layout {layout!r} of a "
            f"weight N={n}, K={k}), got {codes.dtype} {list(codes.shape)}"
        )
    codes = codes.view(torch.uint8)
    if layout == "kn":
        codes = codes.t()
    return _swapped(codes.contiguous().view(n // COLUMNS, COLUMNS, k // 2, 2)).view(n, k)


def unpack(packed: Tensor) -> Tensor:
    """The packed weight [N, K] back to codes, uint8 [N, K]."""
    n, k = packed.shape
    return _swapped(packed.view(n // COLUMNS, k // 2, COLUMNS, 2)).view(n, k)


def refused(n: int, k: int) -> str:
    """Why a weight of this shape is not packed; empty where it is."""
    against = []
    if n < 1 or n % COLUMNS:
        against.append(f"N must be a positive multiple of {COLUMNS} (columns of a block), not {n}")
    if k < 1 or k % DEPTH:
        against.append(f"K must be a positive multiple of {DEPTH} (depth of a tile), not {k}")
    return "; ".join(against)


def _swapped(blocks: Tensor) -> Tensor:
    """Columns and pairs of k change places within each block."""
    return blocks.transpose(1, 2).contiguous()
