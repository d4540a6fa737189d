"""What is wrong with a norm, from its outputs alone: epsilon, weight, and where it rounds."""

import pytest
import torch

from reconcile.diagnosis.norm_fits import diagnose_norm
from reconcile.tracing.norms import norm_inputs

SIZE = 256
EPSILON = 1e-6
WEIGHT = 1 + 0.2 * torch.randn(SIZE, generator=torch.Generator().manual_seed(3))
"""float32: no narrower dtype holds it."""


def exact(x, weight=WEIGHT, epsilon=EPSILON):
    wide = x.double()
    power = wide.square().mean(-1, keepdim=True)
    return wide / (power + epsilon).sqrt() * weight.double()


def normalised(x, epsilon=EPSILON):
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)


def as_transformers(x, weight, dtype):
    """The normalised input rounded, then the product."""
    return (weight * normalised(x).to(dtype)).to(x.dtype)


def in_one_rounding(x, weight, dtype):
    return (weight * normalised(x)).to(x.dtype)


def product_rounded(x, weight, dtype):
    return (weight * normalised(x)).to(dtype).to(x.dtype)


def weight_rounded(x, weight, dtype):
    return (weight.to(dtype).float() * normalised(x)).to(x.dtype)


def both_rounded(x, weight, dtype):
    return (weight.to(dtype).float() * normalised(x).to(dtype).float()).to(x.dtype)


def large_epsilon(x, weight, dtype):
    return (weight * normalised(x, 1e-5).to(dtype)).to(x.dtype)


def plus_one(x, weight, dtype):
    return ((1 + weight) * normalised(x).to(dtype)).to(x.dtype)


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ORDER = "norm_rounding_order"
TABLE = [
    # output, dtype inside, what was done, name, parameters
    (F32, BF16, as_transformers, ORDER, {"rounded": "input", "dtype": "bfloat16"}),
    (F32, F16, as_transformers, ORDER, {"rounded": "input", "dtype": "float16"}),
    (F32, BF16, product_rounded, ORDER, {"rounded": "output", "dtype": "bfloat16"}),
    (F32, BF16, weight_rounded, ORDER, {"rounded": "weight", "dtype": "bfloat16"}),
    (F32, BF16, both_rounded, ORDER, {"rounded": "both", "dtype": "bfloat16"}),
    (BF16, BF16, as_transformers, ORDER, {"rounded": "input", "dtype": "bfloat16"}),
    (BF16, BF16, weight_rounded, ORDER, {"rounded": "weight", "dtype": "bfloat16"}),
    (F16, F16, as_transformers, ORDER, {"rounded": "input", "dtype": "float16"}),
    (F32, F32, large_epsilon, "epsilon", {"epsilon": 1e-5, "reference": 1e-6}),
    (BF16, BF16, large_epsilon, "epsilon", {"epsilon": 1e-5, "reference": 1e-6}),
    (F16, F16, large_epsilon, "epsilon", {"epsilon": 1e-5, "reference": 1e-6}),
    (F32, BF16, plus_one, "norm_weight_plus_one", {"added": 1.0}),
    (BF16, BF16, plus_one, "norm_weight_plus_one", {"added": 1.0}),
]


@pytest.mark.parametrize(("output", "inside", "fault", "name", "parameters"), TABLE)
def test_the_cause_and_its_parameters(output, inside, fault, name, parameters):
    x = norm_inputs(SIZE, output)
    best = diagnose_norm(x, fault(x, WEIGHT, inside), exact(x))[0]

    assert (best.name, best.parameters) == (name, parameters)
    assert best.explains >= 0.95
    assert "tells it from" not in best.text


@pytest.mark.parametrize("output", [BF16, F16, F32])
def test_a_norm_that_rounds_once_has_nothing_to_explain(output):
    x = norm_inputs(SIZE, output)
    assert diagnose_norm(x, in_one_rounding(x, WEIGHT, None), exact(x)) == ()


def test_what_the_data_cannot_tell_apart_is_said():
    """Powers of two: rounding before the product and after it give the same bits."""
    x, weight = norm_inputs(SIZE, F32), 2.0 ** torch.arange(-4, 4).repeat(SIZE // 8)
    best = diagnose_norm(x, as_transformers(x, weight, BF16), exact(x, weight))[0]

    assert (best.name, best.explains) == (ORDER, pytest.approx(1, abs=0.01))
    assert "nothing here tells it from: " in best.text
    assert "the product with the weight is rounded to bfloat16" in best.text


def test_rows_of_zeros_and_weights_of_zero_say_nothing():
    x = norm_inputs(SIZE, F32)
    x[0], x[:, 5] = 0, 0
    weight = WEIGHT.clone()
    weight[7] = 0
    best = diagnose_norm(x, as_transformers(x, weight, BF16), exact(x, weight))[0]
    assert best.parameters == {"rounded": "input", "dtype": "bfloat16"}
    assert diagnose_norm(x[:1], 1 + x[:1], x[:1]) == ()
