"""Faults in the reference: suspected, or noticed by a canary, before a kernel is blamed."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from reconcile_mutants.common import PLAIN, TORCH, fp8_values, weight, weight_of
from reconcile_mutants.kernels import FP8_ROWS, PER_TOKEN, bias_of, weight_in_bfloat16

from reconcile import Contract, activation, check_linear, linears
from reconcile.selftest import CanaryTrial, CaseTrial, Mutant, OpTrial
from reconcile.weight import Format, Packing

SUSPECT = ("reference_suspect",)


def suspect(name, source, text, judged_by, *, form="fp8_e4m3_block"):
    """The weight that the reference has is wrong, and looks it."""
    return Mutant(
        id=f"references/{name}",
        area="references",
        source=source,
        patch=text,
        trial=OpTrial(
            faulty=TORCH, clean=TORCH, weight=weight(form), contract=PLAIN, judged_by=judged_by
        ),
        op="linear:out",
        exit_code=2,
        reasons=SUSPECT,
    )


def undequantised(stored):
    """The raw codes as a bfloat16 weight, one of them at the format's maximum."""
    values = fp8_values(stored)
    values[values.isnan()] = 0
    values[3, 5] = 448
    return values.bfloat16()


def with_nan_block(stored):
    scales = stored.scales.clone()
    scales[0, 0] = 255
    return replace(stored, scales=scales)


def decoder(name, source, text, patch):
    """The reference's decoder is wrong in the embedded case; the second decoder disagrees."""
    return Mutant(
        id=f"references/{name}",
        area="references",
        source=source,
        patch=text,
        trial=CaseTrial(
            faulty="reconcile_mutants.loaders:clean",
            clean="reconcile_mutants.loaders:clean",
            levels=("op",),
            only="model.layers.0.mlp.*",
            patch=patch,
            fresh=True,
        ),
        op="model.layers.0.mlp.gate_proj:param.weight",
        exit_code=2,
        reasons=SUSPECT,
    )


def decoding(place, name, change):
    """A step of `QuantizedWeight.dequantize` followed by ``change``."""
    original = getattr(place, name)

    def changed(self, *arguments, **options):
        return change(original(self, *arguments, **options))

    @contextmanager
    def patch():
        with mock.patch.object(place, name, changed):
            yield

    return patch


def canary(name, source, text, kernel, contract, patch, *, form="fp8_e4m3_channel", bias=None):
    """A correct kernel that a wrong reference would fail."""
    options = {} if bias is None else {"bias": bias}
    return Mutant(
        id=f"references/{name}",
        area="references",
        source=source,
        patch=text,
        trial=CanaryTrial(
            canary=lambda: check_linear(
                kernel, weight_of(form, (64, 128)), contract=contract, **options
            ),
            right=(0, ""),
            patch=patch,
        ),
    )


def float32_operand(x, contract):
    """No quantiser at all."""
    return x


def reciprocal_scales(x):
    """x * (1 / s) where the rule says x / s."""
    wide = x.float()
    inverse = 448 / wide.abs().amax(-1, keepdim=True).clamp_min(2.0**-10)
    codes = (wide * inverse).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.double() / inverse.double()


ONES = torch.ones_like
MUTANTS = (
    suspect(
        "scales_are_ones", "vllm-project/vllm#36297: the reference leaves out the scale",
        "all scales of the reference are 1", lambda w: replace(w, scales=ONES(w.scales)),
    ),
    suspect(
        "scales_are_ones_mxfp8", "sgl-project/sglang#20705: default scales",
        "all E8M0 bytes are 127",
        lambda w: replace(w, scales=torch.full_like(w.scales, 127)), form="mxfp8_e4m3",
    ),
    suspect(
        "codes_as_values", "unslothai/unsloth#6978: raw values read into a bfloat16 weight",
        "the reference is the undequantised weight", undequantised,
    ),
    suspect(
        "all_zero", "vllm-project/vllm#46835: a weight that was never loaded",
        "all codes are 0",
        lambda w: replace(w, codes=torch.zeros_like(w.codes)),
    ),
    suspect(
        "nan_scale", "NVIDIA/TransformerEngine#3070: padding bytes of the scale grid are consumed",
        "one E8M0 byte is 255", with_nan_block, form="mxfp8_e4m3",
    ),
    suspect(
        "nan_code", "modelscope/DiffSynth-Studio#1528: -0 becomes NaN",
        "one code is NaN", lambda w: replace(w, codes=_set(w.codes, 0x7F)),
    ),
    decoder(
        "decoder_signs", "vllm-project/vllm#36297: the reference shares the kernel's mistake",
        "the reference's table has two entries exchanged",
        decoding(Format, "decode", torch.neg),
    ),
    decoder(
        "decoder_order", "chrishayuk/larql#156: the order of the codes in a byte",
        "the reference reads the codes of a byte from the high bits down",
        decoding(Packing, "unpack", lambda c: c.view(len(c), -1, 4).flip(-1).reshape(c.shape)),
    ),
    decoder(
        "decoder_scale", "ROCm/rocm-libraries#12232: the test's own scales are in another order",
        "the reference's scales are shifted by one row",
        decoding(Format, "scale_values", lambda s: s.roll(1)),
    ),
    canary(
        "rounding_left_out", "vllm-project/vllm#29810: which rounding is the specification",
        "the reference leaves out the declared rounding of the weight",
        replace(TORCH, combine=weight_in_bfloat16), Contract(weight_rounding="bfloat16"),
        lambda: mock.patch.object(
            linears, "reference_weight", lambda w, _, dtype: w.dequantize().to(dtype)
        ),
    ),
    canary(
        "quantiser_left_out", "pytorch/ao#4364: one side quantises activations, the other does not",
        "the reference leaves out the declared quantiser", FP8_ROWS, PER_TOKEN,
        lambda: mock.patch.object(linears, "operand", float32_operand),
    ),
    canary(
        "quantiser_by_reciprocal", "ml-dtypes and torch, jax-ml/ml_dtypes#260: another arithmetic",
        "the reference multiplies by a reciprocal where the rule divides", FP8_ROWS, PER_TOKEN,
        lambda: mock.patch.dict(activation.QUANTISERS, per_token_fp8=reciprocal_scales),
    ),
    canary(
        "bias_left_out", "sgl-project/sglang#35358: a bias that one side drops",
        "the reference has no bias", TORCH, PLAIN,
        lambda: _without_bias(), bias=bias_of(64),
    ),
)  # fmt: skip


def _set(codes, code):
    codes = codes.clone()
    codes.view(torch.uint8)[2, 9] = code
    return codes


@contextmanager
def _without_bias():
    original = linears.ReferenceLinear.__init__

    def init(self, weight, contract, dtype):
        original(self, weight, contract, dtype)
        self._bias = None

    with mock.patch.object(linears.ReferenceLinear, "__init__", init):
        yield
