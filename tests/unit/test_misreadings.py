"""Misreadings: each a total function of a weight, with the values that its mistake gives."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from reconcile.registry import formats
from reconcile.weight import QuantizedWeight
from reconcile_references.fp8 import E4M3FN, E4M3FNUZ

PAIRS = [(form, misreading) for form in formats().values() for misreading in form.misreadings]
EACH = {
    "argnames": ("form", "misreading"),
    "argvalues": PAIRS,
    "ids": [f"{form.name}-{misreading.name}" for form, misreading in PAIRS],
}
GENERIC = (44, 76)
SHAPES = (GENERIC, (1, 1), (1, 8), (4, 1), (4, 4), (5, 36))
E4M3_TENSOR = formats()["fp8_e4m3_tensor"]


def legal(form, shape, seed, number=None):
    """A random weight of every code that the format allows, under random scales.

    Blocks are cut at the edge; scales of E8M0 hold the bytes 0 and 255 also.
    """
    rng = np.random.default_rng(seed)
    if not form.packing.fits(shape):
        shape = form.packing.rounded_up(shape)
    allowed = sorted(set(range(len(form.table))) - form.invalid)
    codes = torch.tensor(rng.choice(allowed, shape).astype(np.uint8))
    block = form.block and ((1, 32) if form.block[0] == 1 else (16, 32))
    made = replace(form, block=block)
    grid = made.scale_shape(shape)
    if form.scale_encoding == "e8m0":
        scales = torch.tensor(rng.integers(110, 130, grid).astype(np.uint8))
        if scales.numel() > 3:
            scales.view(-1)[1], scales.view(-1)[3] = 0, 255
    else:
        dtype = form.scale_dtypes[0]
        scales = torch.tensor(np.exp(rng.normal(-2, 1, grid))).to(dtype)
        if number is not None:
            scales = torch.full(grid, min(number, torch.finfo(dtype).max)).to(dtype)
    return QuantizedWeight.from_tensors(
        form.pack(codes), scales, format=form, shape=shape, block=block
    )


def same(a, b):
    """Equal to the bit of a zero, with NaN equal to NaN."""
    a, b = np.asarray(a), np.asarray(b)
    return np.array_equal(a, b, equal_nan=True) and np.array_equal(np.signbit(a), np.signbit(b))


def test_every_format_says_how_it_is_misread():
    for form in formats().values():
        names = [misreading.name for misreading in form.misreadings]
        assert len(set(names)) == len(names) >= 9
        assert names[:3] == ["scale_missing", "scale_inverted", "scale_squared"]
        assert all(misreading.text for misreading in form.misreadings)


@pytest.mark.parametrize(**EACH)
def test_a_generic_weight_shows_the_mistake(form, misreading):
    for seed in range(3):
        weight = legal(form, GENERIC, seed)
        stored = weight.codes.clone(), weight.scales.clone()
        values = misreading.read(weight)
        assert (values.dtype, tuple(values.shape)) == (torch.float64, weight.shape)
        assert not same(values, weight.dequantize())
        assert torch.equal(weight.codes, stored[0])
        assert torch.equal(weight.scales.view(torch.uint8), stored[1].view(torch.uint8))
        assert same(values, misreading.read(weight))


@pytest.mark.parametrize("form", formats().values(), ids=lambda form: form.name)
def test_no_two_mistakes_look_alike_on_a_generic_weight(form):
    weight = legal(form, GENERIC, 0)
    read = {misreading.name: misreading.read(weight) for misreading in form.misreadings}
    alike = {(a, b) for a in read for b in read if a < b and same(read[a], read[b])}
    assert not alike


@pytest.mark.parametrize(**EACH)
def test_a_legal_weight_is_read_whatever_it_holds(form, misreading):
    for shape in SHAPES:
        for number in (None, 0.0, -0.5, 1e-45, 3e38):
            if number == 0 and form.scale_convention == "divide":
                continue
            weight = legal(form, shape, 1, number)
            values = misreading.read(weight)
            assert (values.dtype, tuple(values.shape)) == (torch.float64, weight.shape)


@pytest.mark.parametrize(**EACH)
def test_scales_of_every_dtype_are_read(form, misreading):
    weight = legal(form, GENERIC, 0)
    e8m0 = form.scale_encoding == "e8m0"
    for dtype in form.scale_dtypes:
        scales = weight.scales.view(dtype) if e8m0 else weight.scales.to(dtype)
        other = replace(weight, scales=scales)
        wide = weight if e8m0 else replace(weight, scales=scales.float())
        assert same(misreading.read(other), misreading.read(wide))


# --- what each mistake gives, worked by hand ---------------------------------------------------

ONE = 0x38
GRID = [[2.0, 4.0], [8.0, 16.0]]
BY_BLOCK = {
    "scale_missing": [[1, 1, 1], [1, 1, 1], [1, 1, 1]],
    "scale_inverted": [[1 / 2, 1 / 2, 1 / 4], [1 / 2, 1 / 2, 1 / 4], [1 / 8, 1 / 8, 1 / 16]],
    "scale_squared": [[4, 4, 16], [4, 4, 16], [64, 64, 256]],
    "first_k_block_for_all": [[2, 2, 2], [2, 2, 2], [8, 8, 8]],
    "first_n_block_for_all": [[2, 2, 4], [2, 2, 4], [2, 2, 4]],
    "last_k_block_unscaled": [[2, 2, 1], [2, 2, 1], [8, 8, 1]],
    "last_n_block_unscaled": [[2, 2, 4], [2, 2, 4], [1, 1, 1]],
    "scale_grid_transposed": [[2, 2, 8], [2, 2, 8], [4, 4, 16]],
    "block_size_from_shapes": [[2, 4, 4], [8, 16, 16], [8, 16, 16]],
    "exponent_bias_low": [[4, 4, 8], [4, 4, 8], [16, 16, 32]],
    "exponent_bias_high": [[1, 1, 2], [1, 1, 2], [4, 4, 8]],
    "read_as_e4m3fnuz": [[1, 1, 2], [1, 1, 2], [4, 4, 8]],
    "read_as_e5m2": [[1, 1, 2], [1, 1, 2], [4, 4, 8]],
    "scale_byte_as_number": [[128, 128, 129], [128, 128, 129], [130, 130, 131]],
}


def read(form, name, codes, scales, **fields):
    codes = torch.tensor(codes, dtype=torch.uint8)
    fields = {"shape": tuple(codes.shape)} | fields
    weight = QuantizedWeight.from_tensors(codes, scales, format=form, **fields)
    (misreading,) = [m for m in form.misreadings if m.name == name]
    return misreading.read(weight).tolist()


@pytest.mark.parametrize("name", BY_BLOCK)
@pytest.mark.parametrize("form", ["fp8_e4m3_block", "fp8_e4m3_block_e8m0"])
def test_ones_under_four_block_scales(form, name):
    form = formats()[form]
    if name not in [misreading.name for misreading in form.misreadings]:
        assert (name, form.scale_encoding) == ("scale_byte_as_number", "value")
        return
    scales = torch.tensor(GRID)
    if form.scale_encoding == "e8m0":
        scales = (scales.log2() + 127).to(torch.uint8)
    assert read(form, name, np.full((3, 3), ONE), scales, block=(2, 2)) == BY_BLOCK[name]


def test_a_grid_that_is_not_square_is_read_down_its_columns():
    scales = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    values = read(
        formats()["fp8_e4m3_block"],
        "scale_grid_transposed",
        np.full((2, 3), ONE),
        scales,
        block=(1, 1),
    )
    assert values == [[1, 3, 5], [2, 4, 6]]


def test_block_size_from_shapes_is_what_a_public_loader_takes_it_for():
    """192 rows under two scales of 128-row blocks: rows 96 to 127 get the second."""
    form = formats()["fp8_e4m3_block"]
    codes, scales = np.full((192, 128), ONE), torch.tensor([[1.0], [2.0]])
    values = np.array(read(form, "block_size_from_shapes", codes, scales))
    assert values[:, 0].tolist() == [1.0] * 96 + [2.0] * 96
    right = [1.0] * 128 + [2.0] * 64
    assert np.flatnonzero(values[:, 0] != right).tolist() == list(range(96, 128))
    # 576 rows, five scales: 115 rows each, and the row that is left over.
    codes, scales = np.full((576, 128), ONE), torch.arange(1.0, 6.0)[:, None]
    values = np.array(read(form, "block_size_from_shapes", codes, scales))
    assert values[[0, 114, 115, 459, 460, 574, 575], 0].tolist() == [1, 1, 2, 4, 5, 5, 5]


def test_the_first_scale_for_all_k_gives_64_for_288():
    form = formats()["fp8_e4m3_block"]
    codes, scales = np.full((1, 64), ONE), torch.tensor([[1.0, 8.0]])
    weight = QuantizedWeight.from_tensors(
        torch.tensor(codes, dtype=torch.uint8), scales, format=form, shape=(1, 64), block=(32, 32)
    )
    assert weight.dequantize().sum() == 288
    assert np.sum(read(form, "first_k_block_for_all", codes, scales, block=(32, 32))) == 64


SCALE = {
    "scale_mantissa_dropped": [(1.75, 1), (0.013, 2.0**-7), (-3, -2), (0, 0), (1e-45, 2.0**-149)],
    "scale_rounded_to_float16": [
        (1 + 2.0**-12, 1), (1e-9, 0), (1 + 3 * 2.0**-11, 1 + 2.0**-9), (70000, math.inf)
    ],
    "scale_rounded_to_bfloat16": [
        (1 + 2.0**-9, 1), (1e-9, 0x89 * 2.0**-37), (1 + 3 * 2.0**-8, 1 + 2.0**-6)
    ],
    "scale_inverted": [(4, 0.25), (-0.5, -2), (0, math.inf)],
    "scale_squared": [(0.04, np.float32(0.04).astype(float) ** 2), (-3, 9)],
    "scale_missing": [(0.0013, 1), (0, 1)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "scale", "value"), [(name, *pair) for name, pairs in SCALE.items() for pair in pairs]
)
def test_a_one_under_one_scale(name, scale, value):
    assert read(E4M3_TENSOR, name, [[ONE]], torch.tensor([float(scale)])) == [[value]]


def test_an_inverted_scale_is_off_by_its_square():
    scales = torch.tensor([1.5])
    values = torch.tensor([[1.0, -1.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 0.0]])
    for name, other in (("ternary_hf", 1 / 1.5), ("ternary_hf_divide", 1.5)):
        form = formats()[name]
        stored = form.pack(form.encode(values))
        weight = QuantizedWeight.from_tensors(stored, scales, format=form, shape=(4, 2))
        inverted = form.misreadings[1].read(weight)
        assert torch.allclose(inverted, values.double() * other, rtol=1e-15, atol=0)


@pytest.mark.parametrize(("byte", "number"), [(120, 15360), (127, 127)])
def test_a_scale_byte_as_a_number_is_off_by_orders_of_magnitude(byte, number):
    scales = torch.full((2, 1), byte, dtype=torch.uint8)
    form = formats()["mxfp8_e4m3"]
    wrong = read(form, "scale_byte_as_number", [[ONE], [ONE]], scales)
    assert wrong[0][0] / 2.0 ** (byte - 127) == number
    assert read(form, "exponent_bias_high", [[ONE], [ONE]], scales)[0] == [2.0 ** (byte - 128)]


def test_a_scale_byte_shifted_into_a_float32_loses_both_ends():
    scales = torch.tensor([[0], [1], [127], [254], [255]], dtype=torch.uint8)
    values = read(formats()["mxfp8_e4m3"], "scale_byte_shifted", [[ONE]] * 5, scales)
    assert values == [[0], [2.0**-126], [1], [2.0**127], [math.inf]]
    bits = scales[:, 0].to(torch.int32) << 23
    assert [row[0] for row in values] == bits.view(torch.float32).tolist()


CODES = {
    "sign_ignored": [(0xB8, 1), (0x80, 0), (0x81, 2.0**-9)],
    "subnormals_as_normals": [
        (0x01, 1.125 * 2.0**-7), (0x07, 1.875 * 2.0**-7), (0x84, -1.5 * 2.0**-7), (0, 0),
        (0x08, 2.0**-6),
    ],
    "subnormals_and_zero_as_normals": [(0x01, 1.125 * 2.0**-7), (0, 2.0**-7), (0x80, -(2.0**-7))],
    "subnormals_as_zero": [(0x01, 0), (0x07, 0), (0x87, 0), (0x08, 2.0**-6)],
    "read_as_e4m3fnuz": [(ONE, 0.5), (0x7E, 224), (0x7F, 240), (0x01, 2.0**-10), (0xFF, -240)],
    "read_as_e5m2": [(0x3C, 1), (0x7B, 57344), (0x7C, math.inf)],
    "read_as_e4m3_without_nan": [(0x7F, 480), (0xFF, -480), (0x7E, 448)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "code", "value"), [(name, *pair) for name, pairs in CODES.items() for pair in pairs]
)
def test_a_code_of_e4m3(name, code, value):
    assert read(E4M3_TENSOR, name, [[code]], torch.ones(1)) == [[value]]


@pytest.mark.parametrize(
    ("form", "name", "pairs"),
    [
        ("fp8_e4m3fnuz_tensor", "read_as_e4m3fn", [(ONE, 1), (0x7E, 448), (0x01, 2.0**-9)]),
        ("fp8_e4m3fnuz_tensor", "sign_ignored", [(0x80, 0), (0xB8, 0.5)]),
        ("fp8_e4m3fnuz_tensor", "subnormals_as_normals", [(0x01, 1.125 * 2.0**-8), (0, 0)]),
        ("fp8_e4m3fnuz_tensor", "subnormals_as_normals", [(0x80, math.nan)]),
        ("fp8_e4m3fnuz_tensor", "subnormals_as_zero", [(0x01, 0), (0x80, math.nan)]),
        ("fp8_e5m2_tensor", "read_as_e4m3fn", [(ONE, 1), (0x7C, 384)]),
        ("fp8_e5m2_tensor", "read_as_e5m2fnuz", [(0x3C, 0.5), (0x7C, 32768)]),
        ("fp8_e5m2_tensor", "read_as_e5m2_without_nan", [(0x7C, 65536), (0x7D, 81920)]),
        ("fp8_e5m2_tensor", "subnormals_as_normals", [(0x01, 1.25 * 2.0**-15), (4, 2.0**-14)]),
    ],
)
def test_codes_of_the_other_floats(form, name, pairs):
    for code, value in pairs:
        assert same(read(formats()[form], name, [[code]], torch.ones(1)), [[float(value)]])


def test_fn_and_fnuz_read_as_each_other_are_factors_of_two_and_a_nan():
    codes, ones = [list(range(256))], torch.ones(1)
    there = read(E4M3_TENSOR, "read_as_e4m3fnuz", codes, ones)[0]
    back = read(formats()["fp8_e4m3fnuz_tensor"], "read_as_e4m3fn", codes, ones)[0]
    assert same(there, E4M3FNUZ)
    assert same(back, E4M3FN)
    both = np.isfinite(there) & np.isfinite(back)
    assert np.array_equal(np.array(back)[both], 2 * np.array(there)[both])
    assert both.sum() == 253
    assert np.flatnonzero(np.isnan(there)).tolist() == [0x80]


TERNARY = {
    # Bytes 21 = codes 1, 0, 2, 0 along K.
    ("ternary_k_interleaved", "codes_from_minus_one"): [0, -1, 1, -1],
    ("ternary_k_interleaved", "signs_swapped"): [-1, 0, 1, 0],
    ("ternary_k_interleaved", "codes_sign_extended"): [1, 0, -2, 0],
    ("ternary_k_interleaved", "bit_order_reversed"): [0, -1, 0, 1],
    # The same byte down four rows.
    ("ternary_hf", "codes_from_zero"): [1, 0, -1, 0],
    ("ternary_hf", "signs_swapped"): [0, 1, -1, 1],
    ("ternary_hf", "bit_order_reversed"): [-1, 1, -1, 0],
    ("ternary_hf_divide", "codes_from_zero"): [1, 0, -1, 0],
}


@pytest.mark.parametrize(("name", "misread"), TERNARY)
def test_one_ternary_byte(name, misread):
    form = formats()[name]
    shape = (1, 4) if form.packing.dim == 1 else (4, 1)
    values = read(form, misread, [[0x21]], torch.ones(1), shape=shape)
    assert np.ravel(values).tolist() == TERNARY[name, misread]


@pytest.mark.parametrize(
    ("name", "misread", "shape"),
    [
        ("ternary_k_interleaved", "read_as_planar", (1, 8)),
        ("ternary_hf", "read_as_interleaved", (8, 1)),
    ],
)
def test_the_other_arrangement_deals_the_codes_of_two_bytes_out(name, misread, shape):
    form = formats()[name]
    row = [1.0, 0.0, -1.0, 0.0, 1.0, 1.0, 0.0, -1.0]
    stored = form.pack(form.encode(torch.tensor(row).reshape(shape)))
    values = np.ravel(read(form, misread, stored.tolist(), torch.ones(1), shape=shape)).tolist()
    if form.packing.arrangement == "interleaved":  # bytes hold 0-3, 4-7; read 0, 2, 4, 6 and so on
        assert values == [row[i] for i in (0, 4, 1, 5, 2, 6, 3, 7)]
    else:  # bytes hold 0, 2, 4, 6 and 1, 3, 5, 7; read one after the other
        assert values == [row[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)]


def test_channel_scales_that_go_astray():
    codes, scales = np.full((2, 4), ONE), torch.tensor([3.0, 5.0])
    form = formats()["fp8_e4m3_channel"]
    assert read(form, "first_scale_for_all_rows", codes, scales) == [[3] * 4] * 2
    assert read(form, "scale_along_columns", codes, scales) == [[3, 5, 3, 5]] * 2
