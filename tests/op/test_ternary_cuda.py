"""`ternary_cuda.naive` against golden vectors, a float32 loop in numpy, and other libraries' casts.

Everything runs on the engine ``cuda-on-cpu``; where there is a GPU, on ``cuda`` too.
"""

import ctypes
import importlib.resources
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from reconcile import native
from reconcile.contract import UNIT_ROUNDOFF
from reconcile.exceptions import KernelError
from reconcile.kernel import Engine, Kernel, LinearSpec
from reconcile.native import NativeLibrary
from reconcile.weight import QuantizedWeight
from reconcile_kernels.ternary_cuda import NAIVE, PreparedTernary, ops
from reconcile_references.ternary import TERNARY_HF, TERNARY_K_INTERLEAVED

CUDA, ON_CPU = NAIVE.engines
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
BITS = {"bfloat16": torch.int16, "float16": torch.int16, "float32": torch.int32}


@pytest.fixture(params=filter(NAIVE.is_supported, NAIVE.engines), ids=lambda engine: engine.name)
def engine(request):
    return request.param


@pytest.mark.parametrize("engine", NAIVE.engines, ids=lambda engine: engine.name)
def test_engine_runs_here(engine):
    """One skip for each engine that the tests below leave out, with its reason."""
    support = NAIVE.is_supported(engine)
    if not support:
        pytest.skip(support.reason)
    assert run(engine, random_x((1, 64)), random_weight(33, 64)).isfinite().all()


@pytest.fixture(scope="module")
def vectors():
    folder = importlib.resources.files("reconcile_fixtures") / "vectors"
    with importlib.resources.as_file(folder) as path:
        return {
            name: tensor
            for file in ("06_ternary", "09_linear")
            for name, tensor in load_file(path / f"{file}.safetensors").items()
        }


def device(engine):
    return "cuda" if engine == CUDA else "cpu"


def random_weight(n, k, seed=0, scale_dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 3, (n, k), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(n, generator=generator) + 0.01).to(scale_dtype)
    return QuantizedWeight.from_tensors(
        TERNARY_K_INTERLEAVED.pack(codes), scales, format=TERNARY_K_INTERLEAVED, shape=(n, k)
    )


def random_x(shape, dtype="bfloat16", seed=1):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(DTYPES[dtype])


def run(engine, x, weight, bias=None):
    """Y on the CPU, whatever the engine."""
    prepared = NAIVE.prepare(weight, engine)
    return NAIVE.apply(x.to(device(engine)), prepared, bias).cpu()


def bits(tensor):
    return tensor.contiguous().view(BITS[str(tensor.dtype).removeprefix("torch.")])


def to_numpy(tensor):
    """The same values in numpy, bfloat16 through ml_dtypes."""
    name = str(tensor.dtype).removeprefix("torch.")
    raw = tensor.contiguous().view(BITS[name]).numpy()
    return raw.view(NUMPY[name])


def decode(packed):
    """Values [N, K] of packed bytes [N, K/4], written from the format's definition."""
    slots = [packed >> shift & 3 for shift in (0, 2, 4, 6)]
    codes = np.stack(slots, axis=-1).reshape(packed.shape[0], -1)
    return np.array([0, 1, -1, 0], dtype=np.float32)[codes]


def stepwise(x, weight, bias=None):
    """The declared arithmetic in numpy: every float32 rounding in its place, then one cast."""
    values, wide = decode(weight.codes.numpy()), to_numpy(x).astype(np.float32)
    total = np.zeros((x.shape[0], values.shape[0]), dtype=np.float32)
    for k in range(values.shape[1]):
        total = total + wide[:, k, None] * values[None, :, k]
    total = total * weight.scales.to(torch.float32).numpy()
    if bias is not None:
        total = total + bias.to(torch.float32).numpy()
    assert total.dtype == np.float32
    return total.astype(to_numpy(x).dtype)


# The kernel as a value ------------------------------------------------------------------------


