"""`amx_fp8.w8a16` against golden vectors, the plain instructions, and upstream's tests.

Everything runs on the engines ``avx512_bf16`` and ``amx-emulated``; where AMX is real, on ``amx``.
"""

import functools
import importlib.resources
import re
import shutil
import subprocess
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import reconcile
from reconcile.checking.probes import random_weight
from reconcile.exceptions import BuildError, KernelError
from reconcile.kernel import Engine, Kernel, LinearSpec
from reconcile.weight import QuantizedWeight
from reconcile_kernels.amx_fp8 import W8A16, emulator, features, ops, packing
from reconcile_kernels.amx_fp8.instructions import fused, tdpbf16ps, vdpbf16ps
from reconcile_references import fp8

AMX, AVX512, EMULATED = W8A16.engines
HERE = [engine for engine in W8A16.engines if W8A16.is_supported(engine)]
FORMATS = {
    form.name: form
    for form in (
        fp8.FP8_E4M3_TENSOR,
        fp8.FP8_E4M3_CHANNEL,
        fp8.FP8_E4M3_BLOCK,
        fp8.FP8_E4M3_BLOCK_E8M0,
    )
}
by_name = {"ids": lambda engine: engine.name}


@pytest.fixture(params=HERE, **by_name)
def engine(request):
    return request.param


@pytest.mark.parametrize("engine", W8A16.engines, **by_name)
def test_engine_runs_here(engine):
    """One skip for each engine that the tests below leave out, with its reason."""
    support = W8A16.is_supported(engine)
    if not support:
        pytest.skip(support.reason)
    assert run(engine, random_x(1, 64), weight_of("fp8_e4m3_tensor", (32, 64))).isfinite().all()


@pytest.fixture(scope="module")
def vectors():
    folder = importlib.resources.files("reconcile_fixtures") / "vectors"
    with importlib.resources.as_file(folder) as path:
        files = [load_file(path / f"{name}.safetensors") for name in ("07_vnni", "09_linear")]
    return files[0] | files[1]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def weight_of(name, shape, seed=0, block=None, bias=None):
    """Random finite codes under scales that are no powers of two."""
    form = FORMATS[name] if block is None else replace(FORMATS[name], block=block)
    scales = torch.full(form.scale_shape(shape), 127, dtype=torch.uint8)
    like = QuantizedWeight(
        codes=torch.zeros(shape, dtype=torch.uint8),
        scales=scales if form.scale_encoding == "e8m0" else scales.float(),
        format=form,
        shape=shape,
    )
    return replace(random_weight(like, shape, generator(seed)), bias=bias)


def random_x(m, k, dtype=torch.bfloat16, seed=1):
    return torch.randn(m, k, generator=generator(seed)).to(dtype)


def run(engine, x, weight):
    return W8A16.apply(x, W8A16.prepare(weight, engine), weight.bias)


def bits(tensor):
    return tensor.contiguous().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def widen(tensor):
    """bfloat16 as float32 in numpy."""
    return (
        tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16).astype(np.float32)
    )


# The kernel as a value ------------------------------------------------------------------------


def test_kernel_object():
    assert isinstance(W8A16, Kernel)
    assert W8A16.name == "amx_fp8.w8a16"
    assert W8A16.formats == tuple(FORMATS)
    assert Engine("amx", "ours", "hardware", "bit_exact") == AMX
    assert Engine("avx512_bf16", "ours", "hardware", "bit_exact") == AVX512
    assert Engine("amx-emulated", "ours", "emulated", "bit_exact") == EMULATED
    contract = W8A16.contract
    assert (contract.activation, contract.weight_rounding) == ("none", None)
    assert (contract.scale_applied, contract.k_block) == ("after_block", 128)
    assert (contract.by_batch, contract.batch_invariant) == ((), True)


