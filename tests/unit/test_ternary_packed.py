"""The ternary formats of other engines against vectors that those engines wrote, and gguf."""

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from reconcile.exceptions import FormatError
from reconcile.registry import formats
from reconcile.tile import Tile, strided
from reconcile.weight import QuantizedWeight

ROOT = Path(__file__).resolve().parents[2]
VECTORS = ROOT / "fixtures/reconcile_fixtures/vectors"
TERNARY = load_file(VECTORS / "06_ternary.safetensors")
LINEAR = load_file(VECTORS / "09_linear.safetensors")
FLAT = {"i2s_x86_ap": "ternary_i2_s_x86", "i2s_arm": "ternary_i2_s_arm"}
ROWS = {"i2s_x86_4row": "ternary_i2_s_rows", "msgpu": "ternary_ms_gpu"}
NAMES = sorted(
    name.removesuffix(".w")
    for name in TERNARY
    if name.endswith(".w") and name.split(".")[0] in FLAT | ROWS
)


def test_the_vectors_are_there():
    assert len(NAMES) == 12


@pytest.mark.parametrize("name", NAMES)
def test_pack_and_unpack_give_the_vector(name):
    values, stored = TERNARY[f"{name}.w"], TERNARY[f"{name}.packed"]
    form = formats()[(FLAT | ROWS)[name.split(".")[0]]]
    shape = values.shape
    shaped = torch.tensor(stored).reshape(form.packing.stored_shape(shape))
    assert torch.equal(form.pack(form.encode(torch.tensor(values).double())), shaped)
    assert np.array_equal(form.decode(form.unpack(shaped, shape)).numpy(), values)


@pytest.mark.parametrize("kind", ["tq1_0", "tq2_0"])
@pytest.mark.parametrize("name", ["tern.2x256", "free.2x256", "tern.3x512", "free.3x512"])
def test_gguf_blocks_dequantise_as_in_gguf(kind, name):
    stored = TERNARY[f"{kind}.{name}.packed"]
    expected = TERNARY[f"{kind}.{name}.deq_f32"]
    weight = from_blocks(kind, stored, expected.shape)
    assert np.array_equal(weight.dequantize(torch.float32).numpy(), expected)
    assert torch.equal(weight.format.pack(weight.unpacked()), weight.codes)


@pytest.mark.parametrize("kind", ["tq1_0", "tq2_0"])
def test_random_weights_are_stored_as_gguf_stores_them(kind):
    values = np.random.default_rng(1).integers(-1, 2, (7, 1024)).astype(np.float32)
    values[:, ::256] = 1  # d = 1 for every block
    stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind.upper()])
    weight = from_blocks(kind, stored, values.shape)
    assert np.array_equal(weight.dequantize().numpy(), values)
    form = weight.format
    assert torch.equal(form.pack(form.encode(torch.tensor(values).double())), weight.codes)


@pytest.mark.parametrize("kind", ["tq1_0", "tq2_0"])
def test_every_byte_decodes_as_in_gguf(kind):
    """Also the bytes that no encoder writes."""
    size = {"tq1_0": 54, "tq2_0": 66}[kind]
    stored = np.random.default_rng(2).integers(0, 256, (64, size)).astype(np.uint8)
    stored[:, -2:] = np.array([1], np.float16).view(np.uint8)
    expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind.upper()])
    form = formats()[f"ternary_{kind}"]
    codes = form.unpack(torch.tensor(np.ascontiguousarray(stored[:, :-2])), expected.shape)
    assert np.array_equal(form.decode(codes).numpy(), expected)


