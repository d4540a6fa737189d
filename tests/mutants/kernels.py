"""Faults in kernels: one place of the C++ source of ``ternary_cuda.naive``, or one torch stage."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from reconcile_mutants.common import (
    NAIVE_ON_CPU,
    OP,
    PLAIN,
    SHAPE,
    TORCH,
    PatchedNaive,
    weight,
)

from reconcile import Contract
from reconcile.selftest import Mutant, OpTrial

GENERATOR = 7
"""Seed of the biases."""


FULL_ONLY = frozenset(
    {
        "native_k_tail_of_eight", "native_scale_next", "native_bias_twice", "native_grid_floor",
        "half_of_k_for_few_rows", "splits_overlap", "stale_buffer", "awq_order", "rows_interleaved",
        "m_tail", "bfloat16_sum", "last_k", "truncating_store", "activations_fp8",
        "mxfp8_scale_rule", "nan_swallowed",
        "scales_changed", "corner_unwritten", "written_with_gaps",
        "store_through_float16", "activation_scale_per_tensor",
    }
)  # fmt: skip
"""Mutants whose like is in the quick subset."""


def bias_of(n):
    return torch.randn(n, generator=torch.Generator().manual_seed(GENERATOR))


# ------------------------------------------------------------------ the C++ source

LOOP = (
    "for (int i = 0; i < 4; ++i) sum += Number::widen(row[4 * j + i]) * VALUES[byte >> 2 * i & 3u];"
)
SCALE = "float result = sum * scales[n];"
BIAS = "if (bias) result += bias[n];"
ROUND = "return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);"
K_LOOP = "for (int64_t j = 0; j < K / 4; ++j) {"
GUARD = "if (m >= M || n >= N) return;"
GRID = "const dim3 grid_size((unsigned)((M + 3) / 4), (unsigned)((N + 31) / 32));"


def native(name, causes, source, patch, *changes, bias=False, reasons=(), hard=False, shape=SHAPE):
    """``naive.cu`` with texts replaced, built by the C++ compiler."""
    return Mutant(
        id=f"kernels/{name}",
        area="kernels",
        source=source,
        patch=f"naive.cu: {patch}",
        trial=OpTrial(
            faulty=PatchedNaive(*changes),
            clean=NAIVE_ON_CPU,
            weight=weight("ternary_k_interleaved", shape),
            options={"bias": bias_of(shape[0])} if bias else {},
        ),
        op=OP,
        causes=causes,
        reasons=reasons,
        hard=hard,
        quick=name not in FULL_ONLY,
    )


NATIVE = [
    native(
        "native_bit_order", ("bit_order",),
        "chrishayuk/larql#156: the order of the codes in a byte",
        "shift 6 - 2i for 2i", (LOOP, LOOP.replace("byte >> 2 * i", "byte >> (6 - 2 * i)")),
    ),
    native(
        "native_codes", ("ternary_table", "sign"),
        "chrishayuk/larql#156: 01 = +1 and 10 = -1 exchanged",
        "the table of values has two entries exchanged",
        ("{0.0f, 1.0f, -1.0f, 0.0f}", "{0.0f, -1.0f, 1.0f, 0.0f}"),
    ),
    native(
        "native_last_k", ("k_tail_dropped",),
        "ROCm/aiter#4181: valid elements at the end of K are masked",
        "the last k of the row is left out",
        (LOOP, LOOP.replace("i < 4", "i < 4 && 4 * j + i < K - 1")), hard=True,
    ),
    native(
        "native_k_tail_of_eight", ("k_tail_dropped",),
        "ROCm/aiter#4181: a K that is no multiple of the tile",
        "K is rounded down to a multiple of 32",
        (K_LOOP, "for (int64_t j = 0; j < K / 32 * 8; ++j) {"), shape=(192, 276),
    ),
    native(
        "native_first_twice", ("k_term_doubled",),
        "modular/modular#7165: split boundaries that overlap",
        "the first byte of a row is summed twice",
        (K_LOOP, "for (int64_t i = 0; i < K / 4 + 1; ++i) {\n    const int64_t j = i ? i - 1 : 0;"),
        (LOOP, LOOP.replace("int i = 0; i < 4; ++i", "int q = 0; q < 4; ++q")
         .replace("4 * j + i", "4 * j + q").replace("2 * i", "2 * q")),
    ),
    native(
        "native_scale_of_block", ("scale_reused",),
        "sgl-project/sglang#39626: one scale is indexed per tile",
        "the scale of the first row of each 32",
        (SCALE, "float result = sum * scales[n / 32 * 32];"),
    ),
    native(
        "native_scale_next", ("shifted_rows", "row_ratio", "scale_reused"),
        "vllm-project/vllm#44630: scales that belong to another row",
        "the scale of the row before", (SCALE, "float result = sum * scales[n ? n - 1 : 0];"),
    ),
    native(
        "native_truncating_store", ("truncating_store",),
        "triton-lang/triton#9603: a float32 to bfloat16 store that cuts",
        "bits >> 16 without rounding", (ROUND, "return (uint16_t)(bits >> 16);"), hard=True,
    ),
    native(
        "native_ties_away", (),  # no name of the vocabulary fits
        "ggml-org/llama.cpp#16295: halves are rounded away from zero",
        "+ 0x8000 for ties to even", (ROUND, "return (uint16_t)((bits + 0x8000u) >> 16);"),
    ),
    native(
        "native_bfloat16_sum", ("narrow_accumulator",),
        "ROCm/aiter#4581: a running sum in bfloat16",
        "the sum is rounded to bfloat16 after every byte",
        (LOOP, LOOP + "\n    sum = BFloat16::widen(BFloat16::narrow(sum));"), hard=True,
    ),
    native(
        "native_bias_missing", ("bias_missing",),
        "sgl-project/sglang#35358: the bias is dropped",
        "no bias", (BIAS, ""), bias=True,
    ),
    native(
        "native_bias_twice", ("bias_doubled",),
        "Wenyueh/MinivLLM#80: the bias is added on every rank",
        "the bias is added twice", (BIAS, "if (bias) result += 2.0f * bias[n];"), bias=True,
    ),
    native(
        "native_bias_scaled", ("bias_scaled",),
        "huggingface/transformers bitnet: the bias is added before the scale",
        "the bias is multiplied by the scale",
        (SCALE, "float result = (sum + (bias ? bias[n] : 0.0f)) * scales[n];"), (BIAS, ""),
        bias=True,
    ),
    native(
        "native_last_column", ("unwritten", "n_tail_dropped"),
        "vllm-project/vllm-ascend#17009: up to eight valid elements are left unwritten",
        "the last column is not written", (GUARD, "if (m >= M || n >= N - 1) return;"),
        reasons=("unwritten",),
    ),
    native(
        "native_grid_floor", ("unwritten", "m_tail_dropped"),
        "vllm-project/vllm-ascend#17003: a grid that is rounded down",
        "blocks of M are rounded down", (GRID, GRID.replace("(M + 3) / 4", "M / 4 ? M / 4 : 1")),
        reasons=("unwritten",),
    ),
    native(
        "native_nan_lost", (),
        "ROCm/MIOpen#1400: NaN does not survive",
        "NaN is stored as zero", ("if (y != y) return 0x7fc0u;", "if (y != y) return 0u;"),
        reasons=("nonfinite",),
    ),
    native(
        "native_saturates", ("saturation",),
        "jax-ml/ml_dtypes#400: overflow gives the largest value in one stack, infinity in another",
        "infinity is stored as the largest bfloat16",
        (ROUND, "const uint32_t r = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;\n"
         "    return (uint16_t)((r & 0x7fffu) >= 0x7f80u ? (r & 0x8000u) | 0x7f7fu : r);"),
    ),
]  # fmt: skip

# ------------------------------------------------------------------ torch stages


def torch_stage(
    name, causes, source, patch, *, form="fp8_e4m3_block", shape=SHAPE, bias=False, reasons=(),
    hard=False, contract=PLAIN, clean=TORCH, faulty=None, options=None, **stages
):  # fmt: skip
    """One stage of the torch kernel replaced."""
    given = {"bias": bias_of(shape[0])} if bias else {}
    return Mutant(
        id=f"kernels/{name}",
        area="kernels",
        source=source,
        patch=patch,
        trial=OpTrial(
            faulty=faulty or replace(clean, **stages),
            clean=clean,
            weight=weight(form, shape),
            contract=contract,
            options=given | (options or {}),
        ),
        op=OP,
        causes=causes,
        reasons=reasons,
        hard=hard,
        quick=name not in FULL_ONLY,
    )


def without_last_k(x, w):
    return x[:, :-1] @ w[:, :-1].T


def upper_half_of_k_masked(x, w):
    """Up to 32 rows: a mask made of the packed K hides the rest."""
    half = w.shape[1] // 2
    return x[:, :half] @ w[:, :half].T if len(x) <= 32 else x @ w.T


def overlapping_splits(x, w):
    half = w.shape[1] // 2
    return x[:, : half + 1] @ w[:, : half + 1].T + x[:, half:] @ w[:, half:].T


def bfloat16_partials(x, w):
    half = w.shape[1] // 2
    parts = [x[:, s] @ w[:, s].T for s in (slice(0, half), slice(half, None))]
    return parts[0].bfloat16().float() + parts[1].bfloat16().float()


def bfloat16_sum(x, w):
    total = torch.zeros(len(x), len(w))
    for start in range(0, w.shape[1], 16):
        part = x[:, start : start + 16] @ w[:, start : start + 16].T
        total = (total + part).bfloat16().float()
    return total


def stale_second_buffer(x, w):
    """A double buffer that is read before it is filled: K block 1 multiplies block 0's x."""
    blocks = list(zip(x.split(64, 1), w.split(64, 1), strict=True))
    total = blocks[0][0] @ blocks[0][1].T
    for index, (part, slab) in enumerate(blocks[1:], start=1):
        total += (blocks[0][0][:, : part.shape[1]] if index == 1 else part) @ slab.T
    return total


