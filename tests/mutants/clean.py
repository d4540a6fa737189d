"""Correct kernels and legal perturbations: none of them may be flagged, on any seed."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from reconcile_mutants.common import NAIVE_ON_CPU, PLAIN, TORCH, numbers, spread, weight_of
from reconcile_mutants.kernels import (
    FP8_ROWS,
    MX,
    MX_ROWS,
    PER_TOKEN,
    bfloat16_partials,
    chopped,
    subnormals_are_zero,
    weight_in_bfloat16,
)

from reconcile import Contract, check_batched_linear, check_linear
from reconcile.selftest import Variant

SHAPES = ((192, 256), (130, 200), (96, 320), (257, 132))
"""One per seed, in turn: whole blocks, and partial ones at every edge."""


def variant(name, form, what, kernel, contract=PLAIN, *, bias=False, dtype=None):
    """A kernel on random weights, shapes and activations, one set per seed."""

    def run(seed):
        shape = SHAPES[seed % len(SHAPES)]
        weight = weight_of(form, shape, seed)
        given = {"bias": torch.randn(shape[0])} if bias else {}
        torch.manual_seed(seed)
        return check_linear(kernel, weight, contract=contract, seed=seed, dtype=dtype, **given)

    return Variant(id=f"clean/{name}", what=what, run=run)


# ------------------------------------------------------------------ orders of summation


def in_blocks(x, w, size, order):
    """Blocks of K in an order, summed in float32."""
    total = torch.zeros(len(x), len(w))
    for start in order(range(0, w.shape[1], size)):
        total = total + x[:, start : start + size] @ w[:, start : start + size].T
    return total


def shuffled(starts):
    starts = list(starts)
    order = torch.randperm(len(starts), generator=torch.Generator().manual_seed(len(starts)))
    return [starts[i] for i in order.tolist()]


def one_by_one(x, w):
    """K ascending, one rounding per addition, as the C++ kernel."""
    total = torch.zeros(len(x), len(w))
    for k in range(w.shape[1]):
        total = total + x[:, k : k + 1] * w[:, k]
    return total


def fused(x, w):
    """Fused multiply-adds: the product is exact, each addition rounds once."""
    total = torch.zeros(len(x), len(w))
    wide_x, wide_w = x.double(), w.double()
    for k in range(w.shape[1]):
        total = (total.double() + wide_x[:, k : k + 1] * wide_w[:, k]).float()
    return total


def pairwise(x, w):
    """A tree over K."""
    terms = x[:, None, :] * w[None] if x.shape[0] <= 8 else None
    if terms is None:
        return torch.cat([pairwise(part, w) for part in x.split(8)])
    while terms.shape[-1] > 1:
        odd = terms[..., -1:] if terms.shape[-1] % 2 else terms[..., :0]
        terms = torch.cat([terms[..., 0:-1:2] + terms[..., 1::2], odd], -1)
    return terms[..., 0]


def float64_sums(x, w):
    return (x.double() @ w.double().T).float()


def splits(x, w, count):
    """Partial sums over K, added at the end."""
    parts = [a @ b.T for a, b in zip(x.chunk(count, 1), w.chunk(count, 1), strict=True)]
    return functools.reduce(torch.add, parts)


def by_rows(x, w):
    """One row alone, many in two splits."""
    return splits(x, w, 1 if len(x) <= 4 else 2)


def truncating_sum(x, w):
    """Blocks of 32 exactly, the running sum cut to float32 toward zero."""
    total = torch.zeros(len(x), len(w), dtype=torch.float64)
    for start in range(0, w.shape[1], 32):
        total = total + x[:, start : start + 32].double() @ w[:, start : start + 32].double().T
        near = total.float()
        away = near.double().abs() > total.abs()
        total = (near.view(torch.int32) - away.int()).view(torch.float32).double()
    return total.float()


def in_two_threads(x, w):
    """Two threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        return x @ w.T
    finally:
        torch.set_num_threads(before)


