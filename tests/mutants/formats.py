"""Faults in how codes and scales are read, in the torch kernels of every format."""

from __future__ import annotations

from dataclasses import replace

import torch
from reconcile_mutants.common import (
    OP,
    PLAIN,
    SHAPE,
    TORCH,
    numbers,
    spread,
    ternary_values,
    weight,
)

from reconcile.selftest import Cause, Mutant, OpTrial

FULL_ONLY = frozenset(
    {
        "fp8_subnormals_flushed", "fp8_as_e5m2", "fp8_sign_ignored", "fp8_bias_off_by_one",
        "ternary_sign_extended", "ternary_nibbles_swapped", "ternary_hf_read_interleaved",
        "scale_missing_ternary", "scale_multiplies", "scale_bfloat16_channel", "scale_of_first_row",
        "scale_grid_transposed", "e8m0_bias", "last_block_unscaled",
    }
)  # fmt: skip
"""Mutants whose like is in the quick subset."""


def near(number, relative=1e-3):
    """A check of one parameter."""
    return lambda value: abs(float(value) - number) <= relative * abs(number)


def mutant(name, form, causes, source, patch, *, shape=SHAPE, scales=None, hard=False, **stages):
    """One stage of the torch kernel replaced, judged in one format."""
    return Mutant(
        id=f"formats/{name}",
        area="formats",
        source=source,
        patch=patch,
        trial=OpTrial(
            faulty=replace(TORCH, **stages),
            clean=TORCH,
            weight=weight(form, shape, scales=scales),
            contract=PLAIN,
        ),
        op=OP,
        causes=causes,
        hard=hard,
        quick=name not in FULL_ONLY,
    )


# ------------------------------------------------------------------ code tables


def through(change):
    """Values of the 256 codes after ``change`` of the right table, looked up code by code."""

    def values(weight):
        table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        return change(table.clone())[weight.codes.view(torch.uint8).long()]

    return values


def subnormals_as_normals(table):
    """(1 + m/8) 2^-7 in place of m/8 2^-6."""
    for code in range(1, 8):
        table[code], table[code + 128] = (1 + code / 8) * 2.0**-7, -(1 + code / 8) * 2.0**-7
    return table


def subnormals_flushed(table):
    table[1:8], table[129:136] = 0, 0
    return table


def nan_is_480(table):
    table[0x7F], table[0xFF] = 480, -480
    return table


def one_neighbour(table):
    """Code 0x4A read as 0x4B, as one wrong line of a table does."""
    table[0x4A] = table[0x4B]
    return table


def upper_half_negated_twice(table):
    table[128:] = table[:128]
    return table


def as_fnuz(weight):
    return weight.codes.view(torch.float8_e4m3fnuz).float()


def as_e5m2(weight):
    return weight.codes.view(torch.float8_e5m2).float()


TABLES = [
    mutant(
        "fp8_subnormals",
        "fp8_e4m3_tensor",
        ("subnormals",),
        "1bit-MONSTER/1bit-MONSTER#300: no branch for exponent field 0",
        "codes 0x01-0x07 decode as normals",
        hard=True,
        values=through(subnormals_as_normals),
    ),
    mutant(
        "fp8_subnormals_flushed",
        "fp8_e4m3_block",
        ("subnormals",),
        "triton-lang/triton#2430: small float8 values come out as zero",
        "codes 0x01-0x07 decode to zero",
        values=through(subnormals_flushed),
    ),
    mutant(
        "fp8_fn_as_fnuz",
        "fp8_e4m3_channel",
        ("fn_fnuz",),
        "vllm-project/vllm#7210: the same bits mean half the value on other hardware",
        "e4m3fn bytes viewed as e4m3fnuz",
        values=as_fnuz,
    ),
    mutant(
        "fp8_as_e5m2",
        "fp8_e4m3_tensor",
        ("code_table",),
        "sgl-project/sglang#35111: another float8 dtype is assumed for the bytes",
        "e4m3 bytes viewed as e5m2",
        values=as_e5m2,
    ),
    mutant(
        "fp8_nan_is_480",
        "fp8_e4m3_block",
        ("nan_codes",),
        "ROCm/DeepEP#17: the NaN code is a number in one of the two E4M3",
        "codes 0x7F and 0xFF decode to 480 and -480",
        values=through(nan_is_480),
    ),
    mutant(
        "fp8_sign_ignored",
        "fp8_e4m3_channel",
        ("sign",),
        "intel/torch-xpu-ops#5431: the sign bit is lost in a float8 helper",
        "codes 0x80-0xFF decode as their positive twins",
        values=through(upper_half_negated_twice),
    ),
    mutant(
        "fp8_bias_off_by_one",
        "fp8_e4m3_block",
        ("exponent_bias", Cause("constant_ratio")),
        "NVIDIA/TransformerEngine#3262: an exponent bias off by one, everything is exactly x0.5",
        "every code decodes to half its value",
        values=through(lambda table: table / 2),
    ),
    mutant(
        "fp8_one_code",
        "fp8_e4m3_tensor",
        ("code_table",),
        "ooples/AiDotNet.Tensors#801: single entries of a float8 table are wrong",
        "code 0x4A decodes as 0x4B",
        values=through(one_neighbour),
    ),
]

