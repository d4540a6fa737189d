"""The plain kernel reads every registered format, and is judged by its own contract."""

import pytest
import torch

import reconcile
from reconcile.checking.probes import random_weight, synthetic
from reconcile.registry import formats, kernel
from reconcile.weight import QuantizedWeight

N, K = 48, 256


def weight_of(name):
    form = formats()[name]
    seedling = synthetic(form, torch.zeros(N, K), torch.ones(form.scale_shape((N, K))))
    made = random_weight(seedling, (N, K), torch.Generator().manual_seed(5))
    return QuantizedWeight.from_tensors(made.codes, made.scales, format=form, shape=(N, K))


@pytest.mark.parametrize("name", formats())
def test_it_passes_every_probe_in_every_format(name):
    report = reconcile.check_linear(kernel("torch_dequant"), weight_of(name))
    report.raise_for_verdict()


def test_a_forgotten_scale_is_found():
    def unscaled(x, weight):
        return torch.nn.functional.linear(
            x.float(), weight.format.decode(weight.unpacked(), torch.float32)
        ).to(x.dtype)

    unscaled.contract = kernel("torch_dequant").contract
    weight = weight_of("fp8_e4m3_block")
    assert reconcile.check_linear(unscaled, weight).verdict == "FAIL"
