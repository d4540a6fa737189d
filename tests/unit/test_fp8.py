"""FP8 and MX formats against ml_dtypes, torch, golden vectors and exact fractions."""

import hashlib
import math
import re
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from reconcile.exceptions import FormatError
from reconcile.registry import formats
from reconcile.weight import Format, QuantizedWeight
from reconcile_references import fp8

ROOT = Path(__file__).resolve().parents[2]
VECTORS = ROOT / "fixtures/reconcile_fixtures/vectors"
CODES, E8M0, MX, BLOCKS, LINEAR = (
    load_file(VECTORS / f"{name}.safetensors")
    for name in ("01_fp8_codes", "02_e8m0", "03_mxfp8", "04_block_fp8", "09_linear")
)
TENSOR, CHANNEL, BLOCK, BLOCK_E8M0, FNUZ, E5M2, MXFP8 = (
    formats()[name]
    for name in (
        "fp8_e4m3_tensor",
        "fp8_e4m3_channel",
        "fp8_e4m3_block",
        "fp8_e4m3_block_e8m0",
        "fp8_e4m3fnuz_tensor",
        "fp8_e5m2_tensor",
        "mxfp8_e4m3",
    )
)
ALL = (TENSOR, CHANNEL, BLOCK, BLOCK_E8M0, FNUZ, E5M2, MXFP8)
BY_NAME = {"argnames": "form", "argvalues": ALL, "ids": lambda form: form.name}
BYTES = np.arange(256, dtype=np.uint8)