def awq_order(x, w):
    """Eight neighbours of K in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    k = w.shape[1]
    order = torch.arange(k)
    whole = k // 8 * 8
    order[:whole] = order[:whole].view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
    return x @ w[:, order].T


def neighbours_swapped(x, w):
    order = torch.arange(w.shape[1])
    whole = w.shape[1] // 2 * 2
    order[:whole] = order[:whole].view(-1, 2).flip(1).flatten()
    return x @ w[:, order].T


def rows_interleaved(x, w):
    """Two halves of the rows interleaved, as a fused gate and up projection is."""
    half = w.shape[0] // 2
    order = torch.arange(w.shape[0])
    order[: 2 * half] = order[: 2 * half].view(2, half).T.flatten()
    return x @ w[order].T


def columns_shifted(x, w):
    return x @ w.T.roll(1, 1)


def last_row_of_32(x, w):
    """Rows beyond a multiple of 32 repeat the last whole tile."""
    y = x @ w.T
    whole = len(x) // 32 * 32
    if whole and whole < len(x):
        y[whole:] = y[whole - 1]
    return y


def n_tail_zero(x, w):
    """Columns beyond a multiple of 128 stay zero."""
    y = x @ w.T
    y[:, w.shape[0] // 128 * 128 :] = 0
    return y


def transposed_when_square(x, w):
    return x @ (w if w.shape[0] == w.shape[1] else w.T)


def chopped(y, dtype):
    """The upper 16 bits of float32."""
    return (y.view(torch.int32) & -65536).view(torch.float32).to(dtype)


def through_float16(y, dtype):
    return y.half().to(dtype)


def at_most_448(y, dtype):
    return y.clamp(-448, 448).to(dtype)


def bias_after_the_store(y, weight, bias):
    return y if bias is None else y.bfloat16().float() + bias.float()


def weight_in_bfloat16(values, scales):
    return (values * scales).bfloat16().float()


def int8_rows(x):
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(1e-7) / 127
    return torch.round(wide / scale).clamp(-127, 127) * scale


def fp8_rows(x):
    """Per token, as the contract ``per_token_fp8`` says."""
    wide = x.float()
    amax = wide.abs().amax(-1, keepdim=True)
    scale = (amax / torch.full_like(amax, 448)).clamp_min(1 / (448 * 512))
    return _fp8(wide, scale)


def fp8_tensor(x):
    """One scale for all tokens."""
    wide = x.float()
    return _fp8(wide, (wide.abs().amax() / 448).clamp_min(1 / (448 * 512)))


def fp8_rows_without_floor(x):
    """0 / 0 for a row of zeros."""
    wide = x.float()
    return _fp8(wide, wide.abs().amax(-1, keepdim=True) / 448)


def _fp8(wide, scale):
    spoilt = ~wide.isfinite().all(-1, keepdim=True)
    values = (wide / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return torch.where(spoilt, torch.nan, values)


def mxfp8_groups(x, rule):
    """E4M3 under a power of two per 32 values; ``rule``: amax to exponent."""
    wide = x.float()
    k = wide.shape[-1]
    groups = torch.nn.functional.pad(wide, (0, -k % 32)).unflatten(-1, (-1, 32))
    scale = torch.exp2(rule(groups.abs().amax(-1, keepdim=True)).clamp_min(-127.0).double()).float()
    codes = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    values = (codes * scale).flatten(-2)[..., :k]
    return torch.where(wide.isfinite().all(-1, keepdim=True), values, torch.nan)


def floor_rule(amax):
    return torch.frexp(amax).exponent - 1 - 8.0


def ceil_rule(amax):
    return torch.ceil(torch.log2(amax.double() / 448)).float()


def subnormals_are_zero(x):
    wide = x.float()
    return torch.where(wide.abs() < 2.0**-126, 0.0, wide)


PER_TOKEN = Contract(activation="per_token_fp8", scale_applied="after_sum")
FP8_ROWS = replace(TORCH, load=fp8_rows)
MX = Contract(activation="mxfp8")
MX_ROWS = replace(TORCH, load=functools.partial(mxfp8_groups, rule=floor_rule))

STAGES = [
    torch_stage(
        "last_k", ("k_tail_dropped",),
        "ROCm/aiter#4181: valid elements at the end of K are masked",
        "the last k is left out", hard=True, product=without_last_k,
    ),
    torch_stage(
        # half of K masked, or the second of two splits lost: the same sums are missing
        "half_of_k_for_few_rows", ("k_tail_dropped", "k_range_ratio", "split_missing"),
        "ROCm/aiter#4181: an activation mask in packed units, for small M only",
        "up to 32 rows only the first half of K counts", product=upper_half_of_k_masked,
        form="mxfp8_e4m3",
    ),
    torch_stage(
        "splits_overlap", ("k_term_doubled",),
        "modular/modular#7165: split-K ranges",
        "the k in the middle is summed by both splits", product=overlapping_splits,
    ),
    torch_stage(
        "bfloat16_partials", ("narrow_partials",),
        "ROCm/aiter#4581: split-K partial sums are rounded to bfloat16",
        "two partial sums in bfloat16, which the contract does not say", product=bfloat16_partials,
    ),
    torch_stage(
        "bfloat16_sum", ("narrow_accumulator",),
        "vllm-project/vllm#54706: partial sums in a low precision",
        "the running sum is kept in bfloat16", hard=True, product=bfloat16_sum,
    ),
    torch_stage(
        "stale_buffer", ("k_range_ratio", "column_permutation"),
        "huggingface/optimum-quanto#332: a missing barrier, so that old data is multiplied",
        "K block 1 multiplies the activations of K block 0", product=stale_second_buffer,
        form="fp8_e4m3_channel",
    ),
    torch_stage(
        "awq_order", ("column_permutation", "pair_order"),
        "amd/Quark#30: packed linearly while the config promises AWQ order",
        "eight neighbours of K are read as 0, 2, 4, 6, 1, 3, 5, 7", product=awq_order,
        form="fp8_e4m3_channel",
    ),
    torch_stage(
        "pairs_swapped", ("pair_order", "column_permutation"),
        "kekzl/imp#567: neighbouring elements are exchanged",
        "k = 2i and 2i + 1 are exchanged", product=neighbours_swapped, form="fp8_e4m3_tensor",
    ),
    torch_stage(
        # two sections interleaved: that permutation of rows has a name of its own
        "rows_interleaved", ("row_permutation", "interleaved_planar"),
        "NVIDIA-NeMo/Megatron-Bridge#1818: sections against interleaved groups",
        "output rows of two sections are interleaved", product=rows_interleaved,
        form="fp8_e4m3_tensor",
    ),
    torch_stage(
        "columns_shifted", ("shifted_rows", "row_permutation"),
        "sgl-project/sglang#26084: outputs one place off",
        "output n holds the sum of row n - 1", product=columns_shifted, form="mxfp8_e4m3",
    ),
    torch_stage(
        "m_tail", ("m_tail_dropped", "stale_output"),
        "fla-org/flash-linear-attention#892: the tail of the tokens is not computed",
        "rows beyond a multiple of 32 repeat the row before", product=last_row_of_32,
    ),
    torch_stage(
        "n_tail", ("n_tail_dropped",),
        "tgale96/grouped_gemm#36: a tail of the output stays as it was",
        "columns beyond a multiple of 128 are zero", product=n_tail_zero, form="fp8_e4m3_channel",
    ),
    torch_stage(
        "transposed_when_square", ("transposed",),
        "PTO-ISA/SuperNPUBench#161: a transposition that square or constant inputs hide",
        "a square weight is used as it lies, not transposed", product=transposed_when_square,
        shape=(256, 256), form="fp8_e4m3_tensor",
    ),
    torch_stage(
        "truncating_store", ("truncating_store",),
        "triton-lang/triton#9603: float32 to bfloat16 by cutting",
        "the lower 16 bits are cut", hard=True, store=chopped,
    ),
    torch_stage(
        "store_through_float16", ("double_rounding", "saturation"),
        "pytorch/FBGEMM#3664: an intermediate dtype between accumulator and output",
        "float32 is rounded to float16, then to bfloat16", store=through_float16,
        form="fp8_e4m3_channel",
    ),
    torch_stage(
        "clamped_store", ("saturation",),
        "jax-ml/ml_dtypes#400: outputs are clamped to a format's maximum",
        "outputs are clamped to 448", store=at_most_448,
    ),
    torch_stage(
        "bias_after_rounding", ("bias_after_rounding", "double_rounding"),
        "InternLM/lmdeploy#2842: a cast before the last step",
        "the sum is rounded to bfloat16 before the bias is added", bias=True,
        finish=bias_after_the_store, form="fp8_e4m3_channel",
    ),
    torch_stage(
        "weight_rounded", ("weight_rounding",),
        "vllm-project/vllm#29810: a product is rounded that should not be",
        "code times scale is rounded to bfloat16, which the contract does not say",
        combine=weight_in_bfloat16,
    ),
    torch_stage(
        "activations_int8", ("activation_quantised",),
        "pytorch/ao#1912: activations are quantised in a weight-only path",
        "activations are rounded to int8 per token, which the contract does not say",
        load=int8_rows, form="ternary_k_interleaved",
    ),
    torch_stage(
        "activations_fp8", ("activation_quantised",),
        "vllm-project/vllm-xpu-kernels#440: a W8A8 path in place of W8A16",
        "activations are rounded to E4M3 per token, which the contract does not say",
        load=fp8_rows,
    ),
    torch_stage(
        "activation_scale_per_tensor", ("activation_scale",),
        "vllm-project/vllm-xpu-kernels#440: a granularity that is guessed",
        "one activation scale for all tokens under a contract that says one per token",
        contract=PER_TOKEN, clean=FP8_ROWS, load=fp8_tensor, form="fp8_e4m3_channel",
    ),
    torch_stage(
        "mxfp8_scale_rule", ("activation_scale",),
        "microsoft/microxcaling#4: ceil(amax / 448) against floor(log2 amax) - 8",
        "the shared exponent of activations is rounded up", contract=MX, clean=MX_ROWS,
        form="mxfp8_e4m3", load=functools.partial(mxfp8_groups, rule=ceil_rule),
    ),
    torch_stage(
        "zero_row_is_nan", (),
        "huggingface/kernels-community#681: 0 / 0 for a row of zeros",
        "the activation scale has no floor", contract=PER_TOKEN, clean=FP8_ROWS,
        load=fp8_rows_without_floor, form="fp8_e4m3_channel", reasons=("nonfinite",),
    ),
    torch_stage(
        "subnormals_flushed", ("flush_subnormals",),
        "NVIDIA/TransformerEngine#3262: flush to zero where none is declared",
        "subnormal activations count as zero", load=subnormals_are_zero,
    ),
]  # fmt: skip

# ------------------------------------------------------------------ what a kernel does besides


def whole(change):
    """A kernel that does something to or beside the right output."""

    def kernel(x, weight, bias=None):
        return change(TORCH(x, weight, bias), x, weight)

    return kernel


def nan_to_zero_in(x, weight, bias=None):
    return TORCH(torch.nan_to_num(x, nan=0.0), weight, bias)


def as_if_contiguous(x, weight, bias=None):
    """Strides are ignored: the memory is read from the first element on."""
    if not x.is_contiguous():
        x = x.as_strided(x.shape, torch.empty(x.shape).stride(), x.storage_offset())
    return TORCH(x, weight, bias)


class Stale:
    """One row: what the last batch left."""

    def __init__(self):
        self.kept = {}

    def __call__(self, x, weight, bias=None):
        y = TORCH(x, weight, bias)
        rows = y.view(-1, y.shape[-1])
        key = (weight.shape, int(weight.codes.sum()))
        if len(rows) == 1 and key in self.kept:
            return self.kept[key].view_as(y).clone()
        self.kept[key] = rows[-1:].clone()
        return y


class Racing:
    """Another result in every second call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x, weight, bias=None):
        self.calls += 1
        y = TORCH(x, weight, bias)
        y.view(-1)[self.calls % y.numel()] *= 1 + 2.0**-7 * (self.calls % 2)
        return y