SPEC = LinearSpec(
    n=448, k=160, format="fp8_e4m3_block", bias=False, activation_dtype=torch.bfloat16
)
SPECS = [
    ({}, True, "fp8_e4m3_block, N=448, K=160, bfloat16"),
    ({"format": "fp8_e4m3_tensor", "activation_dtype": torch.float32}, True, "float32"),
    ({"format": "fp8_e4m3_channel", "bias": True, "n": 32, "k": 32}, True, "N=32, K=32"),
    ({"format": "fp8_e4m3_block_e8m0"}, True, "fp8_e4m3_block_e8m0"),
    ({"n": 16}, False, "N must be a positive multiple of 32 (columns of a block), not 16"),
    ({"n": 48}, False, "N must be a positive multiple of 32 (columns of a block), not 48"),
    ({"n": 0}, False, "not 0"),
    ({"k": 80}, False, "K must be a positive multiple of 32 (depth of a tile), not 80"),
    ({"format": "mxfp8_e4m3"}, False, "not mxfp8_e4m3"),
    ({"format": "fp8_e5m2_tensor"}, False, "not fp8_e5m2_tensor"),
    ({"activation_dtype": torch.float16}, False, "x must be bfloat16 or float32, not float16"),
    ({"n": 48, "k": 80, "format": "ternary_hf"}, False, "not ternary_hf; N must be"),
]


@pytest.mark.parametrize(("changes", "ok", "reason"), SPECS)
def test_can_implement(changes, ok, reason):
    support = W8A16.can_implement(replace(SPEC, **changes))
    assert support.ok is ok
    assert reason in support.reason


def test_a_missing_processor_or_compiler_is_named(monkeypatch):
    monkeypatch.setattr(features, "_bits", lambda: (True,) * 5 + (False,) * 5)
    for engine in (AVX512, EMULATED):
        support = W8A16.is_supported(engine)
        assert not support
        assert "lacks avx512_bf16, zmm registers" in support.reason
    assert "amx_tile, amx_bf16, tile registers" in W8A16.is_supported(AMX).reason
    monkeypatch.setenv("CXX", "/no/compiler")
    assert all("no C++ compiler" in W8A16.is_supported(engine).reason for engine in W8A16.engines)
    monkeypatch.setattr(features.platform, "machine", lambda: "aarch64")
    assert "needs Linux on x86_64" in W8A16.is_supported(AVX512).reason
    assert 'no engine "cuda"' in W8A16.is_supported(Engine("cuda")).reason


def test_real_amx_needs_the_permission_of_the_system(monkeypatch):
    class Native:
        def reconcile_cpu_request_tiles(self):
            return 1

    monkeypatch.setattr(features, "_bits", lambda: (True,) * 10)
    monkeypatch.setattr(type(features.LIBRARY), "load", lambda self: Native())
    assert "refuses its tiles: Operation not permitted" in W8A16.is_supported(AMX).reason
    monkeypatch.setattr(Native, "reconcile_cpu_request_tiles", lambda self: 0)
    assert W8A16.is_supported(AMX)
    assert "AMX is real here" in W8A16.is_supported(EMULATED).reason


@pytest.mark.slow
def test_build(tmp_path, monkeypatch):
    monkeypatch.setenv("RECONCILE_CACHE", str(tmp_path))
    paths = {engine: W8A16.build(engine) for engine in W8A16.engines}
    assert paths[AMX] == paths[EMULATED] != paths[AVX512]
    assert len(list(tmp_path.glob("*.so"))) == 3  # the emulator too
    monkeypatch.setenv("CXX", "/no/compiler")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        W8A16.build(AVX512)
    with pytest.raises(KernelError, match="no engine"):
        W8A16.build(Engine("cuda"))


# Packing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["64x32"])
def test_packing_is_that_of_the_vectors(vectors, name):
    codes, packed = (torch.from_numpy(vectors[f"fp8.{name}.{x}"]) for x in ("codes", "packed"))
    shape = tuple(codes.shape)
    assert torch.equal(packing.pack(codes, shape, "nk"), packed)
    assert torch.equal(packing.pack(codes.t().contiguous(), shape, "kn"), packed)
    assert torch.equal(packing.unpack(packed), codes)


