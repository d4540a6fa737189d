"""Thirty more faults from public bug reports, by somebody who does not know the hypotheses.

Faults of kernels; those of models are in ``models.py``. Each one's expectation was committed before
its first run. ``patch`` says the cause in words; ``causes`` are the names that lead a reader to the
same repair. Some of them are in no list: they say how the author would have called it.
"""

import torch
from reconcile_mutants.common import (
    NAIVE_ON_CPU,
    OP,
    PLAIN,
    SHAPE,
    TORCH,
    PatchedNaive,
    TorchKernel,
    numbers,
    weight,
)

from reconcile import Contract
from reconcile.numbers import mx
from reconcile.selftest import BatchedTrial, Mutant, OpTrial

BIAS = torch.randn(SHAPE[0], generator=torch.Generator().manual_seed(77))
WARP = 16
"""Columns of a warp's tile."""
TILE = 64
"""K of a tile in the ring buffer."""


def op(name, faulty, shape=SHAPE, clean=TORCH, contract=PLAIN, scales=None, **options):
    """A kernel on a random weight of a format."""
    return OpTrial(
        faulty=faulty,
        clean=clean,
        weight=weight(name, shape, scales=scales),
        contract=contract,
        options=options,
    )


# ------------------------------------------------------------------ FP8, scales


