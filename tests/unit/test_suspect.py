"""Reference checks: second decoders, suspicions, and the error of quantising itself."""

from dataclasses import replace

import pytest
import torch

from reconcile import registry
from reconcile.checking.probes import random_weight, synthetic
from reconcile.judging.suspect import suspicions, weight_facts
from reconcile.linears import DenseWeight
from reconcile_references.second_decoder import decode_again


def _weight(name, shape=(200, 136)):
    form = registry.formats()[name]
    shape = shape if form.packing.fits(shape) else form.packing.rounded_up(shape)
    like = synthetic(form, torch.zeros(shape), torch.ones(form.scale_shape(shape)))
    return random_weight(like, shape, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", sorted(registry.formats()))
def test_the_second_decoder_agrees_bit_by_bit(name):
    weight = _weight(name)
    again = decode_again(weight)
    assert again.dtype == torch.float64
    assert torch.equal(again, weight.dequantize())
    assert weight_facts(weight, again, None)["suspicions"] == []


@pytest.mark.parametrize("name", sorted(registry.formats()))
def test_a_decoder_that_differs_in_one_weight_is_suspect(name):
    weight = _weight(name)
    again = decode_again(weight).clone()
    again[3, 5] += 1
    facts = weight_facts(weight, again, None)
    size = again.numel()
    assert facts["suspicions"] == [f"a second decoder differs in 1 of {size} weights"]
    assert facts["stats"]["second_decoder_agrees"] is False


@pytest.mark.parametrize(
    ("value", "said"),
    [(448.0, "E4M3"), (240.0, "FNUZ"), (57344.0, "E5M2"), (6.0, "E2M1"), (127.0, "int8"),
     (0.0, "zero"), (float("nan"), "NaN")],
)  # fmt: skip
def test_a_dense_weight_that_was_never_dequantised(value, said):
    tensor = torch.full((4, 4), value) if value == 0 else torch.rand(4, 4)
    tensor[1, 2] = value
    assert any(said in text for text in suspicions(DenseWeight(tensor=tensor)))


def test_an_ordinary_weight_raises_no_suspicion():
    assert suspicions(DenseWeight(tensor=torch.randn(64, 64))) == []


def test_scales_that_were_never_loaded():
    weight = _weight("fp8_e4m3_channel")
    ones = replace(weight, scales=torch.ones_like(weight.scales))
    assert any("scales are 1" in text for text in suspicions(ones))


def test_the_error_of_quantising_is_reported_apart():
    weight = _weight("fp8_e4m3_channel")
    exact = weight.dequantize()
    noise = 0.1 * exact.square().mean().sqrt()
    original = exact + noise * torch.randn(exact.shape, dtype=torch.float64)
    facts = weight_facts(weight, None, original)
    assert facts["stats"]["quantisation_sqnr_db"] == pytest.approx(20, abs=0.2)
    assert facts["suspicions"] == []