def test_kernel_object():
    assert isinstance(NAIVE, Kernel)
    assert NAIVE.name == "ternary_cuda.naive"
    assert NAIVE.formats == ("ternary_k_interleaved",)
    assert [engine.name for engine in NAIVE.engines] == ["cuda", "cuda-on-cpu"]
    assert Engine("cuda", "ours", "hardware", "bit_exact") == CUDA
    assert Engine("cuda-on-cpu", "ours", "emulated", "bit_exact") == ON_CPU
    contract = NAIVE.contract
    assert (contract.scale_applied, contract.accumulator) == ("after_sum", "float32")
    assert (contract.deterministic, contract.batch_invariant) == (True, True)


SPEC = LinearSpec(
    n=448, k=192, format="ternary_k_interleaved", bias=False, activation_dtype=torch.bfloat16
)
SPECS = [
    ({}, True, "ternary_k_interleaved, N=448, K=192, bfloat16"),
    ({"activation_dtype": torch.float32}, True, "float32"),
    ({"activation_dtype": torch.float16, "bias": True}, True, "float16"),
    ({"k": 4, "n": 1}, True, "N=1, K=4"),
    ({"format": "ternary_hf"}, False, "reads ternary_k_interleaved, not ternary_hf"),
    ({"k": 190}, False, "K must be a positive multiple of 4 (codes per byte), not 190"),
    ({"k": 0}, False, "K must be a positive multiple of 4 (codes per byte), not 0"),
    ({"n": 0}, False, "N must be 1 to 2097120 (blocks along y), not 0"),
    ({"n": 2097121}, False, "N must be 1 to 2097120"),
    (
        {"activation_dtype": torch.float64},
        False,
        "x must be bfloat16, float32, float16, not float64",
    ),
    ({"k": 3, "format": "bf16"}, False, "not bf16; K must be"),
]


@pytest.mark.parametrize(("change", "ok", "reason"), SPECS)
def test_can_implement(change, ok, reason):
    support = NAIVE.can_implement(replace(SPEC, **change))
    assert support.ok is ok
    assert reason in support.reason