def from_blocks(kind, stored, shape):
    """The weight in a GGUF tensor of blocks: bytes of codes, then a float16."""
    blocks = torch.tensor(stored).reshape(shape[0], shape[1] // 256, -1)
    return QuantizedWeight.from_tensors(
        blocks[:, :, :-2].reshape(shape[0], -1).contiguous(),
        blocks[:, :, -2:].contiguous().view(torch.float16).squeeze(-1),
        format=formats()[f"ternary_{kind}"],
        shape=shape,
    )


def test_signed_bytes_and_unpacked_codes_are_what_they_say():
    values = torch.tensor([[1.0, 0, -1], [-1, -1, 0]], dtype=torch.float64)
    signed, plain = formats()["ternary_int8"], formats()["ternary_bytes"]
    assert signed.pack(signed.encode(values)).view(torch.int8).tolist() == [[1, 0, -1], [-1, -1, 0]]
    assert plain.pack(plain.encode(values)).tolist() == [[1, 0, 2], [2, 2, 0]]


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("ternary_i2_s_x86", (3, 100), "whole blocks of 1 x 128"),
        ("ternary_tq2_0", (4, 128), "whole blocks of 1 x 256"),
        ("ternary_ms_gpu", (8, 64), "whole blocks of 16 x 32"),
        ("ternary_i2_s_rows", (6, 4), "multiple of 4"),
    ],
)
def test_a_shape_that_is_no_whole_block_is_refused(name, shape, said):
    packing = formats()[name].packing
    assert not packing.fits(shape)
    with pytest.raises(FormatError, match=said):
        packing.stored_shape(shape)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"places": ((0, 0), (0, 0))}, "2 different places"),
        ({"places": ((0, 0), (0, 4))}, "digits below 4"),
        ({"places": ((0, 0), (0, 5)), "base": 3}, "digits below 5"),
        ({"rows": 2, "columns": 1, "places": ((0, 0), (0, 1)), "flat": True}, "flat block"),
    ],
)
def test_a_tile_that_is_no_index_map_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        Tile(**{"rows": 1, "columns": 2, "places": ((0, 0), (0, 1))} | fields)


def test_a_strided_tile_of_one_byte_is_interleaving():
    form = formats()["ternary_k_interleaved"]
    codes = torch.tensor(np.random.default_rng(3).integers(0, 3, (5, 16)).astype(np.uint8))
    assert torch.equal(strided(1, low_first=True).pack(codes), form.pack(codes))


LINEARS = [
    ("i2s_ternary", "packed_x86_ap", "ternary_i2_s_x86", (8, 128)),
    ("i2s_ternary", "packed_arm", "ternary_i2_s_arm", (8, 128)),
    ("i2s_ternary", "packed_x86_4row", "ternary_i2_s_rows", (8, 128)),
    ("msgpu_ternary", "packed", "ternary_ms_gpu", (16, 64)),
    ("tq_ternary", "packed_tq1_0", "ternary_tq1_0", (6, 256)),
    ("tq_ternary", "packed_tq2_0", "ternary_tq2_0", (6, 256)),
]


@pytest.mark.parametrize(("case", "stored", "name", "shape"), LINEARS, ids=[r[2] for r in LINEARS])
def test_linears_of_the_vectors_come_out_exactly(case, stored, name, shape):
    codes = LINEAR[f"{case}.{stored}"]
    x = torch.tensor(bf16(LINEAR[f"{case}.x_bf16"]))
    if case == "tq_ternary":
        weight = from_blocks(name.removeprefix("ternary_"), codes, shape)
    else:
        form = formats()[name]
        if case == "msgpu_ternary":
            bits = LINEAR[f"{case}.weight_scale_bf16"].view(np.int16)
            scales = torch.tensor(bits).view(torch.bfloat16)
        else:
            scales = torch.tensor(LINEAR[f"{case}.scale_f32"])
        shaped = torch.tensor(codes).reshape(form.packing.stored_shape(shape))
        weight = QuantizedWeight.from_tensors(shaped, scales, format=form, shape=shape)
    expected = LINEAR[f"{case}.y_f64"]
    bound = LINEAR[f"{case}.abs_f64"] * 2.0**-45
    assert (np.abs((x @ weight.dequantize().T).numpy() - expected) <= bound).all()


def bf16(bits):
    return bits.view(ml_dtypes.bfloat16).astype(np.float64)