def rows_reversed(x, w):
    """Output rows computed from the last to the first, in tiles of 7."""
    return torch.cat([x @ tile.T for tile in w.flip(0).split(7)], 1).flip(1)


# ------------------------------------------------------------------ other kernels


def scale_after_sum(x, weight, bias=None):
    """Codes are summed, then scaled."""
    rows = x.reshape(-1, x.shape[-1]).float()
    y = rows @ TORCH.values(weight).T * numbers(weight)
    y = y if bias is None else y + bias.float()
    return y.to(x.dtype).reshape(*x.shape[:-1], -1)


def scale_after_block(x, weight, bias=None):
    """Each K block is summed, scaled, and folded in."""
    rows, step = x.reshape(-1, x.shape[-1]).float(), weight.format.block[1]
    codes, scales = TORCH.values(weight), spread(numbers(weight), weight)
    total = torch.zeros(len(rows), weight.shape[0])
    for start in range(0, weight.shape[1], step):
        block = slice(start, start + step)
        total = total + rows[:, block] @ codes[:, block].T * scales[:, start]
    y = total if bias is None else total + bias.float()
    return y.to(x.dtype).reshape(*x.shape[:-1], -1)


def int8_sums(x, weight, bias=None):
    """W8A8: integer sums, then both scales."""
    rows = x.reshape(-1, x.shape[-1]).float()
    amax = rows.abs().amax(-1, keepdim=True).clamp_min(1e-7)
    codes = torch.round(rows * (torch.full_like(amax, 127) / amax)).clamp(-128, 127)
    sums = (codes.double() @ TORCH.values(weight).double().T).float()
    y = sums * (amax / torch.full_like(amax, 127)) * numbers(weight)
    return y.to(x.dtype).reshape(*x.shape[:-1], -1)


def batched(change):
    """A batched kernel over bfloat16 groups."""

    def kernel(x, w, bias=None):
        y = change(x.float(), w.float())
        return (y if bias is None else y + bias[:, None].float()).to(x.dtype)

    return kernel