@pytest.mark.parametrize("name", ["48x64", "16x32", "80x96"])
def test_full_blocks_of_other_vectors(vectors, name):
    """N = 32 j + 16 is refused; its full blocks of 32 columns lie as in the vectors."""
    codes, packed = (torch.from_numpy(vectors[f"fp8.{name}.{x}"]) for x in ("codes", "packed"))
    n, k = codes.shape
    with pytest.raises(KernelError, match=f"multiple of 32 .columns of a block., not {n}"):
        packing.pack(codes, (n, k), "nk")
    full = n // 32 * 32
    if full:
        assert torch.equal(packing.pack(codes[:full], (full, k), "nk"), packed[:full])


@pytest.mark.parametrize(("n", "k"), [(32, 32), (64, 64), (96, 160)])
def test_packing_by_its_formula(n, k):
    codes = torch.randint(0, 256, (n, k), generator=generator(), dtype=torch.uint8)
    flat = packing.pack(codes, (n, k), "nk").flatten()
    rows, columns = torch.meshgrid(torch.arange(n), torch.arange(k), indexing="ij")
    index = rows // 32 * 32 * k + columns // 2 * 64 + rows % 32 * 2 + columns % 2
    assert torch.equal(flat[index], codes)
    assert n != 64 or int(index[33, 5]) == 2179


def test_square_weights_are_told_apart_by_declaration_alone():
    codes = torch.randint(0, 256, (64, 64), generator=generator(), dtype=torch.uint8)
    as_stored, turned = (packing.pack(codes, (64, 64), layout) for layout in ("nk", "kn"))
    assert torch.equal(turned, packing.pack(codes.t(), (64, 64), "nk"))
    assert not torch.equal(as_stored, turned)


@pytest.mark.parametrize(
    ("codes", "shape", "layout", "message"),
    [
        (torch.zeros(32, 64, dtype=torch.uint8), (32, 64), "kn", r"expected codes \[64, 32\]"),
        (torch.zeros(64, 32, dtype=torch.uint8), (32, 64), "nk", r"expected codes \[32, 64\]"),
        (torch.zeros(32, 64), (32, 64), "nk", "got torch.float32"),
        (torch.zeros(32, 64, dtype=torch.uint8), (32, 64), "NK", "layout: expected nk or kn"),
        (torch.zeros(32, 48, dtype=torch.uint8), (32, 48), "nk", "multiple of 32 .depth"),
    ],
)
def test_packing_refuses(codes, shape, layout, message):
    with pytest.raises(KernelError, match=message):
        packing.pack(codes, shape, layout)


def test_a_prepared_weight_can_be_checked():
    weight = weight_of("fp8_e4m3_block", (64, 160))
    prepared = W8A16.prepare(weight, HERE[0])
    assert torch.equal(prepared.codes(), weight.unpacked())
    prepared.check(weight)
    prepared.packed[3, 5] ^= 1
    with pytest.raises(KernelError, match=r"1 of 10240 packed codes .* first at \[n=\d+, k=\d+\]"):
        prepared.check(weight)


def test_a_scalar_scale_becomes_one_row_of_blocks():
    weight = weight_of("fp8_e4m3_tensor", (64, 160))
    prepared = W8A16.prepare(weight, HERE[0])
    assert (prepared.scales.shape, prepared.group) == ((1, 2), 64)
    assert prepared.scales.tolist() == [[float(weight.scales)] * 2]
    turned = W8A16.prepare_tensors(
        weight.unpacked().t(),
        weight.scales.reshape(()),
        form=weight.format,
        shape=(64, 160),
        layout="kn",
        engine=HERE[0],
    )
    assert torch.equal(turned.packed, prepared.packed)
    assert torch.equal(turned.scales, prepared.scales)


# Numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 13, 33])
def test_every_code_is_exact(engine, rows):
    """1 x code at every place of a block of columns, against ml_dtypes; NaN codes are NaN."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(64).view(256, 64).t().contiguous()
    codes = codes.reshape(64, 256).roll(7, 0)[:, torch.arange(256)]
    scales = torch.ones(1)
    weight = QuantizedWeight.from_tensors(
        codes, scales, format=fp8.FP8_E4M3_TENSOR, shape=(64, 256)
    )
    wanted = torch.from_numpy(codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    finite = ~wanted.isnan()
    safe = replace(weight, codes=torch.where(finite, codes, 0))
    identity = torch.eye(256).bfloat16()
    for start in range(0, 256, rows):
        x = identity[start : start + rows]
        y = run(engine, x, safe).float()
        right = torch.where(finite, wanted, 0.0)[:, start : start + rows].t()
        assert torch.equal(y, right)
    spoilt = ~finite.all(1)
    assert torch.equal(run(engine, identity[:rows], weight).isnan().any(0), spoilt)


def stepwise(engine, x, weight):
    """The declared arithmetic, instruction by instruction, in numpy: float32 [M, N]."""
    (n, k), m = weight.shape, x.shape[0]
    values = weight.codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    spread = weight.format.spread(weight.format.scale_values(weight.scales), weight.shape)
    scales, total = spread.expand(n, k).float().numpy(), np.zeros((m, n), np.float32)
    wide = widen(x)
    for start in range(0, k, 128):
        stop, inner = min(start + 128, k), np.zeros((m, n), np.float32)
        if engine == AVX512:
            for at in range(start, stop, 2):
                a = np.broadcast_to(wide[:, None, at : at + 2], (m, n, 2))
                b = np.broadcast_to(values[None, :, at : at + 2], (m, n, 2))
                inner = vdpbf16ps(inner, a, b)
        else:
            for at in range(start, stop, 32):
                b = values[:, at : at + 32].reshape(n, 16, 2).transpose(1, 0, 2).reshape(16, 2 * n)
                inner = tdpbf16ps(inner, wide[:, at : at + 32], b)
        total = fused(inner, np.broadcast_to(scales[None, :, start], (m, n)), total)
    if weight.bias is not None:
        total = total + weight.bias.float().numpy()
    assert total.dtype == np.float32
    return total


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 96, 160), (3, 160, 32), (5, 64, 288), (18, 32, 256)])
def test_bits_are_those_of_the_instructions(engine, name, m, n, k):
    bias = torch.randn(n, generator=generator(2)) if m % 2 else None
    weight, x = weight_of(name, (n, k), bias=bias), random_x(m, k)
    wanted = torch.from_numpy(stepwise(engine, x, weight)).bfloat16()
    assert torch.equal(bits(run(engine, x, weight)), bits(wanted))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_the_same_bits_in_every_batch(engine, dtype):
    if dtype not in ops.activations(engine.name):
        return
    weight, x = weight_of("fp8_e4m3_block", (160, 288)), random_x(70, 288, dtype)
    whole = run(engine, x, weight)
    for m in (1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 16, 17, 31, 32, 33, 64):
        assert torch.equal(bits(run(engine, x[:m], weight)), bits(whole[:m])), m
        assert torch.equal(bits(run(engine, x[70 - m :], weight)), bits(whole[70 - m :])), m


def test_threads_and_the_callers_rounding_change_no_bit(engine):
    weight, x = weight_of("fp8_e4m3_channel", (256, 512)), random_x(40, 512)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run(engine, x, weight)
        torch.set_num_threads(3)
        assert torch.equal(bits(run(engine, x, weight)), bits(one))
        torch.set_flush_denormal(True)
        assert torch.equal(bits(run(engine, x, weight)), bits(one))
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)


GOLDEN = [("fp8_tensor", "fp8_e4m3_tensor", 32), ("fp8_channel", "fp8_e4m3_channel", 32)]
GOLDEN += [("fp8_block", "fp8_e4m3_block", 128)]


@pytest.mark.parametrize(("vector", "name", "rows"), GOLDEN)
def test_golden_outputs(engine, vectors, vector, name, rows):
    """Exact results of the vectors, for as many rows of the weight as are a multiple of 32."""
    get = {key.removeprefix(f"{vector}."): v for key, v in vectors.items() if vector in key}
    x = torch.from_numpy(get["x_bf16"].view(np.int16)).view(torch.bfloat16)
    scales = torch.from_numpy(get.get("scale_f32", np.zeros(0, np.float32)))
    if "scale_bf16" in get:
        scales = torch.from_numpy(get["scale_bf16"].view(np.int16)).view(torch.bfloat16)[:rows, 0]
    bias = torch.from_numpy(get["bias_f32"])[:rows] if "bias_f32" in get else None
    if name == "fp8_e4m3_block":
        scales = scales[:1]
    codes = torch.from_numpy(get["codes"])[:rows].contiguous()
    weight = QuantizedWeight.from_tensors(
        codes,
        scales.reshape(-1) if name != "fp8_e4m3_block" else scales.contiguous(),
        format=FORMATS[name],
        shape=tuple(codes.shape),
        bias=bias,
    )
    y, size = (torch.from_numpy(get[f"{part}.wf32"])[:, :rows] for part in ("y_f64", "abs_f64"))
    error = (run(engine, x, weight).double() - y).abs()
    assert bool((error <= 2.0**-8 * y.abs() + 200 * 2.0**-24 * size).all())


def test_subnormals_count_as_zero_and_nan_and_infinity_arrive(engine):
    weight = weight_of("fp8_e4m3_tensor", (32, 64))
    weight = replace(weight, codes=torch.full((32, 64), 0x38, dtype=torch.uint8))
    x = torch.zeros(4, 64)
    x[0], x[1, 5], x[2, 6], x[3, 7] = 1e-39, torch.inf, torch.nan, 1.0
    for dtype in ops.activations(engine.name):
        y = run(engine, x.to(dtype), weight)
        assert (y[0] == 0).all()
        assert (y[1] == torch.inf).all()
        assert y[2].isnan().all()
        assert y[3].isfinite().all()


# Every probe ----------------------------------------------------------------------------------

CASES = [(name, shape, None) for name in FORMATS for shape in ((256, 256), (96, 160))]
CASES += [("fp8_e4m3_block", (160, 288), (32, 128)), ("fp8_e4m3_block", (192, 128), (64, 128))]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("bias", [None, torch.bfloat16])
@pytest.mark.parametrize(("name", "shape", "block"), CASES)
def test_all_probes(name, shape, block, bias, dtype):
    given = None if bias is None else torch.randn(shape[0], generator=generator()).to(bias)
    contract = replace(W8A16.contract, output=dtype)
    weight = weight_of(name, shape, block=block)
    report = reconcile.check_linear(
        W8A16, weight, bias=given, engine="avx512_bf16", dtype=dtype, contract=contract, repeats=2
    )
    assert report.exit_code == 0, report.explain()
    assert {row.check for row in report.rows} == set(reconcile.checking.linear.PROBES)


@pytest.mark.parametrize(("name", "shape"), [(name, (64, 160)) for name in FORMATS])
def test_probes_emulated(name, shape):
    """Sampled: the full run is a test of its own."""
    report = reconcile.check_linear(
        W8A16, weight_of(name, shape), engine="amx-emulated", batch_sizes=(1, 5), repeats=1
    )
    assert report.exit_code == 0, report.explain()
    assert {row.execution for row in report.rows} == {"emulated"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape", "block"), CASES)
def test_all_probes_emulated(name, shape, block):
    bias = torch.randn(shape[0], generator=generator())
    report = reconcile.check_linear(
        W8A16, weight_of(name, shape, block=block), bias=bias, engine="amx-emulated"
    )
    assert report.exit_code == 0, report.explain()


# Upstream's own test, and what it leaves out ---------------------------------------------------


@functools.cache
def upstream(n, k, seed=0):
    """Weight preset as [K, N] under one scale, as vLLM's test of its per-tensor kernel makes it."""
    weight = torch.randn(n, k, generator=generator(seed)) / k**0.5
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn).t(), scale