def even_groups(scales, weight):
    """Rows of a scale: N div the number of blocks, in place of the declared block."""
    (n, k), (_, columns) = weight.shape, weight.format.block
    rows = max(1, n // len(scales))
    place = (torch.arange(n) // rows).clamp_max(len(scales) - 1)
    return scales[place[:, None], (torch.arange(k) // columns)[None, :]]


def scale_of_warp(scales, weight):
    """The scale of the first of 16 rows for all of them."""
    return scales[torch.arange(weight.shape[0]) // WARP * WARP][:, None]


def bias_then_scale(y, weight, bias):
    """(sum + bias) * scale of the tensor."""
    return y if bias is None else y + bias.float() * numbers(weight)


class TransposesScales:
    """Turns its square grid of scales in place after use, for a sibling that wants it so."""

    def __call__(self, x, weight, bias=None):
        y = TORCH(x, weight, bias)
        if weight.scales.shape[0] == weight.scales.shape[1]:
            weight.scales.copy_(weight.scales.T.clone())
        return y


def split_rounded_down(x, w):
    """From 17 rows on two splits of K; the second begins at the next multiple of 64."""
    if len(x) <= 16:
        return x @ w.T
    half = x.shape[1] // 2
    second = -(-half // TILE) * TILE
    return x[:, :half] @ w[:, :half].T + x[:, second:] @ w[:, second:].T


class RingBuffer:
    """Tiles of K through a ring of three; every third call the last one is read too early."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x, weight, bias=None):
        self.calls += 1
        early = self.calls % 3 == 0

        def product(rows, w):
            tiles = list(zip(rows.split(TILE, 1), w.split(TILE, 1), strict=True))
            if early and len(tiles) > 3:
                tiles[-1] = tiles[-4]
            return sum(a @ b.T for a, b in tiles)

        return TorchKernel(product=product)(x, weight, bias)


def rounded_tiles(x, w):
    """The running sum is kept in bfloat16, tile of 32 by tile."""
    total = torch.zeros(len(x), len(w), dtype=torch.bfloat16)
    for a, b in zip(x.split(32, 1), w.split(32, 1), strict=True):
        total = (total.float() + a @ b.T).bfloat16()
    return total.float()


# ------------------------------------------------------------------ FP8 and int8 activations

TOKEN_FP8 = Contract(activation="per_token_fp8")
TOKEN_INT8 = Contract(activation="per_token_int8")


def token_scale(rows):
    """One scale for each row, as vLLM's dynamic per-token FP8."""
    return (rows.abs().amax(-1, keepdim=True) / 448).clamp_min(1 / (448 * 512))


def fp8_codes(rows, scale):
    """E4M3 codes, saturating."""
    return (rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()


def w8a8(scale_in_epilogue, scale=token_scale, codes=fp8_codes):
    """FP8 weights and activations; the epilogue multiplies by what it takes for the scales."""

    def kernel(x, weight, bias=None):
        rows = x.reshape(-1, x.shape[-1]).float()
        by = scale(rows)
        y = codes(rows, by) @ TORCH.weight(weight).T * scale_in_epilogue(by)
        return TORCH.store(TORCH.finish(y, weight, bias), x.dtype).reshape(*x.shape[:-1], -1)

    return kernel


def own(scale):
    """Each row its own scale."""
    return scale


def of_first_row(scale):
    """One number for the whole call."""
    return scale[:1].expand_as(scale)


def scale_without_nan(rows):
    """Fmax drops NaN."""
    return token_scale(torch.where(rows.isnan(), 0.0, rows))


def codes_without_nan(rows, scale):
    """Fminf(448, NaN) is 448."""
    return fp8_codes(torch.where(rows.isnan(), torch.inf, rows), scale)


W8A8 = w8a8(own)


def lane_sums(lanes):
    """2-bit codes by int8 activations in 16 lanes, folded every 4096 of K; ``lanes`` narrows."""

    def kernel(x, weight, bias=None):
        rows = x.reshape(-1, x.shape[-1]).float()
        amax = rows.abs().amax(-1, keepdim=True).clamp_min(1e-7)
        largest = torch.full_like(amax, 127)
        q = torch.round(rows * (largest / amax))
        codes = weight.unpacked().float()
        lane = torch.arange(q.shape[1]) % 32 // 2
        total = torch.zeros(len(q), len(codes))
        for start in range(0, q.shape[1], 4096):
            part = slice(start, start + 4096)
            for i in range(16):
                a, b = q[:, part][:, lane[part] == i], codes[:, part][:, lane[part] == i]
                total += lanes(a @ b.T)
        y = (total - q.sum(-1, keepdim=True)) * (amax / largest) * weight.scales.float()
        return TORCH.finish(y, weight, bias).to(x.dtype).reshape(*x.shape[:-1], -1)

    return kernel


def int16(sums):
    """Wraps."""
    return torch.remainder(sums + 32768, 65536) - 32768


INT32_LANES = lane_sums(own)
INT16_LANES = lane_sums(int16)


# ------------------------------------------------------------------ MXFP8


def mx_load(rule):
    """Activations to MXFP8 by a rule."""

    def load(rows):
        return mx.quantise(rows, mx.named(rule)).dequantize().float()

    return load


RCEIL = TorchKernel(load=mx_load("mxfp8_rceil"))
FLOOR = TorchKernel(load=mx_load("mxfp8"))


def as_if_interleaved(weight):
    """Row-major scales read at the places of the 128 x 4 interleaved layout."""
    grid = weight.scales.view(torch.uint8)
    rows, columns = grid.shape
    full = torch.full((-(-rows // 128) * 128, -(-columns // 4) * 4), 127, dtype=torch.uint8)
    full[:rows, :columns] = grid
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    tile = r // 128 * (full.shape[1] // 4) + c // 4
    place = tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    return full.flatten()[place].view(torch.float8_e8m0fnu).float()


def half_flushed(weight):
    """E8M0 through float16 without its subnormals: 2^-15 and less is 0."""
    scales = numbers(weight)
    return torch.where(scales < 2.0**-14, 0.0, scales.half().float())


def small_bytes(scales):
    """E8M0 bytes around 2^-15."""
    drawn = torch.randint(107, 118, scales.shape, generator=torch.Generator().manual_seed(5))
    return drawn.to(torch.uint8).view(scales.dtype)


# ------------------------------------------------------------------ batched and dense


def batched_weight():
    """bfloat16 [4, 96, 200]."""
    return torch.randn(4, 96, 200, generator=torch.Generator().manual_seed(3)).bfloat16()


def bmm(x, weight, bias=None):
    """Float32 sums."""
    y = x.float() @ weight.float().transpose(1, 2)
    return (y if bias is None else y + bias[:, None].float()).to(x.dtype)


def logical_strides(x, weight, bias=None):
    """Strides M K, K, 1 whatever those of x are."""
    _, m, k = x.shape
    return bmm(x.as_strided(x.shape, (m * k, k, 1)), weight, bias)


def tail_from_neighbour(x, weight, bias=None):
    """Whole tiles of 32 of K: the last one reads on into the next row."""

    def beyond(t):
        k = t.shape[-1]
        more = -k % 32
        flat = torch.cat([t.contiguous().flatten(), torch.zeros(more, dtype=t.dtype)])
        return flat.as_strided((*t.shape[:2], k + more), (t.shape[1] * k, k, 1))

    return bmm(beyond(x), beyond(weight), bias)


def dense_weight():
    """float32 [96, 256]."""
    return torch.randn(96, 256, generator=torch.Generator().manual_seed(4))


def dense(x, weight, bias=None):
    """Float32 throughout."""
    y = x @ weight.T
    return y if bias is None else y + bias


def tf32(x):
    """To nearest even with ten bits of mantissa."""
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + 0xFFF + (bits >> 13 & 1) & ~0x1FFF).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


def tf32_dense(x, weight, bias=None):
    """The default input precision of a tensor core's float32 product."""
    return dense(tf32(x), tf32(weight), bias)


TL2_STRIDE = PatchedNaive(("y[m * N + n] = ", "y[n] = "))

MUTANTS = (
    Mutant(
        id="blind2/group_from_n",
        area="kernels",
        source="vllm-project/vllm#49596 (review): group size N / n_blocks = 112 for N = 448",
        patch="rows that share a scale are N div the number of blocks, 112, not the block's 128",
        trial=op("fp8_e4m3_block", TorchKernel(spread=even_groups), (448, 256)),
        op=OP,
        causes=("block_boundary", "group_size"),
    ),
    Mutant(
        id="blind2/scale_of_warp_tile",
        area="kernels",
        source="ROCm/rocm-libraries#11724: one scale across a 16-wide warp tile, kN = 1",
        patch="all 16 rows of a warp's tile get the scale of its first row",
        trial=op("fp8_e4m3_channel", TorchKernel(spread=scale_of_warp)),
        op=OP,
        causes=("scale_reused", "row_ratio"),
    ),
    Mutant(
        id="blind2/bias_before_scale",
        area="kernels",
        source="vllm-project/vllm#31676: the bias is added before the dequantisation",
        patch="the bias is multiplied by the weight's scale",
        trial=op("fp8_e4m3_tensor", TorchKernel(finish=bias_then_scale), bias=BIAS),
        op=OP,
        causes=("bias_scaled",),
    ),
    Mutant(
        id="blind2/scales_transposed_in_place",
        area="kernels",
        source="vllm-project/vllm#44630: a kernel transposes weight_scale_inv in place",
        patch="each call transposes the grid of scales in place, so the second is wrong",
        trial=op("fp8_e4m3_block", TransposesScales(), (256, 256)),
        op=OP,
        causes=("scale_axis", "transposed"),
    ),
    Mutant(
        id="blind2/split_k_gap_from_17_rows",
        area="kernels",
        source="ROCm/aiter#5261, deepseek-ai/DeepGEMM#268: right for some M only",
        patch="from 17 rows on K 160 to 191, between two splits of 320, is left out",
        trial=op("fp8_e4m3_block", TorchKernel(product=split_rounded_down), (192, 320)),
        op=OP,
        causes=("k_tail_dropped", "k_range_ratio", "block_boundary"),
    ),
    Mutant(
        id="blind2/ring_buffer_race",
        area="kernels",
        source="ROCm/aiter#4537: the wait leaves one load too many outstanding",
        patch="every third call reads the tile before last's slot of the ring: the last tile of K "
        "is one from three tiles ago",
        trial=op("fp8_e4m3_block", RingBuffer(), (192, 320)),
        op=OP,
        reasons=("unstable", "over_limit"),
    ),
    Mutant(
        id="blind2/tile_sum_bfloat16",
        area="kernels",
        source="microsoft/onnxruntime#29611: a tile accumulates in output_element_t",
        patch="the running sum over tiles of 32 is bfloat16",
        trial=op("fp8_e4m3_channel", TorchKernel(product=rounded_tiles), (96, 512)),
        op=OP,
        causes=("narrow_accumulator", "narrow_partials"),
    ),
    Mutant(
        id="blind2/token_scale_of_first_row",
        area="kernels",
        source="vllm-project/vllm#54683: scales are gathered, the kernel consumes one scalar",
        patch="rows are quantised each with its scale, and all multiplied by the first row's",
        trial=op("fp8_e4m3_channel", w8a8(of_first_row), clean=W8A8, contract=TOKEN_FP8),
        op=OP,
        causes=("activation_scale",),
    ),
    Mutant(
        id="blind2/nan_token_saturates",
        area="kernels",
        source="sgl-project/sglang#31712 (review): fmaxf drops NaN, non-finite inputs become 448",
        patch="NaN in an activation becomes the code of 448",
        trial=op(
            "fp8_e4m3_channel",
            w8a8(own, scale_without_nan, codes_without_nan),
            clean=W8A8,
            contract=TOKEN_FP8,
        ),
        op=OP,
        causes=("nan_hidden", "nan_dropped", "nan_codes", "saturation"),
    ),
    Mutant(
        id="blind2/int16_lanes",
        area="kernels",
        source="microsoft/BitNet#629, #459: 256 products of 2 * 127 in an int16 lane",
        patch="sums of 256 codes (0, 1, 2) times int8 wrap in int16 before they are folded; only "
        "activations of mostly one sign show it",
        trial=op(
            "ternary_i2_s_x86", INT16_LANES, (32, 4096), clean=INT32_LANES, contract=TOKEN_INT8
        ),
        op=OP,
        causes=("narrow_accumulator", "saturation"),
    ),
    Mutant(
        id="blind2/tl2_output_stride",
        area="kernels",
        source="microsoft/BitNet#521: every row of a batch is written to C[i]",
        patch="naive.cu stores all rows to the first one; the others stay unwritten",
        trial=op(
            "ternary_k_interleaved", TL2_STRIDE, clean=NAIVE_ON_CPU, contract=NAIVE_ON_CPU.contract
        ),
        op=OP,
        causes=("unwritten", "strided_output"),
    ),
    Mutant(
        id="blind2/mx_floor_for_rceil",
        area="kernels",
        source="microsoft/microxcaling#4: 957 is 896 with one library and 960 with another",
        patch="activations are quantised by floor (saturating), the contract says rceil",
        trial=op(
            "mxfp8_e4m3",
            FLOOR,
            (128, 256),
            clean=RCEIL,
            contract=Contract(activation="mxfp8_rceil"),
        ),
        op=OP,
        causes=("activation_scale", "activation_quantised", "saturation"),
    ),
    Mutant(
        id="blind2/mx_scales_not_interleaved",
        area="kernels",
        source="flashinfer-ai/flashinfer#4093: scales are not 128x4 interleaved after the shuffle",
        patch="row-major scale bytes are read at the places of the 128 x 4 interleaved layout",
        trial=op("mxfp8_e4m3", TorchKernel(numbers=as_if_interleaved), (128, 256)),
        op=OP,
        causes=("interleaved_planar", "scale_layout", "block_ratio", "scale_axis"),
    ),
    Mutant(
        id="blind2/e8m0_half_flushed",
        area="kernels",
        source="1CatAI/1Cat-vLLM#222: bytes 103 to 112 are flushed to zero in float16",
        patch="scales of 2^-15 and less are 0",
        trial=op("mxfp8_e4m3", TorchKernel(numbers=half_flushed), (128, 256), scales=small_bytes),
        op=OP,
        causes=("flush_subnormals", "scale_low_precision"),
    ),
    Mutant(
        id="blind2/batch_strides_of_shape",
        area="kernels",
        source="ROCm/aiter#5385: strides are derived from the logical shapes",
        patch="a strided x is read as if it were contiguous",
        trial=BatchedTrial(
            faulty=logical_strides, clean=bmm, weight=batched_weight, contract=PLAIN
        ),
        op=OP,
        causes=("strided_input", "batch_stride", "strided_output", "row_permutation"),
    ),
    Mutant(
        id="blind2/k_tail_from_neighbour",
        area="kernels",
        source="ROCm/composable_kernel#883, triton-lang/triton#630: K not a multiple of the tile",
        patch="the last tile of K is not masked: 24 products of the next rows are added",
        trial=BatchedTrial(
            faulty=tail_from_neighbour, clean=bmm, weight=batched_weight, contract=PLAIN
        ),
        op="linear.0:out",
        causes=("k_tail_read", "k_tail_unmasked", "k_tail_dropped", "block_boundary"),
    ),
    Mutant(
        id="blind2/tf32_product",
        area="kernels",
        source="triton-lang/triton#8654, #9080: tl.dot of float32 is TF32 by default",
        patch="both operands of a float32 product are rounded to ten bits of mantissa",
        trial=OpTrial(
            faulty=tf32_dense,
            clean=dense,
            weight=dense_weight,
            contract=Contract(output="float32"),
        ),
        op=OP,
        causes=("operand_rounding", "tf32", "activation_quantised", "weight_rounding"),
    ),
)
