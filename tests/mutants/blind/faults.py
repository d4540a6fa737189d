"""Twenty faults written from public bug reports alone, without knowledge of the hypotheses.

Each fault's expectation was committed before its first run. ``patch`` says the cause in words,
``causes`` which names are right: those that lead a reader to the same repair.
"""

from unittest import mock

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
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from reconcile import Contract
from reconcile.selftest import BatchedTrial, CaseTrial, Mutant, OpTrial
from reconcile.weight import QuantizedWeight
from reconcile_kernels.torch_dequant.kernel import TORCH_DEQUANT, TorchDequant

BIAS = torch.randn(SHAPE[0], generator=torch.Generator().manual_seed(44))


def op(name, faulty, shape=SHAPE, clean=TORCH, contract=PLAIN, **options):
    """A kernel on a random weight of a format."""
    return OpTrial(
        faulty=faulty,
        clean=clean,
        weight=weight(name, shape),
        contract=contract,
        options=options,
    )


# ------------------------------------------------------------------ ternary


def contiguous_rows(weight):
    """Row r from byte row r // 4, slot r % 4; the format has byte row r % R, slot r // R."""
    slots = [(weight.codes >> shift) & 3 for shift in (0, 2, 4, 6)]
    return torch.stack(slots, 1).flatten(0, 1)[: weight.shape[0]].float() - 1


def tq2_values(weight):
    """Code minus 1."""
    return weight.format.packing.unpack(weight.codes, weight.shape).float() - 1


def tq2_zero_point_2(weight):
    """Code minus 2 in the second group of 256."""
    values = tq2_values(weight)
    values[:, 256:512] -= 1
    return values


AWQ_ORDER = (
    "VALUES[byte >> 2 * i & 3u]",
    "VALUES[byte >> (i == 1 ? 4 : i == 2 ? 2 : 2 * i) & 3u]",
)

# ------------------------------------------------------------------ fp8 and MXFP8


def along_k(scales, weight):
    """The scale of column k where that of row n is right; a wide weight starts again."""
    return scales.reshape(1, -1)[:, torch.arange(weight.shape[1]) % weight.shape[0]]


