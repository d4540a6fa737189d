"""Faults in loading: the candidate's own loader, and checkpoints that the harness must refuse."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from unittest import mock

import torch
from reconcile_mutants.common import PLAIN, TORCH

from reconcile.selftest import CaseTrial, Mutant
from reconcile.selftest.trials import embedded_session
from reconcile_references import models

FEW = "model.layers.[0-2].*"
"""Modules of the first three layers: enough for a fault in the middle."""


def clean(x, weight, bias=None):
    return TORCH(x, weight, bias)


clean.contract = PLAIN


def loaded(pattern, change):
    """A correct kernel whose loader does ``change`` to the weights of some modules."""

    def kernel(x, weight, bias=None):
        return TORCH(x, weight, bias)

    kernel.contract = PLAIN
    kernel.prepare = lambda weight: change(weight) if fnmatchcase(weight.name, pattern) else weight
    return kernel


def sibling(weight, old, new):
    """The stored weight of another module of the same layer."""
    return embedded_session()._checkpoint.weights[weight.name.replace(old, new)]


def rows_taken(order):
    """Rows in another order, scales with them."""

    def change(weight):
        rows = order(weight.shape[0])
        return replace(weight, codes=weight.codes[rows].clone(), scales=weight.scales[rows].clone())

    return change


def per_group(n, head=32, groups=2):
    """Rows of a section read as per-group interleaved [q q q] of 2 groups."""
    return torch.arange(n).view(groups, -1, head).transpose(0, 1).flatten()


def halves_interleaved(n, head=32):
    """Rows of each head as neighbouring pairs instead of two halves."""
    return torch.arange(n).view(-1, 2, head // 2).transpose(1, 2).flatten()


def codes_of(weight, codes):
    return replace(weight, codes=weight.format.pack(codes.to(torch.uint8)))


def transposed(weight):
    return codes_of(weight, weight.unpacked().T.contiguous())


def bits_reversed(weight):
    codes = weight.unpacked().view(weight.shape[0], -1, 4).flip(-1).reshape(weight.shape)
    return codes_of(weight, codes)


def without_last_shard(weight):
    """The last eighth of the rows was never read: zeros."""
    codes = weight.unpacked()
    codes[-weight.shape[0] // 8 :] = 0
    return codes_of(weight, codes)


def first_half_of_k(weight):
    """One of two tensor-parallel ranks: the other half of K is not added."""
    codes = weight.unpacked()
    codes[:, weight.shape[1] // 2 :] = 0
    return codes_of(weight, codes)


def scale_in_float16(weight):
    return replace(weight, scales=weight.scales.half().float())


Q1, K1, V1 = (f"model.layers.1.self_attn.{name}_proj" for name in "qkv")
O1, DOWN1, GATE1 = (
    "model.layers.1.self_attn.o_proj",
    "model.layers.1.mlp.down_proj",
    "model.layers.1.mlp.gate_proj",
)
KERNELS = {
    "scale_of_sibling": loaded(
        K1, lambda w: replace(w, scales=sibling(w, "k_proj", "v_proj").scales.clone())
    ),
    "k_and_v_swapped": loaded(
        "*.layers.1.self_attn.[kv]_proj",
        lambda w: replace(
            sibling(w, *(("k_proj", "v_proj") if "k_proj" in w.name else ("v_proj", "k_proj"))),
            name=w.name,
        ),
    ),
    "q_per_group": loaded(Q1, rows_taken(per_group)),
    "q_pairs": loaded(Q1, rows_taken(halves_interleaved)),
    "o_transposed": loaded(O1, transposed),
    "gate_without_scale": loaded(
        "*.mlp.gate_proj", lambda w: replace(w, scales=torch.ones_like(w.scales))
    ),
    "down_bits_reversed": loaded(DOWN1, bits_reversed),
    "down_last_shard": loaded(DOWN1, without_last_shard),
    "o_half_of_k": loaded(O1, first_half_of_k),
    "scales_float16": loaded("*.layers.1.*", scale_in_float16),
    "scale_shifted": loaded(GATE1, lambda w: replace(w, scales=w.scales.roll(1))),
}


def __getattr__(name):
    """Kernels by name, as ``reconcile_mutants.loaders:<name>``."""
    try:
        return KERNELS[name]
    except KeyError:
        raise AttributeError(name) from None


QUICK = frozenset({"scale_of_sibling", "k_and_v_swapped", "o_transposed", "gate_without_scale"})
"""Of the candidates, those of the quick subset."""


def candidate(name, op, causes, source, patch):
    """The candidate's loader does it; the op that holds the weight must be named."""
    return Mutant(
        id=f"loaders/{name}",
        area="loaders",
        source=source,
        patch=patch,
        trial=CaseTrial(
            faulty=f"reconcile_mutants.loaders:{name}",
            clean="reconcile_mutants.loaders:clean",
            levels=("op",),
            only=FEW,
        ),
        op=f"{op}:out",
        causes=causes,
        quick=name in QUICK,
    )


