"""The CUDA variants on the emulated grid: numbers, shapes, and mutants that the grid must catch."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import reconcile
from reconcile import native, registry
from reconcile.exceptions import KernelError
from reconcile.kernel import Engine, Kernel, LinearSpec
from reconcile.native import NativeLibrary
from reconcile.weight import QuantizedWeight
from reconcile_kernels.ternary_cuda import NAIVE, variant_ops, variants

FOLDER = Path(variant_ops.__file__).parent
ROW = (variants.VECTORISED, variants.TILED, variants.MASKS)
BLOCK = (variants.VECTORISED_BLOCK, variants.TILED_BLOCK, variants.MASKS_BLOCK)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
K_INTERLEAVED = registry.formats()["ternary_k_interleaved"]
TQ2_0 = registry.formats()["ternary_tq2_0"]
ON_CPU = NAIVE.engines[1]

pytestmark = pytest.mark.skipif(
    native.find_cxx() is None, reason="no C++ compiler: looked for $CXX, c++, g++, clang++"
)


def name_of(value):
    return getattr(value, "name", str(value))


def random_weight(n, k, form=K_INTERLEAVED, seed=0):
    """A weight whose values are known without decoding: (weight, values int8 [N, K])."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-1, 2, (n, k), generator=generator, dtype=torch.int8)
    scales = torch.rand(form.scale_shape((n, k)), generator=generator) + 0.01
    weight = QuantizedWeight.from_tensors(
        form.pack(form.encode(values)),
        scales.to(form.scale_dtypes[0]),
        format=form,
        shape=(n, k),
    )
    return weight, values


