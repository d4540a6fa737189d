"""The AVX-512 ternary kernels against golden vectors, numpy, and a guarded native call."""

import ctypes
import importlib.resources
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import reconcile
from reconcile.exceptions import KernelError
from reconcile.kernel import Engine, Kernel, LinearSpec
from reconcile.weight import QuantizedWeight
from reconcile_kernels.ternary_cpu import BF16, INT8, ops, processor
from reconcile_references.ternary import TERNARY_HF, TERNARY_HF_DIVIDE, TERNARY_K_INTERLEAVED

KERNELS = {"bf16": BF16, "int8": INT8}
FORMATS = (TERNARY_K_INTERLEAVED, TERNARY_HF, TERNARY_HF_DIVIDE)
NUMPY = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float16: (torch.int16, np.float16),
    torch.float32: (torch.int32, np.float32),
}
RUNS = all(kernel.is_supported(kernel.engines[0]) for kernel in KERNELS.values())
NEEDS_AVX512 = pytest.mark.skipif(not RUNS, reason="no AVX-512 with VNNI and BF16, or no compiler")


@pytest.fixture(params=KERNELS)
def kernel(request):
    found = KERNELS[request.param]
    support = found.is_supported(found.engines[0])
    if not support:
        pytest.skip(support.reason)
    return found


@pytest.fixture(scope="module")
def vectors():
    folder = importlib.resources.files("reconcile_fixtures") / "vectors"
    with importlib.resources.as_file(folder) as path:
        return {
            name: tensor
            for file in ("06_ternary", "09_linear")
            for name, tensor in load_file(path / f"{file}.safetensors").items()
        }


