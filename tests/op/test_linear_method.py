"""A linear as serving engines want it, without one: create, load, process, apply."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from reconcile import registry
from reconcile.checking.probes import random_weight, synthetic
from reconcile.exceptions import FormatError, KernelError
from reconcile.kernel import FunctionKernel, LinearSpec
from reconcile_kernels.linear_method import KernelLinearMethod, WeightNames, always
from reconcile_kernels.ternary_cpu import BF16, INT8
from reconcile_kernels.ternary_cuda import TILED

FORMATS = ("ternary_k_interleaved", "ternary_hf", "ternary_hf_divide", "ternary_tq2_0")
SIZES = (64, 32, 32)
K = 256


def plain(x, weight, bias=None):
    y = x.double() @ weight.dequantize().T
    return (y if bias is None else y + bias.double()).to(x.dtype)


PLAIN = FunctionKernel("plain", plain)


def shards_of(form, sizes=SIZES):
    """A random weight for every projection that the layer fuses."""
    for seed, n in enumerate(sizes):
        scales = torch.ones(form.scale_shape((n, K))).to(form.scale_dtypes[0])
        like = synthetic(form, torch.ones(n, K), scales)
        yield random_weight(like, (n, K), torch.Generator().manual_seed(seed))


def layer_of(method, weights, dtype=torch.bfloat16, prefixes=("q", "k", "v")):
    layer = nn.Module()
    sizes = [weight.shape[0] for weight in weights]
    method.create_weights(layer, K, sizes, K, sum(sizes), dtype, loader="kept")
    names = method.names
    tensors = {}
    for prefix, weight in zip(prefixes, weights, strict=True):
        tensors[f"{prefix}.{names.codes}"] = weight.codes
        tensors[f"{prefix}.{names.scales}"] = weight.scales
    method.load_weights(layer, tensors, prefixes)
    return layer


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(5, K), (2, 3, K), (1, 1, K)], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_fused_projections(name, shape, biased):
    form = registry.formats()[name]
    method = KernelLinearMethod(form, always(PLAIN), WeightNames("packed", "scale"))
    weights = list(shards_of(form))
    layer = layer_of(method, weights)
    assert (layer.packed.loader, layer.packed.requires_grad) == ("kept", False)
    method.process_weights_after_loading(layer)
    assert not list(layer.parameters())
    x = torch.randn(shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    bias = torch.arange(sum(SIZES)).bfloat16() if biased else None
    expected = torch.cat([plain(x, weight).double() for weight in weights], dim=-1)
    dense = torch.cat([weight.dequantize() for weight in weights])
    y = x.double() @ dense.T + (0 if bias is None else bias.double())
    assert method.apply(layer, x, bias).shape == (*shape[:-1], sum(SIZES))
    assert torch.equal(method.apply(layer, x, bias), y.bfloat16())
    assert biased or torch.equal(expected.bfloat16(), y.bfloat16())


@pytest.mark.parametrize("kernel", [BF16, TILED], ids=lambda kernel: kernel.name)
def test_over_the_kernels(kernel):
    if not any(kernel.is_supported(engine) for engine in kernel.engines):
        pytest.skip("no engine of it runs here")
    form = registry.formats()["ternary_hf"]
    method = KernelLinearMethod(form, always(kernel))
    (weight,) = shards_of(form, (64,))
    layer = layer_of(method, [weight], prefixes=("o",))
    method.process_weights_after_loading(layer)
    x = torch.randn(2, 3, K, generator=torch.Generator().manual_seed(9)).bfloat16()
    exact, y = plain(x, weight).double(), method.apply(layer, x)
    assert y.shape == (2, 3, 64)
    assert torch.allclose(y.double(), exact, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("kernel", [BF16, INT8], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_over_the_kernels_compiled_into_one_graph(kernel, biased):
    """Serving engines trace the model: what cannot be traced is behind a custom op."""
    if not any(kernel.is_supported(engine) for engine in kernel.engines):
        pytest.skip("no engine of it runs here")
    form = registry.formats()["ternary_k_interleaved"]
    method = KernelLinearMethod(form, always(kernel))
    layer = layer_of(method, list(shards_of(form)))
    method.process_weights_after_loading(layer)
    bias = torch.arange(sum(SIZES)).bfloat16() if biased else None
    compiled = torch.compile(
        lambda x: method.apply(layer, x, bias), backend="eager", fullgraph=True
    )
    for m in (1, 5, 7):
        x = torch.randn(m, K, generator=torch.Generator().manual_seed(m)).bfloat16()
        assert torch.equal(compiled(x), method.apply(layer, x, bias))


def test_the_choice_is_made_for_each_shape():
    asked = []

    def choose(n, k, dtype):
        asked.append((n, k, dtype))
        return PLAIN

    form = registry.formats()["ternary_k_interleaved"]
    method = KernelLinearMethod(form, choose)
    layer = layer_of(method, list(shards_of(form)))
    method.process_weights_after_loading(layer)
    assert set(asked) == {(n, K, torch.bfloat16) for n in SIZES}


WRONG = [
    (lambda t: t.pop("k.weight_scale"), r"k: missing \['k\.weight_scale'\], not mapped \[\]"),
    (lambda t: t.update({"k.bias": t["k.weight"]}), r"k: missing \[\], not mapped \['k\.bias'\]"),
    (lambda t: t.update({"v.weight": t["q.weight"]}), r"v\.weight: expected \[32, 64\], got \[64,"),
    (lambda t: t.update({"v.weight": t["v.weight"].float()}), r"v\.weight: expected torch\.uint8"),
]


@pytest.mark.parametrize(("spoil", "message"), WRONG)
def test_weights_are_mapped_by_name_or_refused(spoil, message):
    form = registry.formats()["ternary_k_interleaved"]
    method = KernelLinearMethod(form, always(PLAIN))
    weights = list(shards_of(form))
    layer = nn.Module()
    method.create_weights(layer, K, SIZES, K, sum(SIZES), torch.bfloat16)
    tensors = {}
    for prefix, weight in zip("qkv", weights, strict=True):
        tensors |= {f"{prefix}.weight": weight.codes, f"{prefix}.weight_scale": weight.scales}
    spoil(tensors)
    with pytest.raises(FormatError, match=message):
        method.load_weights(layer, tensors, "qkv")
    with pytest.raises(FormatError, match="expected 3 prefixes"):
        method.load_weights(layer, tensors, "qk")


def fresh(method):
    layer = nn.Module()
    method.create_weights(layer, K, SIZES, K, sum(SIZES), torch.bfloat16)
    return layer


def test_shards_come_one_by_one_in_any_order_and_none_may_stay_away():
    form = registry.formats()["ternary_k_interleaved"]
    method = KernelLinearMethod(form, always(PLAIN))
    weights = list(shards_of(form))
    layer = fresh(method)
    for shard in (2, 0):
        method.load_shard(layer, "weight", shard, weights[shard].codes, "w")
        method.load_shard(layer, "weight_scale", shard, weights[shard].scales, "s")
    method.load_shard(layer, "weight", 1, weights[1].codes, "w")
    with pytest.raises(FormatError, match="of 3 shards the checkpoint did not give weight_scale"):
        method.process_weights_after_loading(layer)
    method.load_shard(layer, "weight_scale", 1, weights[1].scales, "s")
    method.process_weights_after_loading(layer)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(9)).bfloat16()
    dense = torch.cat([weight.dequantize() for weight in weights])
    assert torch.equal(method.apply(layer, x), (x.double() @ dense.T).bfloat16())


def test_scales_are_stored_exactly_or_refused():
    form = registry.formats()["ternary_k_interleaved"]
    method = KernelLinearMethod(form, always(PLAIN))
    layer = fresh(method)
    exact = torch.full((SIZES[0],), 0.5, dtype=torch.float64)
    method.load_shard(layer, "weight_scale", 0, exact, "s")
    with pytest.raises(FormatError, match=r"s: expected torch\.float32, got torch\.float64"):
        method.load_shard(layer, "weight_scale", 0, exact / 3, "s")
    for shard in (-1, 3):
        with pytest.raises(FormatError, match=f"the layer has 3 shards, got {shard}"):
            method.load_shard(layer, "weight_scale", shard, exact, "s")


def test_codes_that_no_encoder_writes_are_refused():
    form = registry.formats()["ternary_k_interleaved"]
    method = KernelLinearMethod(form, always(PLAIN))
    layer = layer_of(method, list(shards_of(form)))
    layer.weight.data[70, 3] |= 3
    with pytest.raises(FormatError, match="invalid code"):
        method.process_weights_after_loading(layer)


def test_a_layer_that_the_kernel_does_not_take_is_refused_at_once():
    form = registry.formats()["ternary_k_interleaved"]
    method = KernelLinearMethod(form, always(TILED))
    with pytest.raises(KernelError, match="multiple of 16"):
        method.create_weights(nn.Module(), 20, [8], 20, 8, torch.bfloat16)
    refusing = replace(method, choose=always(_Elsewhere("elsewhere", plain)))
    with pytest.raises(KernelError, match="python"):
        refusing.create_weights(nn.Module(), K, [8], K, 8, torch.bfloat16)


class _Elsewhere(FunctionKernel):
    def is_supported(self, engine):
        return replace(super().is_supported(engine), ok=False)

    def can_implement(self, spec: LinearSpec):
        raise AssertionError("not asked where no engine runs")


def test_shards_of_a_flat_layout_do_not_stack():
    form = registry.formats()["ternary_i2_s_x86"]
    method = KernelLinearMethod(form, always(PLAIN))
    with pytest.raises(FormatError, match="does not stack shards"):
        method.create_weights(nn.Module(), K, [64, 32], K, 96, torch.bfloat16)
