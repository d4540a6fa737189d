"""torch_npu's own schemas and vllm-ascend's own class over the operators on the CPU.

They run where both packages are installed: ``make npu-cases`` runs this file there.
"""

import importlib
import importlib.util

import pytest
import torch

import reconcile
from reconcile.checking.probes import random_weight, synthetic
from reconcile.grouped import GroupedWeight
from reconcile.registry import formats, kernel
from reconcile.weight import QuantizedWeight
from reconcile_kernels.mxfp8_npu import device, layout, linear, operators
from reconcile_kernels.mxfp8_npu.device import NPU, NPU_EMULATED, NPU_SCHEMAS

HERE = all(importlib.util.find_spec(name) for name in ("torch_npu", "vllm_ascend"))
PUBLISHED = kernel("vllm_ascend.mxfp8")
OURS = kernel("mxfp8_npu")
needs_npu_packages = pytest.mark.skipif(not HERE, reason="torch_npu and vllm_ascend: make npu")


def weight_of(shape, name="mxfp8_e4m3", seed=0):
    form = formats()[name]
    seedling = synthetic(form, torch.zeros(shape), torch.ones(form.scale_shape(shape)))
    made = random_weight(seedling, shape, torch.Generator().manual_seed(seed))
    return QuantizedWeight.from_tensors(made.codes, made.scales, format=form, shape=shape)


@pytest.mark.skipif(HERE, reason="they are installed here")
def test_without_them_the_kernel_says_what_is_missing():
    support = PUBLISHED.is_supported(PUBLISHED.engines[0])
    assert not support
    assert support.reason == "torch_npu and vllm_ascend not installed; `make npu` installs it"
    for engine in (NPU, NPU_SCHEMAS):
        assert OURS.is_supported(engine).reason == "torch_npu is not installed"


@needs_npu_packages
def test_the_real_schemas_reach_our_operators():
    from reconcile_kernels.mxfp8_npu.registered import register

    register()
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours = operators.npu_dynamic_mx_quant(x, dst_type=torch.float8_e4m3fn, scale_alg=1)
    theirs = torch.ops.npu.npu_dynamic_mx_quant(x, dst_type=torch.float8_e4m3fn, scale_alg=1)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    with pytest.raises(NotImplementedError, match="only float8_e4m3fn"):
        torch.ops.npu.npu_dynamic_mx_quant(x)  # FP4 is the operator's default


@needs_npu_packages
@pytest.mark.parametrize("k", [96, 224, 256])
def test_the_published_class_passes_every_probe(k):
    """K = 96 and 224 have an odd number of groups."""
    reconcile.check_linear(PUBLISHED, weight_of((48, k))).raise_for_verdict()


@needs_npu_packages
def test_the_published_class_lays_the_weight_out_as_ours_does():
    weight = weight_of((40, 96))
    layer = PUBLISHED.prepare(weight, PUBLISHED.engines[0])
    codes, scales = layout.pack(weight.codes, weight.scales)
    assert torch.equal(layer.weight.view(torch.uint8), codes)
    assert torch.equal(layer.weight_scale, scales)


def mixture_layer(weights, scales):
    """A layer of experts as vLLM hands it over, through vllm-ascend's own loading."""
    PUBLISHED.prepare(weight_of((32, 64)), PUBLISHED.engines[0])  # imports the package
    module = importlib.import_module("vllm_ascend.quantization.methods.w8a8_mxfp8")
    method = object.__new__(module.AscendW8A8MXFP8DynamicFusedMoEMethod)  # asks for a device
    layer = torch.nn.Module()
    for name in ("w13", "w2"):
        codes = weights[name].view(torch.float8_e4m3fn)
        setattr(layer, f"{name}_weight", torch.nn.Parameter(codes, requires_grad=False))
        held = torch.nn.Parameter(scales[name], requires_grad=False)
        setattr(layer, f"{name}_weight_scale", held)
    method.process_weights_after_loading(layer)
    return layer


@needs_npu_packages
@pytest.mark.parametrize("part", ["w13", "w2"])
def test_the_published_class_lays_experts_out_as_ours_does(part):
    hidden, inner, experts = 192, 128, 3
    shapes = {"w13": (2 * inner, hidden), "w2": (hidden, inner)}
    mixture = {
        name: GroupedWeight(
            groups=tuple(weight_of(shape, seed=expert) for expert in range(experts)), name=name
        )
        for name, shape in shapes.items()
    }
    codes, scales = (
        {n: torch.stack([getattr(g, field) for g in w.groups]) for n, w in mixture.items()}
        for field in ("codes", "scales")
    )
    layer = mixture_layer(codes, scales)
    ours = OURS.prepare(mixture[part], NPU_SCHEMAS)
    assert torch.equal(getattr(layer, f"{part}_weight").view(torch.uint8), ours.codes)
    assert torch.equal(getattr(layer, f"{part}_weight_scale"), ours.scales)