class Workspace:
    """One output buffer for each shape, returned again and again."""

    def __init__(self):
        self.kept = {}

    def __call__(self, x, weight, bias=None):
        y = TORCH(x, weight, bias)
        return self.kept.setdefault(tuple(y.shape), torch.zeros_like(y)).copy_(y)


def normalises_in_place(x, weight, bias=None):
    y = TORCH(x, weight, bias)
    x.mul_(0.5)
    return y


def transposes_its_scales(x, weight, bias=None):
    y = TORCH(x, weight, bias)
    weight.scales.copy_(weight.scales.flip(0))
    return y


def unwritten_corner(x, weight, bias=None):
    y = torch.empty(*x.shape[:-1], weight.shape[0], dtype=x.dtype)
    right = TORCH(x, weight, bias)
    flat, good = y.view(-1), right.reshape(-1)
    flat[:-3] = good[:-3]
    return y


def written_by_strides_of_another(x, weight, bias=None):
    """Rows written one after the other into an output that has gaps between its rows."""
    right = TORCH(x, weight, bias)
    rows = right.reshape(-1, right.shape[-1])
    wide = torch.zeros(len(rows), rows.shape[1] + 8, dtype=x.dtype)
    wide.view(-1)[: rows.numel()] = rows.reshape(-1)
    return wide[:, : rows.shape[1]].reshape(right.shape)