def batched_variant(name, what, change, contract=PLAIN):
    def run(seed):
        generator = torch.Generator().manual_seed(seed)
        n, k = SHAPES[seed % len(SHAPES)]
        weight = torch.randn(3, n // 2, k // 2, generator=generator).bfloat16()
        bias = torch.randn(3, n // 2, generator=generator) if seed % 2 else None
        return check_batched_linear(
            batched(change), weight, bias=bias, contract=contract, groups=[seed % 3], seed=seed
        )

    return Variant(id=f"clean/{name}", what=what, run=run)


def kernel(**stages):
    return replace(TORCH, **stages)


def _split(count):
    return functools.partial(splits, count=count)


AFTER_SUM = Contract(scale_applied="after_sum")
VARIANTS = (
    variant("torch_ternary", "ternary_k_interleaved", "plain torch", TORCH),
    variant("torch_ternary_hf", "ternary_hf", "plain torch", TORCH),
    variant("torch_ternary_hf_divide", "ternary_hf_divide", "plain torch", TORCH),
    variant("torch_fp8_tensor", "fp8_e4m3_tensor", "plain torch", TORCH),
    variant("torch_fp8_channel", "fp8_e4m3_channel", "plain torch, with a bias", TORCH, bias=True),
    variant("torch_fp8_block", "fp8_e4m3_block", "plain torch", TORCH),
    variant("torch_fp8_block_e8m0", "fp8_e4m3_block_e8m0", "plain torch", TORCH),
    variant("torch_fnuz", "fp8_e4m3fnuz_tensor", "plain torch", TORCH),
    variant("torch_e5m2", "fp8_e5m2_tensor", "plain torch", TORCH),
    variant("torch_mxfp8", "mxfp8_e4m3", "plain torch", TORCH),
    variant("native", "ternary_k_interleaved", "the C++ source", NAIVE_ON_CPU, None, bias=True),
    variant(
        "blocks_reversed", "fp8_e4m3_block", "K blocks of 32 from the last to the first",
        kernel(product=functools.partial(in_blocks, size=32, order=reversed)),
    ),
    variant(
        "blocks_shuffled", "mxfp8_e4m3", "K blocks of 16 in a random order",
        kernel(product=functools.partial(in_blocks, size=16, order=shuffled)),
    ),
    variant("one_by_one", "fp8_e4m3_channel", "K ascending, one by one",
            kernel(product=one_by_one)),
    variant("fused", "fp8_e4m3_tensor", "fused multiply-adds", kernel(product=fused)),
    variant("pairwise", "fp8_e4m3_block", "a tree over K", kernel(product=pairwise)),
    variant("float64_sums", "ternary_hf", "sums in float64", kernel(product=float64_sums)),
    variant(
        "split_k", "fp8_e4m3_channel", "three splits of K, float32 partials",
        kernel(product=_split(3)), Contract(split_k=3),
    ),
    variant(
        "split_k_bfloat16", "fp8_e4m3_block", "two splits, partials in bfloat16, declared",
        kernel(product=bfloat16_partials), Contract(split_k=2, partials="bfloat16"),
    ),
    variant(
        "by_batch", "fp8_e4m3_channel", "two splits above 4 rows, declared",
        kernel(product=by_rows), Contract(split_k=2, by_batch=((4, PLAIN),)),
    ),
    variant(
        "truncating_sum", "fp8_e4m3_tensor", "an accumulator that truncates, declared",
        kernel(product=truncating_sum), Contract(accumulator_rounding="rtz"),
    ),
    variant(
        "truncating_store", "fp8_e4m3_block", "a store that truncates, declared",
        kernel(store=chopped), Contract(output_rounding="rtz"),
    ),
    variant(
        "weight_rounded", "fp8_e4m3_block", "code times scale in bfloat16, declared",
        kernel(combine=weight_in_bfloat16), Contract(weight_rounding="bfloat16"),
    ),
    variant(
        "flushes", "fp8_e4m3_channel", "subnormal activations count as zero, declared",
        kernel(load=subnormals_are_zero), Contract(flush_subnormals=True),
    ),
    variant("scale_after_sum", "ternary_k_interleaved", "codes summed, then scaled",
            scale_after_sum, AFTER_SUM, bias=True),
    variant("scale_after_sum_fp8", "fp8_e4m3_channel", "codes summed, then scaled",
            scale_after_sum, AFTER_SUM),
    variant("scale_after_block", "fp8_e4m3_block", "each K block scaled, then folded in",
            scale_after_block, Contract(scale_applied="after_block", k_block=128)),
    variant("scale_after_group", "mxfp8_e4m3", "each 32 values scaled, then folded in",
            scale_after_block, Contract(scale_applied="after_block", k_block=32)),
    variant("two_threads", "fp8_e4m3_block", "two threads of torch",
            kernel(product=in_two_threads)),
    variant("rows_reversed", "ternary_hf", "tiles of N from the last",
            kernel(product=rows_reversed)),
    variant("int8_activations", "ternary_k_interleaved", "int8 activations, declared", int8_sums,
            Contract(activation="per_token_int8", scale_applied="after_sum")),
    variant("fp8_activations", "fp8_e4m3_channel", "E4M3 activations per token, declared", FP8_ROWS,
            PER_TOKEN),
    variant("mxfp8_activations", "mxfp8_e4m3", "MXFP8 activations, declared", MX_ROWS, MX),
    variant("float16_output", "fp8_e4m3_block", "float16 activations and output", TORCH,
            Contract(output="float16"), dtype="float16"),
    variant("float32_output", "ternary_hf", "float32 activations and output", TORCH,
            Contract(output="float32"), dtype="float32"),
    batched_variant("batched", "einsum over bfloat16 groups",
                    lambda x, w: torch.einsum("gmk,gnk->gmn", x, w)),
    batched_variant("batched_loop", "one group after the other, sums in float64",
                    lambda x, w: torch.stack([(a.double() @ b.double().T).float()
                                              for a, b in zip(x, w, strict=True)])),
)  # fmt: skip