def of_tile(scales, weight):
    """One scale per compute tile of 64, the first of its two."""
    return scales[:, torch.arange(weight.shape[1]) // 64 * 2]


def next_power_of_two(weight):
    """Scales rounded up to powers of two."""
    return torch.exp2(numbers(weight).log2().ceil())


def byte_numbers(weight):
    """The E8M0 byte as a number."""
    return weight.scales.view(torch.uint8).float()


def fn_values(weight):
    """Bytes of e4m3fnuz as e4m3fn."""
    return weight.codes.view(torch.uint8).view(torch.float8_e4m3fn).float()


def e5m2_without_subnormals(weight):
    """(1 + m/4) 2^(e - 15) for every code but zero, also where e = 0."""
    byte = weight.codes.view(torch.uint8).int()
    exponent, mantissa = (byte >> 2) & 31, byte & 3
    made = (1 + mantissa / 4) * torch.exp2(exponent.float() - 15) * (1 - 2 * (byte >> 7))
    right = byte.to(torch.uint8).view(torch.float8_e5m2).float()
    return torch.where((exponent == 0) & (mantissa != 0), made, right)


def scaled_bias(y, weight, bias):
    """The bias added before the scale is multiplied in."""
    return y if bias is None else y + bias.float() * numbers(weight).reshape(-1)


def bias_of_four_ranks(y, weight, bias):
    """Every one of 4 ranks adds the bias before their sum."""
    return y if bias is None else y + 4 * bias.float()


def bfloat16_partials(x, w):
    """Four partial sums over K, each rounded to bfloat16, added in float32."""
    pairs = zip(x.chunk(4, 1), w.chunk(4, 1), strict=True)
    return sum((a @ b.T).bfloat16().float() for a, b in pairs)


def quantised(x, guarded):
    """E4M3 per row; the scale of a zero row is the least scale, or 0."""
    wide = x.float()
    amax = wide.abs().amax(-1, keepdim=True)
    scale = (amax / 448).clamp_min(1 / (448 * 512))
    if not guarded:
        scale = torch.where(amax > 0, scale, 0.0)
    return (wide / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


# ------------------------------------------------------------------ batched bfloat16


def batched_weight():
    """bfloat16 [3, 64, 192]."""
    return torch.randn(3, 64, 192, generator=torch.Generator().manual_seed(45)).bfloat16()


def batched(x, weight, bias=None):
    """Float32 sums, one rounding."""
    y = x.float() @ weight.float().transpose(1, 2)
    return (y if bias is None else y + bias.float()[:, None]).to(x.dtype)


def batched_packed_k(x, weight, bias=None):
    """For up to 32 rows the mask of x ends at K / 2, the packed length."""
    if x.shape[1] <= 32:
        x = torch.where(torch.arange(x.shape[2]) < x.shape[2] // 2, x, 0)
    return batched(x, weight, bias)


def batched_unwritten(x, weight, bias=None):
    """The last three elements of the last group keep what was in memory."""
    y = batched(x, weight, bias)
    out = torch.empty_like(y)
    written = y.numel() - 3
    out.view(-1)[:written] = y.reshape(-1)[:written]
    return out


# ------------------------------------------------------------------ in the model


class LosesGateScales(TorchDequant):
    """Reads every gate_proj as plain numbers, without its scale."""

    def prepare(self, weight, engine):
        """The decoded weight, of gate_proj with all scales 1."""
        if weight.name.endswith("gate_proj"):
            ones = torch.ones_like(weight.scales)
            weight = QuantizedWeight.from_tensors(
                weight.codes, ones, format=weight.format, shape=weight.shape, name=weight.name
            )
        return TORCH_DEQUANT.prepare(weight, engine)


LOSES_GATE_SCALES = LosesGateScales(name="torch_dequant_loses_gate_scales")


def tiled_kv(states, n_rep):
    """KV heads 0, 1, 0, 1 ... where 0, 0, 1, 1 ... is right."""
    return states.repeat(1, n_rep, 1, 1)


def neighbours(x):
    """(x0, x1, x2, x3 ...) to (-x1, x0, -x3, x2 ...)."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def interleaved_rope(q, k, cos, sin, unsqueeze_dim=1):
    """Neighbours rotated as pairs, where the weights are made for halves."""
    half = cos.shape[-1] // 2
    cos = cos[..., :half].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim)
    sin = sin[..., :half].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim)
    return q * cos + neighbours(q) * sin, k * cos + neighbours(k) * sin


EAGER, LAYER_INIT = qwen3.eager_attention_forward, qwen3.Qwen3DecoderLayer.__init__


def window_of_8(module, query, key, value, attention_mask, **options):
    """Layer 2 sees the last 8 keys only, although the model has no sliding window."""
    if module.layer_idx == 2:
        queries, keys = query.shape[2], key.shape[2]
        place = torch.arange(keys - queries, keys)[:, None]
        hidden = place - torch.arange(keys)[None] >= 8
        lowest = torch.zeros(queries, keys, dtype=query.dtype)
        lowest = lowest.masked_fill(hidden, torch.finfo(query.dtype).min / 2)
        attention_mask = lowest if attention_mask is None else attention_mask + lowest
    return EAGER(module, query, key, value, attention_mask, **options)


def init_with_epsilon(self, config, layer_idx):
    """1e-5 in the second norm of layer 4."""
    LAYER_INIT(self, config, layer_idx)
    if layer_idx == 4:
        self.post_attention_layernorm.variance_epsilon = 1e-5


def in_model(name, replacement, owner=qwen3):
    """The embedded model with one function of transformers replaced in the candidate."""
    return CaseTrial(
        faulty="torch_dequant",
        clean="torch_dequant",
        patch=lambda: mock.patch.object(owner, name, replacement),
    )


MUTANTS = (
    Mutant(
        id="blind/rows_contiguous",
        area="formats",
        source="chrishayuk/larql#156: contiguous decode of a strided layout; HF packs by rows",
        patch="four rows of a byte are taken for neighbours; they are a quarter of N apart",
        trial=op("ternary_hf", TorchKernel(values=contiguous_rows)),
        op=OP,
        causes=("interleaved_planar",),
    ),
    Mutant(
        id="blind/awq_order",
        area="formats",
        source="amd/Quark#30: codes inside a pack in AWQ order 0, 2, 1, 3",
        patch="the two middle codes of each byte are exchanged, in the CUDA source",
        trial=OpTrial(
            faulty=PatchedNaive(AWQ_ORDER),
            clean=NAIVE_ON_CPU,
            weight=weight("ternary_k_interleaved"),
        ),
        op=OP,
        causes=("bit_order", "column_permutation"),
    ),
    Mutant(
        id="blind/zero_point_of_group",
        area="formats",
        source="ModelCloud/GPTQModel#2350: zero point off by one, in one group only",
        patch="the second group of 256 subtracts 2 from the code where 1 is right",
        trial=op(
            "ternary_tq2_0",
            TorchKernel(values=tq2_zero_point_2),
            (192, 512),
            clean=TorchKernel(values=tq2_values),
        ),
        op=OP,
        causes=("zero_point",),
    ),
    Mutant(
        id="blind/scale_along_k",
        area="loaders",
        source="vllm-project/vllm-xpu-kernels#440: meaning of a scale guessed from its shape",
        patch="scales of the output channels are applied along K of a square weight",
        trial=op("fp8_e4m3_channel", TorchKernel(spread=along_k), (256, 256)),
        op=OP,
        causes=("scale_axis",),
    ),
    Mutant(
        id="blind/tile_of_64",
        area="kernels",
        source="sgl-project/sglang#39626: one scale per compute tile of 64 over blocks of 32",
        patch="every odd K block uses the scale of the even one before it",
        trial=op("mxfp8_e4m3", TorchKernel(spread=of_tile)),
        op=OP,
        causes=("scale_reused",),
    ),
    Mutant(
        id="blind/scale_ceil",
        area="kernels",
        source="sgl-project/sglang#39193: float32 scales given to a kernel for powers of two",
        patch="block scales lose their mantissa: each becomes the next power of two above",
        trial=op("fp8_e4m3_block", TorchKernel(numbers=next_power_of_two), (256, 256)),
        op=OP,
        causes=("scale_mantissa_dropped", "scale_low_precision"),
    ),
    Mutant(
        id="blind/scaled_bias",
        area="kernels",
        source="microsoft/BitNet#616: AutoBitLinear adds the bias, then multiplies by the scale",
        patch="the bias is multiplied by the weight's scale",
        trial=op("fp8_e4m3_tensor", TorchKernel(finish=scaled_bias), bias=BIAS),
        op=OP,
        causes=("bias_scaled",),
    ),
    Mutant(
        id="blind/scale_byte",
        area="loaders",
        source="jundot/omlx#2159: E8M0 scales stored as U8 taken for factors",
        patch="the byte of the E8M0 scale is used as a number",
        trial=op("mxfp8_e4m3", TorchKernel(numbers=byte_numbers)),
        op=OP,
        causes=("bytes_as_numbers",),
    ),
    Mutant(
        id="blind/fnuz_as_fn",
        area="formats",
        source="vllm-project/vllm#7210: e4m3fnuz bytes read as e4m3fn",
        patch="the codes are read in the other variant of E4M3: twice the value, other NaN codes",
        trial=op("fp8_e4m3fnuz_tensor", TorchKernel(values=fn_values)),
        op=OP,
        causes=("fn_fnuz",),
    ),
    Mutant(
        id="blind/e5m2_subnormals",
        area="formats",
        source="1bit-MONSTER/1bit-MONSTER#300: no branch for exponent field 0",
        patch="the six subnormal codes of E5M2 are decoded as normal numbers",
        trial=op("fp8_e5m2_tensor", TorchKernel(values=e5m2_without_subnormals)),
        op=OP,
        causes=("subnormals",),
    ),
    Mutant(
        id="blind/zero_row",
        area="kernels",
        source="huggingface/kernels-community#681: scale 0 of an all-zero row, then 0/0",
        patch="the scale of a row of zero activations is 0, so its codes are NaN",
        trial=op(
            "fp8_e4m3_channel",
            TorchKernel(load=lambda x: quantised(x, guarded=False)),
            clean=TorchKernel(load=lambda x: quantised(x, guarded=True)),
            contract=Contract(activation="per_token_fp8"),
        ),
        op=OP,
        causes=("activation_scale",),
    ),
    Mutant(
        id="blind/packed_k",
        area="kernels",
        source="ROCm/aiter#4181: activations masked beyond the packed K, for small M only",
        patch="up to 32 rows the second half of K contributes nothing",
        trial=BatchedTrial(
            faulty=batched_packed_k, clean=batched, weight=batched_weight, contract=PLAIN
        ),
        op="linear.0:out",
        causes=("k_tail_dropped",),
    ),
    Mutant(
        id="blind/bfloat16_partials",
        area="kernels",
        source="ROCm/aiter#4581: split-K partials rounded to bf16 before adding",
        patch="four partial sums over K are rounded to bfloat16 before they are added",
        trial=op("fp8_e4m3_tensor", TorchKernel(product=bfloat16_partials)),
        op=OP,
        causes=("narrow_partials",),
    ),
    Mutant(
        id="blind/last_elements",
        area="kernels",
        source="vllm-project/vllm-ascend#17009: 1 to 8 valid elements unwritten, from empty()",
        patch="the last three elements of the last group are not written",
        trial=BatchedTrial(
            faulty=batched_unwritten, clean=batched, weight=batched_weight, contract=PLAIN
        ),
        op="linear.2:out",
        causes=("unwritten",),
    ),
    Mutant(
        id="blind/bias_of_ranks",
        area="kernels",
        source="Wenyueh/MinivLLM#80: row-parallel bias added on every rank, here of four",
        patch="the bias is added four times",
        trial=op("fp8_e4m3_block", TorchKernel(finish=bias_of_four_ranks), bias=BIAS),
        op=OP,
        causes=("bias_doubled", "bias_scaled"),
    ),
    Mutant(
        id="blind/gate_scales",
        area="loaders",
        source="unslothai/unsloth#6978: every gate_proj read without its scale",
        patch="the scale of gate_proj is discarded in all layers; other modules have theirs",
        trial=CaseTrial(
            faulty="reconcile_mutants.blind.faults:LOSES_GATE_SCALES", clean="torch_dequant"
        ),
        op="model.layers.0.mlp.gate_proj:out",
        causes=("scale_missing",),
    ),
    Mutant(
        id="blind/tiled_kv",
        area="modules",
        source="onnx/onnx#7274: KV heads tiled, not repeated",
        patch="query head h reads KV head h mod 2 where h div 3 is right",
        trial=in_model("repeat_kv", tiled_kv),
        op="model.layers.0.self_attn:out.0",
        causes=("gqa_tiling",),
    ),
    Mutant(
        id="blind/interleaved_rope",
        area="modules",
        source="vllm-project/vllm-metal#44: rotary pairs of neighbours and of halves mixed up",
        patch="neighbouring elements are rotated as a pair where halves are right",
        trial=in_model("apply_rotary_pos_emb", interleaved_rope),
        op="model.layers.0.self_attn:out.0",
        causes=("rope_pairing",),
    ),
    Mutant(
        id="blind/epsilon",
        area="modules",
        source="paiml/aprender#1606: epsilon 1e-5 hard-coded where the config says 1e-6",
        patch="the second norm of layer 4 has epsilon 1e-5 instead of 1e-6",
        trial=in_model("__init__", init_with_epsilon, qwen3.Qwen3DecoderLayer),
        op="model.layers.4.post_attention_layernorm:out",
        causes=("epsilon",),
    ),
    Mutant(
        id="blind/window",
        area="modules",
        source="huggingface/transformers#39408: a window that the other side does not have",
        patch="attention of layer 2 sees 8 keys; the model has no sliding window",
        trial=in_model("eager_attention_forward", window_of_8),
        op="model.layers.2.self_attn:out.0",
        causes=("mask",),
    ),
)
