"""A serving engine loads a model under a default dtype of its own; no kernel may take it over."""

from contextlib import contextmanager

import pytest
import torch

from reconcile import registry
from reconcile.checking.probes import random_weight, synthetic
from reconcile.kernel import choose_engine

SHAPE = (64, 256)
KERNELS = (
    "ternary_cpu.bf16",
    "ternary_cpu.int8",
    "ternary_cuda.naive",
    "ternary_cuda.vectorised",
    "ternary_cuda.tiled",
    "ternary_cuda.masks",
    "torch_dequant",
    "amx_fp8.w8a16",
    "torch_w8a8",
    "mxfp8_npu",
)


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def weight_for(kernel):
    known = kernel.formats or ("ternary_k_interleaved",)
    form = registry.formats()[sorted(known)[0]]
    codes = form.pack(torch.zeros(SHAPE, dtype=torch.uint8))
    like = synthetic(form, codes, torch.ones(form.scale_shape(SHAPE)))
    return random_weight(like, SHAPE, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", KERNELS)
def test_a_layer_made_under_bfloat16_is_the_same(name):
    kernel = registry.kernel(name)
    engine, why = choose_engine(kernel, "auto")
    if engine is None:
        pytest.skip(why)
    weight = weight_for(kernel)
    x = torch.randn(5, SHAPE[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    right = kernel.apply(x, kernel.prepare(weight, engine))
    with default_dtype(torch.bfloat16):
        prepared = kernel.prepare(weight, engine)
        inside = kernel.apply(x, prepared)
    assert right.abs().max() > 0
    assert torch.equal(inside, right)
    assert torch.equal(kernel.apply(x, prepared), right)