def f32(values):
    """Float32 bits of exact values; every NaN is one."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        narrow = np.asarray(values).astype(np.float64).astype(np.float32)
    return np.where(np.isnan(narrow), np.uint32(0x7FC00000), narrow.view(np.uint32))


def bf16(bits):
    return bits.view(ml_dtypes.bfloat16).astype(np.float64)


def torch_bf16(bits):
    return torch.tensor(bits.view(np.int16)).view(torch.bfloat16)


def weight(form, codes, scales, **fields):
    """A weight with one code per byte from numpy arrays or tensors."""
    codes, scales = (torch.as_tensor(item) for item in (codes, scales))
    fields = {"shape": tuple(codes.shape)} | fields
    return QuantizedWeight.from_tensors(codes, scales, format=form, **fields)


# --- codes -------------------------------------------------------------------------------------

TABLES = {
    "e4m3fn": fp8.E4M3FN,
    "e4m3fnuz": fp8.E4M3FNUZ,
    "e5m2": fp8.E5M2,
    "e5m2fnuz": fp8.minifloat_table(5, 2, 16, nonfinite="fnuz"),
}


@pytest.mark.parametrize("name", TABLES)
def test_all_codes_mean_what_ml_dtypes_and_torch_say(name):
    dtype = getattr(ml_dtypes, f"float8_{name}")
    assert np.array_equal(f32(TABLES[name]), f32(BYTES.view(dtype).astype(np.float64)))
    stored = torch.tensor(BYTES).view(getattr(torch, f"float8_{name}"))
    assert np.array_equal(f32(TABLES[name]), f32(stored.to(torch.float64).numpy()))
    if name != "e5m2fnuz":
        vector = CODES[f"table.{name}.f32bits"].view(np.float32)
        assert np.array_equal(f32(TABLES[name]), f32(vector))


@pytest.mark.parametrize(
    ("table", "code", "value"),
    [
        *[("e4m3fn", c, v) for c, v in ((0x38, 1), (0x40, 2), (0x7E, 448), (0x01, 2**-9))],
        *[("e4m3fnuz", c, v) for c, v in ((0x38, 0.5), (0x40, 1), (0x7E, 224), (0x01, 2**-10))],
        *[("e4m3fnuz", c, v) for c, v in ((0x7F, 240), (0xFF, -240), (0x80, math.nan))],
        *[("e4m3fn", c, v) for c, v in ((0x7F, math.nan), (0xFF, math.nan), (0x80, -0.0))],
        *[("e5m2", c, v) for c, v in ((0x7B, 57344), (0x7C, math.inf), (0xFC, -math.inf))],
        *[("e5m2", c, math.nan) for c in (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)],
    ],
)
def test_codes_that_tell_the_formats_apart(table, code, value):
    assert repr(TABLES[table][code]) == repr(float(value))


@pytest.mark.parametrize("form", [TENSOR, FNUZ, E5M2], ids=lambda form: form.name)
def test_every_code_is_found_again_from_its_value(form):
    values = form.decode(torch.tensor(BYTES)[None])
    back = form.encode(values)[0].numpy()
    number = ~np.isnan(np.array(form.table))
    assert np.array_equal(back[number], BYTES[number])
    assert set(back[~number]) == {BYTES[~number][0]}
    assert form.encode(torch.tensor([[0.0, 0.0]])).tolist() == [[0, 0]]


def test_minus_zero_without_a_code_of_its_own_is_zero():
    minus_zero = torch.tensor([[-0.0]])
    assert FNUZ.encode(minus_zero).tolist() == [[0]]
    assert formats()["ternary_hf"].encode(minus_zero).tolist() == [[1]]
    assert TENSOR.encode(minus_zero).tolist() == [[0x80]]


@pytest.mark.parametrize("value", [449.0, 2.0**-10, math.inf])
def test_a_value_between_codes_is_refused(value):
    with pytest.raises(FormatError, match="value without a code"):
        TENSOR.encode(torch.tensor([[value]]))


# --- scale bytes -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", MXFP8.scale_dtypes, ids=str)
def test_all_scale_bytes_mean_what_ml_dtypes_and_torch_say(dtype):
    stored = torch.tensor(BYTES)
    values = MXFP8.scale_values(stored.view(dtype)).numpy()
    assert values.dtype == np.float64
    for oracle in (
        BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float64),
        stored.view(torch.float8_e8m0fnu).to(torch.float64).numpy(),
        E8M0["table.f32bits"].view(np.float32),
    ):
        assert np.array_equal(f32(values), f32(oracle))
    assert [Fraction(v) for v in values[:255]] == [Fraction(2) ** (b - 127) for b in range(255)]


@pytest.mark.parametrize(("byte", "value"), [(0, 2.0**-127), (254, 2.0**127), (127, 1.0)])
def test_the_ends_of_e8m0(byte, value):
    scales = torch.tensor([[byte]], dtype=torch.uint8)
    assert weight(MXFP8, np.full((1, 8), 0x38, np.uint8), scales).dequantize()[0, 0] == value


def test_scale_byte_255_makes_its_own_block_nan():
    scales = np.array([[255, 127], [127, 255]], np.uint8)
    values = weight(MXFP8, np.zeros((2, 40), np.uint8), scales).dequantize()
    assert torch.equal(values[0].isnan(), torch.arange(40) < 32)
    assert torch.equal(values[1].isnan(), torch.arange(40) >= 32)


def test_scale_byte_0_survives_flushing_of_subnormals():
    try:
        torch.set_flush_denormal(True)
        assert MXFP8.scale_values(torch.zeros(9, dtype=torch.uint8)).tolist() == [2.0**-127] * 9
    finally:
        torch.set_flush_denormal(False)


# --- block, channel and tensor scales against vectors --------------------------------------------

SCALED = {
    "blk": (BLOCK, "blk.scale_f32"),
    "blk_bf16": (BLOCK, "blk_bf16.scale_bf16"),
    "blk_e8m0": (BLOCK_E8M0, "blk_e8m0.scale_e8m0"),
    "kv_a": (BLOCK, "kv_a.scale_f32"),
    "edge_small": (BLOCK, "edge_small.scale_f32"),
    "pt": (TENSOR, "pt.scale_f32"),
    "pc_f32": (CHANNEL, "pc_f32.scale_f32"),
    "pc_bf16": (CHANNEL, "pc_bf16.scale_bf16"),
}
FULL_F32 = {
    "blk": "a4e87f8803330c7ee018c5d29c48117e6d70bc60140c9775ee4a5212e872d6f4",
    "kv_a": "81b9a3f088127ea50b51925c0c8d194068491c67964d544fe03d962993a19779",
}
FULL_BF16 = {"kv_a": "8c45b394bf91f60606cfa9bed48c8433dc39a8955b2b00a8e7fa5aef7e1fda52"}
"""SHA-256 of all values, of which the vectors hold samples."""


def scaled(name):
    form, place = SCALED[name]
    codes = BLOCKS["pt.codes" if name.startswith("pc_") else f"{name}.codes"]
    stored = BLOCKS[place]
    scales = torch_bf16(stored) if place.endswith("bf16") else torch.tensor(stored)
    return weight(form, codes, scales if form.granularity == "block" else scales.reshape(-1))


def exactly(values, codes, form, scales, block):
    """Whether float64 values are code times scale, by fractions, each element on its own."""
    return all(
        Fraction(values[n, k].item())
        == Fraction(form.table[codes[n, k]]) * Fraction(scales[n // block[0], k // block[1]].item())
        for n in range(codes.shape[0])
        for k in range(codes.shape[1])
        if math.isfinite(form.table[codes[n, k]])
    )


@pytest.mark.parametrize("name", SCALED)
def test_dequantised_as_public_loaders_do(name):
    """Code times scale rounded to float32, and that to bfloat16."""
    narrow = scaled(name).dequantize(torch.float32)
    half = narrow.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    flat = narrow.numpy().ravel()
    compared = 0
    if f"{name}.deq_f32bits" in BLOCKS:
        assert np.array_equal(f32(narrow), f32(BLOCKS[f"{name}.deq_f32bits"].view(np.float32)))
        compared += 1
    if f"{name}.sample_f32bits" in BLOCKS:
        sample = BLOCKS[f"{name}.sample_f32bits"].view(np.float32)
        assert np.array_equal(f32(flat[BLOCKS[f"{name}.sample_idx"]]), f32(sample))
        compared += 1
    if f"{name}.deq_bf16" in BLOCKS:
        assert np.array_equal(f32(bf16(half)), f32(bf16(BLOCKS[f"{name}.deq_bf16"])))
        compared += 1
    if name in FULL_F32:
        assert hashlib.sha256(flat.astype("<f4").tobytes()).hexdigest() == FULL_F32[name]
        compared += 1
    if name in FULL_BF16:
        assert hashlib.sha256(half.astype("<u2").tobytes()).hexdigest() == FULL_BF16[name]
        compared += 1
    assert compared >= (1 if name in ("blk_bf16", "blk_e8m0") else 2)


@pytest.mark.parametrize("name", [name for name in SCALED if name not in ("blk", "kv_a")])
def test_float64_is_exact(name):
    made = scaled(name)
    grid = made.format.scale_values(made.scales)
    grid = grid if grid.dim() == 2 else grid[:, None]
    block = {"block": (128, 128), "channel": (1, 10**6), "tensor": (10**6, 10**6)}
    block = block[made.format.granularity]
    assert exactly(made.dequantize(), made.codes.numpy(), made.format, grid, block)


@pytest.mark.parametrize("form", [TENSOR, FNUZ, E5M2], ids=lambda form: form.name)
@pytest.mark.parametrize("scale", [1.0, -3.0, 0.1, 2.0**-149, 1.4e-40, 3.4e38, 0.0, 1.9999999])
def test_every_code_times_any_float32_is_exact(form, scale):
    scales = torch.tensor([scale], dtype=torch.float32)
    values = weight(form, BYTES[None], scales).dequantize()
    assert exactly(values, BYTES[None], form, scales.double()[None], (1, 256))
    wrong = [not math.isfinite(value) for value in form.table]
    assert (~values.isfinite())[0].tolist() == wrong


def test_dequantising_to_bfloat16_rounds_once(exact_round):
    made = weight(TENSOR, BYTES[None], torch.tensor([1 / 3], dtype=torch.float32))
    expected = exact_round(made.dequantize().numpy(), "bfloat16")
    assert np.array_equal(f32(made.dequantize(torch.bfloat16).double()), f32(expected))


def test_two_roundings_differ_where_the_first_lands_on_a_tie():
    """1.125 times this scale is 1 + 2^-8 + 2^-24, of which float32 keeps the tie 1 + 2^-8."""
    made = weight(TENSOR, np.array([[0x39]], np.uint8), torch.tensor([7485668 * 2.0**-23]))
    assert made.dequantize().item() == 1 + 2.0**-8 + 2.0**-24
    assert made.dequantize(torch.bfloat16).item() == 1 + 2.0**-7
    assert made.dequantize(torch.float32).bfloat16().item() == 1


@pytest.mark.parametrize("block", [(1, 1), (3, 1), (1, 5), (2, 3), (7, 11), (100, 200)])
@pytest.mark.parametrize("shape", [(7, 11), (1, 1), (1, 9), (6, 1)])
@pytest.mark.parametrize("form", [BLOCK, BLOCK_E8M0], ids=lambda form: form.name)
def test_blocks_of_any_size_are_cut_at_the_edge(form, shape, block):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 0x7F, shape).astype(np.uint8)
    grid = tuple(math.ceil(size / step) for size, step in zip(shape, block, strict=True))
    if form is BLOCK:
        scales = torch.tensor(rng.normal(0, 1, grid), dtype=torch.float32)
    else:
        scales = torch.tensor(rng.integers(0, 255, grid), dtype=torch.uint8)
    values = weight(form, codes, scales, block=block).dequantize()
    assert exactly(values, codes, form, form.scale_values(scales), block)


def test_a_block_declared_with_the_weight_leaves_the_format_alone():
    made = weight(BLOCK, np.zeros((4, 4), np.uint8), np.ones((2, 2), np.float32), block=(2, 2))
    assert (made.format.block, BLOCK.block) == ((2, 2), (128, 128))
    assert made.format.misreadings == BLOCK.misreadings


# --- MXFP8 against vectors -----------------------------------------------------------------------

GROUPS = [name.removesuffix(".deq") for name in MX if re.fullmatch(r"\w+\.(floor|rceil).deq", name)]


def test_dequantising_all_codes_under_the_scales_at_the_ends():
    values = weight(MXFP8, MX["deqtab.codes"], MX["deqtab.scale"]).dequantize()
    assert np.array_equal(f32(values), f32(MX["deqtab.f32bits"].view(np.float32)))
    assert set(MX["deqtab.scale"].ravel()) >= {0, 1, 254, 255}


def test_groups_of_both_rules_are_there():
    assert sorted(GROUPS) == ["rows.floor", "rows.rceil", "rows32.floor", "rows32.rceil"]


@pytest.mark.parametrize("name", GROUPS)
def test_edge_cases_dequantise_as_in_torchao(name):
    values = weight(MXFP8, MX[f"{name}.codes"], MX[f"{name}.scale"]).dequantize()
    assert np.array_equal(f32(values), f32(MX[f"{name}.deq"]))


@pytest.mark.parametrize("rounding", ["nearest", "even"])
@pytest.mark.parametrize("rows", ["rows", "rows32", "rand", "rand32"])
def test_values_dequantise_as_in_microxcaling(rows, rounding):
    """Its shared exponents are numbers; where one is NaN its output is left open."""
    exponents = MX[f"{rows}.microx.shared_exp"]
    codes, scales = MX[f"{rows}.microx_{rounding}.codes"], np.nan_to_num(exponents) + 127
    values = weight(MXFP8, codes, scales.astype(np.uint8)).dequantize().numpy()
    defined = np.repeat(np.isfinite(exponents), 32, axis=1)[:, : codes.shape[1]]
    defined &= np.isfinite(MX[f"{rows}.microx_{rounding}.deq"])
    assert defined.mean() > 0.8
    theirs = MX[f"{rows}.microx_{rounding}.deq"].astype(np.float64)
    assert np.array_equal(values[defined], theirs[defined])


def test_an_odd_number_of_groups_and_the_layout_of_a_kernel():
    codes, scales = MX["layout.lin_odd.codes"], MX["layout.lin_odd.scale"]
    values = weight(MXFP8, codes, scales).dequantize().numpy()
    turned, pairs = MX["layout.lin_odd.kernel_weight"], MX["layout.lin_odd.kernel_scale"]
    for n, k in ((0, 0), (39, 95), (17, 31), (17, 32), (17, 64)):
        byte = int(pairs[k // 32 // 2, n, k // 32 % 2])
        assert values[n, k] == fp8.E4M3FN[turned[k, n]] * 2.0 ** (byte - 127)


# --- exact linears -------------------------------------------------------------------------------


def linear_weights():
    """Name of a vector, its prefix, x and w as float64 arrays."""
    for group, form, scales in (
        ("fp8_tensor", TENSOR, torch.tensor(LINEAR["fp8_tensor.scale_f32"])),
        ("fp8_channel", CHANNEL, torch_bf16(LINEAR["fp8_channel.scale_bf16"])),
        ("fp8_block", BLOCK, torch.tensor(LINEAR["fp8_block.scale_f32"])),
    ):
        scales = scales if form is BLOCK else scales.reshape(-1)
        w = weight(form, LINEAR[f"{group}.codes"], scales).dequantize(torch.float32)
        x = bf16(LINEAR[f"{group}.x_bf16"])
        yield f"{group}.y_f64.wf32", x, w.double().numpy()
        if f"{group}.y_f64.wbf16" in LINEAR:
            yield f"{group}.y_f64.wbf16", x, w.bfloat16().double().numpy()
    for group in ("mxfp8_floor", "mxfp8_rceil"):
        w, quantised = (
            weight(MXFP8, LINEAR[f"{group}.{side}_codes"], LINEAR[f"{group}.{side}_scale"])
            .dequantize()
            .numpy()
            for side in "wx"
        )
        yield f"{group}.y_f64.w8a16", bf16(LINEAR["mxfp8.x_bf16"]), w
        yield f"{group}.y_f64.w8a8", quantised, w


LINEARS = {name: (x, w) for name, x, w in linear_weights()}


def test_every_linear_of_the_vectors_is_compared():
    kinds = ("fp8_", "mxfp8_")
    assert set(LINEARS) == {n for n in LINEAR if n.startswith(kinds) and ".y_f64" in n}


@pytest.mark.parametrize("name", LINEARS)
def test_the_exact_linear_of_the_dequantised_weight(name):
    x, w = LINEARS[name]
    bias = LINEAR.get(f"{name.split('.')[0]}.bias_f32", np.zeros(len(w))).astype(np.float64)
    exact = [[math.fsum([*(a * row), b]) for row, b in zip(w, bias, strict=True)] for a in x]
    assert np.array_equal(exact, LINEAR[name])


# --- what is refused -----------------------------------------------------------------------------

ZEROS = np.zeros((6, 10), np.uint8)
U8 = torch.uint8
F8 = {name: torch.zeros(6, 10).to(getattr(torch, f"float8_{name}")) for name in TABLES}
E8 = torch.zeros(6, 1, dtype=torch.uint8)

REFUSED = {
    "fn for fnuz": (FNUZ, {"codes": F8["e4m3fn"]},
        ["uint8 or float8_e4m3fnuz", "got float8_e4m3fn "]),
    "fnuz for fn": (TENSOR, {"codes": F8["e4m3fnuz"]},
        ["uint8 or float8_e4m3fn [6", "got float8_e4m3fnuz"]),
    "e5m2 for e4m3": (BLOCK, {"codes": F8["e5m2"], "scales": torch.ones(1, 1)},
        ["got float8_e5m2"]),
    "e4m3 for e5m2": (E5M2, {"codes": F8["e4m3fn"]},
        ["uint8 or float8_e5m2 [", "got float8_e4m3fn"]),
    "int8 codes": (TENSOR, {"codes": torch.zeros(6, 10, dtype=torch.int8)}, ["got int8 [6, 10]"]),
    "bfloat16 codes": (TENSOR, {"codes": torch.zeros(6, 10).bfloat16()}, ["got bfloat16 [6, 10]"]),
    "codes [K, N]": (TENSOR, {"codes": ZEROS.T.copy()}, ["[6, 10]; got uint8 [10, 6]"]),
    "codes turned": (TENSOR, {"codes": torch.zeros(10, 6).to(U8).t()}, ["transposed view"]),
    "block for tensor": (TENSOR, {"block": (128, 128)},
        ["one scale per tensor", "block [128, 128]"]),
    "block for channel": (CHANNEL, {"scales": torch.ones(6), "block": (1, 32)}, ["per channel"]),
    "block of none": (BLOCK, {"scales": torch.ones(1, 1), "block": (0, 2)},
        ["at least 1 x 1, got [0, 2]"]),
    "floor grid": (BLOCK, {"scales": torch.ones(1, 2), "block": (4, 4)},
        ["block [4, 4], shape [2, 3]", "[1, 2]"]),
    "transposed grid": (BLOCK, {"scales": torch.ones(3, 2), "block": (4, 4)},
        ["[2, 3]", "[3, 2]; that is the grid transposed", ".t()"]),
    "flat grid": (BLOCK, {"scales": torch.ones(6), "block": (4, 4)}, ["float32 [6]"]),
    "flat row of blocks": (BLOCK, {"scales": torch.ones(3), "block": (6, 4)},
        ["shape [1, 3]", ".reshape(1, 3)"]),
    "block of another size": (BLOCK, {"scales": torch.ones(2, 3)},
        ["block [128, 128], shape [1, 1]"]),
    "channel for block": (BLOCK, {"scales": torch.ones(6, 1)}, ["shape [1, 1]", "float32 [6, 1]"]),
    "channel [N, 1]": (CHANNEL, {"scales": torch.ones(6, 1)},
        ["shape [6]", "[6, 1]", ".reshape(-1)"]),
    "channel [1, N]": (CHANNEL, {"scales": torch.ones(1, 6)},
        ["shape [6]", "[1, 6]", ".reshape(-1)"]),
    "channel [K]": (CHANNEL, {"scales": torch.ones(10)}, ["shape [6]", "[10]"]),
    "tensor scalar": (TENSOR, {"scales": torch.tensor(1.0)},
        ["shape [1]", "float32 []", ".reshape(-1)"]),
    "tensor [N]": (TENSOR, {"scales": torch.ones(6)}, ["shape [1]", "[6]"]),
    "e8m0 as float32": (MXFP8, {"scales": torch.full((6, 1), 127.0)},
        ["uint8, float8_e8m0fnu; got float32"]),
    "float for e8m0": (BLOCK_E8M0, {"scales": torch.ones(1, 1)},
        ["uint8, float8_e8m0fnu; got float32"]),
    "bytes for float": (BLOCK, {"scales": E8[:1]}, ["float32, bfloat16, float16; got uint8"]),
    "e8m0 for float": (BLOCK, {"scales": E8[:1].view(torch.float8_e8m0fnu)},
        ["got float8_e8m0fnu"]),
    "pairs of e8m0": (MXFP8, {"scales": torch.zeros(6, 1, 2, dtype=U8)},
        ["[6, 1]", "uint8 [6, 1, 2]"]),
    "turned e8m0": (MXFP8, {"scales": E8.t()},
        ["shape [6, 1]", "[1, 6]; that is the grid transposed"]),
    "NaN scale": (BLOCK, {"scales": torch.full((1, 1), math.nan)},
        ["1 of 1 scales are not finite"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_tensor_that_contradicts_the_declaration_is_refused(case):
    form, fields, said = REFUSED[case]
    given = {"codes": ZEROS, "scales": torch.ones(1), "shape": (6, 10), "name": "q_proj"} | fields
    with pytest.raises(FormatError) as caught:
        weight(form, given.pop("codes"), given.pop("scales"), **given)
    assert all(words in str(caught.value) for words in ("q_proj: ", *said)), str(caught.value)


def test_the_reshape_that_a_refusal_names_is_right():
    scales = torch.arange(1.0, 7)
    codes = np.full((6, 10), 0x38, np.uint8)
    expected = weight(CHANNEL, codes, scales).dequantize()
    assert torch.equal(expected[:, 0], scales.double())
    for spelling in (scales[:, None], scales[None]):
        assert torch.equal(weight(CHANNEL, codes, spelling.reshape(-1)).dequantize(), expected)


def test_a_wrong_dtype_in_the_right_shape_gets_no_hint_about_shapes():
    with pytest.raises(FormatError) as caught:
        weight(CHANNEL, ZEROS, torch.ones(6).double())
    assert str(caught.value).endswith("got float64 [6]")


@pytest.mark.parametrize(**BY_NAME)
def test_float8_tensors_of_the_declared_dtype_are_taken_by_their_bytes(form: Format):
    declared = form.code_dtypes[1]
    codes = torch.tensor(np.resize(BYTES, (6, 64)))
    scales = torch.full(form.scale_shape((6, 64)), 127).to(form.scale_dtypes[0])
    from_bytes, from_floats = (weight(form, c, scales) for c in (codes, codes.view(declared)))
    assert from_floats.codes.dtype == torch.uint8
    assert torch.equal(from_floats.codes, codes)
    assert np.array_equal(from_bytes.dequantize(), from_floats.dequantize(), equal_nan=True)
    factor = 1 if form.scale_encoding == "e8m0" else 127
    direct = codes.view(declared).double() * factor
    assert np.array_equal(from_floats.dequantize(), direct, equal_nan=True)


def test_formats_of_the_registry_are_those_of_the_module():
    assert [form for form in formats().values() if form.name.split("_")[0] != "ternary"] == sorted(
        ALL, key=lambda form: form.name
    )
    assert all(hash(form) == hash(form) and form == form for form in ALL)


# --- the page that documents them ----------------------------------------------------------------

PAGE = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines()]


@pytest.mark.parametrize(**BY_NAME)
def test_the_page_says_what_the_format_is(form: Format):
    (row,) = [row for row in ROWS if len(row) == 5 and row[0] == f"`{form.name}`"]
    _, codes, per, shape, dtypes = row
    assert form.code_dtypes == (torch.uint8, getattr(torch, codes))
    if form.block is not None:
        assert per == f"{form.block[0]} × {form.block[1]} block"
    else:
        assert per == {"tensor": "tensor", "channel": "row"}[form.granularity]
    written = [
        eval(size, {"N": 300, "K": 500, "ceil": math.ceil})
        for size in shape.strip("`[]").split(", ")
    ]
    assert tuple(written) == form.scale_shape((300, 500))
    assert dtypes.split(", ") == [str(d).removeprefix("torch.") for d in form.scale_dtypes]
    assert form.scale_convention == "multiply"


@pytest.mark.parametrize("form", [TENSOR, FNUZ, E5M2], ids=lambda form: form.name)
def test_the_page_says_what_the_codes_are(form):
    name = str(form.code_dtypes[1]).removeprefix("torch.")
    (row,) = [row for row in ROWS if len(row) == 8 and row[0] == name]
    _, bits, bias, largest, smallest, minus_zero, infinity, nan = row
    _, exponent_bits, mantissa_bits = map(int, bits.split(","))
    table = np.array(form.table)

    def listed(codes):
        return " ".join(f"`{code:02x}`" for code in np.flatnonzero(codes)) or "none"

    finite = table[np.isfinite(table)]
    assert largest == f"{finite.max():g} (`{int(np.flatnonzero(table == finite.max())[0]):02x}`)"
    lowest = [table[1 << mantissa_bits], table[1]]
    assert smallest == ", ".join(f"2^{round(math.log2(value))}" for value in lowest)
    assert table[1 << mantissa_bits] == 2.0 ** (1 - int(bias))
    assert minus_zero == listed((table == 0) & np.signbit(table))
    assert infinity == listed(np.isinf(table))
    assert nan == listed(np.isnan(table))
    assert exponent_bits + mantissa_bits == 7