@needs_npu_packages
def test_the_published_class_has_no_layout_for_an_odd_number_of_groups():
    """Three groups: the kernel says that it does not implement it (`fallback`)."""
    codes = {n: torch.zeros(2, 64, 96, dtype=torch.uint8) for n in ("w13", "w2")}
    scales = {n: torch.zeros(2, 64, 3, dtype=torch.uint8) for n in ("w13", "w2")}
    with pytest.raises(RuntimeError, match="shape"):
        mixture_layer(codes, scales)


# --- the code of the engine ``npu``, without an NPU -----------------------------------------------
# ``npu-schemas`` makes the same calls; torch_npu's dispatcher checks them against its declarations
# and ends in the operators on the CPU, so every row says ``emulated``.


@needs_npu_packages
@pytest.mark.parametrize("k", [96, 224, 256])
@pytest.mark.parametrize("name", ["mxfp8_npu", "mxfp8_npu.scale_alg_1"])
@pytest.mark.parametrize("form", ["fp8_e4m3_block", "mxfp8_e4m3"])
def test_the_calls_of_the_npu_pass_every_probe(name, form, k):
    weight = weight_of((48, k), form)
    report = reconcile.check_linear(kernel(name), weight, engine="npu-schemas")
    report.raise_for_verdict()
    assert {(row.engine, row.execution) for row in report.rows} == {("npu-schemas", "emulated")}


def calls(monkeypatch):
    """What torch_npu's own functions are called with."""
    torch_npu, seen = pytest.importorskip("torch_npu"), []

    def record(name):
        own = getattr(torch_npu, name)

        def call(*arguments, **options):
            seen.append((name, options))
            return own(*arguments, **options)

        monkeypatch.setattr(torch_npu, name, call)

    record("npu_dynamic_mx_quant")
    record("npu_quant_matmul")
    return torch_npu, seen


@needs_npu_packages
@pytest.mark.parametrize("biased", [False, True])
def test_the_npu_is_called_as_vllm_ascend_calls_it(monkeypatch, biased):
    """An Ascend 950 by name alone: the tensors stay on the CPU."""
    torch_npu, seen = calls(monkeypatch)
    monkeypatch.setattr(torch_npu.npu, "is_available", lambda: True)
    monkeypatch.setattr(torch_npu.npu, "get_device_name", lambda: "Ascend950PR_9599")
    monkeypatch.setattr(linear, "place_of", lambda engine: "cpu")
    device.register()
    weight, bias = weight_of((48, 96)), torch.randn(48).bfloat16() if biased else None
    x = torch.randn(2, 3, 96, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert OURS.is_supported(NPU).reason == "Ascend950PR_9599"
    y = OURS.apply(x, OURS.prepare(weight, NPU), bias)
    ours, seen[:] = list(seen), []
    published = PUBLISHED.apply(x, PUBLISHED.prepare(weight, PUBLISHED.engines[0]), bias)
    theirs = list(seen)
    assert [name for name, _ in ours] == ["npu_dynamic_mx_quant", "npu_quant_matmul"]
    for (name, mine), (other, given) in zip(ours, theirs, strict=True):
        mine = {"scale_alg": 0} | mine
        given = {"scale_alg": 0} | given
        assert name == other
        assert set(mine) == set(given)
        for option, value in given.items():
            same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
            assert same(mine[option], value), option
    assert torch.equal(y, published)
    assert torch.equal(y, OURS.apply(x, OURS.prepare(weight, NPU_EMULATED), bias))


@needs_npu_packages
@pytest.mark.parametrize("engine", ["npu-schemas", "npu-emulated"])
def test_a_case_over_the_declarations(engine):
    report = reconcile.run(
        "tiny-mxfp8-moe", engine=engine, only="model.layers.0.*", levels=["op", "module"]
    )
    report.raise_for_verdict()
    assert {(row.engine, row.execution) for row in report.rows} == {(engine, "emulated")}


@needs_npu_packages
def test_without_a_device_the_engine_npu_is_not_run():
    report = reconcile.check_linear(OURS, weight_of((32, 64)), engine="npu")
    assert report.exit_code == 2
    assert {row.reason for row in report.rows} == {"not_run"}