# ------------------------------------------------------------------ ternary packings


def with_table(*table):
    return lambda weight: ternary_values(weight, table=table)


def read_planar(weight):
    """K-interleaved bytes cut into four planes along K."""
    slots = [(weight.codes >> shift) & 3 for shift in (0, 2, 4, 6)]
    return torch.tensor([0.0, 1.0, -1.0, 0.0])[torch.cat(slots, -1).long()]


def read_interleaved(weight):
    """Planes along N read as neighbouring rows."""
    slots = torch.stack([(weight.codes >> shift) & 3 for shift in (0, 2, 4, 6)], 1).flatten(0, 1)
    return torch.tensor([-1.0, 0.0, 1.0, 2.0])[slots[: weight.shape[0]].long()]


TERNARY = [
    mutant(
        "ternary_signs_swapped", "ternary_k_interleaved", ("ternary_table", "sign"),
        "chrishayuk/larql#156: the roles of two codes are exchanged",
        "codes 1 and 2 decode to -1 and +1", values=with_table(0.0, -1.0, 1.0, 0.0),
    ),
    mutant(
        "ternary_table_of_the_other", "ternary_hf", ("ternary_table",),
        "chrishayuk/larql#156: code - 1 against 0, +1, -1",
        "codes 0, 1, 2 decode to 0, +1, -1", values=with_table(0.0, 1.0, -1.0, 0.0),
    ),
    mutant(
        "ternary_sign_extended", "ternary_k_interleaved", ("ternary_table",),
        "SKaiNET-developers/SKaiNET#1165: two bits taken for a signed integer",
        "code 2 decodes to -2", values=with_table(0.0, 1.0, -2.0, -1.0),
    ),
    mutant(
        "ternary_bits_reversed", "ternary_k_interleaved", ("bit_order",),
        "chrishayuk/larql#156: the order of the codes in a byte",
        "high bits first", values=lambda w: ternary_values(w, (6, 4, 2, 0)),
    ),
    mutant(
        "ternary_nibbles_swapped", "ternary_k_interleaved", ("nibble_order",),
        "kekzl/imp#567: low and high nibble exchanged",
        "the low nibble is read after the high one",
        values=lambda w: ternary_values(w, (4, 6, 0, 2)),
    ),
    mutant(
        "ternary_read_planar", "ternary_k_interleaved", ("interleaved_planar",),
        "chrishayuk/larql#156: a contiguous decode of a strided layout",
        "four planes along K instead of neighbours", values=read_planar,
    ),
    mutant(
        "ternary_hf_read_interleaved", "ternary_hf", ("interleaved_planar",),
        "microsoft/BitBLAS#316: rows of one byte taken for neighbours",
        "neighbouring rows instead of planes along N", values=read_interleaved,
    ),
]  # fmt: skip

# ------------------------------------------------------------------ scales


def scaled(change):
    """Scales after ``change`` of the float32 numbers."""
    return lambda weight: change(numbers(weight))


def without_mantissa(scales):
    return torch.exp2(torch.floor(torch.log2(scales)))


def one_block(factor):
    def change(scales):
        scales = scales.clone()
        scales[1, 1] *= factor
        return scales

    return change


def first_k_block(scales):
    return scales[:, :1].expand_as(scales)


def last_k_block_is_one(scales):
    scales = scales.clone()
    scales[:, -1] = 1
    return scales


def along_columns(scales, weight):
    """Scale i of the rows on column i."""
    return scales[torch.arange(weight.shape[1]) % len(scales)][None, :]


