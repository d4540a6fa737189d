"""Ternary formats of other engines: llama.cpp, bitnet.cpp, BitNet's GPU kernels, plain bytes.

===================== =================================== ============ ===================
format                where a code lies                   codes 0..3   scale
===================== =================================== ============ ===================
ternary_i2_s_x86      flat blocks of 128, stride 32, high -1, 0, +1    [1], float32
ternary_i2_s_arm      flat blocks of 64, stride 16, high  -1, 0, +1    [1], float32
ternary_i2_s_rows     4 rows of one column, high first    -1, 0, +1    [1], float32
ternary_tq2_0         blocks of 128 of K, stride 32, low  -1, 0, +1    [N, K/256], float16
ternary_tq1_0         5 base-3 digits per byte            -1, 0, +1    [N, K/256], float16
ternary_ms_gpu        16 x 32 tiles of 32-bit words       -, -1, 0, +1 [1], bfloat16
ternary_bytes         a byte each                         0, +1, -1    [N]
ternary_int8          a signed byte each                  the byte     [1]
===================== =================================== ============ ===================

All scales multiply. The three of ``i2_s`` share one GGUF type (36): which of them a file holds
depends on the machine that wrote it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from reconcile.tile import Tile, strided
from reconcile.weight import Format, Packing
from reconcile_references.misreadings import (
    BLOCK_SCALE,
    CHANNEL_SCALE,
    NUMBER_SCALE,
    SCALE,
    reread,
)

FROM_MINUS_ONE = (-1.0, 0.0, 1.0, 2.0)
"""Code minus one; what decoders make of code 3 is 2."""
SIGNED_BYTES = tuple(float(code - 256 if code > 127 else code) for code in range(256))


def tiled(tile: Tile) -> Packing:
    """The packing of a tile."""
    return Packing(bits=2, dim=1, arrangement="tiled", tile=tile)


def _ms_gpu_places() -> tuple[tuple[int, int], ...]:
    """Byte and digit of (row, column) of a 16 x 32 tile: 32 words of 16 codes each.

    Word t = (row // 8) * 16 + (column // 16) * 8 + row % 8; its element e = column % 16 lies in
    byte e % 4, digit e // 4.
    """
    return tuple(
        (4 * ((row // 8) * 16 + (column // 16) * 8 + row % 8) + column % 4, column % 16 // 4)
        for row in range(16)
        for column in range(32)
    )


def _tq1_places(*, reverse: bool = False) -> tuple[tuple[int, int], ...]:
    """Runs of 32, 16 and 4 bytes that hold 5, 5 and 4 digits each, first digit first."""
    runs = ((0, 32, 5), (32, 16, 5), (48, 4, 4))
    return tuple(
        (start + byte, digits - 1 - digit if reverse else digit)
        for start, length, digits in runs
        for digit in range(digits)
        for byte in range(length)
    )


MS_GPU_TILE = Tile(rows=16, columns=32, places=_ms_gpu_places())
TQ1_TILE = Tile(rows=1, columns=256, places=_tq1_places(), base=3)
TQ2_TILE = strided(32, low_first=True, repeat=2)

_SIGNS = reread("signs_swapped", "+1 and -1 are swapped", table=(1.0, 0.0, -1.0, -2.0))
_FROM_ZERO = reread(
    "codes_from_zero", "codes 0, 1, 2 are read as 0, +1, -1", table=(0.0, 1.0, -1.0, 0.0)
)
_FLAT_CONTIGUOUS = reread(
    "read_as_interleaved",
    "four neighbours are taken from a byte, where they lie a stride apart",
    packing=tiled(strided(1, low_first=False, flat=True)),
)

TERNARY_I2_S_X86 = Format(
    name="ternary_i2_s_x86",
    table=FROM_MINUS_ONE,
    invalid=frozenset({3}),
    packing=tiled(strided(32, low_first=False, flat=True)),
    granularity="tensor",
    scale_dtypes=(torch.float32,),
    reference="microsoft/BitNet 16da220a, src/ggml-bitnet-mad.cpp, ACT_PARALLEL",
    misreadings=(
        *SCALE,
        *NUMBER_SCALE,
        _SIGNS,
        _FROM_ZERO,
        _FLAT_CONTIGUOUS,
        reread(
            "bit_order_reversed",
            "the codes of a byte are read from the low bits up",
            packing=tiled(strided(32, low_first=True, flat=True)),
        ),
        reread(
            "read_as_i2_s_arm",
            "groups of 64 in 16 bytes, as ARM builds write them",
            packing=tiled(strided(16, low_first=False, flat=True)),
        ),
    ),
)
"""uint8 [1, N * K / 4]: byte p of 32 holds elements p, p+32, p+64, p+96 of 128, high bits first."""

TERNARY_I2_S_ARM = replace(
    TERNARY_I2_S_X86,
    name="ternary_i2_s_arm",
    packing=tiled(strided(16, low_first=False, flat=True)),
    reference="microsoft/BitNet 16da220a, src/ggml-bitnet-mad.cpp, __ARM_NEON",
    misreadings=(*SCALE, *NUMBER_SCALE, _SIGNS, _FROM_ZERO, _FLAT_CONTIGUOUS),
)
"""uint8 [1, N * K / 4]: byte p of 16 holds elements p, p+16, p+32, p+48 of 64, high bits first."""

TERNARY_I2_S_ROWS = replace(
    TERNARY_I2_S_X86,
    name="ternary_i2_s_rows",
    packing=Packing(bits=2, dim=0, arrangement="interleaved", low_first=False),
    reference="microsoft/BitNet 16da220a, src/ggml-bitnet-mad.cpp, x86 without ACT_PARALLEL",
    misreadings=(
        *SCALE,
        *NUMBER_SCALE,
        _SIGNS,
        _FROM_ZERO,
        reread(
            "read_as_planar",
            "interleaved codes are read as planar ones",
            packing=Packing(bits=2, dim=0, arrangement="planar", low_first=False),
        ),
    ),
)
"""uint8 [N/4, K]: a byte holds rows 4r .. 4r+3 of one column, row 4r in the high bits."""

TERNARY_TQ2_0 = Format(
    name="ternary_tq2_0",
    table=FROM_MINUS_ONE,
    invalid=frozenset({3}),
    packing=tiled(TQ2_TILE),
    granularity="block",
    block=(1, 256),
    scale_dtypes=(torch.float16,),
    reference="llama.cpp TQ2_0, gguf 0.19.0 quants.py",
    misreadings=(
        *SCALE,
        *NUMBER_SCALE[::2],
        *BLOCK_SCALE[:1],
        *BLOCK_SCALE[2:3],
        _SIGNS,
        _FROM_ZERO,
        reread(
            "read_as_interleaved",
            "four neighbours are taken from a byte, where they lie 32 apart",
            packing=tiled(strided(1, low_first=True)),
        ),
    ),
)
"""uint8 [N, K/4] without the scales: byte j*32 + m holds elements j*128 + 32*l + m, l from low."""

TERNARY_TQ1_0 = Format(
    name="ternary_tq1_0",
    table=(-1.0, 0.0, 1.0),
    packing=tiled(TQ1_TILE),
    granularity="block",
    block=(1, 256),
    scale_dtypes=(torch.float16,),
    reference="llama.cpp TQ1_0, gguf 0.19.0 quants.py",
    misreadings=(
        *SCALE,
        *NUMBER_SCALE[::2],
        *BLOCK_SCALE[:1],
        *BLOCK_SCALE[2:3],
        reread("signs_swapped", "+1 and -1 are swapped", table=(1.0, 0.0, -1.0)),
        reread(
            "digits_reversed",
            "the last digit of a byte is taken for the first",
            packing=tiled(replace(TQ1_TILE, places=_tq1_places(reverse=True))),
        ),
        reread(
            "read_as_interleaved",
            "five neighbours are taken from a byte, where they lie 32, 16 or 4 apart",
            packing=tiled(replace(TQ1_TILE, places=tuple(sorted(TQ1_TILE.places)))),
        ),
    ),
)
"""uint8 [N, 52 K / 256] without the scales: five base-3 digits per byte, strides 32, 16 and 4."""

TERNARY_MS_GPU = Format(
    name="ternary_ms_gpu",
    table=(-2.0, -1.0, 0.0, 1.0),
    invalid=frozenset({0}),
    packing=tiled(MS_GPU_TILE),
    code_dtypes=(torch.int8, torch.uint8),
    granularity="tensor",
    scale_dtypes=(torch.float32, torch.bfloat16),
    reference="microsoft/BitNet 16da220a, gpu/pack_weight.py",
    misreadings=(
        *SCALE,
        *NUMBER_SCALE,
        reread("codes_from_minus_one", "codes 0, 1, 2 are read as -1, 0, +1", table=FROM_MINUS_ONE),
        reread("signs_swapped", "+1 and -1 are swapped", table=(2.0, 1.0, 0.0, -1.0)),
        reread(
            "read_as_interleaved",
            "rows are taken for rows and neighbours for neighbours; the tiles are not undone",
            packing=Packing(bits=2, dim=1, arrangement="interleaved"),
        ),
    ),
)
"""int8 [N, K/4]: 32-bit words of 16 codes in 16 x 32 tiles."""

TERNARY_BYTES = Format(
    name="ternary_bytes",
    table=(0.0, 1.0, -1.0, *(0.0,) * 253),
    invalid=frozenset(range(3, 256)),
    packing=Packing(bits=8, dim=1, arrangement="interleaved"),
    granularity="channel",
    reference="docs/formats.md, ternary_bytes",
    misreadings=(
        *SCALE,
        *NUMBER_SCALE,
        *CHANNEL_SCALE,
        reread(
            "codes_from_minus_one",
            "codes 0, 1, 2 are read as -1, 0, +1",
            table=(-1.0, 0.0, 1.0, *(0.0,) * 253),
        ),
    ),
)
"""uint8 [N, K] of 0, 1, 2: the codes of ``ternary_k_interleaved``, not packed."""

TERNARY_INT8 = Format(
    name="ternary_int8",
    table=SIGNED_BYTES,
    invalid=frozenset(range(2, 255)),
    packing=Packing(bits=8, dim=1, arrangement="interleaved"),
    code_dtypes=(torch.int8, torch.uint8),
    granularity="tensor",
    reference="docs/formats.md, ternary_int8",
    misreadings=(
        *SCALE,
        *NUMBER_SCALE,
        reread(
            "bytes_as_unsigned",
            "the byte of -1 is read as 255",
            table=tuple(map(float, range(256))),
        ),
        reread("sign_ignored", "the sign is ignored", table=tuple(map(abs, SIGNED_BYTES))),
        reread("signs_swapped", "+1 and -1 are swapped", table=tuple(-v for v in SIGNED_BYTES)),
    ),
)
"""int8 [N, K] of -1, 0, 1."""