@functools.cache
def prepared_upstream(n, k, engine):
    """The prepared weight, and its values in float32 [N, K]."""
    turned, scale = upstream(n, k)
    prepared = W8A16.prepare_tensors(
        turned, scale, form=fp8.FP8_E4M3_TENSOR, shape=(n, k), layout="kn", engine=engine
    )
    return prepared, turned.t().float() * scale


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("m", [1, 4, 5, 64])
@pytest.mark.parametrize(("n", "k"), [(32, 64), (5120, 5120), (448, 160), (64, 32)])
def test_upstream(engine, n, k, m, biased):
    """rtol = 0.02 and atol = 0.01 as upstream, and our own bound besides."""
    if engine.execution == "emulated" and n * k * m > 1e7:
        n, k = 256, 512
    prepared, values = prepared_upstream(n, k, engine)
    x = torch.randn(m, k, generator=generator(1)).div(k**0.5).bfloat16()
    x[m // 2] = 0  # a zero row
    bias = 0.1 * torch.randn(n, generator=generator(2)) if biased else None
    y = W8A16.apply(x, prepared, bias)
    right = x.float() @ values.t() + (0 if bias is None else bias)
    torch.testing.assert_close(y, right.bfloat16(), rtol=0.02, atol=0.01)
    size = x.float().abs() @ values.abs().t()
    assert bool(((y.float() - right).abs() <= 2.0**-8 * right.abs() + 3e-5 * size + 1e-7).all())


@pytest.mark.parametrize("n", [16, 48])
def test_upstream_refusals(n):
    turned, scale = upstream(n, 64)
    with pytest.raises(KernelError, match=f"N must be a positive multiple of 32 .*, not {n}"):
        W8A16.prepare_tensors(
            turned, scale, form=fp8.FP8_E4M3_TENSOR, shape=(n, 64), layout="kn", engine=HERE[0]
        )


# The call -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(160,), (0, 160), (2, 3, 160), (2, 1, 3, 160), (1, 160)])
def test_leading_shapes(engine, shape):
    weight = weight_of("fp8_e4m3_tensor", (64, 160))
    x = torch.randn(shape, generator=generator()).bfloat16()
    y = run(engine, x, weight)
    assert y.shape == (*shape[:-1], 64)
    assert torch.equal(y.reshape(-1, 64), run(engine, x.reshape(-1, 160), weight))


def test_strides(engine):
    weight, x = weight_of("fp8_e4m3_tensor", (64, 160)), random_x(6, 160)
    padded = torch.full((6, 323), torch.nan).bfloat16()
    padded[:, 3:163] = x
    wanted = run(engine, x, weight)
    assert torch.equal(run(engine, padded[:, 3:163], weight), wanted)
    assert torch.equal(run(engine, x.t().contiguous().t(), weight), wanted)


def test_apply_refuses(engine):
    weight = weight_of("fp8_e4m3_tensor", (64, 160))
    prepared = W8A16.prepare(weight, engine)
    with pytest.raises(KernelError, match=r"call prepare\(weight, engine\) first"):
        W8A16.apply(random_x(1, 160), weight)
    with pytest.raises(KernelError, match=r"expected x \[..., K\] with K=160"):
        W8A16.apply(random_x(1, 128), prepared)
    with pytest.raises(NotImplementedError, match="got float16"):
        W8A16.apply(random_x(1, 160, torch.float16), prepared)
    with pytest.raises(KernelError, match=r"bias: expected \[64\]"):
        W8A16.apply(random_x(1, 160), prepared, torch.zeros(1, 64))
    if engine != AVX512:
        with pytest.raises(NotImplementedError, match="x must be bfloat16, got float32"):
            W8A16.apply(random_x(1, 160, torch.float32), prepared)


def test_prepare_refuses():
    engine = HERE[0]
    with pytest.raises(NotImplementedError, match="a multiple of 32 rows by 128 columns, not 48"):
        W8A16.prepare(weight_of("fp8_e4m3_block", (96, 160), block=(48, 128)), engine)
    with pytest.raises(NotImplementedError, match="not 128 x 64"):
        W8A16.prepare(weight_of("fp8_e4m3_block", (96, 160), block=(128, 64)), engine)
    with pytest.raises(KernelError, match="no engine"):
        W8A16.prepare(weight_of("fp8_e4m3_tensor", (64, 64)), Engine("cuda"))
    with pytest.raises(KernelError, match=r"expected scales \[1\]"):
        W8A16.prepare_tensors(
            torch.zeros(64, 64, dtype=torch.uint8),
            torch.ones(64),
            form=fp8.FP8_E4M3_TENSOR,
            shape=(64, 64),
            layout="nk",
            engine=engine,
        )


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [1, 64])
def test_opcheck(engine, out, group):
    prepared = W8A16.prepare(
        weight_of("fp8_e4m3_tensor" if group > 1 else "fp8_e4m3_channel", (64, 160)), engine
    )
    for bias in (None, torch.randn(64, generator=generator())):
        operands = (random_x(5, 160), prepared.packed, prepared.scales, bias, group, out)
        torch.library.opcheck(torch.ops.reconcile_kernels.amx_fp8.default, (*operands, engine.name))
        y = ops.amx_fp8(*operands, engine.name)
        assert y.dtype == out