CANDIDATES = [
    candidate(
        "scale_of_sibling", K1, ("row_ratio",),
        "vllm-project/vllm#44630: a scale tensor that belongs to another consumer",
        "k_proj of layer 1 gets the scales of v_proj",
    ),
    candidate(
        "k_and_v_swapped", K1, ("qkv_order",),
        "NVIDIA-NeMo/Megatron-Bridge#1818: q, k and v mixed up after fusing",
        "k_proj and v_proj of layer 1 get each other's weight",
    ),
    candidate(
        "q_per_group", Q1, ("row_permutation", "head_order", "qkv_order"),
        "tenstorrent/tt-metal#38321: sections against per-group interleaved heads",
        "the heads of q_proj of layer 1 are regrouped",
    ),
    candidate(
        "q_pairs", Q1, ("pair_order", "row_permutation", "head_order", "rope_pairing"),
        "vllm-project/vllm-metal#44: interleaved against half-split rotary weights",
        "the rows of each head of q_proj of layer 1 are paired",
    ),
    candidate(
        "o_transposed", O1, ("transposed",),
        "ahrefs/ocannl#640: a square weight is loaded transposed",
        "the codes of o_proj of layer 1 are transposed",
    ),
    candidate(
        "gate_without_scale", "model.layers.0.mlp.gate_proj", ("scale_missing",),
        "unslothai/unsloth#6978: every mlp.gate_proj ignores its scale",
        "the scales of all gate_proj are 1",
    ),
    candidate(
        "down_bits_reversed", DOWN1, ("bit_order",),
        "SKaiNET-developers/SKaiNET#1165: another packing in one layer",
        "the codes of each byte of down_proj of layer 1 are reversed",
    ),
    candidate(
        "down_last_shard", DOWN1, ("n_tail_dropped",),
        "GradientHQ/parallax#444: a part of a weight is never loaded",
        "the last eighth of the rows of down_proj of layer 1 is zero",
    ),
    candidate(
        # one of two ranks, or one of two splits of K: the same sums are missing
        "o_half_of_k", O1, ("partial_sum", "split_missing", "k_tail_dropped", "k_range_ratio"),
        "Wenyueh/MinivLLM#80: partial sums of tensor-parallel ranks",
        "the second half of K of o_proj of layer 1 is not added",
    ),
    candidate(
        "scales_float16", Q1, ("scale_low_precision",),
        "vllm-project/vllm-metal#665: parameters are cast with the model",
        "all scales of layer 1 are rounded to float16",
    ),
    candidate(
        "scale_shifted", GATE1, ("row_ratio", "scale_reused", "shifted_rows"),
        "vllm-project/vllm-xpu-kernels#440: scales and rows are misaligned",
        "the scales of gate_proj of layer 1 are shifted by one row",
    ),
]  # fmt: skip

# ------------------------------------------------------------------ checkpoints to refuse

Q0 = "model.layers.0.self_attn.q_proj"


