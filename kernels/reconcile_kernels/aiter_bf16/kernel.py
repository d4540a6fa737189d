"""The kernel: Y[b] = X[b] W[b]^T (+ bias[b]), one source for Triton and for `torch_language`.

Written in Triton's language. Where Triton runs it, the import below is replaced by Triton's own
(`source.py`); as it stands, the file is executed by torch on the CPU, program by program.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reconcile_kernels.aiter_bf16 import torch_language as tl
from reconcile_kernels.aiter_bf16.config import ADDED, Config
from reconcile_kernels.aiter_bf16.torch_language import jit


@jit
def batched_gemm(
    x, w, y, partials, bias,
    B, M, N, K,
    stride_xb, stride_xm, stride_xk,
    stride_wb, stride_wn, stride_wk,
    stride_yb, stride_ym, stride_yn,
    stride_bb, stride_bn,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr, SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    tile = tl.program_id(1)
    split = tl.program_id(2)
    m = tile // tl.cdiv(N, BLOCK_N) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile % tl.cdiv(N, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = split * SPLIT_K
    end = tl.minimum(start + SPLIT_K, K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(start, end, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        xs = tl.load(
            x + (b * stride_xb + m[:, None] * stride_xm + k[None, :] * stride_xk),
            mask=(m[:, None] < M) & (k[None, :] < end),
            other=0.0,
        )
        ws = tl.load(
            w + (b * stride_wb + n[None, :] * stride_wn + k[:, None] * stride_wk),
            mask=(n[None, :] < N) & (k[:, None] < end),
            other=0.0,
        )
        acc = tl.dot(xs, ws, acc)
    inside = (m[:, None] < M) & (n[None, :] < N)
    if SPLITS == 1:
        if HAS_BIAS:
            at = bias + (b * stride_bb + n * stride_bn)
            acc = acc + tl.load(at, mask=n < N, other=0.0).to(tl.float32)[None, :]
        at = y + (b * stride_yb + m[:, None] * stride_ym + n[None, :] * stride_yn)
        tl.store(at, acc.to(y.dtype.element_ty), mask=inside)
    else:
        at = partials + (((split * B + b) * M + m[:, None]) * N + n[None, :])
        tl.store(at, acc, mask=inside)


@jit
def add_partials(
    partials, y, bias,
    B, M, N,
    stride_yb, stride_ym, stride_yn,
    stride_bb, stride_bn,
    HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    tile = tl.program_id(1)
    m = tile // tl.cdiv(N, BLOCK_N) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile % tl.cdiv(N, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m[:, None] < M) & (n[None, :] < N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for split in range(SPLITS):
        at = partials + (((split * B + b) * M + m[:, None]) * N + n[None, :])
        acc = acc + tl.load(at, mask=inside, other=0.0)
    if HAS_BIAS:
        at = bias + (b * stride_bb + n * stride_bn)
        acc = acc + tl.load(at, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = y + (b * stride_yb + m[:, None] * stride_ym + n[None, :] * stride_yn)
    tl.store(at, acc.to(y.dtype.element_ty), mask=inside)


def run(x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, config: Config) -> Tensor:
    """Launch the kernel; fills and returns ``y``.

    Args:
        x: [B, M, K], any strides.
        w: [B, N, K], any strides.
        bias: [B, N] or None.
        y: [B, M, N], any strides; every element is written.
        config: tile sizes and the number of splits over K.
    """
    (batch, m, k), n = x.shape, w.shape[1]
    splits = config.splits_of(k)
    partials = torch.empty((splits, batch, m, n), dtype=torch.float32, device=x.device)
    added = y if bias is None else bias
    strides_b = (0, 0) if bias is None else bias.stride()
    batched_gemm[(batch, config.tiles(m, n), splits)](
        x, w, y, partials if splits > 1 else y, added, batch, m, n, k,
        *x.stride(), *w.stride(), *y.stride(), *strides_b,
        HAS_BIAS=bias is not None, SPLITS=splits, SPLIT_K=config.split_k(k),
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
    )  # fmt: skip
    if splits > 1:
        add_partials[(batch, ADDED.tiles(m, n))](
            partials, y, added, batch, m, n, *y.stride(), *strides_b,
            HAS_BIAS=bias is not None, SPLITS=splits,
            BLOCK_M=ADDED.block_m, BLOCK_N=ADDED.block_n,
        )  # fmt: skip
    return y


Run = Any
"""`run` of this file or of a copy of it in another language."""