BAD_OPERANDS = [
    {"x": torch.zeros(5, 128, dtype=torch.bfloat16)},
    {"x": torch.zeros(5, 160, dtype=torch.float16)},
    {"x": torch.zeros(160, dtype=torch.bfloat16)},
    {"packed": torch.zeros(48, 160, dtype=torch.uint8)},
    {"packed": torch.zeros(64, 160, dtype=torch.int8)},
    {"scales": torch.zeros(1, 1)},
    {"scales": torch.zeros(1, 2, dtype=torch.float64)},
    {"scales": torch.zeros(())},
    {"group": 48},
    {"group": 0},
    {"group": 1},
    {"bias": torch.zeros(32)},
    {"bias": torch.zeros(64, dtype=torch.bfloat16)},
    {"out": torch.float16},
    {"engine": "cuda"},
]


@pytest.mark.parametrize("changes", BAD_OPERANDS, ids=lambda changes: str(changes)[:40])
def test_the_op_refuses_what_does_not_fit(changes):
    good = {
        "x": torch.zeros(5, 160, dtype=torch.bfloat16),
        "packed": torch.zeros(64, 160, dtype=torch.uint8),
        "scales": torch.zeros(1, 2),
        "bias": None,
        "group": 64,
        "out": torch.bfloat16,
        "engine": "avx512_bf16",
    }
    with pytest.raises(KernelError, match="amx_fp8"):
        ops.amx_fp8(**good | changes)