def damaged(change):
    """While it holds, ``read_tensors`` gives a checkpoint that ``change`` edited."""
    original = models.read_tensors

    def read(path):
        tensors = dict(original(path))
        if f"{Q0}.weight_scale" in tensors:  # not the dense original
            change(tensors)
        return tensors

    @contextmanager
    def patch():
        with mock.patch.object(models, "read_tensors", read):
            yield

    return patch


def edit(name, how):
    def change(tensors):
        tensors[name] = how(tensors[name].clone())

    return change


def with_code_3(codes):
    codes[5, 7] = 0xC0
    return codes


def with_nan(scales):
    scales[3] = torch.nan
    return scales


def checkpoint(name, source, patch, change, *, exit_code=3, says="", reasons=(), op=""):
    """The harness reads it, and must not judge a kernel by it."""
    return Mutant(
        id=f"loaders/{name}",
        area="loaders",
        source=source,
        patch=patch,
        trial=CaseTrial(
            faulty="reconcile_mutants.loaders:clean",
            clean="reconcile_mutants.loaders:clean",
            levels=("op",),
            only="model.layers.0.*",
            patch=damaged(change),
            fresh=True,
        ),
        op=op,
        exit_code=exit_code,
        says=says,
        reasons=reasons,
    )


CHECKPOINTS = [
    checkpoint(
        "scale_tensor_missing", "Lightricks/LTX-2#172: scale tensors are dropped on the way",
        "a scale tensor is not in the files", lambda t: t.pop(f"{Q0}.weight_scale"),
        says=f"{Q0}.weight_scale",
    ),
    checkpoint(
        "tensor_never_consumed", "unslothai/unsloth#6978: an unexpected key is thrown away",
        "a tensor that nothing reads is in the files",
        lambda t: t.update({f"{Q0}.input_scale": torch.ones(1)}), says="input_scale",
    ),
    checkpoint(
        "invalid_code", "chrishayuk/larql#156: code 3 must be rejected, not decoded",
        "one byte holds code 3", edit(f"{Q0}.weight", with_code_3), says="invalid code",
    ),
    checkpoint(
        "nan_scale", "NVIDIA/TransformerEngine#3070: padding bytes that are NaN",
        "one scale is NaN", edit(f"{Q0}.weight_scale", with_nan), says="not finite",
    ),
    checkpoint(
        "scale_shape", "vllm-project/compressed-tensors#843: a granularity read off a shape",
        "a scale per row of another layout, [1, N]",
        edit(f"{Q0}.weight_scale", lambda s: s[None]), says="one scale per channel",
    ),
    checkpoint(
        "raw_codes_as_floats", "unslothai/unsloth#6978: raw values in a bfloat16 weight",
        "the packed weight is stored as bfloat16", edit(f"{Q0}.weight", lambda w: w.bfloat16()),
        says=Q0,
    ),
    checkpoint(
        "head_missing", "vllm-project/vllm#46835: lm_head is not loaded",
        "lm_head.weight is not in the files", lambda t: t.pop("lm_head.weight"),
        says="lm_head.weight",
    ),
    checkpoint(
        "norm_of_another_width", "ROCm/rocm-libraries#12232: a parameter of another shape",
        "the final norm has one weight less", edit("model.norm.weight", lambda w: w[:-1].clone()),
        says="model.norm.weight",
    ),
    checkpoint(
        "scales_never_loaded", "sgl-project/sglang#18818: scales that stay at their default 1.0",
        "the scales of one layer are all 1",
        edit(f"{Q0}.weight_scale", torch.ones_like), exit_code=2,
        reasons=("reference_suspect",), op=f"{Q0}:param.weight",
    ),
    checkpoint(
        "weight_never_loaded", "kekzl/imp#1282: a weight that was never filled",
        "the codes of one layer are all 0", edit(f"{Q0}.weight", torch.zeros_like), exit_code=2,
        reasons=("reference_suspect",), op=f"{Q0}:param.weight",
    ),
]  # fmt: skip

MUTANTS = (*CANDIDATES, *CHECKPOINTS)