def random_x(shape, dtype=torch.bfloat16, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(kernel, x, weight, bias=None):
    return kernel.apply(x, kernel.prepare(weight, ON_CPU), bias)


# The kernels as values ------------------------------------------------------------------------


def test_kernel_objects():
    for kernel in variants.ALL:
        assert isinstance(kernel, Kernel)
        assert registry.kernel(kernel.name) is kernel
        assert kernel.contract.batch_invariant
        by_block = kernel.name.endswith("_block")
        assert kernel.contract.scale_applied == ("after_block" if by_block else "after_sum")
        assert ("ternary_tq2_0" in kernel.formats) is by_block
        assert ("ternary_hf" in kernel.formats) is not by_block
    assert variants.MMA.engines == (Engine("cuda", fidelity="semantic"),)
    assert "mma" not in variant_ops.CPU


SPEC = LinearSpec(n=448, k=192, format="ternary_hf", bias=False, activation_dtype=torch.bfloat16)
SPECS = [
    (variants.VECTORISED, {}, True, "ternary_hf, N=448, K=192, bfloat16"),
    (variants.VECTORISED, {"k": 200}, False, "K must be a positive multiple of 64 (aligned"),
    (variants.TILED, {"k": 208, "activation_dtype": torch.float32}, True, "K=208, float32"),
    (variants.TILED, {"k": 200}, False, "multiple of 16"),
    (variants.MASKS, {"k": 200, "activation_dtype": torch.float16}, True, "K=200, float16"),
    (variants.MASKS, {"k": 0, "n": 0}, False, "not 0; N must be positive, not 0"),
    (variants.MASKS, {"activation_dtype": torch.float64}, False, "not float64"),
    (variants.MMA, {"activation_dtype": torch.float32}, False, "x must be bfloat16, float16"),
    (variants.TILED, {"format": "ternary_tq2_0"}, False, "not ternary_tq2_0"),
    (variants.TILED_BLOCK, {"format": "ternary_tq2_0"}, True, "ternary_tq2_0"),
]


@pytest.mark.parametrize(("kernel", "change", "ok", "reason"), SPECS, ids=name_of)
def test_can_implement(kernel, change, ok, reason):
    support = kernel.can_implement(replace(SPEC, **change))
    assert support.ok is ok
    assert reason in support.reason


def test_another_block_than_the_formats_own_is_refused():
    weight, _ = random_weight(4, 512, TQ2_0)
    odd = replace(weight, format=replace(TQ2_0, block=(1, 96)), name="layer")
    with pytest.raises(KernelError, match=r"layer: .* a multiple of 64 values of K, .* \[1, 96\]"):
        variants.TILED_BLOCK.prepare(odd, ON_CPU)


def test_words_are_packed_by_their_definition():
    _, values = random_weight(5, 96)
    words, planes = variants.interleaved_words(values), variants.mask_words(values[:, :72])
    for n in range(5):
        for k in range(96):
            code = int(words[n * 6 + k // 16]) >> 2 * (k % 16) & 3
            assert (0, 1, -1)[code] == values[n, k]
        for k in range(72):
            plus, minus = (int(planes[n * 6 + 2 * (k // 32) + i]) >> k % 32 & 1 for i in (0, 1))
            assert plus - minus == values[n, k]


# Arithmetic -----------------------------------------------------------------------------------


def lanes_sum(x, values, chunk, lanes=8):
    """float32 [M, N]: chunks of K in turn to lanes, each summed in order; then folded in halves."""
    total = np.zeros((lanes, x.shape[0], values.shape[0]), dtype=np.float32)
    for i, start in enumerate(range(0, x.shape[1], chunk)):
        part = np.zeros(total.shape[1:], dtype=np.float32)
        for k in range(start, min(start + chunk, x.shape[1])):
            part = part + x[:, k, None] * values[None, :, k]
        total[i % lanes] = total[i % lanes] + part
    while len(total) > 1:
        total = total[: len(total) // 2] + total[len(total) // 2 :]
    return total[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 5, 64), (5, 17, 576), (9, 33, 128)])
def test_every_rounding_is_where_it_is_declared(m, n, k, dtype):
    """Bits against numpy; tiled adds in the order of k, as naive does."""
    weight, values = random_weight(n, k)
    x, bias = random_x((m, k), dtype), random_x((n,), torch.float32, seed=3)
    wide, factors = x.float().numpy(), values.numpy().astype(np.float32)
    for kernel, chunk in ((variants.VECTORISED, 64), (variants.MASKS, 32)):
        total = lanes_sum(wide, factors, chunk) * weight.scales.numpy() + bias.numpy()
        assert total.dtype == np.float32
        assert torch.equal(run(kernel, x, weight, bias), torch.from_numpy(total).to(dtype))
    assert torch.equal(run(variants.TILED, x, weight, bias), run_in_tiles(x, weight, values, bias))


def run_in_tiles(x, weight, values, bias):
    """Sums of 64 k each in order, added in order."""
    wide, factors = x.float().numpy(), values.numpy().astype(np.float32)
    total = np.zeros((x.shape[0], values.shape[0]), dtype=np.float32)
    for start in range(0, x.shape[1], 64):
        part = np.zeros_like(total)
        for k in range(start, min(start + 64, x.shape[1])):
            part = part + wide[:, k, None] * factors[None, :, k]
        total = total + part
    return torch.from_numpy(total * weight.scales.numpy() + bias.numpy()).to(x.dtype)


@pytest.mark.parametrize("kernel", BLOCK, ids=name_of)
def test_a_scale_belongs_to_its_block(kernel):
    weight, _ = random_weight(20, 768, TQ2_0)
    x = torch.randint(-3, 4, (6, 768), generator=torch.Generator().manual_seed(0)).float()
    exact = x.double() @ weight.dequantize().T
    size = x.double().abs() @ weight.dequantize().abs().T
    assert bool(((run(kernel, x, weight).double() - exact).abs() <= 770 * 2.0**-24 * size).all())


@pytest.mark.parametrize("kernel", [*ROW, *BLOCK], ids=name_of)
def test_all_probes_pass(kernel):
    form = TQ2_0 if kernel in BLOCK else K_INTERLEAVED
    weight, _ = random_weight(72, 256, form)
    probes = ("code_table", "edge", "special", "layout", "bound", "batch", "integer")
    reconcile.check_linear(kernel, weight, probes=probes).raise_for_verdict()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("kernel", "form"),
    [(kernel, form) for kernel in (*ROW, *BLOCK) for form in kernel.formats],
    ids=name_of,
)
def test_all_probes_pass_on_every_format_and_dtype(kernel, form, dtype):
    weight, _ = random_weight(128, 256, registry.formats()[form])
    contract = replace(kernel.contract, output=dtype)
    report = reconcile.check_linear(kernel, weight, contract=contract, dtype=dtype)
    report.raise_for_verdict()
    assert {row.execution for row in report.rows} == {"emulated"}


# Shapes and calls -----------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ROW, ids=name_of)
@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (0,)])
def test_leading_shapes(kernel, leading):
    weight, _ = random_weight(33, 64)
    x = random_x((*leading, 64))
    y = run(kernel, x, weight)
    assert (y.shape, y.dtype) == ((*leading, 33), torch.bfloat16)
    assert torch.equal(y.reshape(-1, 33), run(kernel, x.reshape(-1, 64), weight))


@pytest.mark.parametrize("kernel", ROW, ids=name_of)
def test_x_that_begins_between_boundaries_is_copied(kernel):
    """Contiguous, but no vector load may touch it where it lies."""
    weight, _ = random_weight(33, 64)
    x = random_x((1 + 6 * 64,)).flatten()[1:].view(6, 64)
    assert x.is_contiguous()
    assert x.data_ptr() % 16
    assert torch.equal(run(kernel, x, weight), run(kernel, x.clone(), weight))


@pytest.mark.parametrize("kernel", ROW, ids=name_of)
def test_opcheck(kernel):
    weight, _ = random_weight(33, 64)
    p = kernel.prepare(weight, ON_CPU)
    arguments = (random_x((5, 64)), p.words, p.scales, None, kernel.variant, 33, 0, False)
    torch.library.opcheck(torch.ops.reconcile_kernels.ternary_cuda.default, arguments)
    with pytest.raises(KernelError, match=r"ternary_cuda: expected x \[M, K\]"):
        torch.ops.reconcile_kernels.ternary_cuda(random_x((5, 640)), *arguments[1:])


def test_tensor_cores_are_not_emulated():
    p = variants.VECTORISED.prepare(random_weight(33, 64)[0], ON_CPU)
    with pytest.raises(KernelError, match="'mma' does not run on cpu"):
        variant_ops.ternary_cuda(random_x((1, 64)), p.words, p.scales, None, "mma", 33, 0, False)
    with pytest.raises(KernelError, match='no engine "cuda-on-cpu"'):
        variants.MMA.build(ON_CPU)


# Mutants that the grid itself must catch --------------------------------------------------------

MUTANTS = [
    # source, what is replaced (once), by what, what the grid says
    ("tiled", "    __syncthreads();\n    float parts", "    float parts",
     "shared w_tile[80] is read before it was written"),
    ("tiled", "    __syncthreads();\n  }\n", "  }\n", "without a barrier"),
    ("tiled", "top + m < o.M && start", "start", "vector load out of bounds"),
    ("tiled", "inside ? o.w.get(place) : 0u", "o.w.get(place)", "load out of bounds"),
    ("tiled", "if (m < o.M && n < o.N) o.store", "o.store", "out of bounds"),
    ("tiled", "    __syncthreads();\n    float", "    if (thread) __syncthreads();\n    float",
     "shared w_tile[80] is read before it was written"),
    ("vectorised", "vector<typename Number::Vector>(row + i)",
     "vector<typename Number::Vector>(row + i + 1)", "misaligned vector load of 16 bytes"),
    ("vectorised", "(n * o.K + k) / 16)", "(n * o.K + k) / 16 + 1)", "misaligned vector load"),
    ("vectorised", "      if (first + r >= o.M) continue;\n", "", "vector load out of bounds"),
    ("vectorised", "  float sums[ROWS]", "  if (n >= o.N) return;\n  float sums[ROWS]",
     "a warp collective that not all lanes reach"),
    ("masks", "(int)(o.K - k < BITS ? o.K - k : BITS)", "BITS", "vector load out of bounds"),
    ("masks", "lane != 0 || n >= o.N", "lane != 0", "out of bounds"),
]  # fmt: skip


@pytest.fixture(scope="module")
def mutants(tmp_path_factory):
    """Every mutant in a namespace of its own, in one library."""
    parts = ['#include "ternary.h"\n']
    for i, (source, old, new, _) in enumerate(MUTANTS):
        text = (FOLDER / f"{source}.cu").read_text()
        assert text.count(old) == 1, (source, old)
        body = text.replace(old, new).replace('#include "ternary.h"', "")
        body = body.replace(
            f"EXPORT({source}, ", f"EXPORT_ONE(ternary_mutant{i}_bfloat16, BFloat16, "
        )
        parts.append(f"namespace mutant{i} {{\n{body}\n}}\n")
        parts.append(
            f'extern "C" const char *ternary_mutant{i}_error(int code) '
            "{ return cudaGetErrorString(code); }\n"
        )
    path = tmp_path_factory.mktemp("mutants") / "mutants.cu"
    path.write_text("".join(parts))
    return NativeLibrary(
        name="ternary_mutants", sources=(path,), headers=(), flags=(f"-I{FOLDER}", "-O1")
    )


@pytest.mark.parametrize("i", range(len(MUTANTS)), ids=[f"{m[0]}-{m[2]:.30}" for m in MUTANTS])
def test_mutants_are_caught_by_the_grid(mutants, i, monkeypatch):
    source, _, _, says = MUTANTS[i]
    kernel = next(kernel for kernel in ROW if kernel.variant == source)
    weight, _ = random_weight(33, 72 if source == "masks" else 192)
    monkeypatch.setitem(variant_ops.CPU, f"mutant{i}", mutants)
    p = kernel.prepare(weight, ON_CPU)
    x = random_x((5, p.k))
    with pytest.raises(KernelError, match="CUDA error 700") as error:
        variant_ops.ternary_cuda(x, p.words, p.scales, None, f"mutant{i}", 33, 0, False)
    assert says in str(error.value)
