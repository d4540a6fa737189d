"""The plain references of VDPBF16PS and TDPBF16PS: golden vectors, and this CPU's silicon."""

import ctypes
import importlib.resources
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from reconcile.native import NativeLibrary
from reconcile_kernels.amx_fp8 import features
from reconcile_kernels.amx_fp8.instructions import tdpbf16ps, vdpbf16ps

SILICON = NativeLibrary(
    name="vdpbf16ps",
    sources=(Path(__file__).with_name("vdpbf16ps.cpp"),),
    flags=("-mavx512f", "-mavx512bf16"),
)
TILES = (
    "normal.16x16x16",
    "normal.3x5x7",
    "denormal.4x16x16",
    "wide.4x16x16",
    "special.2x4x4",
    "directed.1x1x3",
)


@pytest.fixture(scope="module")
def vectors():
    folder = importlib.resources.files("reconcile_fixtures") / "vectors"
    with importlib.resources.as_file(folder / "08_dot_bf16.safetensors") as path:
        return load_file(path)


def widen(bits):
    """bfloat16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def same(got, wanted):
    """Bit for bit; of NaN only that it is one."""
    both_nan = np.isnan(got) & np.isnan(wanted)
    return bool(((got.view(np.uint32) == wanted.view(np.uint32)) | both_nan).all())


def test_vdpbf16ps_vectors(vectors):
    a, b = widen(vectors["vdp.a_bf16"]), widen(vectors["vdp.b_bf16"])
    wanted = vectors["vdp.out_f32bits"].view(np.float32)
    assert same(vdpbf16ps(vectors["vdp.acc_f32bits"].view(np.float32), a, b), wanted)


@pytest.mark.parametrize("name", TILES)
def test_tdpbf16ps_vectors(vectors, name):
    a, b = (widen(vectors[f"tdp.{name}.{side}_bf16"]) for side in "ab")
    c, wanted = (vectors[f"tdp.{name}.{side}_f32bits"].view(np.float32) for side in ("c", "out"))
    assert same(tdpbf16ps(c, a, b), wanted)


def test_chains_of_both(vectors):
    """A loop over K = 64: the two instructions give other bits, as the vectors say."""
    x, w = widen(vectors["chain.x_bf16"]), widen(vectors["chain.w_bf16"])
    pairs = np.zeros((3, 16), np.float32)
    for k in range(0, 64, 2):
        left, right = (
            np.broadcast_to(x[:, None, k : k + 2], (3, 16, 2)),
            np.broadcast_to(w[None, :, k : k + 2], (3, 16, 2)),
        )
        pairs = vdpbf16ps(pairs, left, right)
    tiles = np.zeros((3, 16), np.float32)
    for k in range(0, 64, 32):
        b = w[:, k : k + 32].reshape(16, 16, 2).transpose(1, 0, 2).reshape(16, 32)
        tiles = tdpbf16ps(tiles, x[:, k : k + 32], b)
    assert same(pairs, vectors["chain.vdp_f32bits"].view(np.float32))
    assert same(tiles, vectors["chain.tdp_f32bits"].view(np.float32))
    assert not same(pairs, tiles)


@pytest.mark.parametrize(
    ("accumulator", "odd", "even", "vdp", "tdp"),
    [
        (2.0**24, 1, 1, 2.0**24, 2.0**24 + 2),  # one by one, each is lost; together they are not
        (1, 2.0**24, 1, 2.0**24, 2.0**24),  # even first would give 2^24 + 2
        (-(2.0**24), 2.0**24, 1, 1, 0),
    ],
)
def test_numbers_that_tell_the_orders_apart(accumulator, odd, even, vdp, tdp):
    c = np.full((1, 1), accumulator, np.float32)
    a, b = np.array([[even, odd]], np.float32), np.ones((1, 2), np.float32)
    assert vdpbf16ps(c, a[:, None], b[:, None]) == vdp
    assert tdpbf16ps(c, a, b) == tdp


@pytest.mark.parametrize(
    ("accumulator", "a", "b", "wanted"),
    [
        (2.0**-140, (0, 0), (0, 0), 0.0),  # a subnormal accumulator
        (0, (2.0**-130, 0), (1, 0), 0.0),  # a subnormal operand
        (0, (2.0**-64, 0), (2.0**-64, 0), 0.0),  # a subnormal result
        (0, (-(2.0**-64), 0), (2.0**-64, 0), -0.0),  # keeps its sign
        (0, (2.0**-63, 0), (2.0**-63, 0), 2.0**-126),  # the smallest normal one stays
        (np.nan, (1, 1), (1, 1), np.nan),
        (np.inf, (np.inf, 0), (-1, 0), np.nan),
        (0, (np.inf, 0), (0, 0), np.nan),
        (0, (2.0**127, 0), (2, 0), np.inf),
    ],
)
def test_special_values(accumulator, a, b, wanted):
    start, left, right = (np.array([v], np.float32) for v in (accumulator, a, b))
    assert same(vdpbf16ps(start, left, right), np.array([wanted], np.float32))
    in_tile = tdpbf16ps(start[:, None], left, right)
    assert same(in_tile, np.array([[wanted + 0.0]], np.float32))  # -0 + 0 is +0 there


def cases(kind, count, rng):
    """Bits of one kind: accumulators uint32 [n], and two of uint16 [n, 2]."""
    if kind == "any bits":
        accumulator = rng.integers(0, 1 << 32, count, dtype=np.uint32)
        return accumulator, *(
            rng.integers(0, 1 << 16, (count, 2), dtype=np.uint16) for _ in range(2)
        )
    low, high = {"alike": (120, 134), "tiny": (0, 70), "cancelling": (125, 129)}[kind]
    exponents = rng.integers(low, high, (2, count, 2), dtype=np.uint16)
    rest = rng.integers(0, 1 << 16, (2, count, 2), dtype=np.uint16) & 0x807F
    a, b = exponents << 7 | rest
    accumulator = rng.integers(0, 1 << 32, count, dtype=np.uint32) & np.uint32(0x807FFFFF)
    accumulator |= rng.integers(low, high, count, dtype=np.uint32) << 23
    if kind == "cancelling":
        product = widen(a[:, 1]) * widen(b[:, 1])
        accumulator = (-product).view(np.uint32) + rng.integers(0, 3, count, dtype=np.uint32)
    if kind == "tiny":  # products near the smallest normal number
        b = (250 - exponents[0].astype(np.int32) - 126).clip(0, 254).astype(np.uint16) << 7 | rest[
            1
        ]
    return accumulator, a, b


SPECIAL = np.array(
    [
        0,
        0x8000,
        1,
        0x7F,
        0x80,
        0x8080,
        0x3F80,
        0xBF80,
        0x7F7F,
        0x7F80,
        0xFF80,
        0x7FC0,
        0x7F81,
        0x4B80,
    ],
    np.uint16,
)


def test_vdpbf16ps_is_what_the_silicon_does():
    """1.2 million random cases of four kinds and every combination of 14 special values."""
    support = features.avx512_bf16()
    if not support:
        pytest.skip(support.reason)
    rng = np.random.default_rng(0)
    groups = [cases(kind, 300_000, rng) for kind in ("any bits", "alike", "tiny", "cancelling")]
    grid = np.stack(np.meshgrid(*[SPECIAL] * 5, indexing="ij"), -1).reshape(-1, 5)
    groups.append((grid[:, 0].astype(np.uint32) << 16, grid[:, 1:3], grid[:, 3:5]))
    call = SILICON.load().vdpbf16ps
    total = 0
    for accumulator, a, b in groups:
        start = np.ascontiguousarray(accumulator).view(np.float32)
        left, right = (np.ascontiguousarray(side) for side in (a, b))
        out = np.empty_like(start)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (start, left, right, out)]
        call(*pointers, ctypes.c_int64(len(start)))
        assert same(vdpbf16ps(start, widen(left), widen(right)), out)
        total += len(start)
    assert total > 1_000_000
