"""Experts in MXFP8: one at a time, in place, in little memory; zero-token experts."""

import subprocess
import sys

import pytest
import torch

from reconcile.checking.probes import random_weight, synthetic
from reconcile.exceptions import KernelError
from reconcile.grouped import GroupedWeight
from reconcile.numbers import mx
from reconcile.registry import formats, kernel
from reconcile.weight import QuantizedWeight
from reconcile_kernels.mxfp8_npu import experts, layout
from reconcile_kernels.mxfp8_npu.linear import NPU_EMULATED
from reconcile_kernels.mxfp8_npu.load import load

KERNEL = kernel("mxfp8_npu")
E, N, K = 3, 128, 192


def batched(name="fp8_e4m3_block", shape=(N, K)):
    form = formats()[name]
    groups = []
    for seed in range(E):
        seedling = synthetic(form, torch.zeros(shape), torch.ones(form.scale_shape(shape)))
        made = random_weight(seedling, shape, torch.Generator().manual_seed(seed))
        groups.append(
            QuantizedWeight.from_tensors(made.codes, made.scales, format=form, shape=shape)
        )
    return GroupedWeight(groups=tuple(groups), name="experts.w13")


@pytest.mark.parametrize("name", ["fp8_e4m3_block", "fp8_e4m3_block_e8m0", "mxfp8_e4m3"])
def test_every_expert_is_loaded_as_it_would_be_alone(name):
    weight = batched(name)
    prepared = KERNEL.prepare(weight, NPU_EMULATED)
    assert prepared.codes.shape == (E, K, N)
    assert prepared.scales.shape == (E, K // 64, N, 2)
    for index, group in enumerate(weight.groups):
        alone = layout.pack(*load(group, 0))
        assert all(map(torch.equal, experts.expert(prepared, index), alone))


def test_the_codes_buffer_is_reused():
    weight = batched()
    codes = torch.stack([group.codes for group in weight.groups])
    address, before = codes.data_ptr(), codes.clone()
    scales = torch.stack([group.scales for group in weight.groups])
    found = experts.requantise_in_place(codes, scales, (128, 128), 0)
    assert codes.data_ptr() == address
    assert not torch.equal(codes, before)
    for index, group in enumerate(weight.groups):
        expected = mx.quantise(group.dequantize(torch.float32).bfloat16(), mx.RULES["ascend_0"])
        assert torch.equal(codes[index], expected.codes)
        assert torch.equal(found[index], expected.scales)


MEASURE = """
import os, sys, torch
torch.set_num_threads(1)
from reconcile_kernels.mxfp8_npu.experts import requantise_in_place
def memory(field):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(field))
e, n, k = 16, 2048, 1024
requantise_in_place(torch.zeros(1, 128, 128, dtype=torch.uint8), torch.ones(1, 1, 1), (128, 128), 0)
codes = torch.randint(0, 0x7E, (e, n, k), dtype=torch.uint8)
scales = torch.rand(e, n // 128, k // 128)
before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
found = requantise_in_place(codes, scales, (128, 128), 0)
extra = memory("VmHWM") - before - found.numel()
print(extra / (n * k * 2))
"""


@pytest.mark.slow
def test_extra_memory_is_at_most_one_dense_expert():
    """Peak of the process over its level before, in units of one expert in bfloat16."""
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= 1.0, done.stdout


def test_experts_without_tokens():
    weight = batched()
    prepared = KERNEL.prepare(weight, NPU_EMULATED)
    y = KERNEL.apply(torch.zeros(E, 0, K, dtype=torch.bfloat16), prepared)
    assert y.shape == (E, 0, N)
    x = torch.randn(E, 5, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = KERNEL.apply(x, prepared)
    for index, group in enumerate(weight.groups):
        alone = KERNEL.apply(x[index], KERNEL.prepare(group, NPU_EMULATED))
        assert torch.equal(whole[index], alone)


@pytest.mark.parametrize("k", [96, 160, 80])
def test_odd_numbers_of_groups_have_no_layout(k):
    """Upstream reshapes the bytes to pairs without padding."""
    with pytest.raises(KernelError, match="multiple of 64"):
        experts.check_groups(k)


def test_scales_of_another_number_of_experts():
    with pytest.raises(ValueError, match=r"3 experts have scales of as many, got \[2, 1, 2\]"):
        experts.requantise_in_place(
            torch.zeros(3, 96, 192, dtype=torch.uint8), torch.ones(2, 1, 2), (128, 128), 0
        )