def even_blocks(scales, weight):
    """Block rows from the shapes, N / rows of the grid, in place of 128."""
    rows = -(-weight.shape[0] // scales.shape[0])
    place = torch.arange(weight.shape[0])[:, None] // rows
    return scales[place, torch.arange(weight.shape[1])[None, :] // weight.format.block[1]]


def grid_transposed(scales, weight):
    """The grid's memory read column by column."""
    return spread(scales.reshape(scales.shape[::-1]).T.contiguous(), weight)


SCALES = [
    mutant(
        "scale_missing_channel", "fp8_e4m3_channel", ("scale_missing",),
        "unslothai/unsloth#6978: raw values without their scale",
        "the scale is not applied", numbers=scaled(torch.ones_like),
    ),
    mutant(
        "scale_missing_ternary", "ternary_hf", ("scale_missing", "constant_ratio"),
        "Lightricks/LTX-2#172: scale tensors are discarded as unexpected keys",
        "the scale is not applied", numbers=scaled(torch.ones_like),
    ),
    mutant(
        "scale_inverted", "ternary_hf", ("scale_inverted",),
        "microsoft/BitNet#616: one class divides by the scale, the other multiplies",
        "divides by the scale", numbers=scaled(torch.reciprocal),
    ),
    mutant(
        "scale_multiplies", "ternary_hf_divide", ("scale_inverted",),
        "microsoft/BitNet#616: one class divides by the scale, the other multiplies",
        "multiplies where the format divides", numbers=scaled(torch.reciprocal),
    ),
    mutant(
        "scale_twice", "fp8_e4m3_tensor", ("scale_squared", "constant_ratio"),
        "kekzl/imp#1433: a global scale off by its square",
        "the scale is applied twice", numbers=scaled(torch.square),
    ),
    mutant(
        "scale_mantissa_dropped", "fp8_e4m3_block", ("scale_mantissa_dropped",),
        "sgl-project/sglang#39193: float32 scales given to a kernel that reads powers of two",
        "only the power of two of each scale is used", numbers=scaled(without_mantissa),
    ),
    mutant(
        "scale_float16_ternary", "ternary_k_interleaved", ("scale_low_precision",),
        "vllm-project/vllm-metal#665: parameters are cast with the model",
        "row scales are rounded to float16", hard=True,
        numbers=scaled(lambda scales: scales.half().float()),
    ),
    mutant(
        "scale_bfloat16_channel", "fp8_e4m3_channel", ("scale_low_precision",),
        "deepseek-ai/DeepGEMM#112: scales in a narrower dtype than the kernel expects",
        "row scales are rounded to bfloat16", numbers=scaled(lambda s: s.bfloat16().float()),
    ),
    mutant(
        "scales_one_percent", "fp8_e4m3_block",
        (Cause("constant_ratio", {"ratio": near(1.01, 1e-3)}),),
        "vllm-project/vllm#46400: a scale derived by another rule",
        "every scale is 1 % too large", hard=True, numbers=scaled(lambda scales: scales * 1.01),
    ),
    mutant(
        "one_block_ten_percent", "fp8_e4m3_block", ("block_ratio",),
        "sgl-project/sglang#39193: single block scales differ",
        "the scale of one block is 10 % too large", hard=True, numbers=scaled(one_block(1.1)),
    ),
    mutant(
        # a ratio of two in one block is its exponent off by one: no output tells them apart
        "one_e8m0_off_by_one", "mxfp8_e4m3", ("block_ratio", "scale_exponent_bias"),
        "microsoft/microxcaling#4: the shared exponent of a block differs by one",
        "one E8M0 exponent is one too large", hard=True, numbers=scaled(one_block(2.0)),
    ),
    mutant(
        # half of everything: the bias of the scales, of the codes, or a factor
        "e8m0_bias", "mxfp8_e4m3", ("scale_exponent_bias", "exponent_bias", "constant_ratio"),
        "NVIDIA/TransformerEngine#3262: an exponent bias off by one",
        "E8M0 bytes are decoded with bias 128", numbers=scaled(lambda scales: scales / 2),
    ),
    mutant(
        "e8m0_bytes_as_numbers", "mxfp8_e4m3", ("bytes_as_numbers",),
        "jundot/omlx#2159: E8M0 bytes of dtype uint8 used as factors",
        "the byte is the factor", numbers=lambda w: w.scales.view(torch.uint8).float(),
    ),
    mutant(
        "scale_of_first_k_block", "fp8_e4m3_block", ("scale_reused",),
        "sgl-project/sglang#39626: a pointer step of 0, so that the first scale serves all of K",
        "the scale of K block 0 is used for every K block", numbers=scaled(first_k_block),
    ),
    mutant(
        "scale_of_first_row", "fp8_e4m3_channel", ("scale_reused",),
        "vllm-project/vllm-xpu-kernels#440: a scale per channel taken for one per tensor",
        "the scale of row 0 is used for every row",
        numbers=scaled(lambda scales: scales[:1].expand_as(scales)),
    ),
    mutant(
        "last_block_unscaled", "fp8_e4m3_block", ("last_block_scale_dropped",),
        "vllm-project/compressed-tensors#843: a partial block at the edge is not scaled",
        "the last K block, a partial one, is not scaled", shape=(192, 320),
        numbers=scaled(last_k_block_is_one),
    ),
    mutant(
        "scale_along_columns", "fp8_e4m3_channel", ("scale_axis",),
        "vllm-project/vllm-xpu-kernels#440: the axis is guessed from a shape",
        "row scales are applied to columns", shape=(256, 256), spread=along_columns,
    ),
    mutant(
        "block_from_shapes", "fp8_e4m3_block", ("block_boundary",),
        "vllm-project/compressed-tensors#843: the block size is derived from shapes",
        "rows of 112 instead of 128 share a scale", shape=(448, 256), spread=even_blocks,
    ),
    mutant(
        "scale_grid_transposed", "fp8_e4m3_block", ("scale_axis",),
        "vllm-project/vllm#44630: the scale grid is transposed",
        "the grid is read transposed", shape=(256, 256), spread=grid_transposed,
    ),
]  # fmt: skip

MUTANTS = (*TABLES, *TERNARY, *SCALES)
