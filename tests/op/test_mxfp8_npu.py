"""MXFP8 on an NPU: quantiser, layouts, operators, load stages, fallbacks, the linear kernel."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import reconcile
from reconcile.checking.probes import random_weight, synthetic
from reconcile.exceptions import KernelError
from reconcile.kernel import LinearSpec
from reconcile.numbers import mx
from reconcile.registry import formats, kernel
from reconcile.weight import QuantizedWeight
from reconcile_kernels.mxfp8_npu import fallback, layout, load, operators
from reconcile_kernels.mxfp8_npu.linear import NPU, NPU_EMULATED
from reconcile_kernels.mxfp8_npu.quantise import LEVELS, NATIVE_RULES, implementation, quantise

VECTORS = Path(__file__).resolve().parents[2] / "fixtures/reconcile_fixtures/vectors"
MX, REQUANT, BLOCKS, LINEAR = (
    load_file(VECTORS / f"{name}.safetensors")
    for name in ("03_mxfp8", "05_requant", "04_block_fp8", "09_linear")
)
E4M3 = torch.float8_e4m3fn
KERNEL = kernel("mxfp8_npu")


def bf16(tensor):
    return tensor.view(torch.int16).view(torch.bfloat16)


def weight_of(name, shape, seed=0):
    form = formats()[name]
    seedling = synthetic(form, torch.zeros(shape), torch.ones(form.scale_shape(shape)))
    made = random_weight(seedling, shape, torch.Generator().manual_seed(seed))
    return QuantizedWeight.from_tensors(made.codes, made.scales, format=form, shape=shape)


# --- the native quantiser ------------------------------------------------------------------------


def test_the_native_quantiser_is_what_runs_here():
    assert implementation().startswith("native ")


def hard_inputs():
    """Every bfloat16 as a maximum, every kind of float32 bits, ragged rows."""
    generator = torch.Generator().manual_seed(1)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    codes = torch.zeros(65536, 64, dtype=torch.bfloat16)
    codes[:, 3], codes[:, 9] = every, every.float().mul(0.37).bfloat16()
    codes[:, 40] = torch.randn(65536, generator=generator).bfloat16()
    bits = torch.randint(-(2**31), 2**31 - 1, (3000, 95), generator=generator).int()
    return [codes, bits.view(torch.float32), torch.randn(7, 3, 200, generator=generator)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rule", NATIVE_RULES)
def test_the_native_quantiser_is_the_reference_bit_by_bit(rule, level):
    for x in hard_inputs():
        codes, scales = quantise(x, rule, level=level)
        expected = mx.quantise(x, mx.RULES[rule])
        assert torch.equal(codes, expected.codes)
        assert torch.equal(scales, expected.scales)


@pytest.mark.parametrize("rule", ["floor", "rceil", "ceil", "even"])
@pytest.mark.parametrize("level", LEVELS)
def test_the_native_quantiser_gives_the_vectors(rule, level):
    for source in ("rows", "rand", "rows32", "rand32"):
        x = bf16(MX[f"{source}.x_bf16"]) if f"{source}.x_bf16" in MX else None
        x = MX[f"{source}.x_f32bits"].view(torch.float32) if x is None else x
        codes, scales = quantise(x, rule, level=level)
        assert torch.equal(scales, MX[f"{source}.{rule}.scale"])
        count = (scales != 255).repeat_interleave(32, -1)[..., : x.shape[-1]]
        assert torch.equal(codes[count], MX[f"{source}.{rule}.codes"][count])


def test_threads_strides_and_the_torch_path_change_nothing():
    x = torch.randn(65, 2 * 96, generator=torch.Generator().manual_seed(2))[:, ::2]
    expected = quantise(x.contiguous(), "ascend_0")
    for found in (
        quantise(x, "ascend_0", threads=3),
        quantise(x, "ascend_0", threads=100),
        quantise(x, "ascend_0", native=False),
    ):
        assert all(map(torch.equal, found, expected))
    codes, padded = quantise(x, "ascend_0", pair=True)
    assert torch.equal(codes, expected[0])
    assert torch.equal(padded, torch.nn.functional.pad(expected[1], (0, 1)))
    assert quantise(torch.zeros(0, 64), "floor")[1].shape == (0, 2)


@pytest.mark.parametrize(
    ("x", "rule", "said"),
    [
        (torch.zeros(2, 32, dtype=torch.float16), "floor", "expected bfloat16 or float32"),
        (torch.zeros(()), "floor", "expected bfloat16 or float32"),
        (torch.zeros(2, 32), "flor", "unknown rule 'flor'"),
    ],
)
def test_what_the_quantiser_refuses(x, rule, said):
    with pytest.raises(KernelError, match=said):
        quantise(x, rule)


# --- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lin_odd", "lin_even"])
def test_a_weight_in_the_kernels_layout(name):
    codes, scales = (MX[f"layout.{name}.{part}"] for part in ("codes", "scale"))
    packed = layout.pack(codes, scales)
    assert torch.equal(packed[0], MX[f"layout.{name}.kernel_weight"])
    assert torch.equal(packed[1], MX[f"layout.{name}.kernel_scale"])
    assert all(tensor.is_contiguous() for tensor in packed)
    assert all(map(torch.equal, layout.unpack(*packed), (codes, scales)))
    assert torch.equal(layout.paired(scales), MX[f"layout.{name}.op_scale"])
    n, groups = scales.shape
    for row, group in ((0, 0), (n - 1, groups - 1), (3, 1)):
        assert packed[1][group // 2, row, group % 2] == scales[row, group]


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_experts_in_the_kernels_layout(name):
    codes, scales = (MX[f"layout.moe.{name}.{part}"] for part in ("codes", "scale"))
    packed = layout.pack(codes, scales)
    assert torch.equal(packed[0], MX[f"layout.moe.{name}.kernel_weight"])
    assert torch.equal(packed[1], MX[f"layout.moe.{name}.kernel_scale"])
    assert all(map(torch.equal, layout.unpack(*packed), (codes, scales)))


def test_a_second_load_goes_into_the_same_memory():
    first, second = (layout.pack(*quantise(torch.randn(40, 96), "ascend_0")) for _ in range(2))
    buffers = layout.Buffers()
    buffers.load(*first)
    addresses = buffers.addresses()
    assert addresses != (first[0].data_ptr(), first[1].data_ptr())
    buffers.load(*second)
    assert buffers.addresses() == addresses
    assert torch.equal(buffers.codes, second[0])
    assert torch.equal(buffers.scales, second[1])
    with pytest.raises(KernelError, match=r"holds \[96, 40\], the new weight \[96, 39\]"):
        buffers.load(second[0][:, :39], second[1])


# --- operators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["act_ragged", "act_3d"])
@pytest.mark.parametrize("algorithm", [0, 1])
def test_dynamic_mx_quant_is_the_vendors_golden(name, algorithm):
    x = bf16(MX[f"layout.{name}.x_bf16"])
    codes, scales = operators.npu_dynamic_mx_quant(x, dst_type=E4M3, scale_alg=algorithm)
    assert codes.dtype == E4M3
    assert torch.equal(codes.view(torch.uint8), MX[f"layout.{name}.alg{algorithm}.codes"])
    assert torch.equal(scales, MX[f"layout.{name}.alg{algorithm}.op_scale"])


def test_the_documents_own_example():
    x = torch.tensor([[0.0, 8, 64, 512]], dtype=torch.bfloat16)
    codes, scales = operators.npu_dynamic_mx_quant(x, dst_type=E4M3)
    assert codes.view(torch.uint8).tolist() == [[0, 72, 96, 120]]
    assert scales.tolist() == [[[128, 0]]]


def test_another_axis_interleaves_its_scales():
    x = torch.randn(70, 5, generator=torch.Generator().manual_seed(3)).bfloat16()
    codes, scales = operators.npu_dynamic_mx_quant(x, axis=0, dst_type=E4M3)
    turned, pairs = operators.npu_dynamic_mx_quant(x.T.contiguous(), dst_type=E4M3)
    assert torch.equal(codes.view(torch.uint8), turned.view(torch.uint8).T)
    assert scales.shape == (2, 5, 2)
    assert torch.equal(scales, pairs.transpose(0, 1))
    again = operators.npu_dynamic_mx_quant(x, axis=-2, dst_type=E4M3)[1]
    assert torch.equal(again, scales)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, NotImplementedError),  # the operator's default is FP4
        ({"dst_type": torch.float8_e5m2}, NotImplementedError),
        ({"dst_type": E4M3, "block_size": 64}, NotImplementedError),
        ({"dst_type": E4M3, "max_low_bound": 1.0}, NotImplementedError),
        ({"dst_type": E4M3, "scale_alg": 2}, ValueError),
        ({"dst_type": E4M3, "round_mode": "floor"}, ValueError),
    ],
)
def test_what_dynamic_mx_quant_refuses(options, error):
    with pytest.raises(error):
        operators.npu_dynamic_mx_quant(torch.ones(2, 32), **options)


def operands(rule):
    codes, scales = LINEAR[f"mxfp8_{rule}.w_codes"], LINEAR[f"mxfp8_{rule}.w_scale"]
    weight, packed = layout.pack(codes, scales)
    x, pairs = (LINEAR[f"mxfp8_{rule}.x_{part}"] for part in ("codes", "scale"))
    return {
        "x1": layout.as_float8(x),
        "x2": layout.as_float8(weight),
        "scale": packed,
        "pertoken_scale": layout.paired(pairs),
        "scale_dtype": torch.float8_e8m0fnu,
        "pertoken_scale_dtype": 293,  # torch_npu's number of the same
        "group_sizes": [1, 1, 32],
        "output_dtype": torch.float32,
    }


def multiply(given, **changes):
    given = {**given, **changes}
    return operators.npu_quant_matmul(given.pop("x1"), given.pop("x2"), given.pop("scale"), **given)


@pytest.mark.parametrize("rule", ["floor", "rceil"])
@pytest.mark.parametrize("biased", [False, True])
def test_quant_matmul_against_exact_sums(rule, biased):
    bias = torch.randn(40, generator=torch.Generator().manual_seed(4)) if biased else None
    y = multiply(operands(rule), bias=bias).double()
    exact = LINEAR[f"mxfp8_{rule}.y_f64.w8a8"] + (0 if bias is None else bias.double())
    size = LINEAR[f"mxfp8_{rule}.abs_f64.w8a8"] + (0 if bias is None else bias.double().abs())
    assert bool(((y - exact).abs() <= 96 * 2.0**-24 * size).all())


def test_a_nan_byte_spoils_its_outputs_alone():
    given = operands("floor")
    given["scale"] = given["scale"].clone()
    given["scale"][0, 7, 1] = 255
    y = multiply(given)
    assert bool(y[:, 7].isnan().all())
    assert bool(y[:, torch.arange(40) != 7].isfinite().all())


def test_scales_whose_product_leaves_float32_still_count():
    """2^-127 * 2^127 is 1, and 2^-120 * 2^-20 is below float32, times 448 * 448 is not."""
    given = operands("floor")
    given |= {
        "scale": torch.full_like(given["scale"], 0),
        "pertoken_scale": torch.full_like(given["pertoken_scale"], 254),
    }
    plain = operands("floor")
    plain |= {
        "scale": torch.full_like(plain["scale"], 127),
        "pertoken_scale": torch.full_like(plain["pertoken_scale"], 127),
    }
    assert torch.equal(multiply(given), multiply(plain))
    assert bool(multiply(plain).any())


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"output_dtype": None}, NotImplementedError, "int8"),
        ({"scale_dtype": None}, NotImplementedError, "scale_dtype and pertoken_scale_dtype"),
        ({"pertoken_scale_dtype": torch.uint8}, NotImplementedError, "float8_e8m0fnu; got"),
        ({"group_sizes": None}, NotImplementedError, "MX mode"),
        ({"group_sizes": [1, 1, 64]}, NotImplementedError, "MX mode"),
        ({"pertoken_scale": None}, NotImplementedError, "MX mode"),
        ({"bias": torch.zeros(40, dtype=torch.bfloat16)}, ValueError, "bias float32"),
        ({"bias": torch.zeros(41)}, ValueError, r"bias torch.float32 \[41\]"),
        (
            {"scale": torch.zeros(2, 40, dtype=torch.uint8)},
            ValueError,
            r"scale torch.uint8 \[2, 40\]",
        ),
        ({"pertoken_scale": torch.zeros(7, 1, 2, dtype=torch.uint8)}, ValueError, "P = ceil"),
    ],
)
def test_what_quant_matmul_refuses(changes, error, said):
    with pytest.raises(error, match=said):
        multiply(operands("floor"), **changes)


# --- load ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["f32", "e8m0", "extreme"])
def test_resolving_the_blocks_scales(case):
    codes, scales = REQUANT[f"{case}.codes"], REQUANT[f"{case}.scale_f32"]
    dense = load.resolve_block_scales(codes, scales, (128, 128))
    assert torch.equal(dense.view(torch.int16), REQUANT[f"{case}.resolved_bf16"].view(torch.int16))


def test_blocks_larger_than_a_chunk_and_rows_between():
    rng = np.random.default_rng(5)
    codes = torch.tensor(rng.integers(0, 0x7E, (600, 100)), dtype=torch.uint8)
    scales = torch.tensor(rng.uniform(0.001, 0.1, (3, 4)), dtype=torch.float32)
    dense = load.resolve_block_scales(codes, scales, (256, 32))
    values = codes.view(E4M3).float().numpy()
    spread = scales.numpy()[np.arange(600)[:, None] // 256, np.arange(100)[None] // 32]
    assert torch.equal(dense, torch.tensor(values * spread).bfloat16())


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (3, 2), (2, 2, 1), (4,)])
def test_a_grid_of_another_shape_names_both(shape):
    with pytest.raises(
        ValueError, match=r"\[136, 160\].*128 x 128 has scales \[2, 2\], got"
    ) as error:
        load.resolve_block_scales(REQUANT["f32.codes"], torch.ones(shape), (128, 128))
    assert str(list(shape)) in str(error.value)


def test_only_matrices_are_resolved():
    with pytest.raises(ValueError, match=r"expected a weight \[N, K\], got \[2, 3, 4\]"):
        load.resolve_block_scales(
            torch.zeros(2, 3, 4, dtype=torch.uint8), torch.ones(1, 1), (128, 128)
        )


@pytest.mark.parametrize("name", load.BLOCK_FORMATS)
def test_the_stages_end_in_what_prepare_keeps(name):
    weight = weight_of(name, (48, 224))
    steps = list(KERNEL.stages(weight, NPU_EMULATED))
    assert [stage.name for stage in steps] == ["resolve", "requantise", "repack", "persist"]
    prepared = KERNEL.prepare(weight, NPU_EMULATED)
    codes, scales = layout.unpack(prepared.codes, prepared.scales)
    assert torch.equal(mx.Mx(codes=codes, scales=scales).dequantize(), steps[-1].values)
    assert prepared.scales.shape == (4, 48, 2)
    assert not bool(prepared.scales[3, :, 1].any())  # seven groups, padded


def test_the_source_scale_is_gone():
    weight = weight_of("fp8_e4m3_block", (48, 96))
    prepared = KERNEL.prepare(weight, NPU_EMULATED)
    kept = [getattr(prepared, field.name) for field in dataclasses.fields(prepared)]
    tensors = [value for value in kept if isinstance(value, torch.Tensor)]
    assert {tensor.dtype for tensor in tensors} == {torch.uint8}
    source = {weight.codes.data_ptr(), weight.scales.data_ptr()}
    assert not source & {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_stored_mx_bytes_are_taken_as_they_are():
    weight = weight_of("mxfp8_e4m3", (40, 96))
    scales = weight.scales.clone()
    scales[0, 0], scales[1, 1], scales[2, 2] = 0, 255, 254
    weight = dataclasses.replace(weight, scales=scales)
    prepared = KERNEL.prepare(weight, NPU_EMULATED)
    assert all(
        map(torch.equal, layout.unpack(prepared.codes, prepared.scales), (weight.codes, scales))
    )
    assert [stage.name for stage in KERNEL.stages(weight, NPU_EMULATED)] == ["repack", "persist"]


@pytest.mark.parametrize(
    ("form", "error", "said"),
    [
        ("fp8_e4m3_tensor", NotImplementedError, "without weight_block_size"),
        ("ternary_hf", KernelError, "ternary_hf has no blocks; expected one of"),
    ],
)
def test_a_format_without_blocks_is_refused(form, error, said):
    with pytest.raises(error, match=said):
        KERNEL.prepare(weight_of(form, (32, 64)), NPU_EMULATED)


# --- fallbacks -----------------------------------------------------------------------------------

BLOCK = "fp8_e4m3_block"
W13, W2 = "model.layers.0.mlp.experts.w13", "model.layers.0.mlp.experts.w2"
PRO, OLD = "Ascend950PR_9599", "Ascend910B1"
FALLBACKS = {
    "a plain layer": ({}, PRO, "mxfp8", "MXFP8"),
    "stored MXFP8": ({"format": "mxfp8_e4m3"}, PRO, "mxfp8", "MXFP8"),
    "per tensor": (
        {"format": "fp8_e4m3_tensor"},
        PRO,
        "not implemented",
        "FP8 without weight_block_size is not implemented on Ascend",
    ),
    "per channel": ({"format": "fp8_e4m3_channel"}, PRO, "not implemented", "weight_block_size"),
    "static": (
        {"activation_scheme": "static"},
        PRO,
        "not implemented",
        "activation_scheme 'static' is not implemented on Ascend; expected 'dynamic'",
    ),
    "dynamic": ({"activation_scheme": "dynamic"}, PRO, "mxfp8", "MXFP8"),
    "kv_b_proj": ({"module": "a.kv_b_proj"}, PRO, "dense", "kv_b_proj is kept dense"),
    "not a 950": ({}, OLD, "dense", "Ascend910B1 has no MX operators: dense"),
    "K % 32": ({"k": 80}, PRO, "dense", "K = 80 is no multiple of 32: dense in the model's dtype"),
    "experts": ({"n": 384, "k": 128, "module": W13}, PRO, "mxfp8", "MXFP8"),
    "experts, w2 off, at w2": (
        {"n": 128, "k": 80, "module": W2},
        PRO,
        "dense",
        "w2 has K = 80, no multiple of 32: all experts dense in the model's dtype",
    ),
    "experts, w2 off, at w13": ({"n": 160, "k": 128, "module": W13}, PRO, "dense", "w2 has K = 80"),
    "experts, w13 off, at w2": ({"n": 80, "k": 128, "module": W2}, PRO, "dense", "w13 has K = 80"),
    "experts, both off": (
        {"n": 162, "k": 80, "module": W13},
        PRO,
        "dense",
        "w13 has K = 80 and w2 has K = 81",
    ),
    "experts, one of them": ({"n": 160, "k": 128, "module": f"{W13}.3"}, PRO, "dense", "w2 has"),
    "experts, not a 950": ({"n": 384, "k": 128, "module": W13}, OLD, "dense", "no MX operators"),
    "experts, odd groups": (
        {"n": 384, "k": 96, "module": W13},
        PRO,
        "not implemented",
        "w13 has K = 96: experts need an even number of groups",
    ),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_how_a_layer_runs(case):
    """In runs: tests/model/test_mx_fallbacks.py."""
    changes, named, kind, said = FALLBACKS[case]
    plain = {"n": 64, "k": 96, "format": BLOCK, "bias": False, "activation_dtype": torch.bfloat16}
    decision = fallback.decide(LinearSpec(**plain | changes), named)
    assert decision.kind == kind
    assert said in decision.reason


@pytest.mark.parametrize(
    ("model", "generation", "algorithm"),
    [
        ("minimax_m3", "A5", 1),
        ("minimax_m3", "A3", 0),
        ("qwen3", "A5", 0),
        ("deepseek_v3", "A5", 0),
    ],
)
def test_which_scale_alg_is_taken(model, generation, algorithm):
    assert fallback.scale_alg(model, generation) == algorithm


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"format": "ternary_hf"}, "reads fp8_e4m3_block"),
        ({"format": "fp8_e4m3_tensor"}, "without weight_block_size is not implemented"),
        ({"activation_dtype": torch.float16}, "x must be bfloat16 or float32"),
    ],
)
def test_what_the_kernel_declines(spec, said):
    plain = {
        "n": 64,
        "k": 96,
        "format": "mxfp8_e4m3",
        "bias": False,
        "activation_dtype": torch.bfloat16,
    }
    assert KERNEL.can_implement(LinearSpec(**plain))
    support = KERNEL.can_implement(LinearSpec(**plain | spec))
    assert not support
    assert said in support.reason


@pytest.mark.parametrize("form", ["fp8_e4m3_block", "mxfp8_e4m3"])
def test_a_layer_of_no_whole_groups_runs_dense_and_says_so(form):
    weight = weight_of(form, (48, 80))
    report = reconcile.check_linear(KERNEL, weight, probes=("bound",), batch_sizes=(4,))
    (row,) = report.rows
    assert (row.verdict, row.reason) == ("INCONCLUSIVE", "fell_back")
    assert "K = 80 is no multiple of 32: dense in the model's dtype" in row.text
    x = torch.randn(3, 80, generator=torch.Generator().manual_seed(7)).bfloat16()
    dense = weight.dequantize(torch.float32).bfloat16()
    y = KERNEL.apply(x, KERNEL.prepare(weight, NPU_EMULATED))
    assert torch.equal(y, torch.nn.functional.linear(x, dense))


def test_without_an_npu_the_engine_says_why():
    support = KERNEL.is_supported(NPU)
    assert (bool(support), support.reason) == (False, "torch_npu is not installed")
    with pytest.raises(KernelError, match="torch_npu is not installed"):
        KERNEL.prepare(weight_of("mxfp8_e4m3", (32, 64)), NPU)


# --- the linear kernel ---------------------------------------------------------------------------


@pytest.mark.parametrize("k", [96, 224, 256])
@pytest.mark.parametrize("form", ["fp8_e4m3_block", "fp8_e4m3_block_e8m0", "mxfp8_e4m3"])
@pytest.mark.parametrize("name", ["mxfp8_npu", "mxfp8_npu.scale_alg_1"])
def test_it_passes_every_probe(name, form, k):
    """K = 96 and 224 have three and seven groups: an odd number is padded."""
    reconcile.check_linear(kernel(name), weight_of(form, (48, k))).raise_for_verdict()


def test_with_a_bias_and_in_float32():
    weight = dataclasses.replace(weight_of("mxfp8_e4m3", (48, 96)), bias=torch.randn(48))
    reconcile.check_linear(KERNEL, weight).raise_for_verdict()
    contract = dataclasses.replace(KERNEL.contract, output="float32")
    report = reconcile.check_linear(KERNEL, weight, contract=contract, dtype="float32")
    report.raise_for_verdict()


def test_activations_that_are_quantised_already():
    weight = weight_of("mxfp8_e4m3", (48, 96))
    prepared = KERNEL.prepare(weight, NPU_EMULATED)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(6)).bfloat16()
    quantised = operators.npu_dynamic_mx_quant(x, dst_type=E4M3)
    y = KERNEL.apply(quantised, prepared)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, KERNEL.apply(x, prepared))
    assert KERNEL.apply(x.view(1, 5, 1, 96), prepared).shape == (1, 5, 1, 48)
    with pytest.raises(KernelError, match=r"expected x \[\.\.\., 96\], got \[5, 64\]"):
        KERNEL.apply(x[:, :64], prepared)