def random_weight(n, k, form=TERNARY_K_INTERLEAVED, seed=0):
    """A weight whose values are known without decoding: (weight, values int8 [N, K])."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-1, 2, (n, k), generator=generator, dtype=torch.int8)
    scales = torch.rand(form.scale_shape((n, k)), generator=generator) + 0.01
    codes = form.pack(form.encode(values))
    return QuantizedWeight.from_tensors(codes, scales, format=form, shape=(n, k)), values.numpy()


def random_x(shape, dtype=torch.bfloat16, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(kernel, x, weight, bias=None):
    return kernel.apply(x, kernel.prepare(weight, kernel.engines[0]), bias)


def to_numpy(tensor):
    bits, dtype = NUMPY[tensor.dtype]
    return tensor.contiguous().view(bits).numpy().view(dtype)


def from_bf16(array):
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


# The kernels as values ------------------------------------------------------------------------


def test_kernel_objects():
    for name, kernel in KERNELS.items():
        assert isinstance(kernel, Kernel)
        assert kernel.name == f"ternary_cpu.{name}"
        assert {form.name for form in FORMATS} <= set(kernel.formats)
        assert "fp8_e4m3_tensor" not in kernel.formats
    assert BF16.engines == (Engine("avx512_bf16", "ours", "hardware", "bit_exact"),)
    assert INT8.engines == (Engine("avx512_vnni", "ours", "hardware", "bit_exact"),)
    assert (BF16.contract.activation, INT8.contract.activation) == ("none", "per_token_int8")
    assert BF16.contract.flush_subnormals


SPEC = LinearSpec(n=48, k=20, format="ternary_hf", bias=False, activation_dtype=torch.bfloat16)
SPECS = [
    (BF16, {}, True, "ternary_hf, N=48, K=20, bfloat16"),
    (BF16, {"k": 1, "n": 1, "format": "ternary_k_interleaved"}, True, "N=1, K=1"),
    (BF16, {"activation_dtype": torch.float32}, False, "x must be bfloat16, not float32"),
    (INT8, {"activation_dtype": torch.float32}, True, "float32"),
    (INT8, {"activation_dtype": torch.float64}, False, "x must be bfloat16, float32, float16"),
    (INT8, {"format": "fp8_e4m3_tensor"}, False, "not fp8_e4m3_tensor"),
    (INT8, {"k": 0, "n": 0}, False, "K must be 1 to 4194304, not 0; N must be positive, not 0"),
]


@pytest.mark.parametrize(("kernel", "change", "ok", "reason"), SPECS)
def test_can_implement(kernel, change, ok, reason):
    support = kernel.can_implement(replace(SPEC, **change))
    assert support.ok is ok
    assert reason in support.reason


@pytest.mark.parametrize(("name", "missing"), [("bf16", "avx512_bf16"), ("int8", "avx512_vnni")])
def test_another_processor_is_the_reason(name, missing, tmp_path, monkeypatch):
    """Flags as Linux writes them, without the one instruction set."""
    cpuinfo = tmp_path / "cpuinfo"
    flags = "fpu avx512f avx512bw avx512vl avx512dq avx512_bf16 avx512_vnni".replace(missing, "")
    cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: x\nflags\t\t: {flags}\nbugs\t\t: none\n\n")
    monkeypatch.setattr(processor, "CPUINFO", cpuinfo)
    kernel = KERNELS[name]
    support = kernel.is_supported(kernel.engines[0])
    assert (support.ok, support.reason) == (False, f"the processor has no {missing}")
    with pytest.raises(KernelError, match=f"weight: the processor has no {missing}"):
        kernel.prepare(random_weight(4, 8)[0], kernel.engines[0])


def test_every_missing_part_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    reason = BF16.is_supported(BF16.engines[0]).reason
    assert reason == (
        "no C++ compiler: looked for $CXX, c++, g++, clang++; the processor has no avx512f, "
        "avx512bw, avx512vl, avx512dq, avx512_bf16"
    )
    assert 'no engine "cuda"' in BF16.is_supported(Engine("cuda")).reason


# Decoding -------------------------------------------------------------------------------------

GOLDEN = [
    *(("kint", shape, TERNARY_K_INTERLEAVED) for shape in ("8x4", "5x8", "7x12", "33x96")),
    *(("hf", shape, TERNARY_HF) for shape in ("8x4", "12x20", "64x96")),
]


@pytest.mark.parametrize(("prefix", "shape", "form"), GOLDEN)
def test_impulses_give_the_weight(kernel, prefix, shape, form, vectors):
    """Bytes of other libraries; an impulse of 127 has an int8 scale of one."""
    values = torch.from_numpy(vectors[f"{prefix}.{shape}.w"]).float()
    weight = QuantizedWeight.from_tensors(
        torch.from_numpy(vectors[f"{prefix}.{shape}.packed"]),
        torch.ones(form.scale_shape(values.shape)),
        format=form,
        shape=tuple(values.shape),
    )
    x = 127 * torch.eye(values.shape[1], dtype=torch.bfloat16)
    assert torch.equal(run(kernel, x, weight).float(), 127 * values.T)


def test_a_weight_that_is_not_ternary_is_refused(kernel):
    """Code 3 of the Hugging Face format is +2 to every decoder."""
    weight, _ = random_weight(8, 12, TERNARY_HF)
    codes = weight.codes.clone()
    codes[1, 5] |= 0b00110000
    with pytest.raises(KernelError, match=r"layer: expected values -1, 0 and \+1, got 2 at \[n=5,"):
        kernel.prepare(replace(weight, codes=codes, name="layer"), kernel.engines[0])


def test_other_formats_are_refused(kernel):
    form = reconcile.registry.formats()["fp8_e4m3_tensor"]
    weight = QuantizedWeight(
        codes=torch.zeros(8, 8, dtype=torch.uint8), scales=torch.ones(1), format=form, shape=(8, 8)
    )
    with pytest.raises(KernelError, match="not fp8_e4m3_tensor"):
        kernel.prepare(weight, kernel.engines[0])


# Arithmetic -----------------------------------------------------------------------------------

LINEAR = [
    ("kint_ternary", "packed", "scale_f32", "y_f64", "abs_f64", TERNARY_K_INTERLEAVED),
    ("hf_ternary", "packed", "weight_scale_bf16", "y_f64.mul", "abs_f64.mul", TERNARY_HF),
    ("hf_ternary", "packed", "weight_scale_bf16", "y_f64.div", "abs_f64.mul", TERNARY_HF_DIVIDE),
]


@NEEDS_AVX512
@pytest.mark.parametrize(("case", "codes", "scale", "y", "size", "form"), LINEAR)
def test_golden_linear(case, codes, scale, y, size, form, vectors):
    """Within gamma_K S of the exact result, one rounding for the scale and one to bfloat16."""
    stored = vectors[f"{case}.{scale}"]
    scales = from_bf16(stored) if stored.dtype == np.uint16 else torch.from_numpy(stored)
    x = from_bf16(vectors[f"{case}.x_bf16"])
    exact = torch.from_numpy(vectors[f"{case}.{y}"])
    shape = (exact.shape[1], x.shape[1])
    packed = torch.from_numpy(vectors[f"{case}.{codes}"])
    weight = QuantizedWeight.from_tensors(packed, scales, format=form, shape=shape)
    u, k = 2.0**-24, shape[1]
    magnitude = torch.from_numpy(vectors[f"{case}.{size}"])
    if form.scale_convention == "divide":
        magnitude = magnitude / scales.double() ** 2
    before = (k * u / (1 - k * u) + u) * magnitude
    error = (run(BF16, x, weight).double() - exact).abs()
    assert bool((error <= before + 2.0**-8 * (exact.abs() + before)).all())


@NEEDS_AVX512
@pytest.mark.parametrize("m", [*range(1, 15), 24, 25, 65])
def test_integer_sums_are_exact(m):
    """Every tile height and every tail: sums of small integers have no rounding."""
    for n, k in ((1, 4), (16, 16), (127, 20), (129, 300), (260, 36)):
        weight, values = random_weight(n, k)
        weight = replace(weight, scales=torch.ones(n))
        x = torch.randint(-1, 2, (m, k), generator=torch.Generator().manual_seed(n)).bfloat16()
        expected = x.to(torch.int64).numpy() @ values.T.astype(int)
        got = run(BF16, x, weight)
        rounded = torch.from_numpy(expected).to(torch.float32).to(torch.bfloat16)
        assert torch.equal(got, rounded), (m, n, k)


def by_definition(x, values, scales, divide, bias):
    """per_token_int8 and the declared epilogue in numpy, one float32 rounding at a time."""
    wide = to_numpy(x).astype(np.float32)
    amax = np.maximum(np.abs(wide).max(-1, keepdims=True), np.float32(1e-7))
    codes = np.rint(wide * (np.float32(127) / amax)).clip(-128, 127).astype(np.int64)
    total = (codes @ values.T.astype(np.int64)).astype(np.float32) * (amax / np.float32(127))
    total = total / scales if divide else total * scales
    total = total if bias is None else total + bias
    assert total.dtype == np.float32
    return total.astype(to_numpy(x).dtype)


@NEEDS_AVX512
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", NUMPY, ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 32, 64), (3, 20, 12), (9, 132, 200), (26, 64, 528)])
def test_int8_every_rounding_is_where_it_is_declared(m, n, k, biased, dtype, form):
    weight, values = random_weight(n, k, form)
    x, bias = random_x((m, k), dtype), random_x((n,), seed=4) if biased else None
    scales = weight.scales.numpy().astype(np.float32)
    vector = None if bias is None else bias.float().numpy()
    expected = by_definition(x, values, scales, "divide" in form.name, vector)
    assert to_numpy(run(INT8, x, weight, bias)).tobytes() == expected.tobytes()


@NEEDS_AVX512
def test_bf16_output_rounding():
    """x = 1, w = 1: y is the scale, rounded once to bfloat16; subnormals and NaN among them."""
    patterns = (torch.arange(1 << 16)[:, None] << 16) | torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001])
    scales = patterns.flatten().to(torch.int32).view(torch.float32)
    weight = QuantizedWeight(
        codes=torch.ones(len(scales), 1, dtype=torch.uint8),
        scales=scales,
        format=TERNARY_K_INTERLEAVED,
        shape=(len(scales), 4),
    )
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.bfloat16)
    y, expected = run(BF16, x, weight)[0], scales.to(torch.bfloat16)
    assert torch.equal(y.isnan(), scales.isnan())
    assert torch.equal(y.view(torch.int16)[~y.isnan()], expected.view(torch.int16)[~y.isnan()])


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan])
def test_a_row_that_is_not_finite_spoils_itself_only(kernel, special):
    weight, values = random_weight(40, 64)
    x = random_x((5, 64))
    clean = run(kernel, x, weight)
    x[2, 17] = special
    y = run(kernel, x, weight)
    assert torch.equal(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    expected = special * torch.from_numpy(values[:, 17]).float()
    if kernel is INT8:
        assert y[2].isnan().all()
    else:
        assert torch.equal(y[2].isnan(), expected.isnan())
        assert torch.equal(y[2][~expected.isnan()].float(), expected[~expected.isnan()])


@NEEDS_AVX512
def test_bf16_counts_subnormals_as_zero():
    weight, _ = random_weight(1, 4)
    x = torch.full((1, 4), 2.0**-130, dtype=torch.bfloat16)
    assert run(BF16, x, replace(weight, codes=torch.tensor([[0b01010101]]).byte())).item() == 0


# Shapes and calls -----------------------------------------------------------------------------


def test_a_row_alone_is_the_row_in_any_batch(kernel):
    weight, _ = random_weight(130, 4100)
    x = random_x((65, 4100))
    prepared = kernel.prepare(weight, kernel.engines[0])
    batch = kernel.apply(x, prepared)
    for m in (1, 2, 4, 5, 12, 13, 24, 40):
        assert torch.equal(kernel.apply(x[:m], prepared), batch[:m]), m


def test_threads_do_not_change_a_bit(kernel):
    weight, _ = random_weight(700, 1024)
    x = random_x((64, 1024))
    alone = run(kernel, x, weight)
    torch.set_num_threads(3)
    try:
        assert torch.equal(run(kernel, x, weight), alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_leading_shapes(kernel, leading):
    weight, _ = random_weight(33, 64)
    x = random_x((*leading, 64))
    y = run(kernel, x, weight)
    assert (y.shape, y.dtype) == ((*leading, 33), torch.bfloat16)
    assert torch.equal(y.reshape(-1, 33), run(kernel, x.reshape(-1, 64), weight))


def test_large_weights_begin_on_a_large_page(kernel):
    weight, _ = random_weight(2048, 4096)
    assert kernel.prepare(weight, kernel.engines[0]).words.data_ptr() % (1 << 21) == 0


@NEEDS_AVX512
@pytest.mark.parametrize("m", [1, 3, 9, 30])
@pytest.mark.parametrize("n", [1, 15, 17, 100, 129])
def test_nothing_is_written_outside_y(m, n):
    """The native functions themselves, with a guarded y."""
    k = 36
    for kind, kernel in (("bfloat16", BF16), ("int8", INT8)):
        weight, _ = random_weight(n, k)
        prepared = kernel.prepare(weight, kernel.engines[0])
        x, guard = random_x((m, k)), 512
        whole = torch.full((m * n + 2 * guard,), 3.0, dtype=torch.bfloat16)
        y = whole[guard:-guard]
        function = ops._function(kind, torch.bfloat16)
        tensors = (x, prepared.words, prepared.scales)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
        function(*pointers, None, ctypes.c_void_p(y.data_ptr()), m, n, k, 0, 1)
        assert torch.equal(y.view(m, n), kernel.apply(x, prepared))
        assert bool((whole[:guard] == 3).all())
        assert bool((whole[-guard:] == 3).all())


@NEEDS_AVX512
@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.zeros(3, 60, dtype=torch.bfloat16), None, "expected x [..., K] with K=64, got [3,"),
        (torch.zeros((), dtype=torch.bfloat16), None, "got []"),
        (torch.zeros(3, 64, dtype=torch.bfloat16, device="meta"), None, "x is on meta"),
        (torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(32), "bias: expected [33]"),
        (torch.zeros(3, 64, dtype=torch.bfloat16), torch.zeros(33).double(), "torch.float64 [33]"),
    ],
)
def test_wrong_call(x, bias, message):
    prepared = BF16.prepare(random_weight(33, 64)[0], BF16.engines[0])
    with pytest.raises(KernelError) as error:
        BF16.apply(x, prepared, bias)
    assert message in str(error.value)


@NEEDS_AVX512
def test_other_dtypes_are_declined():
    prepared = BF16.prepare(random_weight(33, 64)[0], BF16.engines[0])
    with pytest.raises(NotImplementedError, match=r"x must be bfloat16, got torch\.float32"):
        BF16.apply(torch.zeros(3, 64), prepared)


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_opcheck(kernel, biased):
    prepared = kernel.prepare(random_weight(33, 64)[0], kernel.engines[0])
    op = getattr(torch.ops.reconcile_kernels, kernel.op).default
    bias = torch.zeros(33) if biased else None
    arguments = (random_x((5, 64)), prepared.words, prepared.scales, bias, 33, False)
    torch.library.opcheck(op, arguments)
    with pytest.raises(KernelError, match="ternary_cpu: expected x"):
        op(random_x((5, 80)), *arguments[1:])


# The judge's own verdict ----------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_all_probes_pass(kernel, form):
    weight, _ = random_weight(448, 192, form)
    reconcile.check_linear(kernel, weight).raise_for_verdict()


def test_all_probes_pass_with_a_bias(kernel):
    weight, _ = random_weight(144, 132)
    reconcile.check_linear(kernel, weight, bias=random_x((144,))).raise_for_verdict()


@NEEDS_AVX512
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_all_probes_pass_on_other_activations(dtype):
    weight, _ = random_weight(144, 192)
    contract = replace(INT8.contract, output=dtype)
    report = reconcile.check_linear(INT8, weight, dtype=dtype, contract=contract)
    report.raise_for_verdict()
