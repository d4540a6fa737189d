"""Faults in an MXFP8 kernel: the quantisers, the bytes, the layout of pairs, the load, experts."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from reconcile_mutants.common import OP, weight, weight_of

from reconcile import registry
from reconcile.case import load_case
from reconcile.checking.linear import check_linear
from reconcile.contract import Contract
from reconcile.kernel import Engine, Support
from reconcile.numbers import mx
from reconcile.selftest import Mutant, OpTrial, Variant
from reconcile.selftest.trials import seen
from reconcile.session import Session
from reconcile_kernels.mxfp8_npu import MXFP8, layout, load, operators
from reconcile_kernels.mxfp8_npu.linear import NPU_EMULATED
from reconcile_kernels.mxfp8_npu.quantise import quantise

ODD = (192, 224)
"""Seven groups along K: their bytes are padded to four pairs."""
EVEN = (192, 256)


def resolved(weight):
    """Block FP8 to bfloat16."""
    return load.resolve_block_scales(weight.codes, load.source_scales(weight), weight.format.block)


def requantised(weight):
    """Codes [N, K] and bytes [N, G]; a weight that is stored so as it is."""
    if weight.format.name == load.MX_FORMAT:
        return weight.codes, weight.scales.view(torch.uint8)
    return quantise(resolved(weight), "ascend_0")


def activations(x):
    """Codes and pairs of bytes of x [M, K]."""
    return operators.npu_dynamic_mx_quant(x, dst_type=torch.float8_e4m3fn)


def product(x, a, w, b):
    """The operators' sum, float32."""
    return operators.grouped_product(x, w, a, b)


@dataclass(frozen=True, kw_only=True)
class Stages:
    """``mxfp8_npu`` in stages; replace one of them and there is a mutant."""

    name: str = "mxfp8_npu"
    contract: Contract = MXFP8.contract
    engines: tuple[Engine, ...] = (NPU_EMULATED,)
    formats: tuple[str, ...] = MXFP8.formats
    load: object = requantised
    pack: object = layout.pack
    quantise: object = activations
    product: object = product

    def is_supported(self, engine):
        return Support(True, "emulated")

    def can_implement(self, spec):
        return MXFP8.can_implement(spec)

    def prepare(self, weight, engine):
        return self.pack(*self.load(weight))

    def apply(self, x, prepared, bias=None):
        rows = x.reshape(-1, x.shape[-1])
        codes, scales = self.quantise(rows)
        w, b = prepared
        y = self.product(codes, scales, layout.as_float8(w), b)
        y = y if bias is None else y + bias.float()
        return y.to(x.dtype).reshape(*x.shape[:-1], y.shape[-1])


RIGHT = Stages()


# ------------------------------------------------------------------ what goes wrong


def bias_off_by_one(weight):
    codes, scales = requantised(weight)
    return codes, scales - 1


def bytes_as_numbers(x, a, w, b):
    """The weight's byte is a factor."""
    plain = operators.grouped_product(x, w, a, torch.full_like(b, 127))
    total = torch.zeros_like(plain)
    for group, start in enumerate(range(0, x.shape[1], 32)):
        part = x.float()[:, start : start + 32] @ w.float()[start : start + 32]
        left = torch.exp2(a.flatten(-2)[:, group, None].float() - 127)
        total += part * left * b.transpose(0, 1).flatten(-2)[None, :, group].float()
    return total


def nan_byte_as_infinity(x, a, w, b):
    """Byte 255 shifted into a float32's exponent: 2^128, infinity."""
    left, right = a.flatten(-2), b.transpose(0, 1).flatten(-2)
    total = torch.zeros(x.shape[0], w.shape[1])
    for group, start in enumerate(range(0, x.shape[1], 32)):
        part = x.float()[:, start : start + 32] @ w.float()[start : start + 32]
        byte = right[None, :, group]
        factor = torch.where(byte == 255, torch.inf, mx.e8m0(byte))
        total += (part.double() * mx.e8m0(left[:, group, None]) * factor).float()
    return total


@dataclass(frozen=True, kw_only=True)
class GroupsAlongN(Stages):
    """The weight quantised in groups of 32 rows, and multiplied as such."""

    def prepare(self, weight, engine):
        dense = resolved(weight).T.contiguous()
        codes, scales = quantise(dense, "ascend_0")
        return mx.Mx(codes=codes, scales=scales).dequantize().float()

    def apply(self, x, prepared, bias=None):
        rows = x.reshape(-1, x.shape[-1])
        codes, pairs = self.quantise(rows)
        scales = layout.unpaired(pairs, x.shape[-1])
        wide = mx.Mx(codes=codes.view(torch.uint8), scales=scales).dequantize().float()
        return (wide @ prepared).to(x.dtype).reshape(*x.shape[:-1], -1)


def pairs_swapped(codes, scales):
    w, b = layout.pack(codes, scales)
    return w, b.flip(-1).contiguous()


def odd_group_dropped(codes, scales):
    """Groups // 2 pairs: the last of an odd number has no place, and is read as 1."""
    even = scales.clone()
    if scales.shape[1] % 2:
        even[:, -1] = 127
    return layout.pack(codes, even)


def from_unrounded(weight):
    """The float32 product is quantised; bfloat16 is skipped."""
    return quantise(weight.dequantize(torch.float32), "ascend_0")


