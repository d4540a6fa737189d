"""Faults in the fast ternary kernels: AVX-512 sources, and CUDA variants on the emulated grid."""

from __future__ import annotations

import functools
from unittest import mock

import torch
from reconcile_mutants.common import OP, patched, weight

from reconcile.selftest import Mutant, OpTrial
from reconcile_kernels.ternary_cpu import BF16, INT8
from reconcile_kernels.ternary_cpu import ops as cpu_ops
from reconcile_kernels.ternary_cuda import variant_ops, variants

SHAPE = (144, 192)


class PatchedCpu:
    """``ternary_cpu`` with one place of its sources changed."""

    def __init__(self, kernel, *changes):
        self.name, self.contract, self.engines = kernel.name, kernel.contract, kernel.engines
        self.formats, self.kernel, self.changes = kernel.formats, kernel, changes
        self.is_supported, self.can_implement = kernel.is_supported, kernel.can_implement

    @functools.cached_property
    def library(self):
        return patched(cpu_ops.LIBRARY, *self.changes)

    def _inside(self, call):
        cpu_ops._function.cache_clear()
        try:
            with mock.patch.object(cpu_ops, "LIBRARY", self.library):
                return call()
        finally:
            cpu_ops._function.cache_clear()

    def prepare(self, weight, engine):
        return self._inside(lambda: self.kernel.prepare(weight, engine))

    def apply(self, x, prepared, bias=None):
        return self._inside(lambda: self.kernel.apply(x, prepared, bias))


class PatchedVariant:
    """A CUDA variant on the emulated grid with one place of its sources changed."""

    def __init__(self, kernel, *changes):
        self.name, self.contract = kernel.name, kernel.contract
        self.engines = tuple(e for e in kernel.engines if e.execution == "emulated")
        self.formats, self.kernel, self.changes = kernel.formats, kernel, changes
        self.is_supported, self.can_implement = kernel.is_supported, kernel.can_implement
        self.prepare = kernel.prepare

    @functools.cached_property
    def library(self):
        return patched(variant_ops.CPU[self.kernel.variant], *self.changes)

    def apply(self, x, prepared, bias=None):
        with mock.patch.dict(variant_ops.CPU, {self.kernel.variant: self.library}):
            return self.kernel.apply(x, prepared, bias)


CLEAN = {
    kernel.name: (PatchedCpu if kernel in (BF16, INT8) else PatchedVariant)(kernel)
    for kernel in (BF16, INT8, variants.VECTORISED, variants.TILED, variants.MASKS)
}
"""The unpatched sources."""


def native(
    name, kernel, causes, source, patch, *changes, form="ternary_k_interleaved", shape=SHAPE,
    reasons=(), bias=False, hard=False,
):  # fmt: skip
    """A fast kernel with texts of its sources replaced."""
    clean = CLEAN[kernel.name]
    given = {"bias": torch.arange(shape[0]).float()} if bias else {}
    return Mutant(
        id=f"kernels/ternary_{name}",
        area="kernels",
        source=source,
        patch=f"{kernel.name}: {patch}",
        trial=OpTrial(
            faulty=type(clean)(kernel, *changes),
            clean=clean,
            weight=weight(form, shape),
            options=given,
        ),
        op=OP,
        causes=causes,
        reasons=reasons,
        hard=hard,
    )


BLAS = "microsoft/BitNet src/ggml-bitnet-mad.cpp: "
MUTANTS = (
    native(
        "cpu_codes_exchanged", BF16, ("ternary_table", "sign"),
        "chrishayuk/larql#156: 01 = +1 and 10 = -1 exchanged", "+1 is packed as -1",
        ("value > 0 ? 1u : 3u", "value > 0 ? 3u : 1u"),
    ),
    native(
        "cpu_not_halved", BF16, ("constant_ratio",),
        "a decoded weight of 2 needs a factor of 1/2 after the sum", "the factor is left out",
        ("_mm512_mul_ps(sum, _mm512_set1_ps(0.5f))", "sum"),
    ),
    native(
        "cpu_offset_left", INT8, (),
        BLAS + "codes 0, 1, 2 are one too large", "the sum of the quantised row is not subtracted",
        ("_mm512_sub_epi32(sum, _mm512_set1_epi32(sums[(size_t)row]))", "sum"),
    ),
    native(
        "cpu_quantiser_truncates", INT8, ("activation_quantised", "activation_scale"),
        "vllm csrc/cpu: rounds to nearest even; a cast truncates", "x is cut to int8",
        ("_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;\n    __m512i total",
         "_MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;\n    __m512i total"), hard=True,
    ),
    native(
        "cpu_scale_of_127", INT8, ("constant_ratio", "activation_scale"),
        "the range of int8 is 127 or 128", "the row's scale is a / 128",
        ("amax / 127.0f", "amax / 128.0f"),
    ),
    native(
        "cpu_second_tile", BF16, (),
        "vllm-project/vllm-ascend#17009: rows beyond the first tile", "tiles beyond 12 rows repeat",
        ("call.rows.of(row) + begin * STEPS * rows", "call.rows.of(0) + begin * STEPS * rows"),
    ),
    native(
        "cpu_divides", BF16, (),
        "transformers BitLinear divides by the scale, AutoBitLinear multiplies",
        "a scale that divides multiplies",
        ("divide ? _mm512_div_ps(sum, scale)", "divide ? _mm512_mul_ps(sum, scale)"),
        form="ternary_hf_divide",
    ),
    native(
        "cpu_truncates", BF16, ("truncating_store",),
        "triton-lang/triton#9603: a float32 to bfloat16 store that cuts", "no rounding",
        ("_mm512_srli_epi32(_mm512_add_epi32(bits, half), 16)", "_mm512_srli_epi32(bits, 16)"),
        hard=True,
    ),
    native(
        "cuda_half_of_the_codes", variants.VECTORISED, (),
        "a published kernel decodes 8 of the 16 codes of each word", "codes 8 to 15 are skipped",
        ("2 * ((i + j) % 16) & 3u", "2 * ((i + j) % 16) & ((i + j) % 16 < 8 ? 3u : 0u)"),
    ),
    native(
        "cuda_sign_extended", variants.TILED, ("ternary_table", "code_table"),
        "a published kernel: (int8_t)(code << 6) >> 6 makes 2 of -1", "code 2 is -2",
        ("(float)((int)(code & 1u) - (int)(code >> 1))",
         "(float)((int)(code & 1u) - 2 * (int)(code >> 1))"),
    ),
    native(
        "cuda_shared_race", variants.TILED, (),
        "a missing barrier", "no barrier before the tiles are read",
        ("    __syncthreads();\n    float parts", "    float parts"), reasons=("raised",),
    ),
    native(
        "cuda_k_tail", variants.MASKS, ("k_tail_dropped",),
        "ROCm/aiter#4181: a K that is no multiple of the tile", "K is rounded down to whole words",
        ("word < words; word += LANES", "word < o.K / BITS; word += LANES"), shape=(144, 200),
    ),
    native(
        "cuda_lane_lost", variants.MASKS, (),
        "a reduction over half a group", "the last shuffle is left out",
        ("far = LANES / 2; far; far /= 2", "far = LANES / 2; far > 1; far /= 2"),
    ),
)  # fmt: skip
