"""torch_npu's own schemas and vllm-ascend's own class over the operators on the CPU.

They run where both packages are installed: ``make npu-cases`` runs this file there.
"""

import importlib.util

import pytest
import torch

import reconcile
from reconcile.probes import random_weight, synthetic
from reconcile.registry import formats, kernel
from reconcile.weight import QuantizedWeight
from reconcile_kernels.mxfp8_npu import layout, operators

HERE = all(importlib.util.find_spec(name) for name in ("torch_npu", "vllm_ascend"))
PUBLISHED = kernel("vllm_ascend.mxfp8")
needs_npu_packages = pytest.mark.skipif(not HERE, reason="torch_npu and vllm_ascend: make npu")


def weight_of(shape):
    form = formats()["mxfp8_e4m3"]
    seedling = synthetic(form, torch.zeros(shape), torch.ones(form.scale_shape(shape)))
    made = random_weight(seedling, shape, torch.Generator().manual_seed(0))
    return QuantizedWeight.from_tensors(made.codes, made.scales, format=form, shape=shape)


@pytest.mark.skipif(HERE, reason="they are installed here")
def test_without_them_the_kernel_says_what_is_missing():
    support = PUBLISHED.is_supported(PUBLISHED.engines[0])
    assert not support
    assert support.reason == "torch_npu and vllm_ascend not installed; `make npu` installs it"


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
