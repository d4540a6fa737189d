"""Ternary formats against golden vectors, transformers' own packing and hand-worked bytes."""

import importlib
import inspect
import math
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from reconcile.exceptions import FormatError
from reconcile.registry import formats
from reconcile.weight import Format, Packing, QuantizedWeight

ROOT = Path(__file__).resolve().parents[2]
VECTORS = ROOT / "fixtures/reconcile_fixtures/vectors"
TERNARY = load_file(VECTORS / "06_ternary.safetensors")
LINEAR = load_file(VECTORS / "09_linear.safetensors")
KINT = formats()["ternary_k_interleaved"]
HF = formats()["ternary_hf"]
HF_DIVIDE = formats()["ternary_hf_divide"]
BY_PREFIX = {"hf": HF, "kint": KINT}
VECTOR_NAMES = sorted(name.removesuffix(".w") for name in TERNARY if name.endswith(".w"))
VECTOR_NAMES = [name for name in VECTOR_NAMES if name.split(".")[0] in BY_PREFIX]

SMALL = np.array(
    [
        [1, 0, -1, 0],
        [0, -1, -1, 1],
        [-1, 1, 0, 0],
        [1, 1, 1, -1],
        [0, 0, 1, 1],
        [1, -1, 0, -1],
        [-1, -1, -1, -1],
        [0, 1, 0, 1],
    ],
    dtype=np.int8,
)
LARGE = np.array(
    [[((n + 2 * k + k // 5) % 3) - 1 for k in range(256)] for n in range(32)], dtype=np.int8
)


def packed(form, values):
    return form.pack(form.encode(torch.tensor(np.asarray(values))))


def decoded(form, stored, shape):
    return form.decode(form.unpack(torch.tensor(stored), shape)).numpy()


def bf16(bits):
    return bits.view(ml_dtypes.bfloat16).astype(np.float64)


def quantized(form, values, scales, **fields):
    """A weight from values; keywords replace the stored tensors."""
    shape = tuple(np.shape(values))
    given = {"codes": packed(form, values), "scales": scales, "format": form, "shape": shape}
    given |= fields
    return QuantizedWeight.from_tensors(given.pop("codes"), given.pop("scales"), **given)


# --- bytes against vectors ---------------------------------------------------------------------


def test_vectors_of_both_formats_are_there():
    assert sum(name.startswith("hf.") for name in VECTOR_NAMES) == 7
    assert sum(name.startswith("kint.") for name in VECTOR_NAMES) == 4


@pytest.mark.parametrize("name", VECTOR_NAMES)
def test_pack_and_unpack_give_the_vector(name):
    form, values = BY_PREFIX[name.split(".")[0]], TERNARY[f"{name}.w"]
    stored = TERNARY[f"{name}.packed"]
    assert np.array_equal(packed(form, values).numpy(), stored)
    assert np.array_equal(decoded(form, stored, values.shape), values)


@pytest.mark.parametrize("name", [name for name in VECTOR_NAMES if name.startswith("hf.")])
def test_padded_rows_decode_as_in_transformers(name):
    stored, unpacked = TERNARY[f"{name}.packed"], TERNARY[f"{name}.unpacked"]
    assert np.array_equal(decoded(HF, stored, unpacked.shape), unpacked)


@pytest.mark.parametrize(
    ("form", "stored", "expected"),
    [
        (HF, np.arange(256, dtype=np.uint8)[None, :], TERNARY["hf.all_bytes.unpacked"]),
        (KINT, np.arange(256, dtype=np.uint8)[:, None], TERNARY["kint.all_bytes.unpacked"]),
    ],
    ids=["hf", "kint"],
)
def test_every_byte_decodes_as_the_public_decoder_does(form, stored, expected):
    assert np.array_equal(decoded(form, stored, expected.shape), expected)
    codes = form.unpack(torch.tensor(stored), expected.shape)
    assert np.array_equal(form.pack(codes).numpy(), stored)


@pytest.mark.parametrize(
    ("form", "values", "where", "expected"),
    [
        (HF, SMALL, np.s_[:, :], "12192425 69885882"),
        (KINT, SMALL, np.s_[:, 0], "2168069550 89aa44"),
        (HF, LARGE, np.s_[0, :8], "1886611886866118"),
        (KINT, LARGE, np.s_[0, :8], "868581a161616068"),
        (HF, np.zeros((8, 4)), np.s_[:, :], "55" * 8),
        (KINT, np.zeros((8, 4)), np.s_[:, :], "00" * 8),
    ],
    ids=["hf-8x4", "kint-8x4", "hf-32x256", "kint-32x256", "hf-zero", "kint-zero"],
)
def test_bytes_worked_by_hand(form, values, where, expected):
    assert packed(form, values).numpy()[where].tobytes() == bytes.fromhex(expected)


@pytest.mark.parametrize(("n", "k"), [(1, 3), (2, 2), (5, 6), (8, 4), (13, 7), (64, 96)])
def test_hf_bytes_are_those_of_transformers(n, k):
    library = importlib.import_module("transformers.integrations.bitnet")
    values = np.random.default_rng(n * k).integers(-1, 2, (n, k)).astype(np.int8)
    stored = library.pack_weights(torch.tensor(values))
    assert torch.equal(packed(HF, values), stored)
    rows = inspect.unwrap(library.unpack_weights)(stored, torch.float32).numpy()
    assert np.array_equal(decoded(HF, stored.numpy(), (len(rows), k)), rows)


def test_one_set_element_lands_in_one_place():
    """A single +1 moves exactly the bits that the definition names."""
    for n, k in ((0, 0), (3, 33), (7, 63)):
        values = np.zeros((8, 64), dtype=np.int8)
        values[n, k] = 1
        kint = packed(KINT, values).numpy()
        assert kint[n, k // 4] == 1 << (2 * (k % 4))
        assert np.count_nonzero(kint) == 1
        hf = packed(HF, values).numpy()
        assert hf[n % 2, k] == 0x55 + (1 << (2 * (n // 2)))
        assert np.count_nonzero(hf != 0x55) == 1


# --- packing as an index map -------------------------------------------------------------------


def place(packing, i, length):
    """Byte and slot of logical index i: the definition, one index at a time."""
    per_byte = 8 // packing.bits
    units = math.ceil(length / per_byte)
    if packing.arrangement == "interleaved":
        unit, slot = divmod(i, per_byte)
    else:
        slot, unit = divmod(i, units)
    return unit, packing.bits * (slot if packing.low_first else per_byte - 1 - slot)


PACKINGS = [
    Packing(bits=bits, dim=dim, arrangement=arrangement, low_first=low_first, pad=pad)
    for bits in (1, 2, 4, 8)
    for dim in (0, 1)
    for arrangement in ("interleaved", "planar")
    for low_first in (True, False)
    for pad in (True, False)
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "packing",
    PACKINGS,
    ids=lambda p: (
        f"{p.bits}-{'NK'[p.dim]}-{p.arrangement}-{'low' if p.low_first else 'high'}-"
        f"{'pad' if p.pad else 'whole'}"
    ),
)
def test_packing_is_the_invertible_map_that_it_says(packing, seed):
    rng = np.random.default_rng(seed)
    n, k = (int(size) for size in rng.integers(1, 14, 2))
    if not packing.pad:
        n, k = 8 * n, 8 * k
    codes = rng.integers(0, 1 << packing.bits, (n, k)).astype(np.uint8)
    stored = packing.pack(torch.tensor(codes))
    expected = np.zeros(packing.stored_shape((n, k)), dtype=np.uint8)
    for row in range(n):
        for column in range(k):
            index = [row, column]
            index[packing.dim], shift = place(packing, index[packing.dim], (n, k)[packing.dim])
            expected[tuple(index)] |= codes[row, column] << shift
    assert np.array_equal(stored.numpy(), expected)
    assert stored.is_contiguous()
    assert np.array_equal(packing.unpack(stored, (n, k)).numpy(), codes)


def test_codes_in_any_layout_pack_to_the_same_contiguous_bytes():
    codes = torch.tensor(np.random.default_rng(0).integers(0, 3, (8, 12)), dtype=torch.uint8)
    for form in (KINT, HF):
        turned = form.pack(codes.t().contiguous().t())
        assert torch.equal(turned, form.pack(codes))
        assert turned.is_contiguous()


# --- values and scales -------------------------------------------------------------------------

KINT_SCALES = LINEAR["kint_ternary.scale_f32"]
HF_SCALE_BITS = LINEAR["hf_ternary.weight_scale_bf16"]


def torch_bf16(bits):
    return torch.tensor(bits.view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize(
    ("form", "group", "result", "scales"),
    [
        (KINT, "kint_ternary", "y_f64", torch.tensor(KINT_SCALES)),
        (HF, "hf_ternary", "y_f64.mul", torch_bf16(HF_SCALE_BITS)),
        (HF_DIVIDE, "hf_ternary", "y_f64.div", torch_bf16(HF_SCALE_BITS)),
    ],
    ids=["kint", "hf", "hf-divide"],
)
def test_dequantised_weight_gives_the_exact_linear(form, group, result, scales):
    stored, y = LINEAR[f"{group}.packed"], LINEAR[f"{group}.{result}"]
    x = bf16(LINEAR[f"{group}.x_bf16"])
    weight = QuantizedWeight.from_tensors(
        torch.tensor(stored), scales, format=form, shape=(y.shape[1], x.shape[1])
    )
    values = weight.dequantize().numpy()
    exact = np.array([[math.fsum(a * b) for b in values] for a in x])
    # One rounding of each weight where the scale divides, none where it multiplies.
    magnitude = np.abs(x) @ np.abs(values).T
    assert np.all(np.abs(exact - y) <= 2.0**-52 * magnitude)
    if form is not HF_DIVIDE:
        assert np.array_equal(exact, y)


SCALE_DTYPES = {
    torch.float32: np.float32,
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float16: np.float16,
}


@pytest.mark.parametrize("form", [KINT, HF, HF_DIVIDE], ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", SCALE_DTYPES, ids=str)
def test_scale_of_every_dtype_is_widened_exactly(form, dtype):
    count = 8 if form is KINT else 1
    wanted = np.linspace(0.3, 1.7, count).astype(SCALE_DTYPES[dtype])
    scales = torch.tensor(wanted.astype(np.float64)).to(dtype)
    expected = wanted.astype(np.float64)[:, None]
    expected = SMALL / expected if form is HF_DIVIDE else SMALL * expected
    weight = quantized(form, SMALL, scales)
    assert np.array_equal(weight.dequantize().numpy(), expected)
    for narrow in (torch.float32, torch.bfloat16, torch.float16):
        rounded = expected.astype(SCALE_DTYPES[narrow]).astype(np.float64)
        assert np.array_equal(weight.dequantize(narrow).double().numpy(), rounded)


def test_multiply_and_divide_differ_by_the_square_of_the_scale():
    scale = torch.tensor([1.5])
    ratio = (
        quantized(HF, SMALL, scale).dequantize() / quantized(HF_DIVIDE, SMALL, scale).dequantize()
    )
    assert ratio[SMALL != 0].unique().tolist() == [1.5**2]


@pytest.mark.parametrize("form", [KINT, HF, HF_DIVIDE], ids=lambda form: form.name)
def test_zero_share_counts_zeros_and_not_small_scales(form):
    scales = torch.full((8,) if form is KINT else (1,), 1e-30)
    assert quantized(form, SMALL, scales).zero_share() == np.mean(SMALL == 0)


def test_zero_share_of_the_packed_model_is_that_of_its_values():
    weight = quantized(HF, SMALL[:6], torch.ones(1))  # two padded rows do not count
    assert weight.zero_share() == np.mean(SMALL[:6] == 0)


@pytest.mark.parametrize("form", [KINT, HF, HF_DIVIDE], ids=lambda form: form.name)
def test_quantising_and_back_stays_close(form):
    """Scale inverted, table permuted or bytes swapped: each would break this."""
    rng = np.random.default_rng(0)
    dense = rng.normal(0, 0.04, (32, 64))
    per_row = form.granularity == "channel"
    mean = np.abs(dense).mean(axis=1) if per_row else np.abs(dense).mean(keepdims=True).ravel()
    values = np.clip(np.round(dense / mean[:, None]), -1, 1)
    stored = 1 / mean if form is HF_DIVIDE else mean
    back = quantized(form, values, torch.tensor(stored, dtype=torch.float32)).dequantize().numpy()
    assert np.linalg.norm(back - dense) < 0.6 * np.linalg.norm(dense)


# --- what is refused ---------------------------------------------------------------------------

F32 = torch.float32
SCALES = torch.ones(8)
BYTES = packed(KINT, SMALL)
SQUARE = torch.tensor(np.eye(16, dtype=np.int8) - np.eye(16, k=1, dtype=np.int8))

REFUSED = {
    "codes int8": (KINT, {"codes": BYTES.view(torch.int8)}, ["stores uint8 [8, 1]", "int8 [8, 1]"]),
    "codes float": (KINT, {"codes": torch.ones(8, 4)}, ["uint8 [8, 1]", "float32 [8, 4]"]),
    "codes transposed": (KINT, {"codes": BYTES.t().contiguous()}, ["[8, 1]", "[1, 8]"]),
    "codes flat": (KINT, {"codes": BYTES.flatten()}, ["[8, 1]", "uint8 [8]"]),
    "codes unpacked": (KINT, {"codes": KINT.encode(torch.tensor(SMALL))}, ["[8, 1]", "[8, 4]"]),
    "hf bytes as kint": (KINT, {"codes": packed(HF, SMALL)}, ["[8, 1]", "[2, 4]"]),
    "kint bytes as hf": (HF, {"codes": BYTES, "scales": torch.ones(1)}, ["[2, 4]", "[8, 1]"]),
    "scale [N, 1]": (KINT, {"scales": SCALES[:, None]}, ["channel, shape [8]", "float32 [8, 1]"]),
    "scale [1, N]": (KINT, {"scales": SCALES[None]}, ["shape [8]", "[1, 8]"]),
    "scale [1]": (KINT, {"scales": SCALES[:1]}, ["shape [8]", "float32 [1]"]),
    "scale 0-d": (HF, {"scales": torch.tensor(1.0)}, ["per tensor, shape [1]", "float32 []"]),
    "scale per row": (HF, {"scales": SCALES}, ["per tensor, shape [1]", "[8]"]),
    "scale [K]": (KINT, {"scales": torch.ones(4)}, ["shape [8]", "[4]"]),
    "scale empty": (HF, {"scales": torch.ones(0)}, ["shape [1]", "[0]"]),
    "scale float64": (KINT, {"scales": SCALES.double()}, ["float32, bfloat16, float16", "float64"]),
    "scale bytes": (KINT, {"scales": SCALES.byte()}, ["float32, bfloat16, float16", "uint8 [8]"]),
    "scale fp8": (KINT, {"scales": SCALES.to(torch.float8_e4m3fn)}, ["float8_e4m3fn"]),
    "scale NaN": (KINT, {"scales": SCALES * math.nan}, ["8 of 8 scales are not finite"]),
    "one scale NaN": (KINT, {"scales": SCALES / SCALES.cumsum(0).sub(3)}, ["1 of 8 scales"]),
    "scale inf": (HF, {"scales": torch.tensor([math.inf])}, ["1 of 1 scales are not finite"]),
    "scale divides by zero": (HF_DIVIDE, {"scales": torch.zeros(1)}, ["divides is zero"]),
    "scale divides by -0": (HF_DIVIDE, {"scales": -torch.zeros(1)}, ["divides is zero"]),
    "bias long": (KINT, {"bias": torch.ones(9)}, ["bias [8]", "float32 [9]"]),
    "bias [N, 1]": (KINT, {"bias": torch.ones(8, 1)}, ["bias [8]", "[8, 1]"]),
    "bias integer": (KINT, {"bias": torch.ones(8, dtype=torch.int32)}, ["bias [8]", "int32"]),
    "K has a tail": (KINT, {"shape": (8, 6)}, ["K to be a multiple of 4", "got 6", "[8, 6]"]),
    "no rows": (KINT, {"shape": (0, 4)}, ["at least 1 x 1", "[0, 4]"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_tensor_that_does_not_fit_is_refused_with_both_sides_named(case):
    form, fields, said = REFUSED[case]
    scales = SCALES if form is KINT else torch.ones(1)
    with pytest.raises(FormatError) as caught:
        quantized(form, SMALL, **{"scales": scales, "name": "layers.3.up_proj"} | fields)
    assert all(words in str(caught.value) for words in ("layers.3.up_proj: ", *said))


def test_transposed_bytes_of_a_square_weight():
    """Known by shape for HF, by strides for a view; a copied square K-interleaved is neither."""
    hf = packed(HF, SQUARE).t().contiguous()
    with pytest.raises(FormatError, match=r"\[4, 16\]; got uint8 \[16, 4\]"):
        quantized(HF, SQUARE, torch.ones(1), codes=hf)
    bytes_square = packed(KINT, SQUARE[:4])
    with pytest.raises(FormatError, match="transposed view"):
        quantized(KINT, SQUARE[:4], torch.ones(4), codes=bytes_square.t())
    copied = quantized(KINT, SQUARE[:4], torch.ones(4), codes=bytes_square.t().contiguous())
    assert not torch.equal(copied.dequantize(), SQUARE[:4].double())


@pytest.mark.parametrize("form", [KINT, HF, HF_DIVIDE], ids=lambda form: form.name)
@pytest.mark.parametrize("places", [[(2, 3)], [(7, 0), (5, 1)], [(0, 0), (0, 1), (7, 3)]], ids=str)
def test_code_3_is_refused_with_its_first_place_and_the_count(form, places):
    codes = form.encode(torch.tensor(SMALL))
    for n, k in places:
        codes[n, k] = 3
    n, k = min(places)
    said = rf"gate: invalid code .*: 3 at \[n={n}, k={k}\], {len(places)} of 32 in all"
    with pytest.raises(FormatError, match=said):
        quantized(
            form,
            SMALL,
            SCALES if form is KINT else torch.ones(1),
            codes=form.pack(codes),
            name="gate",
        )


@pytest.mark.parametrize("form", [KINT, HF], ids=lambda form: form.name)
@pytest.mark.parametrize(
    ("value", "n", "k"), [(2, 1, 2), (0.5, 7, 3), (-3, 0, 0), (math.nan, 4, 1)]
)
def test_a_value_without_a_code_is_refused(form, value, n, k):
    values = torch.tensor(SMALL, dtype=torch.float64)
    values[n, k] = value
    said = rf"{form.name}: value without a code: {value}.* at \[n={n}, k={k}\], 1 of 32 in all"
    with pytest.raises(FormatError, match=said):
        form.encode(values)


@pytest.mark.parametrize(
    ("rows", "first", "fits"), [(6, 8, False), (5, 8, False), (7, 7, True), (6, 6, True)]
)
def test_hf_rows_beyond_the_declared_ones_must_be_padding(rows, first, fits):
    values = np.ones((first, 4), dtype=np.int8)
    stored = packed(HF, values)
    if fits:
        weight = quantized(HF, values[:rows], torch.ones(1), codes=stored)
        assert np.array_equal(weight.dequantize().numpy(), values[:rows])
    else:
        with pytest.raises(FormatError, match="the padding beyond"):
            quantized(HF, values[:rows], torch.ones(1), codes=stored)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: KINT.packing.pack(torch.full((1, 4), 4, dtype=torch.uint8)), "more than 2 bits"),
        (lambda: KINT.packing.pack(torch.zeros(1, 4)), "codes as uint8"),
        (lambda: KINT.packing.pack(torch.zeros(4, dtype=torch.uint8)), r"uint8 \[4\]"),
        (lambda: KINT.unpack(torch.zeros(2, 2, dtype=torch.uint8), (2, 4)), r"uint8 \[2, 1\]"),
        (lambda: KINT.unpack(torch.zeros(2, 1, dtype=torch.uint8), (2, 8)), r"uint8 \[2, 2\]"),
        (lambda: HF.unpack(torch.zeros(1, 8), (4, 8)), "got float32"),
        (lambda: KINT.pack(torch.zeros(4, 6, dtype=torch.uint8)), "multiple of 4"),
        (lambda: KINT.encode(torch.zeros(4)), r"values \[N, K\]"),
    ],
)
def test_direct_calls_check_their_arguments(call, said):
    with pytest.raises(FormatError, match=said):
        call()


def test_a_format_that_contradicts_itself_cannot_be_built():
    with pytest.raises(ValueError, match="expected 1, 2, 4 or 8, got 3"):
        Packing(bits=3, dim=0, arrangement="planar")
    with pytest.raises(ValueError, match="table of 4 values"):
        Format(
            name="x", table=(0.0, 1.0), packing=KINT.packing, granularity="tensor", reference="none"
        )


# --- the page that documents them --------------------------------------------------------------

PAGE = (ROOT / "docs/formats.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```example (\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def rows_of(text, kind):
    """Rows apart by ``/``; ``-1*30`` stands for thirty times -1."""
    return [[value for item in row.split() for value in run(item, kind)] for row in text.split("/")]


def run(item, kind):
    value, _, count = item.partition("*")
    return [kind(value)] * int(count or 1)


def test_the_page_has_a_section_and_an_example_for_every_format():
    sections = re.findall(r"^## ((?:ternary|fp8|mxfp8)_\w+)$", PAGE, re.MULTILINE)
    assert sorted(sections) == sorted(formats())
    assert {name for name, _ in EXAMPLES} == set(formats())
    assert len(EXAMPLES) == 20


def hexadecimal(digits):
    return int(digits, 16)


def signed(values):
    """Numbers as text, which tells -0 from 0."""
    return [[repr(float(value)) for value in row] for row in values]


@pytest.mark.parametrize(("name", "text"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_an_example_of_the_page_is_what_the_code_does(name, text):
    lines = dict(line.split(":", 1) for line in text.splitlines())
    form, weight = formats()[name], rows_of(lines["weight"], float)
    stored = rows_of(lines["bytes"], hexadecimal)
    assert packed(form, weight).tolist() == stored
    values = decoded(form, np.array(stored, np.uint8), np.shape(weight))
    assert signed(values) == signed(weight)
    if "scale" in lines:
        if form.scale_encoding == "e8m0":
            scale = torch.tensor(rows_of(lines["scale"], hexadecimal), dtype=torch.uint8)
        else:
            scale = torch.tensor(rows_of(lines["scale"], float)).to(form.scale_dtypes[0])
        scale = scale if form.granularity == "block" else scale[0]
        block = tuple(rows_of(lines["block"], int)[0]) if "block" in lines else None
        values = quantized(form, weight, scale, block=block).dequantize()
        assert signed(values) == signed(rows_of(lines["values"], float))


@pytest.mark.parametrize("column", [1, 2, 3])
def test_the_table_of_the_page_is_what_the_formats_are(column):
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines()]
    rows = [row for row in rows if len(row) == 4]
    table = {row[0]: row[column] if row[column] != "the same" else row[1] for row in rows}
    form = formats()[table[""].strip("`")]
    codes = table["Codes 0, 1, 2, 3"].replace("−", "-").replace("invalid (", "").rstrip(")")
    assert tuple(float(code) for code in codes.split(",")) == form.table
    assert form.invalid == {3}
    assert table["Packed dimension"] == f"{form.packing.dim} ({'NK'[form.packing.dim]})"
    assert table["Arrangement"] == form.packing.arrangement
    assert (table["Bit order"] == "low bits first") is form.packing.low_first
    assert (
        table["The scale"] == {"multiply": "multiplies", "divide": "divides"}[form.scale_convention]
    )
    assert table["`weight_scale`"].startswith(
        {"channel": "`[N]`", "tensor": "`[1]`"}[form.granularity]
    )
    assert table["Dtype of the scale"].split(", ") == [
        str(dtype).removeprefix("torch.") for dtype in form.scale_dtypes
    ]
    assert ("refused" in table["A length that is no multiple of 4"]) is not form.packing.pad
    zero = packed(form, np.zeros((4, 4))).unique().tolist()
    assert [f"`{byte:02x}`" for byte in zero] == [table["A zero weight in bytes"]]