def one_scale_per_tensor(x):
    _, scales = activations(x)
    largest = scales.flatten(-2)[:, : -(-x.shape[1] // 32)].max()
    wide = x.float() * torch.exp2(127 - largest.float())
    return wide.clamp(-448, 448).to(torch.float8_e4m3fn), torch.full_like(scales, largest)


# ------------------------------------------------------------------ experts


@dataclass(frozen=True, kw_only=True)
class Experts(Stages):
    """Experts of a batched weight, each through the stages."""

    scales_of: object = staticmethod(lambda index: index)
    """Which expert's bytes an expert gets."""

    def prepare(self, weight, engine):
        loaded = [self.load(group) for group in weight.groups]
        return [
            layout.pack(codes, loaded[self.scales_of(index)][1])
            for index, (codes, _) in enumerate(loaded)
        ]

    def apply(self, x, prepared, bias=None):
        made = [
            super(Experts, self).apply(rows, one) for rows, one in zip(x, prepared, strict=True)
        ]
        return torch.stack(made)


RIGHT_EXPERTS = Experts()
FIRST_SCALES_FOR_ALL = Experts(scales_of=lambda index: 0)


@functools.cache
def mixture():
    """The embedded mixture of experts without its required kernel; loaded once per process."""
    case = load_case(registry.case_file("tiny-mxfp8-moe"))
    return Session(replace(case, gate=replace(case.gate, require=())))


@dataclass(frozen=True, kw_only=True)
class MixtureTrial:
    """A kernel on the first layer's w13, by its name in this file."""

    faulty: str
    clean: str

    def run(self, *, faulty):
        kernel = f"{Path(__file__).resolve()}:{self.faulty if faulty else self.clean}"
        return seen(lambda: mixture().run(kernel=kernel, levels=("op",), only=W13))


W13 = "model.layers.0.mlp.experts.w13"


def mutant(name, causes, source, patch, *, form="fp8_e4m3_block", shape=EVEN, **changes):
    return Mutant(
        id=f"mxfp8/{name}",
        area="kernels",
        source=source,
        patch=patch,
        trial=OpTrial(faulty=replace(RIGHT, **changes), clean=RIGHT, weight=weight(form, shape)),
        op=OP,
        causes=causes,
    )


MUTANTS = (
    mutant(
        "e8m0_bias",
        ("scale_exponent_bias", "exponent_bias", "constant_ratio"),  # everything is halved
        "NVIDIA/TransformerEngine#3262: an exponent bias off by one",
        "every byte of the weight is one too small",
        load=bias_off_by_one,
    ),
    mutant(
        "byte_as_number",
        ("bytes_as_numbers",),
        "jundot/omlx#2159: E8M0 bytes of dtype uint8 used as factors",
        "the weight's byte is a factor",
        form="mxfp8_e4m3",
        product=bytes_as_numbers,
    ),
    Mutant(
        id="mxfp8/groups_along_n",
        area="kernels",
        source="OCP MX v1.0, section 5.1: the shared dimension is the one that is summed over",
        patch="the weight is quantised in groups of 32 rows, not of 32 columns",
        trial=OpTrial(faulty=GroupsAlongN(), clean=RIGHT, weight=weight("fp8_e4m3_block", EVEN)),
        op=OP,
        causes=("scale_axis",),
    ),
    mutant(
        "pair_order",
        ("pair_order",),
        "vllm-project/vllm-ascend: scales are [ceil(G/2), N, 2], the byte of group g at g % 2",
        "the two bytes of a pair are swapped",
        pack=pairs_swapped,
    ),
    mutant(
        "odd_group_dropped",
        ("last_block_scale_dropped",),
        "vllm-project/vllm-ascend: an odd number of groups needs a padded pair",
        "the last group of an odd number has no byte",
        shape=ODD,
        pack=odd_group_dropped,
    ),
    mutant(
        "from_unrounded_float32",
        ("weight_rounding", "double_rounding"),
        "vllm-project/vllm-ascend#14852: the weight is rounded to the model's dtype first",
        "the weight is quantised from the float32 product",
        load=from_unrounded,
    ),
    mutant(
        "one_activation_scale",
        ("activation_scale", "activation_quantised"),
        "CANN, aclnnDynamicMxQuant: one scale per 32 values of each row",
        "one scale serves the whole activation tensor",
        quantise=one_scale_per_tensor,
    ),
    mutant(
        "byte_255_as_infinity",
        ("nan_codes", "bytes_as_numbers"),
        "vLLM, sglang and transformers read the E8M0 byte 255 as 2^128",
        "the byte 255 of the weight is infinity, not NaN",
        form="mxfp8_e4m3",
        product=nan_byte_as_infinity,
    ),
    Mutant(
        id="mxfp8/scales_of_expert_0",
        area="kernels",
        source="vllm-project/vllm-ascend#14852: experts are converted one at a time",
        patch="every expert is multiplied under the scale bytes of expert 0",
        trial=MixtureTrial(faulty="FIRST_SCALES_FOR_ALL", clean="RIGHT_EXPERTS"),
        op=f"{W13}:out",
        causes=("scale_reused",),
    ),
)


def variant(name, what, **changes):
    return Variant(
        id=f"mxfp8/{name}",
        what=what,
        run=lambda seed: check_linear(
            replace(RIGHT, **changes), weight_of("fp8_e4m3_block", ODD, seed), seed=seed
        ),
        seeds=5,
    )


def from_the_last_group(x, a, w, b):
    """The same sum, the last group first."""
    groups = range(0, x.shape[1], 32)
    left, right = a.flatten(-2), b.transpose(0, 1).flatten(-2)
    total = torch.zeros(x.shape[0], w.shape[1])
    for group, start in reversed(list(enumerate(groups))):
        part = x.float()[:, start : start + 32] @ w.float()[start : start + 32]
        factors = mx.e8m0(left[:, group, None]) * mx.e8m0(right[None, :, group])
        total += (part.double() * factors).float()
    return total


VARIANTS = (
    variant("usual", "groups are added from the first"),
    variant("reversed", "groups are added from the last", product=from_the_last_group),
)