def behaviour(
    name, causes, source, patch, faulty, reasons=(), form="fp8_e4m3_block", contract=PLAIN
):
    return torch_stage(
        name, causes, source, patch, faulty=faulty, reasons=reasons, form=form, contract=contract
    )


BEHAVIOUR = [
    behaviour(
        "nan_swallowed", (), "ralna/RALFit#138: NaN is dropped by a maximum",
        "NaN of the input counts as zero", nan_to_zero_in, ("nonfinite",),
    ),
    behaviour(
        "strides_ignored", ("strided_input",),
        "mindie-agent/mindie-agent#75: kernels read raw storage",
        "a strided input is read as if it were contiguous", as_if_contiguous,
        form="fp8_e4m3_channel",
    ),
    behaviour(
        "written_with_gaps", ("strided_output",),
        "vllm-project/vllm#40737: an output of other strides than the kernel assumes",
        "rows are written without the gaps of the output", written_by_strides_of_another,
        form="fp8_e4m3_channel",
    ),
    behaviour(
        "old_row", ("stale_output",),
        "tenstorrent/vllm#415: the second request gets what the first left",
        "a single row returns the last row of the batch before", Stale(),
    ),
    behaviour(
        "race", (), "vllm-project/vllm#54706: two hundred results in two hundred calls",
        "every second call changes one element", Racing(), ("unstable",),
    ),
    behaviour(
        "workspace_shared", (), "IBM/vLLM-Hook#6: one buffer is overwritten by each replay",
        "the same output tensor is returned for each shape", Workspace(), ("unstable",),
    ),
    behaviour(
        "input_scaled", (), "GeeeekExplorer/nano-vllm#170: works in place on the caller's data",
        "the input is halved after use", normalises_in_place, ("input_mutated",),
    ),
    behaviour(
        "scales_changed", (), "vllm-project/vllm#44630: scales are transposed in place",
        "the scale tensor is flipped after use", transposes_its_scales, ("input_mutated",),
    ),
    behaviour(
        "corner_unwritten", ("unwritten",),
        "vllm-project/vllm-ascend#17009: up to eight valid elements are left unwritten",
        "the last three elements come from empty()", unwritten_corner, ("unwritten",),
    ),
]  # fmt: skip

MUTANTS = (*NATIVE, *STAGES, *BEHAVIOUR)
