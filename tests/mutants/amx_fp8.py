"""Faults in ``amx_fp8.w8a16``: one place of its C++ sources or of its ``prepare``."""

from __future__ import annotations

import functools
from unittest import mock

import torch
from reconcile_mutants.common import OP, patched, weight

from reconcile.selftest import Mutant, OpTrial
from reconcile_kernels.amx_fp8 import W8A16, kernel, ops
from reconcile_kernels.amx_fp8.packing import pack

AMX, AVX512, EMULATED = W8A16.engines

SHAPE = (192, 288)
"""A last K block of 32."""
SQUARE = (256, 256)
GENERATOR = 11


class PatchedAmx:
    """The kernel with places of its native source, or its packing, changed."""

    name = W8A16.name
    contract = W8A16.contract
    formats = W8A16.formats
    is_supported = staticmethod(W8A16.is_supported)
    can_implement = staticmethod(W8A16.can_implement)

    def __init__(self, *changes, engine=AVX512, packing=pack):
        self.changes, self.engines, self.packing = changes, (engine,), packing

    @functools.cached_property
    def entry(self):
        library, *rest = ops._ENGINES[self.engines[0].name]
        return (patched(library, *self.changes), *rest)

    def prepare(self, weight, engine):
        with mock.patch.object(kernel, "pack", self.packing):
            return W8A16.prepare(weight, engine)

    def apply(self, x, prepared, bias=None):
        with mock.patch.dict(ops._ENGINES, {self.engines[0].name: self.entry}):
            return W8A16.apply(x, prepared, bias)


CLEAN = PatchedAmx()
"""The unpatched sources: the twin of every patched one."""
CLEAN_TILES = PatchedAmx(engine=EMULATED)


def native(
    name, causes, source, patch, *changes, form="fp8_e4m3_block", shape=SHAPE, bias=False,
    reasons=(), hard=False, packing=pack, clean=CLEAN, options=None, quick=True,
):  # fmt: skip
    """One fault, under the weight that shows it."""
    given = {"bias": torch.randn(shape[0], generator=torch.Generator().manual_seed(GENERATOR))}
    return Mutant(
        id=f"amx_fp8/{name}",
        area="kernels",
        source=source,
        patch=patch,
        trial=OpTrial(
            faulty=PatchedAmx(*changes, engine=clean.engines[0], packing=packing),
            clean=clean,
            weight=weight(form, shape),
            options=(given if bias else {}) | {"engine": clean.engines[0].name} | (options or {}),
        ),
        op=OP,
        causes=causes,
        reasons=reasons,
        hard=hard,
        quick=quick,
    )


def guesses_by_shape(codes, shape, layout):
    """A square weight is taken for [K, N], as `torch._scaled_mm` would want it."""
    return pack(codes, shape, "kn" if shape[0] == shape[1] else layout)


SCALE = "call.scales[n / call.group * call.k_blocks() + kb]"
TAIL = "return left < PAIRS ? left : PAIRS;"
LEFT_BIAS = "left = _mm512_add_ps(left, _mm512_loadu_ps(call.bias + n));"
RIGHT_BIAS = "right = _mm512_add_ps(right, _mm512_loadu_ps(call.bias + n + 16));"
STORE = "_mm512_storeu_si512((uint16_t *)call.y + at, (__m512i)_mm512_cvtne2ps_pbh(right, left));"
HALF_STORE = (
    "if (n + COLUMNS == call.N)\n"
    "      _mm256_storeu_si256((__m256i *)((uint16_t *)call.y + at), "
    "(__m256i)_mm512_cvtneps_pbh(left));\n"
    "    else\n      " + STORE
)
ZERO = "if (!mantissa) return 0;"
FOLD = "_mm512_store_ps(total, _mm512_fmadd_ps(first, scale.first, _mm512_load_ps(total)));"
LOWER_ROWS = "_tile_loadd(5, (const char *)x + TILE * x_stride, x_stride);"

MUTANTS = (
    native(
        "square_is_turned", ("transposed",),
        "PTO-ISA/SuperNPUBench#161: a transposition that square inputs hide",
        "prepare takes a square weight for [K, N]", packing=guesses_by_shape, shape=SQUARE,
        form="fp8_e4m3_tensor",
    ),
    native(
        "scale_by_the_other_axis", ("scale_axis", "block_ratio"),
        "vllm-project/vllm#44630: a scale grid that is transposed",
        "linear.h: the scale of block (n, kb) is read at (kb, n)",
        (SCALE, "call.scales[kb * call.k_blocks() + n / call.group]"), shape=SQUARE,
    ),
    native(
        "tail_of_a_block", ("k_tail_dropped",),
        "ROCm/aiter#4181: a K that is no multiple of the block",
        "linear.h: a last block of fewer than 128 k is left out",
        (TAIL, "return left < PAIRS ? 0 : PAIRS;"),
    ),
    native(
        "last_sixteen_columns", ("unwritten", "n_tail_dropped"),
        "vllm-project/vllm-ascend#17009: elements at the end are left unwritten",
        "linear.h: the last 16 columns are not stored", (STORE, HALF_STORE),
        reasons=("unwritten",),
    ),
    native(
        "bias_twice", ("bias_doubled",),
        "Wenyueh/MinivLLM#80: the bias is added twice",
        "linear.h: the bias is added twice",
        (LEFT_BIAS, f"{LEFT_BIAS} {LEFT_BIAS}"), (RIGHT_BIAS, f"{RIGHT_BIAS} {RIGHT_BIAS}"),
        bias=True,
    ),
    native(
        "one_subnormal_code", ("subnormals", "code_table"),
        "1bit-MONSTER/1bit-MONSTER#300: codes of exponent field 0",
        "fp8.h: 0x03 and 0x83 decode to zero",
        (ZERO, "if (!mantissa || code == 3) return 0;"), hard=True,
    ),
    native(
        "half_of_the_columns_unscaled",
        ("column_ratio", "row_ratio", "scale_missing", "block_ratio"),
        "vllm-project/vllm-xpu-kernels#440: scales that reach only a part of the outputs",
        "linear.h: the first register of sums is folded without its scale",
        (FOLD, "_mm512_store_ps(total, _mm512_add_ps(first, _mm512_load_ps(total)));"),
        form="fp8_e4m3_channel", quick=False,
    ),
    native(
        "tiles_repeat_their_rows", ("stale_output", "shifted_rows", "m_tail_dropped"),
        "fla-org/flash-linear-attention#892: the tail of the tokens is not computed",
        "amx.cpp, under the emulator: rows 16 to 31 of a chunk are computed from rows 0 to 15",
        (LOWER_ROWS, "_tile_loadd(5, x, x_stride);"), shape=(64, 160), form="fp8_e4m3_tensor",
        clean=CLEAN_TILES, options={"batch_sizes": (1, 33), "repeats": 1}, quick=False,
    ),
)  # fmt: skip