# The binary -----------------------------------------------------------------------------------

TILE_INSTRUCTIONS = ("ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbf16ps")


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump (binutils)")
def test_the_binaries_hold_the_instructions():
    """What engine ``amx-emulated`` runs is the library of engine ``amx``, and has tiles in it."""
    found = {}
    for engine in (AMX, EMULATED, AVX512):
        listing = subprocess.run(
            ["objdump", "-d", "--no-show-raw-insn", str(ops.library(engine.name).build())],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        found[engine] = set(re.findall(r"^\s*[0-9a-f]+:\s+(\w+)", listing, re.MULTILINE))
    assert set(TILE_INSTRUCTIONS) <= found[AMX]
    assert found[AMX] == found[EMULATED]
    assert not set(TILE_INSTRUCTIONS) & found[AVX512]
    assert "vdpbf16ps" in found[AVX512]


def test_the_emulated_engine_executes_tile_instructions():
    if not emulator.supported():
        pytest.skip(emulator.supported().reason)
    before = emulator.executed()
    run(EMULATED, random_x(33, 160), weight_of("fp8_e4m3_tensor", (64, 160)))
    ran = {kind: count - before[kind] for kind, count in emulator.executed().items()}
    # 2 blocks of columns; 33 rows are 32 and 1; K = 160 is 4 + 1 steps of 32
    assert ran["tdpbf16ps"] == 2 * (5 * 4 + 5 * 2)
    assert ran["tilestore"] == 2 * 2 * (4 + 2)
    assert ran["tilerelease"] == 1