def test_no_compiler_is_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(native, "_NVCC_FOLDER", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("NVCC", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    text = "no C++ compiler: looked for $CXX, c++, g++, clang++"
    support = NAIVE.is_supported(ON_CPU)
    assert (support.ok, support.reason) == (False, text)
    with pytest.raises(KernelError, match=r"layer: no C\+\+ compiler"):
        NAIVE.prepare(replace(random_weight(4, 8), name="layer"), ON_CPU)
    support = NAIVE.is_supported(CUDA)
    assert not support
    assert support.reason.startswith(
        "no CUDA compiler: looked for $NVCC, nvcc, /nowhere/nvcc; no CUDA device: torch "
    )


def test_no_device_is_the_reason(tmp_path, monkeypatch):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o700)
    monkeypatch.setenv("NVCC", str(nvcc))
    monkeypatch.setattr(torch.version, "cuda", None)
    support = NAIVE.is_supported(CUDA)
    assert not support
    assert support.reason == (f"no CUDA device: torch {torch.__version__} was built without CUDA")


def test_unknown_engine():
    support = NAIVE.is_supported(Engine("cuda-on-cpi"))
    assert not support
    assert 'no engine "cuda-on-cpi"; did you mean "cuda-on-cpu"?' in support.reason
    with pytest.raises(KernelError, match="no engine"):
        NAIVE.build(Engine("amx"))


# Decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_decodes(engine, dtype, vectors):
    """Row n holds byte n; an impulse at k reads its slot k. Code 3 counts as 0."""
    weight = QuantizedWeight(
        codes=torch.arange(256, dtype=torch.uint8)[:, None],
        scales=torch.ones(256),
        format=TERNARY_K_INTERLEAVED,
        shape=(256, 4),
    )
    y = run(engine, torch.eye(4, dtype=DTYPES[dtype]), weight)
    expected = torch.from_numpy(vectors["kint.all_bytes.unpacked"]).T
    assert torch.equal(y, expected.to(DTYPES[dtype]))
    assert (expected[:, 0b11111111] == 0).all()


SHAPES = ["8x4", "5x8", "7x12", "33x96"]


@pytest.mark.parametrize("shape", SHAPES)
def test_impulses_give_the_weight(engine, shape, vectors):
    values = torch.from_numpy(vectors[f"kint.{shape}.w"]).float()
    n, k = values.shape
    weight = QuantizedWeight.from_tensors(
        torch.from_numpy(vectors[f"kint.{shape}.packed"]),
        torch.from_numpy(vectors[f"kint.{shape}.scale_f32"]),
        format=TERNARY_K_INTERLEAVED,
        shape=(n, k),
    )
    y = run(engine, torch.eye(k), weight)
    assert torch.equal(y, (values * weight.scales[:, None]).T)


# Arithmetic -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_golden_linear(engine, dtype, vectors):
    """Within gamma_K * S of the exact result, then one rounding to the dtype of y."""
    codes = torch.from_numpy(vectors["kint_ternary.packed"])
    n, k = codes.shape[0], 4 * codes.shape[1]
    weight = QuantizedWeight.from_tensors(
        codes,
        torch.from_numpy(vectors["kint_ternary.scale_f32"]),
        format=TERNARY_K_INTERLEAVED,
        shape=(n, k),
    )
    stored = torch.from_numpy(vectors["kint_ternary.x_bf16"].view(np.int16)).view(torch.bfloat16)
    x = stored.to(DTYPES[dtype])
    if dtype == "float16" and not torch.equal(x.float(), stored.float()):
        pytest.fail("the golden x is not exact in float16")
    exact = torch.from_numpy(vectors["kint_ternary.y_f64"])
    u = UNIT_ROUNDOFF["float32"]
    before_cast = k * u / (1 - k * u) * torch.from_numpy(vectors["kint_ternary.abs_f64"])
    cast = 0.0 if dtype == "float32" else UNIT_ROUNDOFF[dtype]
    bound = before_cast + cast * (exact.abs() + before_cast)
    error = (run(engine, x, weight).double() - exact).abs()
    assert bool((error <= bound).all()), f"largest share of the bound: {(error / bound).max()}"


STEPWISE = [(m, n, k) for m in (1, 4, 5) for n, k in ((1, 4), (31, 8), (33, 100), (64, 192))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("m", "n", "k"), STEPWISE)
def test_every_rounding_is_where_it_is_declared(engine, m, n, k, biased, dtype):
    weight = random_weight(n, k)
    bias = random_x((n,), "float32", seed=3) if biased else None
    x = random_x((m, k), dtype)
    assert to_numpy(run(engine, x, weight, bias)).tobytes() == stepwise(x, weight, bias).tobytes()


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
def test_narrow_scales_are_widened_exactly(engine, scale_dtype):
    weight = random_weight(33, 64, scale_dtype=scale_dtype)
    wide = replace(weight, scales=weight.scales.float())
    assert NAIVE.prepare(weight, engine).scales.dtype == torch.float32
    x = random_x((4, 64))
    assert torch.equal(run(engine, x, weight), run(engine, x, wide))


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bias_is_added_after_the_scale_in_float32(engine, bias_dtype):
    weight = random_weight(33, 64)
    bias = random_x((33,), "float32", seed=5).to(bias_dtype)
    x = random_x((4, 64))
    y = run(engine, x, weight, bias)
    assert to_numpy(y).tobytes() == stepwise(x, weight, bias).tobytes()
    assert torch.equal(run(engine, torch.zeros(2, 64), weight, bias), bias.float().expand(2, 33))


def edge_scales():
    """float32 [N]: every upper half with the lower halves around a bfloat16 tie."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    patterns = (upper[:, None] | lower).flatten()
    return patterns.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_output_rounding(engine, dtype):
    """x = 1, w = 1: y is the scale, rounded once. Ties, subnormals, overflow, Inf and NaN."""
    scales = edge_scales()
    weight = QuantizedWeight(
        codes=torch.ones(len(scales), 1, dtype=torch.uint8),
        scales=scales,
        format=TERNARY_K_INTERLEAVED,
        shape=(len(scales), 4),
    )
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=DTYPES[dtype])
    y = run(engine, x, weight)[0]
    nan = scales.isnan()
    with np.errstate(over="ignore", invalid="ignore"):
        cast = scales.numpy().astype(NUMPY[dtype])
    for expected in (scales.to(DTYPES[dtype]), torch.from_numpy(cast.view(bits(y).numpy().dtype))):
        assert torch.equal(bits(y)[~nan], bits(expected.view(DTYPES[dtype]))[~nan])
    quiet = {"bfloat16": 0x7FC0, "float16": 0x7E00, "float32": 0x7FC00000}[dtype]
    assert bool((bits(y)[nan] == quiet).all())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_x_is_widened_exactly(engine, dtype):
    """All 65536 patterns of x through w = 1 into y; -0 becomes +0, since the sum starts at +0."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    columns = torch.zeros(1 << 16, 4, dtype=DTYPES[dtype])
    columns[:, 2] = x
    codes = torch.tensor([[0b00010000]], dtype=torch.uint8)
    weight = QuantizedWeight.from_tensors(
        codes, torch.ones(1), format=TERNARY_K_INTERLEAVED, shape=(1, 4)
    )
    y = run(engine, columns, weight)[:, 0]
    assert torch.equal(y.isnan(), x.isnan())
    assert torch.equal(y[~x.isnan()], x[~x.isnan()])


SPECIAL = [
    # x, byte (k = 0..3 low bits first), result
    ([float("inf"), 1.0, 0.0, 0.0], 0b00000101, float("inf")),
    ([float("inf"), 1.0, 0.0, 0.0], 0b00000110, float("-inf")),
    ([float("inf"), float("inf"), 0.0, 0.0], 0b00001001, float("nan")),
    ([float("inf"), 1.0, 0.0, 0.0], 0b00000100, float("nan")),
    ([float("nan"), 1.0, 0.0, 0.0], 0b00000101, float("nan")),
    ([float("nan"), 1.0, 0.0, 0.0], 0b00000100, float("nan")),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("x", "byte", "expected"), SPECIAL)
def test_inf_and_nan_reach_y_as_in_a_matmul(engine, x, byte, expected, dtype):
    weight = QuantizedWeight.from_tensors(
        torch.tensor([[byte]], dtype=torch.uint8),
        torch.ones(1),
        format=TERNARY_K_INTERLEAVED,
        shape=(1, 4),
    )
    x = torch.tensor([x], dtype=DTYPES[dtype])
    y = run(engine, x, weight)
    assert torch.equal(y.isnan(), torch.tensor([[expected != expected]]))
    assert expected != expected or y.item() == expected
    matmul = x.double() @ weight.dequantize().T
    assert torch.allclose(y.double(), matmul, rtol=0, atol=0, equal_nan=True)


def test_subnormals_are_kept(engine):
    weight = replace(random_weight(1, 4), codes=torch.tensor([[1]], dtype=torch.uint8))
    weight = replace(weight, scales=torch.ones(1))
    x = torch.tensor([[2.0**-149, 0.0, 0.0, 0.0]])
    assert run(engine, x, weight).item() == 2.0**-149


# Shapes and calls -----------------------------------------------------------------------------

LEADING = [(), (1,), (5,), (2, 3), (2, 1, 3), (1, 1)]


@pytest.mark.parametrize("leading", LEADING)
def test_leading_shapes(engine, leading):
    weight = random_weight(33, 64)
    x = random_x((*leading, 64))
    y = run(engine, x, weight)
    assert y.shape == (*leading, 33)
    assert y.dtype == torch.bfloat16
    assert torch.equal(bits(y.reshape(-1, 33)), bits(run(engine, x.reshape(-1, 64), weight)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_is_the_row_in_the_batch(engine, dtype):
    weight, x = random_weight(65, 128), random_x((9, 128), dtype)
    batch = run(engine, x, weight)
    for m in range(9):
        assert torch.equal(bits(run(engine, x[m : m + 1], weight)), bits(batch[m : m + 1]))


LAYOUTS = {
    "transposed": lambda: random_x((64, 6)).T,
    "every second row": lambda: random_x((12, 64))[::2],
    "every second column": lambda: random_x((6, 128))[:, ::2],
    "offset": lambda: random_x((7, 65)).flatten()[3 : 3 + 6 * 64].view(6, 64),
    "expanded": lambda: random_x((1, 64)).expand(6, 64),
    "leading transposed": lambda: random_x((3, 2, 64)).transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_x_does_not_matter_and_x_is_left_alone(engine, layout):
    weight, x = random_weight(33, 64), LAYOUTS[layout]().to(device(engine))
    before, strides = x.clone(), x.stride()
    y = run(engine, x, weight)
    assert torch.equal(bits(y), bits(run(engine, before.contiguous(), weight)))
    assert torch.equal(bits(x), bits(before))
    assert x.stride() == strides


@pytest.mark.parametrize("leading", [(0,), (2, 0), (0, 3)])
def test_no_rows_launch_nothing(leading, engine, monkeypatch):
    prepared = NAIVE.prepare(random_weight(33, 64), engine)
    monkeypatch.setattr(ops, "ternary_naive", None)
    x = torch.empty((*leading, 64), dtype=torch.bfloat16, device=device(engine))
    y = NAIVE.apply(x, prepared)
    assert y.shape == (*leading, 33)
    assert y.dtype == torch.bfloat16


def test_op_without_rows(engine):
    prepared = NAIVE.prepare(random_weight(33, 64), engine)
    x = torch.empty((0, 64), device=device(engine))
    assert ops.ternary_naive(x, prepared.codes, prepared.scales, None).shape == (0, 33)


def test_all_of_y_is_written(engine):
    """torch fills what it allocates with NaN here; none is left."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device=device(engine)).isnan().all()
        assert run(engine, random_x((5, 64)), random_weight(33, 64)).isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_prepare_keeps_the_stored_bytes(engine):
    weight = random_weight(33, 64)
    prepared = NAIVE.prepare(weight, engine)
    assert isinstance(prepared, PreparedTernary)
    assert (prepared.n, prepared.k, prepared.engine) == (33, 64, engine)
    assert torch.equal(prepared.codes.cpu(), weight.codes)
    assert prepared.codes.device.type == device(engine)


# Errors ---------------------------------------------------------------------------------------

NEEDS_CXX = pytest.mark.skipif(
    native.find_cxx() is None, reason="no C++ compiler: looked for $CXX, c++, g++, clang++"
)
WRONG_CALLS = [
    (torch.zeros(3, 60), None, "expected x [..., K] with K=64, got [3, 60] with K=60"),
    (torch.zeros(()), None, "expected x [..., K] with K=64, got []"),
    (torch.zeros(3, 64, device="meta"), None, "prepared for cuda-on-cpu on cpu, x is on meta"),
    (torch.zeros(3, 64), torch.zeros(32), "bias: expected [33] in torch.float32"),
    (torch.zeros(3, 64), torch.zeros(33, dtype=torch.float64), "got torch.float64 [33]"),
]


@NEEDS_CXX
@pytest.mark.parametrize(("x", "bias", "message"), WRONG_CALLS)
def test_wrong_call(x, bias, message):
    prepared = NAIVE.prepare(random_weight(33, 64), ON_CPU)
    with pytest.raises(KernelError) as error:
        NAIVE.apply(x, prepared, bias)
    assert message in str(error.value)


@NEEDS_CXX
@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_other_dtypes_are_declined(dtype):
    prepared = NAIVE.prepare(random_weight(33, 64), ON_CPU)
    with pytest.raises(NotImplementedError, match="x must be bfloat16, float32, float16"):
        NAIVE.apply(torch.zeros(3, 64).to(dtype), prepared)


def test_other_formats_are_refused():
    weight = QuantizedWeight.from_tensors(
        torch.zeros(2, 8, dtype=torch.uint8),
        torch.ones(1),
        format=TERNARY_HF,
        shape=(8, 8),
        name="layers.0",
    )
    with pytest.raises(
        KernelError, match=r"layers\.0: .*reads ternary_k_interleaved, not ternary_hf"
    ):
        NAIVE.prepare(weight, ON_CPU)


OP_CALLS = [
    (torch.zeros(3, 60), (33, 16), 33, None),
    (torch.zeros(64), (33, 16), 33, None),
    (torch.zeros(3, 64, dtype=torch.float64), (33, 16), 33, None),
    (torch.zeros(3, 64), (33, 16), 32, None),
    (torch.zeros(3, 64), (33, 16), 33, torch.zeros(1)),
    (torch.zeros(3, 64), (33, 16), 33, torch.zeros(33, dtype=torch.bfloat16)),
]


@pytest.mark.parametrize(("x", "codes", "scales", "bias"), OP_CALLS)
def test_op_refuses_what_the_native_code_cannot_read(x, codes, scales, bias):
    arguments = (x, torch.zeros(codes, dtype=torch.uint8), torch.ones(scales), bias)
    with pytest.raises(KernelError, match=r"ternary_naive: expected x \[M, K\].*; got x "):
        torch.ops.reconcile_kernels.ternary_naive(*arguments)


def test_op_reads_operands_of_any_layout(engine):
    prepared, place = NAIVE.prepare(random_weight(33, 64), engine), device(engine)
    x, bias = random_x((5, 64)).to(place), random_x((33,), "float32").to(place)
    operands = (x, prepared.codes, prepared.scales, bias)
    spread = [operand.repeat_interleave(2, dim=-1)[..., ::2] for operand in operands]
    assert not any(operand.is_contiguous() for operand in spread)
    assert torch.equal(ops.ternary_naive(*spread), ops.ternary_naive(*operands))


# Registration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(engine, dtype, biased):
    prepared = NAIVE.prepare(random_weight(33, 64), engine)
    bias = torch.ones(33, device=device(engine)) if biased else None
    x = random_x((5, 64), dtype).to(device(engine))
    for operand in (x, x[::2], x[:, :64].T.contiguous().T):
        torch.library.opcheck(
            torch.ops.reconcile_kernels.ternary_naive.default,
            (operand, prepared.codes, prepared.scales, bias),
        )


# Native sources -------------------------------------------------------------------------------


@NEEDS_CXX
def test_build_ahead_of_time(tmp_path, monkeypatch):
    monkeypatch.setenv("RECONCILE_CACHE", str(tmp_path))
    path = NAIVE.build(ON_CPU)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.name.startswith("ternary_naive-cpu-")


def test_cuda_source_compiles(tmp_path, monkeypatch):
    support = ops.CUDA.available()
    if not support:
        pytest.skip(support.reason)
    monkeypatch.setenv("RECONCILE_CACHE", str(tmp_path))
    path = NAIVE.build(CUDA)
    assert path.read_bytes()[:4] == b"\x7fELF"
    loaded = ctypes.CDLL(str(path))  # needs neither a driver nor a GPU
    for dtype in DTYPES:
        assert hasattr(loaded, f"ternary_naive_{dtype}")
    loaded.ternary_naive_error.restype = ctypes.c_char_p
    assert loaded.ternary_naive_error(0) == b"no error"


@NEEDS_CXX
def test_grid_visits_every_thread_once(tmp_path, monkeypatch):
    monkeypatch.setenv("RECONCILE_CACHE", str(tmp_path / "cache"))
    header = ops.CPU.headers[0]
    source = tmp_path / "count.cu"
    source.write_text(
        f"""#include "{header}"
__global__ void count(int *seen) {{
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  seen[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1;
}}
extern "C" void run(int *seen) {{
  LAUNCH(count, dim3(2, 3, 4), dim3(5, 6, 7), (cudaStream_t)0, seen);
}}
"""
    )
    library = NativeLibrary(name="count", sources=(source,), headers=(header,))
    seen = (ctypes.c_int * (2 * 3 * 4 * 5 * 6 * 7))()
    library.load().run(seen)
    assert set(seen) == {1}
